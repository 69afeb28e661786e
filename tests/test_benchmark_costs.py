"""The benchmarks of costs: of tuning, of a call, and of collecting data."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import pytest
from benchmark_fakes import H100, WORKLOAD, A, B, C, FakeRunner, compiled

from costmodel.collect import Job
from costmodel.data.measurement import Candidate, Measurement
from costmodel.gemm.specialize import specialize
from costmodel.hardware.target import Target
from costmodel.tuning.tuning_result import BucketPlan, Costs, Segment, TuningResult


class FakeTuning:
    def __init__(self, compiled: int, timed: int) -> None:
        self.costs = Costs(0.1, 0.2, 0.3, compiled, timed)


def test_tuning_cost_by_hand(script: Any) -> None:
    bench = script("bench_tuning_cost")

    def row(topk_s: float, exhaustive_s: float, kept_us: float, inductor: Any) -> Any:
        return bench.row_of(
            WORKLOAD, (FakeTuning(8, 8), topk_s), (FakeTuning(1000, 900), exhaustive_s),
            {"topk": kept_us, "exhaustive": 10.0}, inductor,
        )  # fmt: skip

    by_inductor = {"inductor_s": 6.0, "inductor_us": 15.0, "beside_inductor_us": 12.0}
    first, second = row(2.0, 40.0, 12.5, by_inductor), row(4.0, 80.0, 20.0, {})
    assert (first["ratio"], first["speed_kept_pct"]) == (20.0, 80.0)
    assert first["topk_stages"] == {"rank_s": 0.1, "compile_s": 0.2, "measure_s": 0.3}
    assert bench.summarize([first, second]) == {
        "workloads": 2, "exhaustive_s": 60.0, "exhaustive_compiled": 1000, "exhaustive_timed": 900,
        "topk_s": 3.0, "topk_compiled": 8, "topk_timed": 8, "ratio": 20.0,
        "speed_kept_pct": pytest.approx(100 * (0.8 * 0.5) ** 0.5),
        "inductor_s": 6.0, "inductor_ratio": 3.0, "faster_than_inductor": 1.25,
    }  # fmt: skip
    without = bench.summarize([second])
    assert without["inductor_s"] is without["inductor_ratio"] is None
    assert without["faster_than_inductor"] is None
    only_seconds = row(2.0, 40.0, 12.5, {"inductor_s": 6.0})
    assert bench.summarize([only_seconds])["faster_than_inductor"] is None


def test_shared_binaries_are_compiled_once_and_cost_what_they_took(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = script("bench_tuning_cost")
    asked: list[int] = []

    def compile_(specs: Any, target: Any, pool: object) -> Any:
        asked.append(len(specs))
        for artifact in compiled(specs, target):
            yield replace(artifact, compile_s=0.5)

    monkeypatch.setattr(bench, "compile_for_device", compile_)
    compiler = bench.Compiler(None)
    specs = [specialize(WORKLOAD, config) for config in (A, B, C)]
    assert [a.spec for a in compiler(specs[:2], H100)] == specs[:2]
    assert {a.spec for a in compiler(specs, H100)} == set(specs)
    assert (asked, compiler.reused) == ([2, 1], 2)
    assert bench.compile_s(WORKLOAD, H100, compiler, 3) == pytest.approx(3 * 0.5 / 3)


class FakePool:
    def __init__(self, workers: int) -> None:
        self.workers = workers

    def start(self, count: int) -> None:
        assert count == self.workers

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeDevice(FakeRunner):
    """As many of it as there are processes; each sees the caches that it was started with."""

    started: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__({None: 90.0})
        self.started.append(os.environ["TRITON_CACHE_DIR"])

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("arguments", "processes", "own"),
    [(["--workers", "3"], 2 + 1, "-3-workers"), (["--full"], 2 + 2, "")],
)
def test_the_whole_run_with_a_device_that_is_made_up(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str],
    processes: int, own: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bench = script("bench_tuning_cost")
    monkeypatch.setattr(Target, "current", lambda: H100)
    monkeypatch.setattr(FakeDevice, "started", [])
    monkeypatch.setattr(bench, "DeviceRunner", FakeDevice)
    monkeypatch.setattr(bench, "CompilePool", FakePool)
    monkeypatch.setattr(bench, "SIZES", ((16, 4096, 4096), (1000, 1000, 1000)))
    monkeypatch.setattr(
        bench, "compile_for_device",
        lambda specs, target, pool: (replace(a, compile_s=9.0) for a in compiled(specs, target)),
    )  # fmt: skip
    monkeypatch.setattr(bench, "inductor", lambda workload, ours: {"inductor_s": 4.0})
    monkeypatch.setattr(bench.joblib, "cpu_count", lambda: 3)
    options = ["--results", str(tmp_path), *arguments]
    monkeypatch.setattr("sys.argv", ["bench", *options])
    bench.main()
    data = json.loads((tmp_path / f"tuning_cost{own}-h100-sxm.json").read_text())
    assert data["versions"]["compile_workers"] == "3"
    assert len(set(FakeDevice.started)) == processes, "each from empty caches of its own"
    first, second = data["rows"]
    assert first["topk_timed"] == second["topk_timed"] == 8
    assert second["exhaustive_timed"] > 500
    assert (second["reused"] > 2 * first["reused"]) == ("--full" not in arguments)
    # Nine seconds each, by three workers, whoever compiled it: the clock saw much less.
    for row in (first, second):
        assert row["exhaustive_s"] == pytest.approx(3.0 * row["exhaustive_compiled"], rel=0.2)
        assert row["exhaustive_s"] > 100 * row["exhaustive_wall_s"]
    assert data["summary"]["inductor_s"] == 4.0
    assert "16x4096x4096" in capsys.readouterr().out


def test_compilers_start_from_empty_caches(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", "/before")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with script("bench_tuning_cost").empty_caches():
        inside = Path(knobs.cache.dir)
        assert inside.parent.is_dir()
        assert not inside.exists()
    assert not inside.parent.exists()
    assert os.environ["TRITON_CACHE_DIR"] == "/before"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.slow
def test_inductor_that_fails_is_left_out(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("bench_tuning_cost")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bench.inductor(WORKLOAD, A) == {}
    assert "inductor left out" in capsys.readouterr().err


def test_the_host_time_of_a_call_is_a_median(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = script("bench_dispatch")
    clock, calls, waits = [0.0], [0, 0], [0]

    def call(which: int, takes_s: float) -> None:
        repeat = calls[which] // bench._AT_A_TIME
        calls[which] += 1
        # The first ones are not timed; two turns of forty meet a slow host, for both.
        clock[0] += 1.0 if repeat == 0 else takes_s + (repeat in (4, 5))

    def synchronize() -> None:
        waits[0] += 1
        clock[0] += 10.0

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    ours, theirs = bench.host_us((lambda: call(0, 2e-6), lambda: call(1, 3e-6)), synchronize)
    assert (ours, theirs) == (pytest.approx(2.0, rel=1e-3), pytest.approx(3.0, rel=1e-3))
    assert calls == [bench._CALLS + bench._AT_A_TIME] * 2
    assert waits[0] == 2 * (1 + bench._CALLS // bench._AT_A_TIME)


def test_dispatch_by_hand(script: Any) -> None:
    bench = script("bench_dispatch")
    warm: dict[str, Any] = {"matmul_us": 15.0, "torch_mm_us": 20.0, "ratio": 0.75}
    assert bench.summarize_known([{"out": False, **warm}, {"ratio": 99.0}]) == warm
    assert bench.summarize_first([{"first_call": "auto", "seconds": 3.0}]) == {
        "first_call_s": 3.0, "predict_first_call_s": None, "warm_process_first_call_ms": None,
        "first_of_all_s": None,
    }  # fmt: skip
    named = {"auto": 3.0, "predict": 1.5, "first of all": 9.0, "warm caches": 0.25}
    assert bench.summarize_first([{"first_call": n, "seconds": s} for n, s in named.items()]) == {
        "first_call_s": 3.0, "predict_first_call_s": 1.5, "warm_process_first_call_ms": 250.0,
        "first_of_all_s": 9.0,
    }  # fmt: skip


def test_a_first_call_is_the_median_of_runs_with_caches_of_their_own(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = script("bench_dispatch")
    folders: dict[str, list[Path]] = {"first of all": [], "warm caches": []}
    seconds = {"first of all": iter([7.0, 5.0, 6.0]), "warm caches": iter([0.1, 0.3, 0.2])}

    def first_call(kind: str, mode: str, model: object, caches: Path) -> dict[str, Any]:
        assert (mode, model) == ("auto", None)
        assert caches.is_dir()
        folders[kind].append(caches)
        return {"first_call": kind, "seconds": next(seconds[kind]), "stages": len(folders[kind])}

    monkeypatch.setattr(bench, "first_call", first_call)
    assert bench.first_calls(tuple(folders), 3, None) == [
        {"first_call": "first of all", "seconds": 6.0, "stages": 3, "runs": 3, "least_s": 5.0,
         "most_s": 7.0},
        {"first_call": "warm caches", "seconds": 0.2, "stages": 3, "runs": 3, "least_s": 0.1,
         "most_s": 0.3},
    ]  # fmt: skip
    assert len({*folders["first of all"]}) == 3
    assert folders["first of all"] == folders["warm caches"], "which find what it filled"


def test_stages_are_those_since_the_watch_began(script: Any) -> None:
    bench = script("bench_dispatch")

    class Work:
        def do(self, seconds: float) -> float:
            time.sleep(seconds)
            return seconds

    stages = bench.Stages()
    stages.watch(Work, "do", "work")
    Work().do(0.01)
    stages.begin()
    assert [Work().do(seconds) for seconds in (0.01, 0.02)] == [0.01, 0.02]
    first, second = stages.found
    assert first["stage"] == second["stage"] == "work"
    assert first["took_s"] >= 0.01
    assert second["took_s"] >= 0.02
    assert first["at_s"] + first["took_s"] <= second["at_s"]


def test_the_stages_of_a_first_call_are_functions_that_there_are(script: Any) -> None:
    for owner, function, stage in script("bench_dispatch").first_call_stages():
        assert callable(getattr(owner, function)), stage


def test_collection_by_hand(script: Any) -> None:
    compiling = {"compiled": 300, "failed": 3, "cores": 16, "seconds": 10.0}
    summarize = script("bench_collection").summarize
    one = [{"gpus": 1, "timed": rows, "seconds": 1.0} for rows in (300, 100)]
    two = {"gpus": 2, "timed": 780, "seconds": 2.0}
    expected = {
        "rows_per_s_1gpu": 200.0, "rows_per_s_2gpu": None, "compiles_per_s": 30.0, "cores": 16,
    }  # fmt: skip
    assert summarize([compiling, *one]) == expected
    assert summarize([compiling, *one, two]) == expected | {"rows_per_s_2gpu": 390.0}
    assert summarize([compiling])["rows_per_s_1gpu"] is None


def test_the_parts_of_a_collection_add_up(script: Any) -> None:
    """After torch come the rows; what is timed without torch before it is timed again."""

    class Slow(FakeRunner):
        def measure(self, workload: Any, candidates: Any, best_us: float = inf) -> Any:
            time.sleep(0.002 * len(candidates))
            return [Measurement("ok", 10.0) for _ in candidates]

    clocked = script("bench_collection").Clocked(Slow({None: 10.0}))
    three = [Candidate(config, None) for config in (A, B, A)]
    for candidates in (three, three[:1]):
        clocked.measure_torch(WORKLOAD)
        clocked.measure(WORKLOAD, candidates)
        assert len(clocked.measure(WORKLOAD, three[:1])) == 1
    assert len(clocked.compare(WORKLOAD, [A, B])) == 2
    timings = {part: row["timings"] for part, row in clocked.parts.items()}
    assert timings == {"torch": 2, "rows": 4, "again": 2, "finalists": 2}
    assert clocked.parts["rows"]["seconds"] >= 0.008


def test_the_profile_of_a_row_by_hand(script: Any) -> None:
    """A session that sleeps, in a function of its own, 2 ms for each configuration."""
    bench = script("bench_collection")

    class Session:
        def measure(self, problem: object, config: object, best_us: float) -> Measurement:
            if config is not None:
                self.nap()
            return Measurement("ok", 10.0)

        def nap(self) -> None:
            time.sleep(0.002)

    row = bench.profiled(Session(), Job(WORKLOAD, (A, B, A)))
    assert row["profiled"] == 3
    (nap,) = [found for found in row["functions"] if found["function"].endswith(":nap")]
    assert nap["calls"] == 1
    assert 2 <= nap["ms"] <= row["ms"]
    assert nap["own_ms"] < nap["ms"]


def test_buckets_by_hand(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each m in between the bucket has something that is 10 % slower than its own winner, and
    the winner of the first m is slower still by as much; torch is not chosen."""
    bench = script("bench_buckets")
    assert bench.between(129, 160) == [138, 154]
    assert bench.between(1, 1) == bench.between(17, 32) == []
    for first, last in ((33, 64), (513, 640), (2049, 2560)):
        ends = {first - 1 + (last - first + 1) * i // 8 for i in range(1, 9)}
        timed = {first} | ends | {end - 1 for end in ends} | {end + 1 for end in ends}
        assert len(asked := bench.between(first, last)) == 2
        assert timed.isdisjoint(asked)
    own = dict(zip((129, 138, 154), (A, B, B), strict=True))

    def tuned(_: object, workload: Any, *__: object, **___: object) -> TuningResult:
        config = own[workload.m]
        return TuningResult.unranked(workload, H100, "auto", config, "", source="device (it)")

    class Device(FakeRunner):
        def __enter__(self) -> Device:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(bench, "DeviceRunner", lambda: Device({A: 12.1, B: 10.0, C: 11.0}))
    monkeypatch.setattr(bench, "tune_by", tuned)
    plan = BucketPlan((Segment(144, C), Segment(160, B)))
    monkeypatch.setattr(bench, "plan_by_timing", lambda *_: (plan, Costs(measure_s=0.5)))
    monkeypatch.setattr(bench, "plan_by_prediction", lambda *_: BucketPlan((Segment(160, C),)))
    rows = list(bench.measured(4096, 4096, (129, 160), H100, None, None))
    assert [row["workload"] for row in rows] == ["138x4096x4096", "154x4096x4096"]
    assert [row["slower_pct"] for row in rows] == [pytest.approx(10.0), pytest.approx(0.0)]
    assert [row["first_slower_pct"] for row in rows] == [pytest.approx(21.0)] * 2
    assert [row["predicted_slower_pct"] for row in rows] == [pytest.approx(10.0)] * 2
    assert [row["parts_s"] for row in rows] == [0.5, 0.5]
    assert [(row["own"], row["shared"], row["first"]) for row in rows] == [
        (str(B), str(C), str(A)), (str(B), str(B), str(A)),
    ]  # fmt: skip
    chosen = {"own": A, "shared": B, "predicted": B, "first": None}
    us = {"own": 1.0, "shared": None, "predicted": 1.0, "first": 1.0}
    failed = bench.row_of(9, 8, 8, (9, 16), chosen, us) | {"parts_s": 0.5, "tuning_s": 1.0}
    assert failed["first"] == "torch"
    summary = bench.summarize([*rows, failed])
    assert summary["slower_geomean_pct"] == pytest.approx(100 * (1.1**0.5 - 1))
    assert (summary["workloads"], summary["not_timed"], summary["over_5_pct"]) == (3, 1, 1)
    assert summary["first_slower_geomean_pct"] == pytest.approx(21.0)
    assert summary["first_over_5_pct"] == 2
    assert (summary["predicted_over_5_pct"], summary["parts_s"]) == (2, 0.5)
    assert summary["slower_worst_workload"] == "138x4096x4096"
    assert bench.summarize([failed])["slower_worst_pct"] is None
