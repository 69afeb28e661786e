"""Replay: recorded outcomes in order, and never a guess."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from costmodel.compile.compiler import Artifact
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Candidate, Measurement, RunInfo, Runner, TuningRecord
from costmodel.errors import NotRecorded
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.measure.replay import ReplayRunner

RUN = RunInfo("run-1", "GPU-aaaa", "570.1", "2.11.0", "2026-11-27T12:00:00+00:00")
WORKLOAD = Workload.dense(64, 4000, 1024)
CONFIGS = [GemmConfig("tma", 128, 128, 64, num_stages=s) for s in (3, 4, 5)]
OUTCOMES = [
    Measurement("ok", 12.5, 12.0, 13.0, 9, 1755),
    Measurement("wrong_result", error="3 of 256,000 elements are off"),
    Measurement("ok", 11.5, 11.0, 12.0, 9, 1755),
]
TORCH = Measurement("ok", 10.0, 9.5, 10.5, 9, 1755)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    target = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
    data = Dataset.create(tmp_path, target, {"repeats": 5})
    rows = zip(CONFIGS, OUTCOMES, strict=True)
    records = [TuningRecord(WORKLOAD, config, "key", outcome) for config, outcome in rows]
    data.append_measurements(records, run=RUN, role="eval", torch={WORKLOAD: TORCH})
    return data


@pytest.fixture
def runner(dataset: Dataset) -> ReplayRunner:
    return ReplayRunner(Dataset.open(dataset.path))


def test_outcomes_are_answered_in_order_failures_too(runner: ReplayRunner) -> None:
    protocol: Runner = runner
    order = [2, 0, 1, 0]
    found = protocol.measure(WORKLOAD, [Candidate(CONFIGS[i]) for i in order])
    assert [repr(m) for m in found] == [repr(OUTCOMES[i]) for i in order]
    assert protocol.measure_torch(WORKLOAD) == TORCH
    assert protocol.measure(WORKLOAD, []) == []


def test_it_says_what_it_holds(runner: ReplayRunner) -> None:
    assert runner.workloads() == [WORKLOAD]
    assert set(runner.configs(WORKLOAD)) == set(CONFIGS)
    assert runner.target.device.name == "h100-sxm"


def test_an_unknown_workload_names_the_nearest(runner: ReplayRunner) -> None:
    unknown = Workload.dense(65, 4000, 1024)
    for ask in (
        lambda: runner.measure(unknown, [Candidate(CONFIGS[0])]),
        lambda: runner.configs(unknown),
        lambda: runner.measure_torch(unknown),
    ):
        with pytest.raises(NotRecorded, match=r"65x4000x1024.*64x4000x1024.*larger recording"):
            ask()


def test_an_unknown_configuration_is_no_guess(runner: ReplayRunner) -> None:
    unknown = GemmConfig("pointer", 16, 16, 16)
    with pytest.raises(NotRecorded, match=r"pointer 16x16x16.*3 other"):
        runner.measure(WORKLOAD, [Candidate(CONFIGS[0]), Candidate(unknown)])


def test_torch_may_be_missing_alone(dataset: Dataset) -> None:
    other = Workload.dense(8, 400, 96)
    dataset.append_measurements([TuningRecord(other, CONFIGS[0], "key", OUTCOMES[0])], run=RUN)
    with pytest.raises(NotRecorded, match=r"torch\.matmul"):
        ReplayRunner(dataset).measure_torch(other)


def test_anchors_do_not_answer(dataset: Dataset) -> None:
    again = TuningRecord(WORKLOAD, CONFIGS[0], "key", Measurement("ok", 99.0))
    dataset.append_measurements([again], run=RUN, role="anchor")
    answer = ReplayRunner(dataset).measure(WORKLOAD, [Candidate(CONFIGS[0])])
    assert answer == [OUTCOMES[0]]


def test_two_versions_of_a_kernel_are_not_mixed(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one measured last answers, whole workloads or not; another kernel's rows stay."""
    pointer = GemmConfig("pointer", 16, 16, 16)
    later = replace(RUN, run_id="run-2", started="2026-11-28T12:00:00+00:00")
    for run, key, code, configs in (
        (later, "new", "v2", CONFIGS[:2]),
        (RUN, "key", "v1", CONFIGS[2:]),
        (RUN, "other", "v1", [pointer]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("costmodel.data.artifact_table.kernel_hash", lambda _, code=code: code)
            dataset.append_artifacts([Artifact(key, specialize(WORKLOAD, configs[0]))])
        rows = [TuningRecord(WORKLOAD, c, key, Measurement("ok", 7.0)) for c in configs]
        dataset.append_measurements(rows, run=run, role="eval")
    for _ in range(2):
        runner = ReplayRunner(Dataset.open(dataset.path))
        assert set(runner.configs(WORKLOAD)) == {*CONFIGS[:2], pointer}
        with pytest.raises(NotRecorded):
            runner.measure(WORKLOAD, [Candidate(CONFIGS[2])])
        dataset.compact()


def test_a_small_sample_replays_alike(dataset: Dataset, tmp_path: Path, script: Any) -> None:
    sample = ReplayRunner(script("sample").extract(dataset, tmp_path / "sample", [WORKLOAD]))
    assert sample.measure_torch(WORKLOAD) == TORCH
    assert sample.measure(WORKLOAD, [Candidate(CONFIGS[2])]) == [OUTCOMES[2]]
