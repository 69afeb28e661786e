"""The benchmarks of choices: what strategies and models choose, and how fast that is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_fakes import FAILED, H100, WORKLOAD, A, B, C, FakeRunner, compiled, ok

from costmodel.compile.compiler import Artifact
from costmodel.data.measurement import Measurement
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload
from costmodel.models import RuleHeuristic
from costmodel.tuning.ranking import rank

# --- strategies ---------------------------------------------------------------------------------


def test_the_tutorial_list_is_whole(script: Any) -> None:
    bench = script("bench_strategies")
    assert len(set(bench.TUTORIAL)) == 16
    first, last = bench.AUTOTUNE[0], bench.AUTOTUNE[-1]
    assert str(first) == "pointer 128x256x64 w8 s3 g8"
    assert str(last) == "pointer 128x32x64 w4 s4 g8"


def test_each_strategy_proposes_from_the_space(script: Any) -> None:
    bench = script("bench_strategies")
    ranking = rank(WORKLOAD, H100, RuleHeuristic())
    found = bench.proposals(ranking)
    assert {name: len(part) for name, part in found.items() if name != "autotune"} == {
        "heuristic": 8, "ptx": 8, "nvmmh": 0, "model": 8,
    }  # fmt: skip
    assert found["heuristic"] == found["model"] == list(ranking.configs[:8])
    # 128x256x128 in three stages does not fit an H100's shared memory: left out, as by Triton.
    assert bench.AUTOTUNE[0] in found["autotune"]
    assert bench.AUTOTUNE[8] not in found["autotune"]
    known = bench.AUTOTUNE[2:4]
    assert bench.proposals(ranking, known)["autotune"] == list(known)
    peer = bench.proposals(ranking, peer=RuleHeuristic())
    assert peer["nvmmh"] == peer["heuristic"]


def test_a_timed_strategy_takes_the_fastest_and_another_the_first(script: Any) -> None:
    proposed = {
        "autotune": [C],
        "heuristic": [B, A],
        "ptx": [B],
        "nvmmh": [B, C],
        "model": [A, B, C],
    }
    measured = {A: FAILED, B: ok(9.0), C: ok(7.0)}
    assert script("bench_strategies").choose(proposed, measured) == {
        "autotune": C, "heuristic": B, "ptx_top8": B, "nvmmh_top1": B, "nvmmh_top8": C,
        "model_top1": B, "model_top8": C,
    }  # fmt: skip
    nothing = {"autotune": [A], "heuristic": [A], "ptx": [], "nvmmh": [], "model": [A, C]}
    assert script("bench_strategies").choose(nothing, measured) == {
        "model_top1": C, "model_top8": C,
    }  # fmt: skip


def test_strategies_by_hand(script: Any) -> None:
    bench = script("bench_strategies")
    workload = Workload.dense(1000, 1000, 1000)  # 2 GFLOP: 20 us are 100 TFLOP/s
    final = {"torch": ok(20.0), "autotune": ok(40.0), "model_top8": ok(10.0), "heuristic": FAILED}
    chosen = {"autotune": A, "model_top8": B, "heuristic": C}
    spent = {"tuning_s": 3.0, "compiled": 16, "timed": 16}
    row = bench.row_of("square", workload, chosen, final, {"model_top8": spent})
    assert row["workload"] == "1000x1000x1000"
    assert row["model_top8"] == {
        "config": str(B), "steady_ms": 0.01, "tflops": pytest.approx(200.0),
        "gbs": pytest.approx(600.0), "speedup": 2.0, "improvement_pct": 300.0, **spent,
    }  # fmt: skip
    assert row["torch"]["config"] == "torch"
    assert row["torch"]["improvement_pct"] == 100.0
    assert row["heuristic"] is row["ptx_top8"] is None
    slow = bench.row_of("square", workload, chosen, {**final, "model_top8": ok(40.0)}, {})
    assert bench.summarize([row, slow]) == {
        "square_autotune_speedup": pytest.approx(0.5),
        "square_model_top8_speedup": pytest.approx(1.0),  # of 2 and 1/2
        "square_model_top8_tuning_s": 3.0,
    }
    best = next(r for r in bench.overall([row, slow]) if r["strategy"] == "model_top8")
    assert best == {
        "group": "overall", "workloads": "square (2)", "strategy": "model_top8",
        "steady_ms_geomean": pytest.approx(0.02), "gbs_geomean": pytest.approx(300.0),
        "tflops_geomean": pytest.approx(100.0), "speedup_geomean": pytest.approx(1.0),
        "speedup_worst": 0.5, "improvement_geomean_pct": pytest.approx(100.0),  # of 4 and 1
        "tuning_s_mean": 3.0, "timed_mean": 16,
    }  # fmt: skip


def test_what_a_strategy_spends(script: Any) -> None:
    """Triton's tuner compiles one after the other; equal binaries are compiled once."""
    bench = script("bench_strategies")
    proposed = {"autotune": [A, B, C], "heuristic": [A], "ptx": [A, B], "nvmmh": [], "model": [B]}
    seconds = {A: 2.0, B: 4.0, C: 4.0}
    made = {c: Artifact("one" if c is A else "two", specialize(WORKLOAD, c), compile_s=s)
            for c, s in seconds.items()}  # fmt: skip
    measured_s = {"autotune": 0.5, "heuristic": 9.0, "ptx": 0.25, "nvmmh": 0.0, "model": 0.125}
    found = bench.costs_of(proposed, made, measured_s, rank_s=0.0625)
    assert found["autotune"] == {"tuning_s": 6.5, "compiled": 2, "timed": 3}
    assert found["ptx_top8"] == {"tuning_s": 4.25, "compiled": 2, "timed": 2}
    assert found["heuristic"] == {"tuning_s": 2.0, "compiled": 1, "timed": 0}
    assert found["model_top1"] == {"tuning_s": 4.0625, "compiled": 1, "timed": 0}
    assert found["model_top8"] == {"tuning_s": 4.1875, "compiled": 1, "timed": 1}
    assert "nvmmh_top8" not in found
    assert bench.costs_of(proposed, {}, measured_s, 0.1) == {}, "a replay compiles nothing"


def test_inductor_is_compared_with_the_torch_of_its_process(script: Any, tmp_path: Path) -> None:
    bench = script("bench_strategies")
    final = {"torch": ok(20.0), "autotune": ok(40.0)}
    row = bench.row_of("eval", WORKLOAD, {"autotune": A}, final, {})
    results = script("common").Results("strategies", H100, tmp_path, {}, bench.summarize)
    results.add(row)
    failed = {"error": "no kernel"}
    found = {"tuning_s": 4.0, "us": 15.0, "torch_us": 30.0}
    bench.add_inductor([(row, WORKLOAD)], iter([failed]), results, float("inf"))
    assert row["inductor"] is None
    bench.add_inductor([(row, WORKLOAD)], iter([found]), results, float("inf"))
    (saved,) = script("tables").read_results(results.path)["rows"]
    assert saved["inductor"]["speedup"] == 2.0
    assert saved["inductor"]["improvement_pct"] == 300.0  # autotune: half of torch's speed
    assert saved["inductor"]["tuning_s"] == 4.0


def test_the_reason_is_the_fact_that_differs_most(script: Any) -> None:
    """A small product in large tiles leaves most of the card idle."""
    ranking = rank(Workload.dense(512, 512, 512), H100, RuleHeuristic())
    small = next(c for c in ranking.configs if (c.block_m, c.block_n, c.split_k) == (32, 64, 1))
    large = next(c for c in ranking.configs if (c.block_m, c.block_n, c.split_k) == (128, 256, 1))
    why = script("strategy_reasons").why
    assert why(ranking, small, large).startswith(("multiprocessors busy", "of latency"))
    assert why(ranking, small, small) is None
    assert why(ranking, small, GemmConfig("tma", 512, 512, 64)) is None, "not in the ranking"


def test_strategies_from_end_to_end(script: Any, tmp_path: Path) -> None:
    bench = script("bench_strategies")
    ranking = rank(WORKLOAD, H100, RuleHeuristic())
    proposed = bench.proposals(ranking)
    favourite = proposed["model"][5]
    runner = FakeRunner({None: 25.0, favourite: 20.0})
    results = script("common").Results("strategies", H100, tmp_path, {}, bench.summarize)
    rows = bench.run([("eval", ranking, proposed, 0.1)], runner, {}, results, float("inf"))
    results.add(*bench.overall(results.rows))
    assert [workload for _, workload in rows] == [WORKLOAD]
    first, *rest = script("tables").read_results(results.path)["rows"]
    assert first["model_top8"]["config"] == str(favourite)
    assert first["model_top8"]["speedup"] == 1.25
    assert first["model_top1"]["speedup"] == 0.5
    assert first[first["best"]]["config"] == str(favourite)
    assert first["why"]
    assert {row["group"] for row in rest} == {"overall"}


# --- kernels ------------------------------------------------------------------------------------


def frozen(script: Any, torch_us: float, b_us: float = 15.0) -> tuple[dict[str, Any], GemmConfig]:
    """What is frozen where A and B were the best recorded, the model's fifth choice takes 20 us
    and all but B take 50."""
    bench = script("bench_kernels")
    favourite = rank(WORKLOAD, H100, RuleHeuristic(), 8).configs[4]
    runner = FakeRunner({None: torch_us, favourite: 20.0, B: b_us})
    ahead = script("common").CompiledAhead(compiled)
    winner = bench.freeze("o_proj", WORKLOAD, [A, B], runner, H100, RuleHeuristic(), ahead)
    return winner, favourite


def test_the_best_of_the_top_and_the_default_are_frozen(script: Any) -> None:
    winner, favourite = frozen(script, torch_us=30.0)
    assert winner["triton_best"] == B.to_dict()
    assert winner["model_top8"] == winner["default"] == favourite.to_dict()
    assert json.loads(json.dumps(winner)) == winner


def test_the_best_known_may_be_the_models(script: Any) -> None:
    winner, favourite = frozen(script, torch_us=30.0, b_us=25.0)
    assert winner["triton_best"] == favourite.to_dict()


def test_the_default_may_be_torch(script: Any) -> None:
    winner, favourite = frozen(script, torch_us=10.0)
    assert winner["default"] == "torch"
    assert winner["model_top8"] == favourite.to_dict()


def test_frozen_winners_are_timed_beside_torch(script: Any) -> None:
    winner, favourite = frozen(script, torch_us=10.0)
    runner = FakeRunner({None: 12.0, favourite: 16.0, B: 10.0})
    found = script("bench_kernels").measure([winner], runner, float("inf"))
    assert found == {
        WORKLOAD.key(): {
            "torch": 12.0, "triton_best": 10.0, "model_top8": 16.0, "default": 12.0,
        }
    }  # fmt: skip
    assert runner.compared == [(None, B, favourite)]


def kernels_rows(bench: ModuleType) -> list[dict[str, Any]]:
    """Two workloads by hand: one where Triton is chosen, and one where torch is."""
    other = Workload.dense(16, 4096, 1024)
    chosen = {"triton_best": A.to_dict(), "model_top8": B.to_dict(), "default": B.to_dict()}
    torch = {"triton_best": None, "model_top8": B.to_dict(), "default": "torch"}
    winners = [
        {"name": "a", "workload": WORKLOAD.to_dict(), **chosen},
        {"name": "b", "workload": other.to_dict(), **torch},
    ]
    runs = [
        {
            WORKLOAD.key(): {"torch": t, "triton_best": 8.0, "model_top8": d, "default": d},
            other.key(): {"torch": 5.0, "model_top8": 10.0, "default": 5.0},
        }
        for t, d in ((10.0, 12.5), (12.0, 16.0), (16.0, 12.8))
    ]
    return list(bench.rows_of(winners, runs))


def test_the_best_of_the_runs_counts(script: Any) -> None:
    first, second = kernels_rows(script("bench_kernels"))
    assert first["torch_us"] == 10.0
    assert first["triton_best"] == 1.25
    assert first["default"] == 0.8  # 10 over 12.5, not the best ratio of a run, 16 over 12.8
    assert first["default_worst_run"] == 0.75  # 12 over 16
    assert first["default_config"] == str(B)
    assert second["triton_best"] is second["triton_best_config"] is None
    assert (second["default"], second["default_config"]) == (1.0, "torch")


def test_what_arithmetic_bounds_is_summed_up_apart(script: Any) -> None:
    bench = script("bench_kernels")
    rows = [
        {**row, "flops_per_byte": f} for row, f in zip(kernels_rows(bench), (400, 20), strict=True)
    ]
    summary = bench.summarize(rows)
    assert summary["compute_bound_workloads"] == 1
    assert summary["triton_best_compute_bound_geomean"] == pytest.approx(1.25)
    assert summary["model_top8_compute_bound_geomean"] == pytest.approx(0.8)


def test_kernels_by_hand(script: Any) -> None:
    bench = script("bench_kernels")
    summary = bench.summarize(kernels_rows(bench))
    assert summary == {
        "workloads": 2, "of_eval_list": 78,
        "triton_best_geomean": pytest.approx(1.25), "triton_best_worst": 1.25,
        "model_top8_geomean": pytest.approx(0.4**0.5), "model_top8_worst": 0.5,
        "default_geomean": pytest.approx(0.8**0.5), "default_worst": 0.8,
        "triton_best_compute_bound_geomean": None, "model_top8_compute_bound_geomean": None,
        "compute_bound_workloads": 0, "default_worst_run": 0.75, "triton_chosen_share": 0.5,
        "triton_best_five_worst": "64x4096x1024 1.250",
        "model_top8_five_worst": "16x4096x1024 0.500, 64x4096x1024 0.800",
        "default_five_worst": "64x4096x1024 0.800, 16x4096x1024 1.000",
        "not_timed": 0,
    }  # fmt: skip


def test_a_choice_that_failed_in_one_run_has_no_speed(script: Any) -> None:
    bench = script("bench_kernels")
    winner, _ = frozen(script, torch_us=30.0)
    good = {"torch": 10.0, "triton_best": 8.0, "model_top8": 9.0, "default": 9.0}
    row = bench.row_of(winner, [good, {**good, "default": None}, good])
    assert row["default"] is None
    assert row["model_top8"] == pytest.approx(10 / 9)
    assert bench.summarize([row])["not_timed"] == 1


def test_a_workload_that_a_run_did_not_reach_is_left_out(script: Any) -> None:
    winner, _ = frozen(script, torch_us=30.0)
    run = {WORKLOAD.key(): {"torch": 1.0, "triton_best": 1.0, "model_top8": 1.0, "default": 1.0}}
    assert len(script("bench_kernels").rows_of([winner], [run, run])) == 1
    assert script("bench_kernels").rows_of([winner], [run, {}]) == []


def test_bfloat16_goes_by_what_float16_showed(script: Any) -> None:
    class Recorded:
        def recorded(self, workload: Workload) -> dict[GemmConfig, Measurement]:
            of_half = {A: Measurement("ok", 2.0), B: Measurement("ok", 1.0)}
            return of_half if workload == WORKLOAD else {}

    best = script("bench_kernels").recorded_finalists
    twin = replace(WORKLOAD.code, dtype="bfloat16", out_dtype="bfloat16")
    assert best(Recorded(), replace(WORKLOAD, code=twin)) == best(Recorded(), WORKLOAD) == [B, A]
    assert best(Recorded(), replace(WORKLOAD, m=3)) == []
    assert best(None, WORKLOAD) == []
