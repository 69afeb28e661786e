"""The benchmark of users' kernels: how they are drawn, what the rows and the summary say."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_fakes import FOLDER

from costmodel.errors import CostModelError


@pytest.fixture
def bench(script: Any) -> Any:
    script("autotune_cases")
    return script("bench_autotune")


@pytest.fixture
def cases(script: Any) -> Any:
    return script("autotune_cases")


def pool(bench: Any, lengths: list[int]) -> list[Any]:
    return [bench.Listed(f"package.m:k{i:03d}", "case", n) for i, n in enumerate(lengths)]


# --- the draw -----------------------------------------------------------------------------------


def test_the_draw_has_the_number_and_stays_under_the_cap(bench: Any) -> None:
    kernels = pool(bench, [4, 6, 8, 12, 16, 24, 32, 48] * 10)
    for seed in range(20):
        drawn = bench.draw(kernels, seed, number=20, cap=200)
        assert len(set(drawn)) == 20
        assert sum(kernel.configs for kernel in drawn) <= 200


def test_the_draw_depends_on_the_seed_and_not_on_the_order_of_the_list(bench: Any) -> None:
    kernels = pool(bench, [5] * 100)
    drawn = bench.draw(kernels, 1, number=10, cap=50)
    assert bench.draw(kernels[::-1], 1, number=10, cap=50) == drawn
    assert bench.draw(kernels, 2, number=10, cap=50) != drawn


def test_lists_that_need_no_tuner_are_not_drawn(bench: Any) -> None:
    assert bench.draw(pool(bench, [1, 2, 3, 4]), number=4, cap=100) == pool(bench, [1, 2, 3, 4])[3:]


def test_without_a_tight_cap_long_lists_are_drawn_too(bench: Any) -> None:
    kernels = pool(bench, [4] * 30 + [100])
    found = [bench.draw(kernels, seed, number=10, cap=1000) for seed in range(30)]
    assert any(kernel.configs == 100 for drawn in found for kernel in drawn)


# --- what is committed --------------------------------------------------------------------------


def test_the_committed_draw_is_that_of_the_seed(bench: Any) -> None:
    kernels, drawn = bench.read_list()
    assert drawn == bench.draw(kernels)
    assert len(drawn) >= 30


def test_the_list_names_allowed_modules_and_known_cases(bench: Any, cases: Any) -> None:
    kernels, _ = bench.read_list()
    modules = {kernel.kernel.split(":")[0] for kernel in kernels}
    assert [m for m in sorted(modules) if not cases.within(m, cases.ALLOWED)] == []
    assert {kernel.case for kernel in kernels} <= set(cases.CASES)


def test_every_package_is_drawn_from(bench: Any) -> None:
    packages = {kernel.kernel.split(".")[0] for kernel in bench.read_list()[1]}
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
    return [bench.row_of(kernel, stock, ours, us) for kernel in (first, second, third)]


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


def test_another_part_keeps_what_was_measured_before(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "autotune-h200-sxm.json"
    assert bench.kept_rows(path, ["gla"]) == []
    path.write_text('{"rows": [{"part": "gla"}, {"part": "kernels"}]}')
    assert bench.kept_rows(path, ["gla", "gdr"]) == [{"part": "kernels"}]


def test_without_a_gpu_it_says_so_and_writes_nothing(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", "--results", str(tmp_path)])
    with pytest.raises(CostModelError, match="no usable NVIDIA GPU"):
        bench.main()
    assert list(tmp_path.iterdir()) == []
