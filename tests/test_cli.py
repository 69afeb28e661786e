"""The command line: its names, its JSON, its errors, on a small made-up recording."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_recording import RECORDED, TARGET, TRAINING, write_recording
from typer.testing import CliRunner, Result

import costmodel
from costmodel.cli import app
from costmodel.evaluation.heldout import eval_workloads
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import Workload
from costmodel.models.confidence import Confidence, Coverage

COMMANDS = (
    "collect", "compile", "train", "evaluate", "rank", "tune", "explain", "report", "doctor",
    "bench", "cache", "kernels",
)  # fmt: skip


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def run_json(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("cli") / "data").path


@pytest.fixture(scope="module")
def model(data: Path) -> Path:
    path = data.parent / "model"
    trained = run_json("train", data, "--out", path, "--name", "mine")
    assert trained["name"] == "mine"
    assert trained["training"]["rows"] == 39 * len(TRAINING)
    assert trained["training"]["dropped"] == {"timeout": len(TRAINING)}
    return path


def test_the_names_are_a_contract() -> None:
    from typer.main import get_command

    group: Any = get_command(app)
    assert tuple(group.list_commands(None)) == COMMANDS


def test_rank_lists_configurations_with_predictions(model: Path) -> None:
    arguments = ("rank", RECORDED.m, RECORDED.n, RECORDED.k, "--target", "h100-sxm")
    found = run_json(*arguments, "--model", model, "--top", 5)
    assert found["workload"] == RECORDED.to_dict()
    assert found["model"]["name"] == "mine"
    predicted = [row["predicted_us"] for row in found["ranked"]]
    assert len(predicted) == 5
    assert predicted == sorted(predicted)
    legal = [c.to_dict() for c in SearchSpace.of(RECORDED, TARGET).configs]
    assert all(row["config"] in legal for row in found["ranked"])
    table = run(*arguments, "--model", model)
    assert "predicted us" in table.stdout


def test_explain_says_why_the_first_are_first(model: Path) -> None:
    arguments = (RECORDED.m, RECORDED.n, RECORDED.k, "--target", "h100-sxm", "--model", model)
    ranked = run_json("rank", *arguments, "--top", 5)["ranked"]
    found = run_json("explain", *arguments, "--top", 2)
    assert [row["place"] for row in found["explained"]] == [1, 2]
    for row, expected in zip(found["explained"], ranked, strict=False):
        assert row["config"] == expected["config"]
        assert row["predicted_us"] == pytest.approx(expected["predicted_us"])
        assert row["grid"]["tiles"] >= 1
    table = run("explain", *arguments).stdout
    assert all(text in table for text in ("waves", "latency x bandwidth", "on average"))


def test_evaluate_prints_the_contract(data: Path, model: Path) -> None:
    entries = {e["name"]: e for e in run_json("evaluate", "--data", data, "--model", model)}
    kinds = {name: entry["kind"] for name, entry in entries.items()}
    expected = {
        "mine": "learned", "mine config-only": "learned", "static": "baseline",
        "heuristic": "baseline", "ptx-score": "baseline", "ptx-score-hopper": "baseline",
        "random": "baseline", "oracle": "oracle",
    }  # fmt: skip
    assert kinds.items() >= expected.items()
    for entry in entries.values():
        for part in ("regret", "aligned", "ragged"):
            assert set(entry[part]) == {"1", "4", "8", "16"}
            assert all(0 < v["worst_pct"] <= v["geomean_pct"] <= 100 for v in entry[part].values())
        assert -1 <= entry["kendall_tau"] <= 1
    assert entries["mine"]["mape_pct"] > 0
    assert entries["ptx-score"]["mape_pct"] is None
    assert entries["mine"]["regret"]["8"]["geomean_pct"] > 90
    table = run("evaluate", "--data", data, "--model", model).stdout
    assert "ptx-score" in table
    assert "geometric mean (worst)" in " ".join(table.split())


@pytest.mark.fault("B11")
def test_tune_answers_from_a_recording_and_says_so(data: Path, model: Path) -> None:
    arguments = ("tune", RECORDED.m, RECORDED.n, RECORDED.k, "--replay", "--data", data)
    found = run_json(*arguments, "--model", model, "--top", 6)
    assert "replay" in found["source"]
    assert sum(row["status"] == "ok" for row in found["measured"]) == 6
    best = min(row["latency_us"] for row in found["measured"] if row["status"] == "ok")
    chosen = next(r for r in found["measured"] if r["config"] == found["chosen"])
    assert chosen["latency_us"] == best
    people = run(*arguments, "--model", model)
    assert "REPLAY" in people.stderr
    assert "timings: replay" in people.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_what_was_not_recorded_is_ranked(data: Path) -> None:
    for options in ((), ("--replay",), ("--data", data)):
        result = run("tune", 777, 888, 999, *options)
        assert result.exit_code == 2
        assert "`costmodel rank 777 888 999 --target h100-sxm` predicts" in result.stderr


@pytest.mark.parametrize("width", [80, 120, 300])
def test_many_columns_are_several_tables(
    model: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("costmodel.cli.common._PIPE_WIDTH", width)
    arguments = (RECORDED.m, RECORDED.n, RECORDED.k, "--target", "h100-sxm", "--model", model)
    ranked = run_json("rank", *arguments, "--top", 11)["ranked"]
    shown = run("explain", *arguments, "--top", 11).stdout
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(shown.split())
    for place, row in enumerate(ranked, 1):
        kernel = costmodel.GemmConfig.from_dict(row["config"]).kernel
        assert words.count(f" {place}: {kernel}"[:16]) == 2, "on paper, and by the model"
    assert shown.count(" predicted ") == 2 * -(-11 // max(2, (width - 34) // 24))


def test_people_are_told_how_sure_it_is(model: Path, tmp_path: Path) -> None:
    sure = costmodel.load(model)
    covered = Coverage.of([Workload.dense(64, 64, 64), RECORDED])
    known = Confidence({"1": 0.95, "8": 0.994}, {"1": 0.95, "8": 0.994}, covered)
    sure.card = replace(sure.card, confidence=known)
    path = sure.save(tmp_path / "sure")
    options = ("--target", "h100-sxm", "--model", path)
    for command in ("rank", "explain"):
        inside = run(command, RECORDED.m, RECORDED.n, RECORDED.k, *options)
        assert "the best of the first 8 is expected to keep 99.4 %" in inside.stderr
        beyond = run(command, RECORDED.m, RECORDED.n, 10 * RECORDED.k, *options)
        assert f"unsure: k = {10 * RECORDED.k} is beyond" in beyond.stderr


def test_compile_needs_no_gpu(tmp_path: Path) -> None:
    found = run_json(
        "compile", 64, 64, 64, "--target", "h100-sxm", "--limit", 2, "--jobs", 2,
        "--dump", tmp_path / "dump",
    )  # fmt: skip
    assert found["compiled"] == len(found["artifacts"]) == 2
    for artifact in found["artifacts"]:
        assert artifact["status"] == "ok"
        assert artifact["registers"] > 0
        assert (tmp_path / "dump" / f"{artifact['key']}.ptx").read_text().startswith("//")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rank", 64, 64, 64, "--dtype", "float64"), "has no kernel"),
        (("rank", 64, 64, 64, "--dtype", "float32", "--out-dtype", "float16"), "expected float32"),
        (("tune", 77, 78, 1790, "--replay", "--data", "DATA"), "was not recorded"),
        (("tune", 77, 78, 1790, "--replay", "--data", "DATA", "--mode", "x"), "expected one of"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments: tuple[object, ...], message: str, data: Path
) -> None:
    result = run(*(data if a == "DATA" else a for a in arguments))
    assert result.exit_code == 2
    (line,) = (x for x in result.stderr.splitlines() if x.startswith("error: "))
    assert message in line
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_debug_shows_where_an_error_came_from() -> None:
    with pytest.raises(LookupError, match="unknown target"):
        run("--debug", "rank", 64, 64, 64, "--target", "vax")


def test_what_is_no_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("costmodel.tuning.ranking.rank", broken)
    with pytest.raises(ZeroDivisionError):
        run("rank", 64, 64, 64, "--target", "h100-sxm")


def test_shapes_are_read_from_the_eval_list() -> None:
    from costmodel.cli.draw import read_shapes

    path = Path(__file__).parents[1] / "benchmarks" / "eval.csv"
    assert read_shapes(path) == [(w.m, w.n, w.k) for w in eval_workloads()]


def test_bench_lists_what_there_is() -> None:
    listed = run_json("bench")
    run_by = {row["run"].split()[0] for row in listed} - {"reproduce.py"}
    scripts = Path(__file__).parents[1].joinpath("benchmarks").glob("bench_*.py")
    assert run_by == {p.name for p in scripts}
    assert all(row["answers"].endswith(("?", ".")) for row in listed)
