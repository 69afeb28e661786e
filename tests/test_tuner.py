"""The tuner: from a recording, and with runners and compilers in which things go wrong."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import Candidates, CostModel
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import (
    NO_ROOM,
    Candidate,
    Measurement,
    RunInfo,
    Runner,
    TuningRecord,
)
from costmodel.errors import InvalidInput, NoModel, NotRecorded
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import artifact_key
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.measure.device import DeviceRunner
from costmodel.measure.replay import ReplayRunner
from costmodel.measure.timing import Request
from costmodel.tuning.tuner import tune
from costmodel.tuning.tuning_result import TuningResult

H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
LARGE = Workload.dense(64, 4096, 1024)
SMALL = Workload.dense(64, 512, 256)
TORCH_US = 100.0


class ByOrder(CostModel):
    """A model that ranks configurations in the order of the space."""

    name = "by-order"
    hash = "1"
    predicts_latency = True

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        place = {c: float(i) for i, c in enumerate(SearchSpace.of(workload, target).configs)}
        return np.array([place.get(c, 1e6) for c in candidates.configs])


def first(count: int, workload: Workload = LARGE) -> list[GemmConfig]:
    """What ``ByOrder`` ranks first."""
    return list(SearchSpace.of(workload, H100).configs[:count])


def ok(latency_us: float) -> Measurement:
    return Measurement("ok", latency_us, latency_us, latency_us, 5)


class FakeRunner(Runner):
    """Answers what a function says of a configuration."""

    def __init__(
        self, outcome: Callable[[GemmConfig], Measurement], torch: Measurement | None = None
    ) -> None:
        self.outcome = outcome
        self.torch = torch or ok(TORCH_US)
        self.asked: list[GemmConfig] = []

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], best_us: float = np.inf
    ) -> list[Measurement]:
        self.asked += [c.config for c in candidates]
        return [self.outcome(c.config) for c in candidates]

    def measure_torch(self, workload: Workload) -> Measurement:
        return self.torch

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]:
        return [self.torch if c is None else self.outcome(c) for c in configs]


class ComparingRunner(FakeRunner):
    """Times finalists again, with other results."""

    def __init__(self, again: Callable[[GemmConfig | None], Measurement]) -> None:
        super().__init__(lambda c: ok(50.0 + first(20).index(c)))
        self.again = again
        self.compared: list[GemmConfig | None] = []

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]:
        self.compared = list(configs)
        return [self.again(c) for c in configs]


def compiles(specs: Sequence[Specialization], target: Target) -> Iterable[Artifact]:
    for spec in specs:
        key = artifact_key(spec, target)
        yield Artifact(key, spec, ptx_hash=key)


def crashing(bad: Sequence[GemmConfig]) -> Callable[..., Iterator[Artifact]]:
    """A compiler that dies of some configurations."""

    def compile_(specs: Sequence[Specialization], target: Target) -> Iterator[Artifact]:
        for artifact in compiles(specs, target):
            fails = artifact.spec.config_binary in {c.binary for c in bad}
            yield replace(artifact, status="crashed", error="LLVM ERROR") if fails else artifact

    return compile_


def run(
    runner: FakeRunner, workload: Workload = LARGE, *, k: int = 4, **options: object
) -> TuningResult:
    settings = {"target": H100, "model": ByOrder(), "compile_": compiles, **options}
    return tune(workload, runner=runner, k=k, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Forty configurations of one workload: the tenth is the fastest, the first failed."""
    data = Dataset.create(tmp_path_factory.mktemp("recording"), H100, {"repeats": 5})
    configs = first(40)
    outcomes = [ok(60.0 + abs(i - 10)) for i in range(len(configs))]
    outcomes[0] = Measurement("wrong_result", error="3 elements are off")
    records = [TuningRecord(LARGE, c, "", m) for c, m in zip(configs, outcomes, strict=True)]
    run_info = RunInfo("run", "GPU-a", "570", "2.11", "2026-11-27T00:00:00+00:00")
    data.append_measurements(records, run=run_info, torch={LARGE: ok(TORCH_US)})
    return data


@pytest.mark.fault("B11")
def test_replay_needs_no_gpu_and_says_what_it_is(recording: Dataset) -> None:
    result = tune(LARGE, runner=ReplayRunner(recording), model=ByOrder())
    assert result.k == 8
    assert result.source == "replay of h100-sxm"
    assert result.target == H100
    # The first of the ranking failed: the ninth was timed in its place.
    assert [c for c, m in result.measured if m.ok] == first(9)[1:]
    assert result.config == first(9)[8]
    assert result.latency_us == 62.0
    assert result.costs.compiled == 0


def test_exhaustive_replay_finds_the_best(recording: Dataset) -> None:
    result = tune(LARGE, runner=ReplayRunner(recording), model=ByOrder(), mode="exhaustive")
    assert result.config == first(11)[10]
    assert len(result.measured) == 40


def test_replay_of_what_was_not_recorded(recording: Dataset) -> None:
    with pytest.raises(NotRecorded, match="64x4096x1024"):
        tune(Workload.dense(8, 4096, 1024), runner=ReplayRunner(recording), model=ByOrder())


@pytest.mark.parametrize(
    "break_it",
    [
        lambda d: d.pop("why"),
        lambda d: d.update(chosen={"kernel": "__import__('os')"}),
        lambda d: d["chosen"].update(block_m=7),
        lambda d: d["measured"][0].update(status="fine"),
        lambda d: d.update(measured=[1]),
        lambda d: d.update(costs=[]),
    ],
)
def test_a_foreign_result_is_refused(
    recording: Dataset, break_it: Callable[[dict[str, object]], object]
) -> None:
    data = tune(LARGE, runner=ReplayRunner(recording), model=ByOrder()).to_dict()
    break_it(data)
    with pytest.raises(InvalidInput):
        TuningResult.from_dict(data)


def test_the_fastest_of_the_top_k_is_chosen() -> None:
    best = first(4)[2]
    runner = FakeRunner(lambda c: ok(40.0 if c == best else 80.0))
    result = run(runner)
    assert result.chosen == best
    assert runner.asked == first(4)
    assert (result.costs.compiled, result.costs.timed) == (4, 4)
    assert result.reliable
    assert result.model == "by-order"
    assert result.ranked[0] == (first(1)[0], 0.0)


@pytest.mark.fault("N11")
def test_torch_wins_what_is_close() -> None:
    close = run(FakeRunner(lambda c: ok(TORCH_US * 0.98)))
    assert (close.chosen, close.reliable) == ("torch", True)
    assert "torch takes 100.00 us" in close.why
    assert "98.00 us, is not surely 3 % faster" in close.why
    assert run(FakeRunner(lambda c: ok(TORCH_US * 0.96))).chosen != "torch"
    slow = run(FakeRunner(lambda c: ok(TORCH_US * 3)))
    assert slow.chosen == "torch"
    assert slow.latency_us == TORCH_US
    assert {m.latency_us for _, m in slow.measured} == {TORCH_US * 3}


def test_torch_can_be_left_out() -> None:
    result = run(FakeRunner(lambda c: ok(TORCH_US * 3)), include_torch=False)
    assert result.config is not None
    assert result.torch is None


@pytest.mark.fault("B09", "B12")
@pytest.mark.parametrize(
    "status", ["wrong_result", "crashed", "timeout", "too_slow", "out_of_resources"]
)
def test_what_fails_is_replaced_by_the_next_and_reported(
    status: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = first(3)
    runner = FakeRunner(
        lambda c: Measurement(status, 1.0, error="why") if c in bad else ok(50.0)  # type: ignore[arg-type]
    )
    with caplog.at_level(logging.INFO, "costmodel"):
        result = run(runner)
    assert result.config is not None
    assert result.config not in bad
    outcomes = dict(result.measured)
    assert [outcomes[c].status for c in bad] == [status] * 3
    assert sum(m.ok for m in outcomes.values()) == 4
    assert sum(status in record.getMessage() or "wrong" in record.getMessage()
               for record in caplog.records) == 3  # fmt: skip


@pytest.mark.fault("B14")
def test_a_configuration_that_does_not_compile_is_never_timed() -> None:
    bad = first(2)
    runner = FakeRunner(lambda c: ok(50.0))
    result = run(runner, compile_=crashing(bad))
    assert not set(bad) & set(runner.asked)
    assert dict(result.measured)[bad[0]].status == "crashed"
    assert sum(m.ok for _, m in result.measured) == 4


def test_what_is_compiled_is_timed_while_the_rest_is_compiled() -> None:
    timed = threading.Semaphore(0)
    runner = FakeRunner(lambda c: ok(50.0))
    runner.outcome = lambda c: (timed.release(), ok(50.0))[1]
    runner.measure_torch = lambda w: (timed.release(), ok(TORCH_US))[1]  # type: ignore[method-assign]

    def one_by_one(specs: Sequence[Specialization], target: Target) -> Iterator[Artifact]:
        for artifact in compiles(specs, target):
            assert timed.acquire(timeout=60), "torch, then each before the next is there"
            yield artifact

    result = run(runner, compile_=one_by_one)
    assert result.torch == ok(TORCH_US)
    assert len(result.measured) == 4


def test_what_the_compiler_raises_is_raised() -> None:
    def broken(specs: Sequence[Specialization], target: Target) -> Iterator[Artifact]:
        yield from [*compiles(specs, target)][:2]
        raise KeyError("a bug of ours")

    with pytest.raises(KeyError, match="a bug of ours"):
        run(FakeRunner(lambda c: ok(50.0)), compile_=broken)


def test_where_there_is_no_room_to_time_the_first_that_compiles_is_predicted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = Measurement("out_of_resources", error=f"{NO_ROOM}: 1 MiB are free")
    bad = first(1)[0]
    runner = FakeRunner(lambda c: full, torch=full)
    result = run(runner, compile_=crashing([bad]))
    works = [c for c in first(4) if c.binary != bad.binary]
    assert result.config == works[0]
    assert runner.asked == works, "no other is tried in their place"
    assert (result.timed, result.reliable) == (False, False)
    assert "that compiles: no room in device memory" in result.why
    assert "1 MiB are free" in caplog.text
    assert TuningResult.from_dict(result.to_dict()).to_dict() == result.to_dict()


def test_memory_for_one_candidate_is_no_reason_to_time_none() -> None:
    greedy = first(1)[0]
    lacks = Measurement("out_of_resources", error="device memory: split-K's partial sums")
    result = run(FakeRunner(lambda c: lacks if c == greedy else ok(50.0)))
    assert result.timed
    assert sum(m.ok for _, m in result.measured) == 4


@pytest.mark.parametrize("budget_s", [np.inf, 1e-9])
def test_a_runner_that_holds_memory_rests_once_all_is_timed(budget_s: float) -> None:
    class Resting(ComparingRunner):
        rested = 0

        def rest(self) -> None:
            self.rested += 1

    runner = Resting(lambda c: ok(50.0))
    run(runner, budget_s=budget_s)
    assert runner.rested == 1
    assert bool(runner.compared) == (budget_s == np.inf)


@pytest.mark.fault("B61")
def test_a_device_is_told_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few are there at a time: else each would be timed to the end."""
    asked: list[float] = []
    latencies = iter((50.0, 20.0, 30.0, 40.0))

    def answer(self: DeviceRunner, request: Request, count: int = 1) -> list[Measurement]:
        if request.compare:
            return [ok(20.0)] * len(request.compare)
        asked.append(request.best_us)
        return [ok(next(latencies))]

    monkeypatch.setattr(DeviceRunner, "_ask", answer)

    def one_by_one(specs: Sequence[Specialization], target: Target) -> Iterator[Artifact]:
        for i, artifact in enumerate(compiles(specs, target)):
            while len(asked) < i:
                time.sleep(0.001)
            yield artifact

    with DeviceRunner() as runner:
        run(runner, compile_=one_by_one, include_torch=False)  # type: ignore[arg-type]
    assert asked == [np.inf, 50.0, 20.0, 20.0]


def test_equal_binaries_are_timed_once() -> None:
    twins = {c.binary for c in first(3)}

    def same(specs: Sequence[Specialization], target: Target) -> Iterator[Artifact]:
        for spec in specs:
            key = artifact_key(spec, target)
            yield Artifact(key, spec, ptx_hash="twin" if spec.config_binary in twins else key)

    runner = FakeRunner(lambda c: ok(50.0))
    result = run(runner, compile_=same)
    distinct = {(c.block_m, c.block_n, c.num_warps, c.group_m, c.split_k) for c in first(3)}
    assert len([c for c in runner.asked if c in first(3)]) == len(distinct)
    assert sum(m.ok for _, m in result.measured) == 4


@pytest.mark.fault("B66")
def test_nothing_works_so_torch_does_with_a_warning() -> None:
    runner = FakeRunner(lambda c: Measurement("crashed", error="illegal access"))
    with pytest.warns(RuntimeWarning, match="torch computes it"):
        result = run(runner)
    assert result.chosen == "torch"
    assert "16 crashed" in result.why
    assert len(runner.asked) == 16, "failures are replaced, but not for ever"
    assert not result.reliable, "it may be the machine's fault: not to be kept"


@pytest.mark.fault("B43")
def test_finalists_are_timed_again_beside_torch() -> None:
    again = dict(zip(first(3), (70.0, 55.0, 90.0), strict=True))
    runner = ComparingRunner(lambda c: ok(TORCH_US) if c is None else ok(again[c]))
    result = run(runner)
    assert runner.compared == [*first(3), None]
    assert result.config == first(3)[1]
    assert result.latency_us == 55.0


@pytest.mark.fault("B09")
def test_a_finalist_that_is_wrong_the_second_time_does_not_win() -> None:
    wrong = first(1)[0]
    outcomes = {wrong: Measurement("wrong_result", error="now and then"), None: ok(TORCH_US)}
    result = run(ComparingRunner(lambda c: outcomes.get(c, ok(60.0))))
    assert result.config == first(2)[1]
    assert dict(result.measured)[wrong].status == "wrong_result"


@pytest.mark.fault("B04")
def test_a_crash_among_the_finalists_condemns_them_but_not_torch() -> None:
    result = run(ComparingRunner(lambda c: Measurement("crashed", error="on the tenth launch")))
    assert result.config == first(4)[3], "the only one left that works"
    assert result.torch == ok(TORCH_US)


def test_the_drift_of_torch_counts_too() -> None:
    runner = ComparingRunner(lambda c: ok(50.0) if c is None else ok(51.0))
    assert run(runner).chosen == "torch"


def test_small_problems_are_not_timed() -> None:
    runner = FakeRunner(lambda c: ok(50.0))
    result = run(runner, SMALL)
    assert not runner.asked
    assert result.chosen == first(1, SMALL)[0]
    assert result.source == "predicted"
    assert not result.timed
    assert np.isnan(result.latency_us)
    assert run(runner, SMALL, mode="exhaustive").timed


@pytest.mark.parametrize("mode", ["predict", "heuristic"])
def test_untimed_modes_need_no_runner(mode: str) -> None:
    result = tune(LARGE, runner=None, target=H100, model=ByOrder(), mode=mode)
    assert result.config is not None
    assert not result.timed
    assert result.model == ("heuristic" if mode == "heuristic" else "by-order")


@pytest.mark.fault("B12")
def test_an_untimed_choice_is_compiled_where_it_can_do_no_harm() -> None:
    options: dict[str, Any] = {"mode": "predict", "compile_": crashing(first(2))}
    result = tune(LARGE, runner=None, target=H100, model=ByOrder(), **options)
    assert result.config is not None
    assert result.config.binary not in {c.binary for c in first(2)}
    assert {m.status for _, m in result.measured} == {"crashed"}
    assert result.costs.compiled == len(result.measured) + 1
    assert not result.timed


@pytest.mark.fault("B03")
def test_no_model_for_the_device_is_one_warning_and_the_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("costmodel.validation._warned", set())
    other = Target.named("b200-sxm", Toolchain("3.6.0", "12.8"))
    with pytest.warns(RuntimeWarning, match="b200-sxm"):
        result = tune(LARGE, runner=None, target=other, mode="predict")
    tune(LARGE, runner=None, target=other, mode="predict")  # a second warning would be an error
    assert result.model == "heuristic"
    assert "b200-sxm" in result.caveat


@pytest.mark.fault("B61")
def test_a_budget_ends_the_trial_with_the_best_so_far() -> None:
    def slowly(config: GemmConfig) -> Measurement:
        time.sleep(0.01)
        return ok(50.0)

    start = time.monotonic()
    result = run(FakeRunner(slowly), mode="exhaustive", budget_s=0.5)
    assert time.monotonic() - start < 10, "all take longer"
    assert result.config is not None
    assert 0 < len(result.measured) < len(SearchSpace.of(LARGE, H100))
    assert not result.reliable


@pytest.mark.parametrize(("mode", "promised"), [("topk", 0.98), ("predict", 0.95)])
def test_a_result_promises_what_the_ranking_does(mode: str, promised: float) -> None:
    class Sure(ByOrder):
        def expected_kept(self, *, ptx: bool) -> dict[str, float]:
            return {"1": 0.95, "4": 0.98, "8": 0.99}

        def out_of_coverage(self, workload: Workload) -> str:
            return "m is large"

    result = run(FakeRunner(lambda c: ok(50.0)), mode=mode, model=Sure())
    assert result.expected_kept == promised
    assert (result.sure, result.out_of_coverage) == (False, "m is large")
    assert TuningResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_bad_input() -> None:
    runner = FakeRunner(lambda c: ok(50.0))
    for options in (
        {"mode": "fast"},
        {"k": 0},
        {"k": "all"},
        {"budget_s": 0.0},
        {"workload": Workload(0, 8, 8)},
    ):
        with pytest.raises(InvalidInput):
            run(runner, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="empty product") as empty:
        run(runner, workload=Workload(0, 8, 8))
    assert "budget" not in str(empty.value)
    for budget_s in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidInput, match=r"^budget_s=.*seconds over 0$"):
            run(runner, budget_s=budget_s)
    with pytest.raises(InvalidInput, match="runner"):
        tune(LARGE, runner=None, target=H100, model=ByOrder())


@pytest.mark.fault("B66")
def test_nothing_goes_to_stdout(capsys: pytest.CaptureFixture[str], recording: Dataset) -> None:
    tune(LARGE, runner=ReplayRunner(recording), model=ByOrder())
    assert capsys.readouterr().out == ""


@pytest.mark.fault("B03")
def test_a_model_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NoModel):
        tune(LARGE, runner=None, target=H100, model=tmp_path / "none", mode="predict")
