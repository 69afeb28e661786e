"""The evaluation protocol, on a recording small enough to know every answer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import Candidates, CostModel
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, RunInfo, TuningRecord
from costmodel.errors import MissingData
from costmodel.evaluation.evaluate import evaluate
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.reports.comparison import compared_models

TARGET = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
RUN = RunInfo("run-1", "GPU-aaaa", "570.1", "2.11.0", "2026-11-27T12:00:00+00:00")
ALIGNED, RAGGED = Workload.dense(64, 4096, 4096), Workload.dense(333, 777, 555)
# Group sizes name the configurations: group_m = i is the i-th fastest on the aligned workload.
CONFIGS = [GemmConfig("pointer", 16, 64, 64, group_m=i) for i in range(1, 5)]


def record(workload: Workload, config: GemmConfig, latency_us: float) -> TuningRecord:
    outcome = Measurement("ok", latency_us) if latency_us < np.inf else Measurement("timeout")
    return TuningRecord(
        workload, config, artifact_key(specialize(workload, config), TARGET), outcome
    )


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    data = Dataset.create(tmp_path, TARGET, {"repeats": 5})
    data.append_artifacts(
        Artifact((s := specialize(w, CONFIGS[0])) and artifact_key(s, TARGET), s, ptx_hash="same")
        for w in (ALIGNED, RAGGED)
    )
    for workload, latencies in ((ALIGNED, (10, 20, 40, np.inf)), (RAGGED, (80, 50, 100, 25))):
        rows = [record(workload, c, us) for c, us in zip(CONFIGS, latencies, strict=True)]
        data.append_measurements(rows, run=RUN, role="eval", torch={workload: Measurement("ok", 1)})
    data.append_measurements([record(Workload.dense(8, 400, 96), CONFIGS[0], 1.0)], run=RUN)
    return data


class ByGroup(CostModel):
    """Predicts ``sign`` times the group size, times ten us."""

    predicts_latency = True
    kind = "learned"

    def __init__(self, sign: int) -> None:
        self.sign = sign
        self.name = f"group {sign}"

    def predict(self, workload: Workload, candidates: Candidates, target: Target) -> Any:
        assert target == TARGET
        return np.array([self.sign * 10.0 * c.group_m for c in candidates.configs])


def by_name(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in entries}


def test_entries_hold_what_the_contract_says(dataset: Dataset) -> None:
    entries = by_name(evaluate(dataset, [ByGroup(1)], TARGET))
    entry = entries["group 1"]
    assert json.loads(json.dumps(entry)) == entry
    assert entry["kind"] == "learned"
    assert entry["workloads"] == 2
    # Aligned: 10 of 10. Ragged: top-1 takes 80 where 25 was to be had, top-4 takes all.
    assert entry["aligned"]["1"] == {"geomean_pct": 100.0, "worst_pct": 100.0}
    assert entry["ragged"]["1"] == {"geomean_pct": 31.25, "worst_pct": 31.25}
    assert entry["regret"]["1"] == {"geomean_pct": 55.9, "worst_pct": 31.25}
    assert entry["regret"]["4"] == {"geomean_pct": 100.0, "worst_pct": 100.0}
    assert list(entry["regret"]) == ["1", "4", "8", "16"]
    assert entry["speed_kept"] == entry["regret"], "what it is, beside its older name"
    # Ordered pairs of those that work: 3 of 3, and 2 of 6.
    assert entry["kendall_tau"] == pytest.approx((1 + (2 - 4) / 6) / 2, abs=1e-4)
    # |10-10|/10, |20-20|/20, |30-40|/40; |10-80|/80, |20-50|/50, |30-100|/100, |40-25|/25.
    expected = (np.mean([0, 0, 25]) + np.mean([87.5, 60, 70, 60])) / 2
    assert entry["mape_pct"] == pytest.approx(expected, abs=0.01)


def test_failed_picks_are_wasted(dataset: Dataset) -> None:
    entry = by_name(evaluate(dataset, [ByGroup(-1)], TARGET))["group -1"]
    assert entry["aligned"]["1"]["worst_pct"] == 25.0  # timeout: as the slowest, 10 / 40


def test_what_is_known_not_to_launch_is_nobodys_pick(tmp_path: Path) -> None:
    data = Dataset.create(tmp_path, TARGET, {})
    large = GemmConfig("pointer", 128, 64, 64, num_stages=5)
    for config, latency_us in ((CONFIGS[0], 10.0), (large, np.inf)):
        spec, over = specialize(ALIGNED, config), TARGET.device.shared_bytes + 1
        key = artifact_key(spec, TARGET)
        shared = 0 if config in CONFIGS else over
        data.append_artifacts([Artifact(key, spec, shared_bytes=shared, ptx_hash=key)])
        data.append_measurements([record(ALIGNED, config, latency_us)], run=RUN, role="eval")
    entry = by_name(evaluate(data, [ByGroup(-1)], TARGET))["group -1"]
    assert entry["regret"]["1"]["worst_pct"] == 100.0


def test_references_stand_beside_the_models(dataset: Dataset) -> None:
    entries = by_name(evaluate(dataset, [], TARGET))
    assert set(entries) == {"random", "oracle"}
    assert entries["oracle"]["kind"] == "oracle"
    assert entries["oracle"]["regret"]["1"] == {"geomean_pct": 100.0, "worst_pct": 100.0}
    assert entries["oracle"]["kendall_tau"] == 1
    random = entries["random"]
    assert (random["kind"], random["kendall_tau"], random["mape_pct"]) == ("baseline", 0, None)
    expected = np.mean([10 / 10, 10 / 20, 10 / 40, 10 / 40])
    assert random["aligned"]["1"]["geomean_pct"] == pytest.approx(100 * expected, abs=0.01)


def test_the_noise_ceiling_is_what_the_pick_keeps_in_a_second_measurement(
    dataset: Dataset,
) -> None:
    later = dataclasses.replace(RUN, run_id="run-2")
    again = [record(ALIGNED, c, us) for c, us in zip(CONFIGS, (12.0, 9.0, 40.0), strict=False)]
    without_the_pick = [record(RAGGED, c, 30.0) for c in CONFIGS[:3]]
    dataset.append_measurements([*again, *without_the_pick], run=later, role="anchor")
    ceiling = by_name(evaluate(dataset, [], TARGET))["noise ceiling"]
    assert ceiling["workloads"] == 1
    assert ceiling["regret"]["1"] == {"geomean_pct": 75.0, "worst_pct": 75.0}
    assert ceiling["regret"]["4"]["worst_pct"] == 100.0
    assert ceiling["ragged"] is None


def test_equal_programs_take_one_pick(tmp_path: Path) -> None:
    data = Dataset.create(tmp_path, TARGET, {})
    workload = Workload.dense(16, 4096, 4096)  # one row of tiles: every group size is the same
    spec = specialize(workload, CONFIGS[0])
    data.append_artifacts([Artifact(artifact_key(spec, TARGET), spec, ptx_hash="same")])
    fast = GemmConfig("pointer", 16, 64, 64, group_m=9, num_stages=5)
    latencies = (20.0, 21.0, 22.0, 23.0, 10.0)
    rows = [record(workload, c, us) for c, us in zip([*CONFIGS, fast], latencies, strict=True)]
    data.append_measurements(rows, run=RUN, role="eval")
    entries = by_name(evaluate(data, [ByGroup(1)], TARGET))
    assert entries["group 1"]["regret"]["1"]["worst_pct"] == 50.0
    assert entries["group 1"]["regret"]["4"]["worst_pct"] == 100.0  # the second program is in
    assert entries["random"]["regret"]["1"]["worst_pct"] == 75.0  # two programs, not five


def add_of_another_version(
    data: Dataset, monkeypatch: pytest.MonkeyPatch, latency_us: float, **names: str
) -> None:
    """Rows that an edited pointer kernel gave: all is as fast, and faster than the present one."""
    configs = [GemmConfig("pointer", 32, 64, 64, group_m=i) for i in range(1, 4)]
    with monkeypatch.context() as patch:
        patch.setattr("costmodel.data.artifact_table.kernel_hash", lambda name: "of another day")
        spec = specialize(ALIGNED, configs[0])
        data.append_artifacts([Artifact("edited", spec, ptx_hash="edited")])
    rows = [TuningRecord(ALIGNED, c, "edited", Measurement("ok", latency_us)) for c in configs]
    data.append_measurements(rows, run=RUN, role=names.get("role", "eval"))


def test_rows_of_a_kernel_that_has_changed_judge_nothing(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = evaluate(dataset, [ByGroup(1)], TARGET)
    assert not caplog.text
    add_of_another_version(dataset, monkeypatch, 1.0)
    assert evaluate(dataset, [ByGroup(1)], TARGET) == before
    assert "kernel pointer has changed (3 rows)" in caplog.text


def test_nor_do_anchors_of_one(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    again = [record(ALIGNED, c, us) for c, us in zip(CONFIGS, (12.0, 9.0), strict=False)]
    dataset.append_measurements(again, run=RUN, role="anchor")
    before = evaluate(dataset, [], TARGET)
    assert "noise ceiling" in by_name(before)
    add_of_another_version(dataset, monkeypatch, 1.0, role="anchor")
    assert evaluate(dataset, [], TARGET) == before


def test_without_rows_of_the_present_kernels_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset.create(tmp_path, TARGET, {})
    add_of_another_version(data, monkeypatch, 1.0)
    with pytest.raises(MissingData, match=r"pointer has changed \(3 rows\); record it again"):
        evaluate(data, [ByGroup(1)], TARGET)


def test_without_eval_rows_it_says_what_to_do(tmp_path: Path) -> None:
    data = Dataset.create(tmp_path, TARGET, {})
    data.append_measurements([record(ALIGNED, CONFIGS[0], 1.0)], run=RUN, role="train")
    data.append_measurements([record(RAGGED, CONFIGS[0], np.inf)], run=RUN, role="eval")
    with pytest.raises(MissingData, match="--data DIR"):
        evaluate(data, [ByGroup(1)], TARGET)


def test_without_training_rows_static_is_left_out_and_why(tmp_path: Path) -> None:
    data = Dataset.create(tmp_path / "eval only", TARGET, {"repeats": 5})
    data.append_measurements([record(ALIGNED, CONFIGS[0], 1.0)], run=RUN, role="eval")
    models, reason = compared_models(data, None)
    assert "static" not in {model.name for model in models}
    assert f"static: {data.path} has no training rows to learn it from" in reason
    data.append_measurements([record(Workload.dense(8, 400, 96), CONFIGS[0], 1.0)], run=RUN)
    models, reason = compared_models(data, None)
    assert "static" in {model.name for model in models}
    assert "static" not in reason
