"""Tunes a workload: rank, compile the best few, time them, choose."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from os import PathLike
from typing import Any

from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import CostModel
from costmodel.data.measurement import Candidate, Measurement, Runner
from costmodel.errors import InvalidInput
from costmodel.evaluation.duplicates import identity
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.specialize import compile_for_device, device_compilers, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.baselines import RuleHeuristic
from costmodel.tuning.modes import check_tuning_mode
from costmodel.tuning.ranking import Answering, Ranking, rank_by, with_answering
from costmodel.tuning.search import TopKSearch
from costmodel.tuning.tuning_result import PREDICTED, Costs, TuningResult
from costmodel.validation import one_line, require, require_count

Compile = Callable[[Sequence[Specialization], Target], Iterable[Artifact]]
"""Begins to compile in other processes, and leaves the binaries where the runner finds them."""

log = logging.getLogger("costmodel")

_COMPILED_FIRST = 8  # children that start early
# So many candidates are tried for each one wanted before those that fail are no longer replaced.
_ATTEMPTS = 4
# Predictions of torch are off by 8 % in the median: untimed, it is chosen only well beyond that.
_TORCH_MARGIN = 0.8


def tune(
    workload: Workload,
    *,
    runner: Runner | None,
    target: Target | None = None,
    model: CostModel | str | PathLike[str] | None = None,
    k: int = 8,
    mode: str = "auto",
    include_torch: bool = True,
    budget_s: float = inf,
    compile_: Compile | None = None,
) -> TuningResult:
    """Choose how to compute a workload.

    Args:
        runner: times the candidates: a ``DeviceRunner``, or a ``ReplayRunner``, which answers from
            a recording and needs no GPU. None is enough where nothing is timed.
        target: default: that of a replay's recording, else the current CUDA device.
        model: as for :func:`costmodel.tuning.ranking.rank`.
        k: how many working candidates to time.
        mode: ``auto`` times the top k; small problems, and operands that cannot be drawn for
            timing, are left to the prediction. ``topk`` times small ones too. ``predict`` takes
            the model's first choice and ``heuristic`` the rules', untimed; ``exhaustive`` times
            the whole space.
        include_torch: ``torch.matmul`` (cuBLAS) is a candidate too; where nothing is timed, by
            what the model predicts of it.
        budget_s: stop compiling and timing after about so many seconds; the best so far wins.
        compile_: how to compile; default: :func:`compile_for_device` where a device is to time,
            else not at all. Where nothing is timed, the first choice that it can compile wins.

    Raises:
        InvalidInput: an unknown mode, k < 1, an empty product, or nothing to time with.
        NotRecorded: the recording does not hold this workload.
    """
    check_tuning_mode(mode)
    check_tuning(workload, k, budget_s)
    if runner is not None and not isinstance(runner, Runner):
        raise InvalidInput(f"runner is a {type(runner).__name__}: expected a DeviceRunner or such")
    if target is not None:
        require("target", target, Target, "a Target, such as Target.named('h100-sxm')")
    target = target or (runner and runner.target) or Target.current()
    if mode == "heuristic":
        model = RuleHeuristic()
    return with_answering(
        model, target, workload,
        lambda answering: tune_by(
            answering, workload, target, runner=runner, k=k, mode=mode,
            include_torch=include_torch, budget_s=budget_s, compile_=compile_,
        ),
    )  # fmt: skip


def tune_by(
    answering: Answering,
    workload: Workload,
    target: Target,
    *,
    runner: Runner | None,
    k: int,
    mode: str,
    include_torch: bool,
    budget_s: float = inf,
    compile_: Compile | None = None,
    largest: Workload | None = None,
) -> TuningResult:
    """Tune as :func:`tune` does, by a model that was resolved before.

    Args:
        largest: choose only what is legal for this product too, see
            :func:`costmodel.tuning.ranking.rank_by`.
    """
    start = time.perf_counter()
    if compile_ is None and runner is not None and runner.needs_binaries:
        device_compilers().start(_COMPILED_FIRST)  # while the model ranks
    ranking = rank_by(
        answering,
        workload,
        target,
        None if mode == "exhaustive" else _ATTEMPTS * k,
        configs=runner.configs(workload) if runner else None,
        largest=largest,
    )
    rank_s = time.perf_counter() - start
    if reason := untimed_because(workload, mode):
        result = _untimed(ranking, mode, k, reason, rank_s, compile_ or _nothing_to_compile)
        return _or_torch(result, ranking, answering.model) if include_torch else result
    if runner is None:
        raise InvalidInput(f"mode={mode!r} times candidates: expected a runner, e.g. DeviceRunner")
    compile_ = compile_ or (compile_for_device if runner.needs_binaries else _nothing_to_compile)
    wanted = len(ranking) if mode == "exhaustive" else k
    search = search_of(ranking, runner, compile_, time.monotonic() + budget_s)
    search.run(wanted, with_torch=include_torch)
    search.remeasure_finalists()
    choice = search.choose()
    costs = Costs(rank_s, search.compile_s, search.measure_s, search.compiled, len(search.measured))
    name = target.device.name
    source = f"device ({name})" if runner.needs_binaries else f"replay of {name}"
    return TuningResult(
        **_common(ranking, mode, k, wanted),
        measured=tuple(search.measured.items()),
        torch=search.torch,
        config=choice.config,
        why=choice.why,
        source=source if choice.timed else PREDICTED,
        reliable=choice.reliable,
        costs=costs,
    )


def search_of(
    ranking: Ranking, runner: Runner, compile_: Compile, deadline: float = inf
) -> TopKSearch:
    """The search among ranked configurations of a product."""
    workload = ranking.workload

    def compiled(candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Those that differ only in how they are launched share a binary."""
        waiting: dict[Specialization, list[Candidate]] = {}
        for candidate in candidates:
            waiting.setdefault(specialize(workload, candidate.config), []).append(candidate)
        made = compile_(list(waiting), ranking.target)
        return ([Candidate(c.config, a) for c in waiting.pop(a.spec, ())] for a in made)

    return TopKSearch(
        problem=workload,
        candidates=[Candidate(config) for config in ranking.configs],
        ranked_by=ranking.model,
        runner=runner,
        compile_=compiled,
        identity=lambda candidate: identity(workload, candidate.config, candidate.artifact),
        deadline=deadline,
    )


def check_tuning(workload: Workload, k: int, budget_s: float) -> None:
    """Refuse what cannot be tuned, whatever it is to run on.

    Raises:
        InvalidInput: no workload, an empty product, k < 1, or no seconds.
    """
    require("workload", workload, Workload, "a Workload, such as Workload.dense(m, n, k)")
    require_count("k", k)
    require("budget_s", budget_s, (int, float), "seconds")
    if not (workload.m and workload.n and workload.k):
        raise InvalidInput(f"{workload} is an empty product: expected m, n and k over 0")
    if not budget_s > 0:
        raise InvalidInput(f"budget_s={budget_s:g}: expected seconds over 0")


def untimed_because(workload: Workload, mode: str) -> str:
    """Return why a workload is not timed in this mode; empty if it is."""
    code = workload.code
    if mode in ("predict", "heuristic"):
        return f"mode {mode} times nothing"
    if "strided" in (code.a_layout, code.b_layout, code.c_layout):
        return "operands without a contiguous dimension are not timed"
    if mode == "auto" and workload.is_small():
        return "every side is at most 512, timing would cost more than it gives"
    return ""


def _nothing_to_compile(specs: Sequence[Specialization], target: Target) -> Iterable[Artifact]:
    return ()


def _untimed(
    ranking: Ranking, mode: str, k: int, reason: str, rank_s: float, compile_: Compile
) -> TuningResult:
    """The first choice that compiles; torch if none does.

    What is known to compile is not compiled here; the rest is, in a process that may die of it.
    """
    start = time.perf_counter()
    failures: list[tuple[GemmConfig, Measurement]] = []
    compiled = 0
    chosen, why = None, "no configuration compiles"
    for config, compiles in zip(ranking.configs, ranking.candidates.has_artifact, strict=True):
        artifact = None
        if not compiles:
            made = list(compile_([specialize(ranking.workload, config)], ranking.target))
            compiled += len(made)
            artifact = made[0] if made else None
        if artifact is None or artifact.ok:
            chosen, why = config, f"first choice of {ranking.model} that compiles: {reason}"
            break
        log.info("%s: %s %s", config, artifact.status, one_line(artifact.error))
        failures.append((config, Measurement(artifact.status, error=artifact.error)))
    if chosen is None:
        warnings.warn(f"{ranking.workload}: {why}; torch computes it", RuntimeWarning, 3)
    return TuningResult(
        **_common(ranking, mode, k, 1),
        measured=tuple(failures),
        torch=None,
        config=chosen,
        why=why,
        source=PREDICTED,
        reliable=chosen is not None,
        costs=Costs(rank_s, time.perf_counter() - start, compiled=compiled),
    )


def _or_torch(result: TuningResult, ranking: Ranking, model: CostModel) -> TuningResult:
    """The result, or torch where the model expects it to be faster by more than it may err."""
    expected_us = dict(result.ranked).get(result.config) if result.config else None
    if expected_us is None:
        return result
    torch_us = model.predict_torch(ranking.workload, ranking.target)
    if not torch_us < _TORCH_MARGIN * expected_us:
        return result
    why = f"torch is predicted to take {torch_us:.2f} us, the first choice {expected_us:.2f}"
    return replace(result, config=None, why=why)


def _common(ranking: Ranking, mode: str, k: int, looked_at: int) -> dict[str, Any]:
    return {
        "expected_kept": ranking.expected_kept(looked_at),
        "out_of_coverage": ranking.out_of_coverage,
        "workload": ranking.workload,
        "target": ranking.target,
        "model": ranking.model,
        "model_hash": ranking.model_hash,
        "caveat": ranking.caveat,
        "answered_by": ranking.answered_by,
        "mode": mode,
        "k": k,
        "ranked": tuple((c, ranking.predicted_us(i)) for i, c in enumerate(ranking.configs)),
    }
