"""The benchmarks of costs: of tuning, of a call, and of collecting data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from benchmark_fakes import H100, WORKLOAD, A, B, C, FakeRunner

from costmodel.tuning_result import Costs


class FakeTuning:
    def __init__(self, compiled: int, timed: int) -> None:
        self.costs = Costs(compiled=compiled, timed=timed)


def test_tuning_cost_by_hand(script: Any) -> None:
    bench = script("bench_tuning_cost")

    def row(topk_s: float, exhaustive_s: float, kept_us: float, inductor_s: float | None) -> Any:
        return bench.row_of(
            WORKLOAD, (FakeTuning(8, 8), topk_s), (FakeTuning(1000, 900), exhaustive_s),
            {"topk": kept_us, "exhaustive": 10.0}, inductor_s,
        )  # fmt: skip

    first, second = row(2.0, 40.0, 12.5, 6.0), row(4.0, 80.0, 20.0, None)
    assert (first["ratio"], first["speed_kept_pct"]) == (20.0, 80.0)
    assert bench.summarize([first, second]) == {
        "workloads": 2, "exhaustive_s": 60.0, "exhaustive_compiled": 1000, "exhaustive_timed": 900,
        "topk_s": 3.0, "topk_compiled": 8, "topk_timed": 8, "ratio": 20.0,
        "speed_kept_pct": pytest.approx(100 * (0.8 * 0.5) ** 0.5),
        "inductor_s": 6.0, "inductor_ratio": 3.0,
    }  # fmt: skip
    without = bench.summarize([second])
    assert without["inductor_s"] is without["inductor_ratio"] is None


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


def test_inductor_that_fails_is_left_out(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("bench_tuning_cost")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bench.inductor_s(WORKLOAD) is None
    assert "inductor left out" in capsys.readouterr().err


def test_the_host_time_of_a_call_is_a_median(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = script("bench_dispatch")
    clock, calls, waits = [0.0], [0], [0]

    def call() -> None:
        calls[0] += 1
        # One repeat of nine is disturbed; what comes before the repeats is not timed.
        clock[0] += 1.0 if calls[0] <= bench._CALLS else 2e-6 + (calls[0] < 2 * bench._CALLS)

    def synchronize() -> None:
        waits[0] += 1
        clock[0] += 10.0

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert bench.host_us(call, synchronize) == pytest.approx(2.0, rel=1e-3)
    assert waits[0] == 1 + bench._REPEATS


def test_dispatch_by_hand(script: Any) -> None:
    warm: dict[str, Any] = {"matmul_us": 15.0, "torch_mm_us": 20.0, "ratio": 0.75}
    rows = [warm, {"matmul_us": 99.0, "torch_mm_us": 1.0, "ratio": 99.0}]
    summarize = script("bench_dispatch").summarize
    assert summarize(rows) == {
        **warm, "first_call_s": None, "predict_first_call_s": None,
        "warm_process_first_call_ms": None,
    }  # fmt: skip
    named = {"auto": 3.0, "predict": 1.5, "warm caches": 0.25}
    rows += [{"first_call": name, "seconds": s} for name, s in named.items()]
    assert summarize(rows) == {
        **warm, "first_call_s": 3.0, "predict_first_call_s": 1.5,
        "warm_process_first_call_ms": 250.0,
    }  # fmt: skip


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


def test_buckets_by_hand(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket's winner is 10 % slower on every m in between; torch is not chosen."""
    bench = script("bench_buckets")
    assert bench.between(129, 160) == [144, 160]
    assert bench.between(1, 1) == []
    own = dict(zip((129, 144, 160), (A, B, C), strict=True))

    class Tuned:
        def __init__(self, workload: Any) -> None:
            self.config = own[workload.m]

    class Runner(FakeRunner):
        def __enter__(self) -> Runner:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(bench, "DeviceRunner", lambda: Runner({A: 11.0, B: 10.0, C: 11.0}))
    monkeypatch.setattr(bench, "tune", lambda workload, **_: Tuned(workload))
    rows = list(bench.measured(4096, 4096, (129, 160), H100, None, None))
    assert [row["workload"] for row in rows] == ["144x4096x4096", "160x4096x4096"]
    assert [row["slower_pct"] for row in rows] == [pytest.approx(10.0), pytest.approx(0.0)]
    failed = bench.row_of(9, 8, 8, (9, 16), {"shared": None, "own": 1.0})
    summary = bench.summarize([*rows, failed])
    assert summary["slower_geomean_pct"] == pytest.approx(100 * (1.1**0.5 - 1))
    assert (summary["workloads"], summary["not_timed"], summary["over_5_pct"]) == (3, 1, 1)
    assert summary["slower_worst_workload"] == "144x4096x4096"
    assert bench.summarize([failed])["slower_worst_pct"] is None
