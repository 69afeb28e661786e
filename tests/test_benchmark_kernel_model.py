"""The benchmark of the model of kernels: what it counts, on made-up kernels."""

from __future__ import annotations

import json
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_datasets import entry

from costmodel.autotune.dataset import KernelDataset


@pytest.fixture
def bench(script: Any) -> Any:
    return script("bench_kernel_model")


@pytest.mark.parametrize("times", [[1.0, 2.0], [3.0, 1.0, 1.0, 7.0], [1.0, 1.5, 2.0, 4.0, 9.0]])
def test_random_is_the_mean_of_all_orders(bench: Any, times: list[float]) -> None:
    label = np.log(times)
    of_orders = [bench.lost(label, np.array(p)) for p in permutations(range(len(times)))]
    assert bench.lost_at_random(label) == pytest.approx(np.mean(of_orders, axis=0))


def test_the_best_of_the_first_counts(bench: Any) -> None:
    label = np.log([4.0, 2.0, 1.0, 8.0])
    assert np.exp(bench.lost(label, np.array([0, 1, 2, 3]))) == pytest.approx([4, 2, 1, 1])


def test_columns_are_told_apart_by_what_they_need(bench: Any) -> None:
    kinds = {
        "num_warps in its list": "configuration", "m+n-num_warps": "configuration",
        "tensor_bytes-programs": "launch", "scf.for": "TTIR", "full_waves in its list": "binary",
        "ptx_loop_mma_flops-ptx_loop_cp_async+num_warps in its list": "PTX",
    }  # fmt: skip
    assert {name: bench.kind_of(name) for name in kinds} == kinds


def test_a_model_beats_chance_on_kernels_like_those_it_has_seen(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"one.ops.k{i}.kernel" for i in range(12)] + ["liger_kernel.ops.x.kernel"]
    made = [entry(name, 1 + i) for i, name in enumerate(names)]
    KernelDataset.of(made, {"one": "one 1", "liger_kernel": "liger 1"}).write(tmp_path / "data")
    few = bench.replace(bench.KERNELS, rounds=20, max_depth=3)
    monkeypatch.setattr(bench, "KERNELS", few)
    arguments = ["bench", "--dataset", tmp_path / "data", "--results", tmp_path, "--nthread", 1]
    monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
    bench.main()
    found = json.loads((tmp_path / "kernel-model-h200-sxm.json").read_text())
    rows = {(row["judge"], row["ranking"]): row for row in found["rows"]}
    for judge, lists in (("modules left out", 12), ("judges", 1)):
        assert rows[judge, "after compiling"]["lists"] == lists
        after, chance = (rows[judge, x]["first_1_pct"] for x in ("after compiling", "random"))
        assert after > chance
    assert rows["judges", "after compiling"]["within_2_deviations_pct"] > 50
    assert rows["liger_kernel.ops.x.kernel", "after compiling"]["lists"] == 1
