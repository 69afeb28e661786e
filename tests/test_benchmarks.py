"""The benchmark scripts: what they write, and how they come by it; no GPU is needed for that."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from costmodel.artifact import Artifact
from costmodel.config import GemmConfig
from costmodel.heldout import EVAL_WORKLOADS
from costmodel.measurement import Candidate, Measurement
from costmodel.models import RuleHeuristic
from costmodel.ranking import rank
from costmodel.report import read_results
from costmodel.specialize import artifact_key, specialize
from costmodel.target import DEVICES, Target, Toolchain
from costmodel.tuning_result import Costs
from costmodel.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(p.stem for p in FOLDER.glob("bench_*.py"))
H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
WORKLOAD = Workload.dense(64, 4096, 1024)
A, B, C = (GemmConfig("tma", 64, 128, 64, num_stages=s) for s in (3, 4, 5))
FAILED = Measurement("crashed", error="gone")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script by name, as Python does that runs it: its folder comes first."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def ok(us: float) -> Measurement:
    return Measurement("ok", us, us, us, 5)


class FakeRunner:
    """Latencies by configuration; torch is None. What is not named takes 50 us."""

    def __init__(self, us: dict[GemmConfig | None, float]) -> None:
        self.us = us
        self.compared: list[tuple[GemmConfig | None, ...]] = []

    def measure(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Measurement]:
        return [ok(self.us.get(c.config, 50.0)) for c in candidates]

    def measure_torch(self, workload: Workload) -> Measurement:
        return ok(self.us[None])

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None]
    ) -> list[Measurement]:
        self.compared.append(tuple(configs))
        return [ok(self.us.get(c, 50.0)) for c in configs]


class Replays:
    """A runner that cannot compare."""

    def measure(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Measurement]:
        return [ok(7.0) for _ in candidates]

    def measure_torch(self, workload: Workload) -> Measurement:
        return ok(9.0)


def compiled(specs: Sequence[Any], target: Target) -> list[Artifact]:
    return [Artifact(artifact_key(s, target), s, ptx_hash=artifact_key(s, target)) for s in specs]


# --- what all of them share ---------------------------------------------------------------------


def test_results_are_saved_with_every_row(script: Any, tmp_path: Path) -> None:
    results = script("common").Results(
        "kernels-float16", H100, tmp_path / "new", {"triton": "3.6.0"},
        lambda rows: {"total": sum(row["us"] for row in rows)},
    )  # fmt: skip
    path = tmp_path / "new" / "kernels-float16-h100-sxm.json"
    for count in (1, 2):
        results.add({"us": 1.5})
        found = read_results(path)
        assert found["rows"] == [{"us": 1.5}] * count
        assert found["summary"] == {"total": 1.5 * count}
    assert (found["bench"], found["target"]) == ("kernels-float16", "h100-sxm")
    assert found["device"] == "NVIDIA H100 80GB HBM3"
    assert found["versions"] == {"triton": "3.6.0"}


def test_choices_are_timed_in_turn_and_each_once(script: Any) -> None:
    runner = FakeRunner({None: 10.0, A: 8.0})
    found = script("common").in_turn(runner, WORKLOAD, {"torch": None, "x": A, "y": A, "z": None})
    assert runner.compared == [(None, A)]
    assert {name: m.latency_us for name, m in found.items()} == {
        "torch": 10.0, "x": 8.0, "y": 8.0, "z": 10.0,
    }  # fmt: skip


def test_a_runner_that_cannot_compare_answers_one_by_one(script: Any) -> None:
    found = script("common").in_turn(Replays(), WORKLOAD, {"torch": None, "x": A})
    assert {name: m.latency_us for name, m in found.items()} == {"torch": 9.0, "x": 7.0}


def test_what_was_compiled_ahead_is_not_compiled_again(script: Any) -> None:
    asked = []

    def compile_(specs: Sequence[Any], target: Target) -> list[Artifact]:
        asked.append(len(specs))
        return compiled(specs, target)

    ahead = script("common").CompiledAhead(compile_)
    a, b = (specialize(WORKLOAD, c) for c in (A, B))
    assert [x.spec for x in ahead([a, a], H100)] == [a, a]
    assert [x.spec for x in ahead([b, a], H100)] == [b, a]
    assert asked == [1, 1]


def test_a_spent_budget_ends_the_loop(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    common = script("common")
    assert list(common.until(float("inf"), "abc")) == ["a", "b", "c"]
    assert list(common.until(0.0, "abc")) == []
    assert "0 of 3 done" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["strategies", "kernels", "tuning_cost", "dispatch", "collection"])
def test_without_a_gpu_a_benchmark_says_so_and_writes_nothing(
    script: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", "--results", str(tmp_path)])
    module = script(f"bench_{name}")
    assert script("common").at_exit_code(module.main) == 1
    assert "no usable NVIDIA GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- evaluate -----------------------------------------------------------------------------------


def test_evaluate_summarizes_the_model_and_the_score(script: Any) -> None:
    def entry(name: str, top1: float, top8: float) -> dict[str, Any]:
        kept = {k: {"geomean_pct": v, "worst_pct": v / 2} for k, v in (("1", top1), ("8", top8))}
        return {"name": name, "workloads": 39, "regret": kept}

    rows = [entry("xgb", 96.0, 99.0), entry("static", 1.0, 1.0), entry("ptx-score", 40.0, 60.0)]
    assert script("bench_evaluate").summarize(rows) == {
        "model": "xgb", "workloads": 39, "of_eval_list": 78,
        "top1_geomean_pct": 96.0, "top1_worst_pct": 48.0,
        "top8_geomean_pct": 99.0, "top8_worst_pct": 49.5,
        "ptx_score_top1_geomean_pct": 40.0, "ptx_score_top1_worst_pct": 20.0,
        "ptx_score_top8_geomean_pct": 60.0, "ptx_score_top8_worst_pct": 30.0,
    }  # fmt: skip


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
        "heuristic": 8, "ptx": 8, "model": 8,
    }  # fmt: skip
    assert found["heuristic"] == found["model"] == list(ranking.configs[:8])
    # 128x256x128 in three stages does not fit an H100's shared memory: left out, as by Triton.
    assert bench.AUTOTUNE[0] in found["autotune"]
    assert bench.AUTOTUNE[8] not in found["autotune"]
    known = bench.AUTOTUNE[2:4]
    assert bench.proposals(ranking, known)["autotune"] == list(known)


def test_a_timed_strategy_takes_the_fastest_and_another_the_first(script: Any) -> None:
    proposed = {"autotune": [C], "heuristic": [B, A], "ptx": [B], "model": [A, B, C]}
    measured = {A: FAILED, B: ok(9.0), C: ok(7.0)}
    assert script("bench_strategies").choose(proposed, measured) == {
        "autotune": C, "heuristic": B, "ptx_top8": B, "model_top1": B, "model_top8": C,
    }  # fmt: skip
    nothing = {"autotune": [A], "heuristic": [A], "ptx": [], "model": [A, C]}
    assert script("bench_strategies").choose(nothing, measured) == {
        "model_top1": C, "model_top8": C,
    }  # fmt: skip


def test_strategies_by_hand(script: Any) -> None:
    bench = script("bench_strategies")
    workload = Workload.dense(1000, 1000, 1000)  # 2 GFLOP: 20 us are 100 TFLOP/s
    final = {"torch": ok(20.0), "autotune": ok(40.0), "model_top8": ok(10.0), "heuristic": FAILED}
    chosen = {"autotune": A, "model_top8": B, "heuristic": C}
    row = bench.row_of("square", workload, chosen, final)
    assert row["workload"] == "1000x1000x1000"
    assert row["model_top8"] == {
        "config": str(B), "steady_ms": 0.01, "tflops": pytest.approx(200.0), "speedup": 2.0,
        "improvement_pct": 300.0,
    }  # fmt: skip
    assert row["torch"]["config"] == "torch"
    assert row["torch"]["improvement_pct"] == 100.0
    assert row["heuristic"] is row["ptx_top8"] is None
    slow = bench.row_of("square", workload, chosen, {**final, "model_top8": ok(40.0)})
    assert bench.summarize([row, slow]) == {
        "square_autotune_speedup": pytest.approx(0.5),
        "square_model_top8_speedup": pytest.approx(1.0),  # of 2 and 1/2
    }
    best = next(r for r in bench.overall([row, slow]) if r["strategy"] == "model_top8")
    assert best == {
        "group": "overall", "workloads": "square (2)", "strategy": "model_top8",
        "tflops_geomean": pytest.approx(100.0), "speedup_geomean": pytest.approx(1.0),
        "speedup_worst": 0.5, "improvement_geomean_pct": pytest.approx(100.0),  # of 4 and 1
    }  # fmt: skip


def test_strategies_from_end_to_end(script: Any, tmp_path: Path) -> None:
    bench = script("bench_strategies")
    ranking = rank(WORKLOAD, H100, RuleHeuristic())
    proposed = bench.proposals(ranking)
    favourite = proposed["model"][5]
    runner = FakeRunner({None: 25.0, favourite: 20.0})
    results = script("common").Results("strategies", H100, tmp_path, {}, bench.summarize)
    bench.run([("eval", ranking, proposed)], runner, {}, results, float("inf"))
    first, *rest = read_results(results.path)["rows"]
    assert first["model_top8"]["config"] == str(favourite)
    assert first["model_top8"]["speedup"] == 1.25
    assert first["model_top1"]["speedup"] == 0.5
    assert {row["group"] for row in rest} == {"overall"}


# --- kernels ------------------------------------------------------------------------------------


def frozen(script: Any, torch_us: float) -> tuple[dict[str, Any], GemmConfig]:
    """What is frozen where the model's fifth choice takes 20 us and all others 50."""
    bench = script("bench_kernels")
    favourite = rank(WORKLOAD, H100, RuleHeuristic(), 8).configs[4]
    runner = FakeRunner({None: torch_us, favourite: 20.0})
    ahead = script("common").CompiledAhead(compiled)
    return bench.freeze("o_proj", WORKLOAD, A, runner, H100, RuleHeuristic(), ahead), favourite


def test_the_best_of_the_top_and_the_default_are_frozen(script: Any) -> None:
    winner, favourite = frozen(script, torch_us=30.0)
    assert winner["triton_best"] == A.to_dict()
    assert winner["model_top8"] == winner["default"] == favourite.to_dict()
    assert json.loads(json.dumps(winner)) == winner


def test_the_default_may_be_torch(script: Any) -> None:
    winner, favourite = frozen(script, torch_us=10.0)
    assert winner["default"] == "torch"
    assert winner["model_top8"] == favourite.to_dict()


def test_frozen_winners_are_timed_beside_torch(script: Any) -> None:
    winner, favourite = frozen(script, torch_us=10.0)
    runner = FakeRunner({None: 12.0, favourite: 16.0, A: 10.0})
    found = script("bench_kernels").measure([winner], runner, float("inf"))
    assert found == {
        WORKLOAD.key(): {
            "torch": 12.0, "triton_best": 10.0, "model_top8": 16.0, "default": 12.0,
        }
    }  # fmt: skip
    assert runner.compared == [(None, A, favourite)]


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


def test_kernels_by_hand(script: Any) -> None:
    bench = script("bench_kernels")
    summary = bench.summarize(kernels_rows(bench))
    assert summary == {
        "workloads": 2, "of_eval_list": 78,
        "triton_best_geomean": pytest.approx(1.25), "triton_best_worst": 1.25,
        "model_top8_geomean": pytest.approx(0.4**0.5), "model_top8_worst": 0.5,
        "default_geomean": pytest.approx(0.8**0.5), "default_worst": 0.8,
        "default_worst_run": 0.75, "triton_chosen_share": 0.5,
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


# --- tuning cost, dispatch, collection ----------------------------------------------------------


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
    rows = [compiling, {"timed": 300, "ok": 290, "seconds": 1.0}, {"timed": 100, "seconds": 1.0}]
    assert summarize(rows) == {
        "rows_per_s_1gpu": 200.0, "rows_per_s_2gpu": None, "compiles_per_s": 30.0, "cores": 16,
    }  # fmt: skip
    assert summarize([compiling])["rows_per_s_1gpu"] is None


# --- a model of one's own -----------------------------------------------------------------------


def test_the_copy_has_everything_but_the_models(script: Any, tmp_path: Path) -> None:
    folder = script("own_model").copy_without_models(tmp_path)
    code = (
        "import costmodel, json\n"
        "from costmodel.models import shipped_models\n"
        "from costmodel.specialize import kernel_hash\n"
        "print(json.dumps([costmodel.__file__, shipped_models(), kernel_hash('tma')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    file, shipped, _ = json.loads(done.stdout)
    assert Path(file).is_relative_to(tmp_path)
    assert shipped == {}


def test_a_wrong_product_is_seen(script: Any) -> None:
    import torch

    worst_error = script("own_model").worst_error
    a, b = (torch.randn(40, 40, generator=torch.manual_seed(i)).half() for i in (0, 1))
    right = (a.float() @ b.float()).half()
    error, allowed = worst_error(right, a, b)
    assert error <= allowed
    for wrong in (0.0, float("nan"), float("inf")):
        spoilt = right.clone()
        spoilt.view(-1)[right.abs().argmax()] = wrong
        error, allowed = worst_error(spoilt, a, b)
        assert error > allowed


def test_another_model_or_a_wrong_product_is_a_failure(script: Any) -> None:
    failures_of = script("own_model").failures_of
    good = {"model": "own", "model_hash": "1234", "worst_error": 0.1, "allowed": 0.2}
    assert (
        failures_of({"tune": {"model": "own", "model_hash": "1234"}, "m": good}, "1234", []) == []
    )
    for spoilt in ({"model": "xgb"}, {"model_hash": "5678"}, {"worst_error": 0.3},
                   {"worst_error": float("nan")}):  # fmt: skip
        assert len(failures_of({"m": {**good, **spoilt}}, "1234", [])) == 1
    assert failures_of({"m": good}, "1234", ["h100-sxm"]) == [
        "a shipped model is visible: h100-sxm"
    ]


def test_own_model_without_a_gpu_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "own_model.py"), "--json"], capture_output=True, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no usable NVIDIA GPU" in done.stderr


# --- what is committed --------------------------------------------------------------------------


def committed() -> list[Path]:
    return sorted((FOLDER / "results").glob("*.json"))


@pytest.mark.parametrize("path", committed(), ids=lambda p: p.name)
def test_committed_results_are_named_after_their_device(path: Path) -> None:
    results = read_results(path)
    assert path.name == f"{results['bench']}-{results['target']}.json"
    assert results["device"] == DEVICES[results["target"]].product
    assert "cpu" not in results["versions"].get("torch", "")


@pytest.mark.parametrize("path", committed(), ids=lambda p: p.name)
def test_committed_results_are_of_the_shipped_model(path: Path) -> None:
    results = read_results(path)
    card = ROOT / "models" / results["target"] / "card.json"
    if not card.is_file() or "model" not in results["versions"]:
        pytest.skip("no model is shipped for this target, or none was asked")
    shipped = json.loads(card.read_text())
    assert results["versions"]["model"] == f"{shipped['name']} {shipped['hash']}", "run it again"


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))],
                         ids=lambda p: p.name)  # fmt: skip
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_eval_list_is_that_of_the_csv() -> None:
    lines = (FOLDER / "eval.csv").read_text().splitlines()
    assert lines[1:] == [f"{e.name},{e.m},{e.n},{e.k}" for e in EVAL_WORKLOADS]
