"""The benchmark of the learner: what it counts, on made-up lists."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
from kernel_datasets import ARGUMENTS, KEY, latency_us

from costmodel.autotune.dataset import KernelDataset
from costmodel.autotune.model import KernelModel
from costmodel.autotune.store import KernelEntry, config_name
from costmodel.data.measurement import Measurement

CONFIGS = {
    config_name(triton.Config({"BLOCK": block}, num_warps=warps)): (block, warps)
    for block in (32, 64, 128, 256, 512, 1024)
    for warps in (1, 2, 4, 8)
}


@pytest.fixture
def bench(script: Any) -> Any:
    return script("bench_learner")


def entry(kernel: str, rows: int) -> KernelEntry:
    """Return timings of a list of 24 at one size; of two warps nothing works."""
    measured = {}
    for name, (block, warps) in CONFIGS.items():
        us = latency_us(block, warps, rows)
        works = Measurement("ok", us, us, us, 9)
        measured[name] = Measurement("out_of_resources", error="no") if warps == 2 else works
    key = KEY | {"name": kernel, "key": {"N": rows}}
    return KernelEntry(Path(f"{kernel}-{rows}.jsonl"), key, ARGUMENTS | {"N": rows}, measured, {})


def test_what_is_never_found_counts_as_the_whole_list(bench: Any) -> None:
    zeros = np.zeros(4)
    times = np.array([4.0, np.nan, 2.0, 1.99])
    recorded = bench.Recorded(
        "judges", "k", "k-1", [{}] * 4, times, np.arange(4), {}, {"alone": zeros}
    )
    assert recorded.kept([1, 0, 2]) == pytest.approx([0, 1.99 / 4, 1.99 / 2])
    assert bench.Replay(recorded, [1, 0, 2], 3).needed == 3
    assert bench.Replay(recorded, [1, 0], 2).needed == 4
    assert bench.Replay(recorded, [1, 0, 2], 2).kept == pytest.approx(1.99 / 4)
    twice = replace(
        recorded, latency_us=np.array([4.0, np.nan, 4.0, 1.99]), binary=np.array([0, 1, 0, 2])
    )
    assert bench.Replay(twice, [0, 1, 2, 3], 4).needed == 3
    assert bench.figures([bench.Replay(twice, [0, 1, 2, 3], 3)])["timed_pct"] == 50.0
    assert np.isnan(bench.Replay(recorded, [1, 0], 2).tried("alone").latency_us).tolist() == [
        False, True, True, True,
    ]  # fmt: skip


@pytest.mark.slow
def test_every_search_is_a_row(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [f"one.ops.k{i}.kernel" for i in range(3)] + ["liger_kernel.ops.x.kernel"]
    made = [entry(name, 2**i) for name in kernels for i in range(6)]
    dataset = KernelDataset.of(made, {"one": "one 1", "liger_kernel": "liger 1"})
    few = bench.KERNELS.__class__(rounds=20, max_depth=3)
    monkeypatch.setattr(bench, "KERNELS", few)
    dataset.write(tmp_path / "data")
    KernelModel.train(dataset, few).save(tmp_path / "model")
    arguments = ["bench", "--dataset", tmp_path / "data", "--model", tmp_path / "model"]
    arguments += ["--results", tmp_path, "--nthread", 1, "--seeds", 2]
    monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
    bench.main()
    found = json.loads((tmp_path / "learner-h200-sxm.json").read_text())
    rows = {(row["judge"], row["start"], row["search"]): row for row in found["rows"]}
    assert len(rows) == 2 * 2 * 6
    for judge, lists in (("judges", 6), ("modules left out", 18)):
        for start in bench.GOALS:
            ours, chance = (rows[judge, start, name] for name in ("the learner", "in random order"))
            assert 2 <= ours["lists"] <= lists
            assert ours["to_within_2_pct"] < chance["to_within_2_pct"]
            assert ours["timed_pct"] < 100
            assert ours["kept_pct"] >= chance["kept_pct"]
    cold, later = (rows["judges", start, "the learner"] for start in bench.GOALS)
    assert later["timed_pct"] < cold["timed_pct"]
