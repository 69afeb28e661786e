"""The bench of what each kind of feature is worth, on a made-up machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from costmodel.features.features import FEATURES
from costmodel.models import TrainingTable


def test_every_setting_is_validated_and_saved(
    script: Any, tmp_path: Path, table: TrainingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, common = script("bench_ablation"), script("common")
    monkeypatch.setattr(bench, "PARAMS", replace(bench.PARAMS, rounds=15))
    results = common.Results("ablation", table.target, tmp_path, {}, bench.summarize)
    options = {"folds": 2, "seeds": 1, "nthread": 1}
    bench.study(table, results, bench.SETTINGS, options)
    saved = json.loads(results.path.read_text())
    assert [row["setting"] for row in saved["rows"]] == [s.name for s in bench.SETTINGS]
    by_name = {row["setting"]: row for row in saved["rows"]}
    assert saved["summary"]["top1_pct, + PTX"] == by_name["+ PTX"]["top1_pct"]
    assert by_name["all workloads"]["top1_pct"] == by_name["+ PTX"]["top1_pct"]
    # Sizes of the launch are not in the binary: what it cannot see costs.
    assert by_name["PTX without configuration"]["top1_pct"] < by_name["+ PTX"]["top1_pct"]
    assert all(50 < row["top1_pct"] <= row["top8_pct"] <= 100 for row in saved["rows"])


def test_columns_exist_and_a_setting_without_artifacts_sees_none(script: Any) -> None:
    for setting in script("bench_ablation").SETTINGS:
        assert set(setting.columns) <= set(FEATURES)
        if not setting.ptx:
            assert "spill_bytes" not in setting.columns


def test_no_row_of_the_fold_is_learned_from(
    script: Any, make_training_table: Callable[..., TrainingTable],
    make_workloads: Callable[[int, int], list[Any]],
) -> None:  # fmt: skip
    import numpy as np

    bench = script("bench_ablation")
    table = make_training_table(make_workloads(6, 3), rows=10)
    work = bench.Study(table, nthread=1)
    setting = bench.Setting("workloads", "two", workloads=2, per_workload=5)
    rows = work._train_rows(setting, np.array([0, 1, 2]), np.random.default_rng(0))
    seen = set(table.workload_index[rows].tolist())
    assert seen <= {3, 4, 5}
    assert len(seen) == 2
    assert len(rows) == 10
