"""The benchmark of users' kernels: how they are drawn, what the rows and the summary say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from autotune_fakes import add, configs, in_place_of_triton, machine_without_gpu
from benchmark_fakes import FOLDER, H100
from triton.runtime.autotuner import Autotuner as StockAutotuner

from costmodel.errors import CostModelError


@pytest.fixture
def bench(script: Any) -> Any:
    script("autotune_cases")
    return script("bench_autotune")


@pytest.fixture
def drawing(script: Any) -> Any:
    script("autotune_cases")
    return script("autotune_draw")


@pytest.fixture
def cases(script: Any) -> Any:
    return script("autotune_cases")


def listed(drawing: Any, lengths: list[int]) -> list[Any]:
    return [drawing.Listed(f"package.m:k{i:03d}", "case", n) for i, n in enumerate(lengths)]


# --- the draw -----------------------------------------------------------------------------------


def test_the_draw_has_the_number_and_stays_under_the_cap(drawing: Any) -> None:
    kernels = listed(drawing, [4, 6, 8, 12, 16, 24, 32, 48] * 10)
    for seed in range(20):
        drawn = drawing.draw(kernels, seed, number=20, cap=200)
        assert len(set(drawn)) == 20
        assert sum(kernel.configs for kernel in drawn) <= 200


def test_the_draw_depends_on_the_seed_and_not_on_the_order_of_the_list(drawing: Any) -> None:
    kernels = listed(drawing, [5] * 100)
    drawn = drawing.draw(kernels, 1, number=10, cap=50)
    assert drawing.draw(kernels[::-1], 1, number=10, cap=50) == drawn
    assert drawing.draw(kernels, 2, number=10, cap=50) != drawn


def test_lists_that_need_no_tuner_are_not_drawn(drawing: Any) -> None:
    assert (
        drawing.draw(listed(drawing, [1, 2, 3, 4]), number=4, cap=100)
        == listed(drawing, [1, 2, 3, 4])[3:]
    )


def test_without_a_tight_cap_long_lists_are_drawn_too(drawing: Any) -> None:
    kernels = listed(drawing, [4] * 30 + [100])
    found = [drawing.draw(kernels, seed, number=10, cap=1000) for seed in range(30)]
    assert any(kernel.configs == 100 for drawn in found for kernel in drawn)


# --- what is committed --------------------------------------------------------------------------


def test_the_committed_draw_is_that_of_the_seed(drawing: Any) -> None:
    kernels, drawn = drawing.read_list()
    assert drawn == drawing.draw(kernels)
    assert len(drawn) >= 30


def test_the_list_names_allowed_modules_and_known_cases(drawing: Any, cases: Any) -> None:
    kernels, _ = drawing.read_list()
    modules = {kernel.kernel.split(":")[0] for kernel in kernels}
    assert [m for m in sorted(modules) if not cases.within(m, cases.ALLOWED)] == []
    assert {kernel.case for kernel in kernels} <= set(cases.CASES)


def test_every_package_is_drawn_from(drawing: Any) -> None:
    packages = {kernel.kernel.split(".")[0] for kernel in drawing.read_list()[1]}
    assert packages == {"fla", "flag_gems", "liger_kernel"}


def test_a_case_imports_no_module_that_may_not_be_run(cases: Any) -> None:
    text = (FOLDER / "autotune_cases.py").read_text()
    modules = set(re.findall(r"(?:fla|flag_gems|liger_kernel)\.[\w.]+(?=:)", text))
    assert len(modules) > 10
    assert [m for m in sorted(modules) if not cases.within(m, cases.ALLOWED)] == []


def test_a_name_that_only_begins_alike_is_not_allowed(cases: Any) -> None:
    assert cases.within("fla.ops.gla.chunk", cases.ALLOWED)
    assert not cases.within("fla.ops.gla2.chunk", cases.ALLOWED)
    assert not cases.within("fla.ops.kda.chunk", cases.ALLOWED)
    assert not cases.within("fla.ops", cases.ALLOWED)


# --- rows and summary ---------------------------------------------------------------------------


def tuned(seconds: float, winner: int, compiled: int, timed: int) -> dict[str, Any]:
    return {
        "seconds": seconds, "winner": {"BLOCK": winner}, "compiled": compiled, "timed": timed,
        "key": "n=1", "listed": 12,
    }  # fmt: skip


def rows(bench: Any) -> list[dict[str, Any]]:
    """Two kernels tuned by both, one of them to the same winner; one that was not reached."""
    first, second, third = (bench.Listed(f"fla.ops.gsa.m:k{i}", "c", 12) for i in range(3))
    stock = {first.kernel: tuned(9.0, 1, 10, 9), second.kernel: tuned(11.0, 1, 12, 12)}
    ours = {first.kernel: tuned(1.5, 1, 4, 4), second.kernel: tuned(0.5, 2, 6, 3)}
    us = {
        first.kernel: {"stock_us": 10.0, "ours_us": 10.1, "stock_again_us": 10.0},
        second.kernel: {"stock_us": 9.0, "ours_us": 10.0, "stock_again_us": 9.9},
    }
    return [bench.row_of("kernels", kernel, stock, ours, us) for kernel in (first, second, third)]


def test_what_is_kept_is_stocks_time_over_ours(bench: Any) -> None:
    same, other, missing = rows(bench)
    assert same["kept_pct"] == 100.0
    assert other["kept_pct"] == pytest.approx(90)
    assert missing["kept_pct"] is None
    assert (other["of"], other["compiled"], other["timed"]) == (12, 6, 3)
    assert same["of"] == 10, "stock's own pruning decides how long the list is"
    assert same["held_out"]


def test_the_summary_leaves_out_what_was_not_reached(bench: Any) -> None:
    summary = bench.summarize(rows(bench))
    assert summary["kernels"] == 2
    assert summary["wall_ratio_first_key"] == pytest.approx(20.0 / 2.0)
    assert summary["kept_worst_pct"] == pytest.approx(90)
    assert summary["kept_geomean_pct"] == pytest.approx((90 * 100) ** 0.5)
    assert summary["noise_worst_pct"] == pytest.approx(100 * 9.0 / 9.9)
    assert (summary["configurations"], summary["compiled"], summary["timed"]) == (22, 10, 7)
    assert summary["gla_s"] is None


def test_a_part_alone_has_a_summary(bench: Any) -> None:
    gla = {"part": "gla", "ours_s": 20.0, "stock_s": 248.6, "again_s": 2.0, "single_s": 1.9}
    summary = bench.summarize([gla])
    assert (summary["gla_s"], summary["gla_stock_s"], summary["gla_again_s"]) == (20.0, 248.6, 2.0)
    assert summary["wall_ratio_first_key"] is None
    assert summary["gdr_s"] is None


def test_the_seconds_of_a_call_are_those_of_the_case(bench: Any) -> None:
    lines = [
        {"kernel": "a:k", **tuned(3.0, 1, 4, 2)}, {"kernel": "b:k", **tuned(2.0, 1, 5, 3)},
        {"finished": "case", "seconds": 7.5, "error": None},
    ]  # fmt: skip
    assert bench.total(lines, "ours") == {"ours_s": 7.5, "compiled": 9, "timed": 5}
    assert bench.total([], "again")["again_s"] is None


# --- a run, with processes that only write what they would find -----------------------------------


def worker(bench: Any, seconds: dict[str, float]) -> Any:
    """Stands for the processes: a kernel of a case takes so long on a side, and so do its keys."""
    found, _ = bench.read_list()

    def run(command: list[str], environment: dict[str, str], deadline: float) -> None:
        side, *rest = command[2:]
        options = {rest[i]: rest[i + 1] for i in range(len(rest) - 1) if rest[i].startswith("--")}
        cases = rest[: next(i for i, word in enumerate(rest) if word.startswith("--"))]
        kernels = rest[rest.index("--kernels") + 1 :] if "--kernels" in rest else []
        assert (environment["COSTMODEL_MODE"] == "exhaustive") == (side == "everything")
        with Path(options["--out"]).open("a") as out:
            for case in cases:
                names = [k.kernel for k in found if k.case == case and k.kernel in kernels]
                keys = len(bench.KEYS.get(case, ())) if "--keys" in rest else 0
                for label in [f"{n}{'#' * (i > 1)}{i if i > 1 else ''}" for n in names
                              for i in range(1, 2 + keys)]:  # fmt: skip
                    line: dict[str, Any] = {"kernel": label, "case": case}
                    if side == "compare":
                        line |= {"stock_us": 10.0, "ours_us": 10.0, "stock_again_us": 10.0}
                    else:
                        line |= tuned(seconds[side], 1 if side == "stock" else 2, 4, 4)
                    out.write(json.dumps(line) + "\n")
                out.write(json.dumps({"finished": case, "seconds": 9.0, "error": None}) + "\n")

    return run


@pytest.fixture
def run_bench(
    bench: Any, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the benchmark by stand-ins for its processes; returns what is in its file then."""
    monkeypatch.setattr(H100.__class__, "current", lambda index=None: H100)

    def run(*options: str, **seconds: float) -> dict[str, Any]:
        took = {"stock": 10.0, "everything": 2.0, "ours": 0.5} | seconds
        monkeypatch.setattr(script("autotune_processes"), "run_limited", worker(bench, took))
        monkeypatch.setattr(sys, "argv", ["bench", "--results", str(tmp_path), *options])
        bench.main()
        found: dict[str, Any] = json.loads((tmp_path / "autotune-h100-sxm.json").read_text())
        return found

    return run


def of_part(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["part"] == part]


def test_keys_two_to_five_of_eight_kernels_are_compared(run_bench: Any) -> None:
    found = run_bench("--only", "keys")
    rows = of_part(found, "keys")
    assert len({row["kernel"].split("#")[0] for row in rows}) == 8
    assert sorted({row["number"] for row in rows}) == [2, 3, 4, 5]
    assert len(rows) == 32
    assert found["summary"]["wall_ratio_later_keys"] == pytest.approx(20)
    assert found["summary"]["kept_later_keys_pct"] == pytest.approx(100)
    assert found["summary"]["wall_ratio_first_key"] is None


def test_long_lists_are_compared_with_ours_without_a_model(run_bench: Any) -> None:
    found = run_bench("--only", "lists")
    rows = of_part(found, "lists")
    assert all(row["of"] and row["everything_s"] == 2.0 for row in rows)
    first = {row["kernel"] for row in rows if row["number"] == 1}
    fifth = {row["kernel"] for row in rows if row["number"] == 5}
    assert len(first) > 15
    assert fifth < first
    assert len(fifth) >= 5
    assert found["summary"]["lists_ratio_first_key"] == pytest.approx(4)
    assert found["summary"]["lists_ratio_fifth_key"] == pytest.approx(4)


def test_parts_are_measured_one_by_one_into_one_file(run_bench: Any) -> None:
    run_bench("--only", "lists")
    run_bench("--only", "gla")
    found = run_bench("--only", "kernels", ours=1.0)
    assert len(of_part(found, "kernels")) == 32
    assert len(of_part(found, "gla")) == 1
    assert found["summary"]["lists_ratio_first_key"] == pytest.approx(4)
    assert found["summary"]["wall_ratio_first_key"] == pytest.approx(10)


def test_what_stock_took_before_is_measured_once(run_bench: Any) -> None:
    found = run_bench("--only", "kernels", stock=7.0)
    assert {row["stock_measured"] for row in of_part(found, "kernels")} == {"now"}
    found = run_bench("--only", "kernels", "--stock-before", stock=99.0, ours=1.0)
    assert {row["stock_measured"] for row in of_part(found, "kernels")} == {"before"}
    assert {row["stock_s"] for row in of_part(found, "kernels")} == {7.0}
    assert {row["ours_s"] for row in of_part(found, "kernels")} == {1.0}
    assert {row["kept_pct"] for row in of_part(found, "kernels")} == {100.0}


def test_a_spent_budget_loses_nothing_that_is_in_the_file(run_bench: Any) -> None:
    run_bench("--only", "keys")
    found = run_bench("--only", "keys", "--budget-s", "0")
    assert len(of_part(found, "keys")) == 32


def test_of_a_case_that_is_begun_again_the_first_time_counts(bench: Any) -> None:
    lines = [{"kernel": "m:k", "seconds": 3.0}, {"kernel": "m:k", "seconds": 0.1}]
    assert bench.by_kernel(lines)["m:k"]["seconds"] == 3.0


# --- the process ----------------------------------------------------------------------------------


def test_each_key_of_a_case_is_tuned_and_named(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases, worker = script("autotune_cases"), script("autotune_worker")
    lines: list[dict[str, Any]] = []
    with machine_without_gpu(tmp_path) as machine, in_place_of_triton():
        kernel = StockAutotuner(triton.jit(add), ["x_ptr", "y_ptr", "out_ptr", "n", "BLOCK"],
                                configs(16, 32, 64), ["n"], None, None)  # fmt: skip
        x = torch.zeros(64)

        def call(n: int) -> None:
            kernel[(1,)](x, x, x, n)
            kernel[(1,)](x, x, x, n)

        monkeypatch.setitem(cases.CASES, "case", lambda t: call(64))
        monkeypatch.setitem(worker.KEYS, "case", [lambda t: call(32), lambda t: call(17)])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        name = worker.name_of(kernel)
        recorder = worker.Recorder("ours", {name}, {}, str(tmp_path), lambda **x: lines.append(x))
        monkeypatch.setattr(StockAutotuner, "run", recorder.wrap(StockAutotuner.run))
        monkeypatch.setattr(worker, "Tensors", lambda device: None)
        worker.run_case("case", recorder, recorder.write, keys=True)
        assert machine.timed() == {16, 32, 64}
    assert [line["kernel"] for line in lines if "kernel" in line] == [
        name,
        f"{name}#2",
        f"{name}#3",
    ]
    assert all(line["timed"] for line in lines if "kernel" in line)
    assert [line.get("finished") for line in lines] == [None] * 5 + ["case"]
    assert not any(line.get("error") for line in lines)


def test_without_a_gpu_it_says_so_and_writes_nothing(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", "--results", str(tmp_path)])
    with pytest.raises(CostModelError, match="no usable NVIDIA GPU"):
        bench.main()
    assert list(tmp_path.iterdir()) == []
