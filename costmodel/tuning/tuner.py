"""Tunes a workload: rank, compile the best few, time them, choose."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import ModelLike
from costmodel.data.measurement import Batch, Candidate, Runner
from costmodel.errors import InvalidInput
from costmodel.evaluation.duplicates import identity
from costmodel.gemm.config import Specialization
from costmodel.gemm.specialize import compile_for_device, device_compilers, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.baselines import RuleHeuristic
from costmodel.tuning.modes import check_tuning_mode
from costmodel.tuning.ranking import Answering, Ranking, rank_by, with_answering
from costmodel.tuning.search import Choice, TopKSearch
from costmodel.tuning.tuning_result import PREDICTED, Answered, Costs, TuningResult
from costmodel.validation import require, require_count

Compile = Callable[[Sequence[Specialization], Target], Iterable[Artifact]]
"""Begins to compile in other processes, and leaves the binaries where the runner finds them."""

_COMPILED_FIRST = 8  # children that start early
# So many candidates are tried for each one wanted before those that fail are no longer replaced.
_ATTEMPTS = 4
# Predictions of torch are off by 8 % in the median: untimed, it is chosen only if it is predicted
# to be faster by well over that.
_TORCH_MARGIN = 0.8


def tune(
    workload: Workload,
    *,
    runner: Runner | None,
    target: Target | None = None,
    model: ModelLike = None,
    mode: str = "auto",
    **options: Any,
) -> TuningResult:
    """Choose how to compute a workload.

    Args:
        runner: times the candidates: a ``DeviceRunner``, or a ``ReplayRunner``, which answers from
            a recording and needs no GPU. None is enough where nothing is timed.
        target: default: that of a replay's recording, else the current CUDA device.
        model: as for :func:`costmodel.tuning.ranking.rank`.
        mode: ``auto`` times the top k; small problems, and operands that cannot be drawn for
            timing, are left to the prediction. ``topk`` times small ones too. ``predict`` takes
            the model's first choice and ``heuristic`` the rules', untimed; ``exhaustive`` times
            the whole space.
        options: ``k``, ``include_torch``, ``budget_s`` and ``compile_`` of :func:`tune_by`.

    Raises:
        InvalidInput: an unknown mode, k < 1, an empty product, or nothing to time with.
        NotRecorded: the recording does not hold this workload.
    """
    check_tuning_mode(mode)
    check_tuning(workload, options.get("k", 1), options.get("budget_s", inf))
    if runner is not None and not isinstance(runner, Runner):
        raise InvalidInput(f"runner is a {type(runner).__name__}: expected a DeviceRunner or such")
    if target is not None:
        require("target", target, Target, "a Target, such as Target.named('h100-sxm')")
    target = target or (runner and runner.target) or Target.current()
    return with_answering(
        RuleHeuristic() if mode == "heuristic" else model, target, workload,
        lambda answering: tune_by(
            answering, workload, target, runner=runner, mode=mode, **options
        ),
    )  # fmt: skip


def tune_by(
    answering: Answering,
    workload: Workload,
    target: Target,
    *,
    runner: Runner | None,
    mode: str,
    k: int = 8,
    include_torch: bool = True,
    budget_s: float = inf,
    compile_: Compile | None = None,
    largest: Workload | None = None,
) -> TuningResult:
    """Tune as :func:`tune` does, by a model that was resolved before.

    Args:
        k: how many working candidates to time.
        include_torch: ``torch.matmul`` (cuBLAS) is a candidate too; where nothing is timed, by its
            predicted time.
        budget_s: stop compiling and timing after about this many seconds; the best so far wins.
        compile_: how to compile; default: :func:`compile_for_device` where a device is to time,
            else not at all. Where nothing is timed, the first choice that it can compile wins.
        largest: choose only configurations that are legal for this product too, see
            :func:`costmodel.tuning.ranking.rank_by`.
    """
    untimed = untimed_because(workload, mode)
    if runner is None and not untimed:
        raise InvalidInput(f"mode={mode!r} times candidates: expected a runner, e.g. DeviceRunner")
    start = time.perf_counter()
    if compile_ is None:
        compile_ = lambda specs, target: ()  # noqa: E731
        if runner is not None and runner.needs_binaries:
            compile_ = compile_for_device
            device_compilers().start(_COMPILED_FIRST)  # while the model ranks
    count = None if mode == "exhaustive" else _ATTEMPTS * k
    configs = runner.configs(workload) if runner else None
    ranking = rank_by(answering, workload, target, count, configs=configs, largest=largest)
    rank_s = time.perf_counter() - start
    wanted = 1 if untimed else len(ranking) if mode == "exhaustive" else k
    search = search_of(ranking, runner, compile_, time.monotonic() + budget_s)
    if untimed:
        choice = search.choose_untimed(ranking.candidates.has_artifact.tolist(), untimed)
        choice = _or_torch(choice, ranking) if include_torch else choice
    else:
        search.run(wanted, with_library=include_torch)
        search.remeasure_finalists()
        choice = search.choose()
    how = "device ({})" if runner is not None and runner.needs_binaries else "replay of {}"
    timed = 0 if untimed else len(search.measured)
    return TuningResult(
        **{name: getattr(ranking, name) for name in Answered.__dataclass_fields__},
        mode=mode, k=k,
        ranked=tuple((c, ranking.predicted_us(i)) for i, c in enumerate(ranking.configs)),
        expected_kept=ranking.expected_kept(wanted),
        measured=tuple(search.measured.items()), torch=search.library,
        config=choice.config, why=choice.why, reliable=choice.reliable,
        unsteady=choice.unsteady,
        source=how.format(target.device.name) if choice.timed else PREDICTED,
        costs=Costs(rank_s, search.compile_s, search.measure_s, search.compiled, timed),
    )  # fmt: skip


def search_of(
    ranking: Ranking, runner: Runner | None, compile_: Compile, deadline: float = inf
) -> TopKSearch:
    """The search among ranked configurations of a product."""
    workload = ranking.workload

    def compiled(candidates: Batch) -> Generator[list[Candidate], None, None]:
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
        runner=cast(Runner, runner),  # None is never called
        compile_=compiled,
        identity=lambda candidate: identity(workload, candidate.config, candidate.artifact),
        deadline=deadline,
    )


def check_tuning(workload: Workload, k: int, budget_s: float) -> None:
    """Refuse what cannot be tuned on any target.

    Raises:
        InvalidInput: no workload, an empty product, k < 1, or a budget that is not over 0 s.
    """
    require("workload", workload, Workload, "a Workload, such as Workload.dense(m, n, k)")
    require_count("k", k)
    require("budget_s", budget_s, (int, float), "seconds")
    if workload.is_empty:
        raise InvalidInput(f"{workload} is an empty product: expected m, n and k over 0")
    if not budget_s > 0:
        raise InvalidInput(f"budget_s={budget_s:g}: expected seconds over 0")


def untimed_because(workload: Workload, mode: str) -> str:
    """Return why a workload is not timed in this mode; empty if it is."""
    if mode in ("predict", "heuristic"):
        return f"mode {mode} times nothing"
    if workload.code.is_strided:
        return "operands without a contiguous dimension are not timed"
    if mode == "auto" and workload.is_small():
        return "every side is at most 512, timing would cost more than it gives"
    return ""


def _or_torch(choice: Choice, ranking: Ranking) -> Choice:
    """The choice, or torch where the model expects it to be faster by more than it may err."""
    if choice.config is None:
        return choice
    expected_us = ranking.predicted_us(ranking.configs.index(choice.config))
    torch_us = ranking.cost_model.predict_torch(ranking.workload, ranking.target)
    if expected_us is None or not torch_us < _TORCH_MARGIN * expected_us:
        return choice
    why = f"torch is predicted to take {torch_us:.2f} us, the first choice {expected_us:.2f}"
    return replace(choice, config=None, why=why)
