"""The benchmark scripts: what all of them share, those of models, and what is committed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
from benchmark_fakes import FOLDER, H100, ROOT, WORKLOAD, A, B, FakeRunner, compiled, ok

from costmodel.compile.compiler import Artifact
from costmodel.data.measurement import Candidate, Measurement, Runner
from costmodel.evaluation.heldout import eval_list
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import DEVICES, Target


@pytest.mark.parametrize(
    ("command", "expected"),
    [("draw_reference train --out nowhere/x", "there is no folder"),
     ("draw_reference train --out x --dtypes int8", "int8"),
     ("draw_reference train --out x --target vax", "unknown target 'vax'"),
     ("draw_reference train --out x --led-by nowhere", "no model at"),
     ("draw_reference transfer --out x --data nowhere", "no dataset at"),
     ("draw_reference transfer --out x --workloads 99999", "training workloads of float16"),
     ("draw_reference train --out x --workloads 0", "expected a whole number of at least 1"),
     ("draw_reference train --out x --configs -3", "expected a whole number of at least 1"),
     ("fit_estimate --data nowhere", "no dataset at"),
     ("fit_estimate --each 0", "expected a whole number of at least 1"),
     ("bench_ablation --seeds 0", "expected a whole number of at least 1"),
     ("bench_objectives --seeds 1.5", "expected a whole number of at least 1"),
     ("bench_objectives --folds 0", "expected a whole number of at least 1"),
     ("bench_strategies --replay --every 0", "expected a whole number of at least 1"),
     ("bench_strategies --replay --every two", "expected a whole number of at least 1")],
)  # fmt: skip
def test_wrong_input_is_told_in_a_line_wherever_it_is_run(
    tmp_path: Path, command: str, expected: str
) -> None:
    name, *options = command.split()
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *options], cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert expected in done.stderr.splitlines()[-1]
    assert os.listdir(tmp_path) == []


@pytest.mark.slow  # mypy reads torch
def test_scripts_call_what_there_is(tmp_path: Path) -> None:
    """Scripts that need a GPU hardly run in tests: at least their calls fit what they call."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports",
         "--check-untyped-defs", "--cache-dir", str(tmp_path), *map(str, FOLDER.glob("*.py"))],
        env={**os.environ, "MYPYPATH": f"{FOLDER}{os.pathsep}{ROOT}"}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "checked" in done.stdout, done.stdout + done.stderr
    codes = ("call-arg", "attr-defined", "name-defined", "call-overload", "used-before-def")
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if line.endswith(tuple(f"[{code}]" for code in codes))]
    assert wrong == []


def test_what_the_system_refuses_is_a_line(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "results.json")

    assert script("common").at_exit_code(full) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line


class Replays(Runner):
    """A runner that cannot compare."""

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], best_us: float = inf
    ) -> list[Measurement]:
        return [ok(7.0) for _ in candidates]

    def measure_torch(self, workload: Workload) -> Measurement:
        return ok(9.0)


# --- what all of them share ---------------------------------------------------------------------


def test_results_are_saved_with_every_row(script: Any, tmp_path: Path) -> None:
    results = script("common").Results(
        "kernels-float16", H100, tmp_path / "new", {"triton": "3.6.0"},
        lambda rows: {"total": sum(row["us"] for row in rows)},
    )  # fmt: skip
    path = tmp_path / "new" / "kernels-float16-h100-sxm.json"
    for count in (1, 2):
        results.add({"us": 1.5})
        found = script("tables").read_results(path)
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


@pytest.mark.fault("B11")
@pytest.mark.parametrize(
    "name", ["strategies", "kernels", "tuning_cost", "dispatch", "collection", "buckets"]
)
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


# --- a model of one's own -----------------------------------------------------------------------


def test_the_copy_has_everything_but_the_models(script: Any, tmp_path: Path) -> None:
    folder = script("own_model").copy_without_models(tmp_path)
    code = (
        "import costmodel, json\n"
        "from costmodel.models import shipped_models\n"
        "from costmodel.gemm.specialize import kernel_hash\n"
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


@pytest.mark.slow
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
def test_committed_results_are_named_after_their_device(script: Any, path: Path) -> None:
    results = script("tables").read_results(path)
    assert path.name == f"{results['bench']}-{results['target']}.json"
    if results["target"] in ("scaling", "fleet"):  # needs no device
        return
    assert results["device"] == DEVICES[results["target"]].product
    if results["bench"] not in (
        "kernel-model",
        "learner",
        "scaled-model",
    ):  # computed from what was recorded
        assert "cpu" not in results["versions"].get("torch", "")


def test_the_shipped_model_is_the_one_evaluated(script: Any) -> None:
    """Other results may be of an earlier one, which README marks: making them takes a GPU."""
    results = script("tables").read_results(FOLDER / "results" / "evaluate-h100-sxm.json")
    shipped = json.loads((ROOT / "models" / "h100-sxm" / "card.json").read_text())
    assert results["versions"]["model"] == f"{shipped['name']} {shipped['hash']}", "run it again"


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))],
                         ids=lambda p: p.name)  # fmt: skip
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?:)([^)#]+)", prose)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_eval_list_is_that_of_the_csv() -> None:
    lines = (FOLDER / "eval.csv").read_text().splitlines()
    assert lines[1:] == [f"{e.name},{e.m},{e.n},{e.k}" for e in eval_list()]
