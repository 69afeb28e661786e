"""The benchmark of fp8 and int8 products: its shapes, what a row holds, what the summary says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from autotune_fakes import Machine, machine_without_gpu

from costmodel.autotune.store import KernelStore
from costmodel.data.measurement import Measurement
from costmodel.evaluation.heldout import eval_workloads
from costmodel.evaluation.metrics import geomean
from costmodel.kernels.scaled import scaled_tiles
from costmodel.scaled.launch import tuned

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench(script: Any) -> Any:
    return script("bench_lowprecision")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    scaled_tiles.device_caches.clear()  # of another machine
    with machine_without_gpu(tmp_path / "kernels") as machine:
        machine.us = lambda launch: 1e-3  # torch, which this clock does not see, takes no time
        yield machine
        tuned.__dict__.pop("_costmodel", None)
        tuned.cache.clear()


class Session:
    """Launches each choice; the first takes 5 us, each other one 1 us more."""

    def compare(self, problem: Any, choices: list[Any], rounds: int) -> list[Measurement]:
        for choice in choices:
            for operands in problem.operands(None, 2):
                choice(operands)
        return [Measurement("ok", 5.0 + i, 5.0, 5.0, rounds) for i in range(len(choices))]


def timed(bench: Any, problem: Any, keep: Path | None = None) -> dict[str, Any]:
    row: dict[str, Any] = bench.timed(Session(), problem, bench.tuned_row(problem, keep))
    return row


def test_shapes_are_enough_and_none_is_of_the_eval_list(bench: Any) -> None:
    shapes = {(p.m, p.n, p.k) for p in bench.problems(["row"])}
    assert len(shapes) >= 60
    assert {m for m, _, _ in shapes} >= {1, 8192}
    assert not {(n, k) for _, n, k in shapes} & {(w.n, w.k) for w in eval_workloads()}


@pytest.mark.parametrize("form", ["row", "tensor", "int8", "int32", "row_fast"])
def test_operands_and_the_check_of_results_fit_torch(bench: Any, form: str) -> None:
    problem = bench.Scaled(form, 32, 256, 512, "cpu")
    (operands,) = problem.operands(None, 1)
    call = operands[0]
    call[5].copy_(bench.by_torch(operands))
    assert bench.error_of(problem, call) < 0.01
    call[5][0, 0] += 1 + 2 * call[5].abs().max()
    assert bench.error_of(problem, call) > bench.WRONG


def test_a_row_has_our_best_beside_torch(
    bench: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "error_of", lambda problem, call: 0.001)
    row = timed(bench, bench.Scaled("row", 16, 256, 512, "cpu"))
    assert row["us"] == {"ours": 5.0, "torch": 6.0, "default": row["us"]["default"]}
    assert row["speedup"] == 1.2
    alone = timed(bench, bench.Scaled("block", 1, 256, 512, "cpu"))
    assert alone["us"] == {"ours": 5.0, "bfloat16": 6.0, "default": 5.0}
    assert alone["speedup"] is None
    found = bench.summarize([row, alone, {"form": "row", "failure": "no room"}])
    assert (found["rows"], found["failed"]) == (3, 1)
    assert found["row_small_geomean"] == found["block_over_bfloat16_geomean"] == 1.2


def test_a_wrong_result_is_no_row(
    bench: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "error_of", lambda problem, call: float("nan"))
    with pytest.raises(bench.CostModelError, match="off by nan"):
        timed(bench, bench.Scaled("row", 8, 256, 512, "cpu"))


def test_timings_are_kept_to_learn_from(bench: Any, machine: Machine, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(bench, "error_of", lambda problem, call: 0.001)
    monkeypatch.setattr("costmodel.autotune.tuning.store", KernelStore())
    for m in (16, 32):
        row = timed(bench, bench.Scaled("int8", m, 256, 512, "cpu"), tmp_path / "kept")
        assert row["timed"] > 8
    lists = [entry.arguments["m"] for entry in KernelStore(tmp_path / "kept/kernels").entries()]
    assert sorted(lists) == [16, 32]


def test_processes_make_one_row_with_the_mean_and_the_worst(bench: Any) -> None:
    def row(m: int, ours: float, by_torch: float, **more: Any) -> dict[str, Any]:
        found = {"form": "row", "m": m, "n": 256, "k": 512, "config": "c", "chosen": "tma"} | more
        us = {"ours": ours, "torch": by_torch, "default": ours}
        return bench.with_ratios(found | {"us": us}, bench.Scaled("row", m, 256, 512))  # type: ignore[no-any-return]

    failed = {"form": "row", "m": 64, "n": 256, "k": 512, "failure": "no room"}
    first = [row(16, 2.0, 4.0), row(32, 1.0, 1.0), row(64, 1.0, 1.0)]
    found = bench.merged([first, [row(16, 4.0, 4.0), failed]])
    assert [(r["m"], r.get("speedup"), r.get("worst")) for r in found] == [
        (16, pytest.approx(2**0.5, abs=1e-3), 1.0), (32, 1.0, 1.0), (64, None, None),
    ]  # fmt: skip
    summary = bench.summarize(found)
    assert (summary["row_small_worst"], summary["default_worst"], summary["failed"]) == (1, 1, 1)
    assert summary["processes"] == 1  # of m = 32


# --- The page -------------------------------------------------------------------------------------

RESULTS = ROOT / "benchmarks" / "results" / "lowprecision-h200-sxm.json"


def test_the_page_has_the_figures_of_the_results(bench: Any) -> None:
    results = json.loads(RESULTS.read_text())
    summary = bench.summarize(results["rows"])
    assert summary == results["summary"]
    page = (ROOT / "docs" / "low-precision.md").read_text()
    text = page.partition("## How fast it is")[2].partition("\n## ")[0]
    lines = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines()]
    lines = [line for line in lines if line and line[0] in bench.FORMS]
    found = {tuple(line[:2]): (line[2], line[4]) for line in lines if len(line) == 6}
    expected = {}
    for form in bench.FIRST:
        for name, key in (("to 128", f"{form}_small"), ("above", f"{form}_large")):
            figures = summary[f"{key}_geomean"], summary[f"{key}_worst"]
            expected[form, name] = tuple(f"{x:.2f}" for x in figures)
    assert found == expected
    by_m = {line[0]: line[1:] for line in lines if len(line) == 9}
    for form in bench.FORMS:
        means = [bench.mean_over(results["rows"], form, m) for m in bench.ROWS]
        assert by_m[form] == [x if isinstance(x, str) else f"{x:.2f}" for x in means]
    prose = " ".join(text.split())
    defaults = [row["worst_default"] for row in results["rows"] if row.get("worst_default")]
    good = sum(x >= 0.98 for x in defaults)
    for part in (
        f"the {len(defaults)} products that torch computes, {good} took at most 2 % longer",
        f"ran at {summary['default_worst']:.2f} of torch's speed",
        f"{summary['block_over_bfloat16_geomean']:.2f} (block, m = 1)",
        f"{summary['int8_over_bfloat16_geomean']:.2f} times (int8",
        f"ours is {summary['block_over_baseline_geomean']:.2f} times",
    ):  # fmt: skip
        assert part in prose
    rows = {(r["form"], r["m"], r["n"], r["k"]): r["us"] for r in results["rows"]}

    def ratio(first: tuple[str, str], second: tuple[str, str], least: int, most: int) -> float:
        """Return the mean time of one form by one side over that of another, of the same m."""
        found = []
        for (form, *shape), us in rows.items():
            other = rows.get((second[0], *shape), {})
            if form == first[0] and least <= shape[0] <= most and first[1] in us:
                found += [us[first[1]] / other[second[1]]] if second[1] in other else []
        return float(geomean(found))

    one = ("tensor", "torch")
    for part in (
        f"{ratio(('row', 'torch'), one, 1, 128):.2f} times as long with scales of rows",
        f"{ratio(('block', 'torch'), one, 1, 128):.2f} times with blocks",
        f"takes {ratio(('int8', 'ours'), ('row', 'ours'), 512, 8192):.2f} of the time that fp8",
        f"Blocks take {ratio(('block', 'ours'), ('row', 'ours'), 512, 8192):.2f} times as long",
    ):
        assert part in prose
    large = [us for (form, m, n, k), us in rows.items() if form == "tensor" and m <= 16
             and n * k > 50e6]  # fmt: skip
    bytes_of = {id(us): n * k for (_, _, n, k), us in rows.items()}
    speeds = [bytes_of[id(us)] / us[side] / 1e6 for us in large for side in ("ours", "torch")]
    assert f"{min(speeds):.1f} to {max(speeds):.1f} of the card's" in prose
    at_128 = [rows["tensor", 128, n, 7168] for n in (2112, 4096)]
    found_at = [f"{us['torch'] / us['ours']:.2f}" for us in at_128]
    assert f"{found_at[0]} and {found_at[1]} of torch's speed with one scale" in prose
    small = summary["row_small_geomean"], summary["row_small_worst"]
    readme = (ROOT / "README.md").read_text()
    assert "{:.2f} times as fast as torch (goal 1.7; worst {:.2f}".format(*small) in readme
