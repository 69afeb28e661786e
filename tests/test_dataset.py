"""Datasets: what is written is read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from dataset_examples import CONFIGS, PROTOCOL, RUN, TARGET, A, B, artifact, ok, record, records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodel.artifact import Artifact
from costmodel.config import GemmConfig
from costmodel.dataset import Dataset
from costmodel.kernel_code import kernel_hash
from costmodel.measurement import Measurement, TuningRecord
from costmodel.ptx import PTX_FEATURES
from costmodel.specialize import specialize
from costmodel.workload import Workload


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset.create(tmp_path / "data", TARGET, PROTOCOL)


workloads = st.builds(
    Workload.dense,
    st.integers(0, 20_000),
    st.integers(0, 140_000),
    st.integers(0, 70_000),
    st.sampled_from(["float16", "bfloat16"]),
    a_layout=st.sampled_from(["row", "col"]),
    b_layout=st.sampled_from(["row", "col"]),
    bias=st.booleans(),
    activation=st.sampled_from(["none", "relu", "gelu", "silu"]),
)
configs = st.builds(
    GemmConfig,
    st.sampled_from(["pointer", "tma", "tma_persistent"]),
    *[st.sampled_from([16, 32, 64, 128, 256])] * 3,
    num_warps=st.sampled_from([1, 2, 4, 8, 16]),
    num_stages=st.integers(1, 8),
    maxnreg=st.sampled_from([0, 80, 128]),
    halves=st.booleans(),
    flatten=st.booleans(),
    group_m=st.integers(1, 16),
    split_k=st.integers(1, 16),
)
latencies = st.floats(0.5, 1e6, width=32)
measurements = st.one_of(
    st.builds(
        Measurement, st.sampled_from(["ok", "too_slow"]), latencies, latencies, latencies,
        st.integers(1, 100), st.integers(0, 2000),
    ),
    st.builds(
        Measurement, st.sampled_from(["compile_error", "crashed", "timeout", "wrong_result"]),
        error=st.text(max_size=40),
    ),
)  # fmt: skip


def same(a: Measurement, b: Measurement) -> bool:
    """Equal, where NaN equals NaN."""
    return repr(a) == repr(b)


@given(st.dictionaries(st.tuples(workloads, configs), measurements, max_size=12), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rows_come_back_as_written(
    tmp_path_factory: pytest.TempPathFactory,
    rows: dict[tuple[Workload, GemmConfig], Measurement],
    data: st.DataObject,
) -> None:
    written = Dataset.create(tmp_path_factory.mktemp("d"), TARGET, PROTOCOL)
    batch = [TuningRecord(w, c, f"key{i}", m) for i, ((w, c), m) in enumerate(rows.items())]
    cut = data.draw(st.integers(0, len(batch)))
    written.append_measurements(batch[:cut], run=RUN)
    written.append_measurements(batch[cut:], run=RUN, role="eval")
    if data.draw(st.booleans()):
        written.compact()
    read = Dataset.open(written.path)
    found = {(w, c): m for w in read.workloads() for c, m in read.recorded(w).items()}
    assert found.keys() == rows.keys()
    assert all(same(found[key], rows[key]) for key in rows)


def test_identity_and_runs_come_back(dataset: Dataset) -> None:
    dataset.append_measurements(records(A), run=RUN, torch={A: ok(9.0)})
    read = Dataset.open(dataset.path)
    assert (read.target, read.protocol) == (TARGET, PROTOCOL)
    assert read.runs() == (RUN,)
    assert read.torch(A) == ok(9.0)
    assert read.torch(B) is None


@pytest.mark.parametrize("compacted", [False, True])
def test_artifacts_come_back(dataset: Dataset, compacted: bool) -> None:
    good = artifact(A, CONFIGS[0])
    failed = Artifact(
        artifact(A, CONFIGS[1]).key, specialize(A, CONFIGS[1]), "compile_error", "ptxas: too many"
    )
    dataset.append_artifacts([good])
    dataset.append_artifacts([dataclasses.replace(good, registers=1), failed])
    if compacted:
        dataset.compact()
    read = Dataset.open(dataset.path)
    assert dict(read.artifacts()) == {good.key: good, failed.key: failed}
    assert read.artifact("unknown") is None
    columns = read.artifacts().columns([failed.key, good.key, "unknown"])
    assert columns[1].tolist() == [96, 8, 65536, *range(len(PTX_FEATURES))]
    assert np.isnan(columns[[0, 2]]).all()


def test_frame_joins_rows_with_their_artifacts(dataset: Dataset) -> None:
    dataset.append_artifacts([artifact(A, CONFIGS[0])])
    dataset.append_measurements(records(B, 20.0), run=RUN, role="eval")
    failed = record(A, CONFIGS[1], Measurement("timeout", error="killed"))
    dataset.append_measurements(
        [record(A, CONFIGS[0], ok(10.0)), failed], run=RUN, torch={A: ok(1.0)}
    )
    frame = dataset.frame("train")
    assert frame.workloads == (A,)
    assert frame.workload_index.tolist() == [0, 0]
    assert frame.candidates.configs == CONFIGS[:2]
    assert frame.candidates.artifacts == (artifact(A, CONFIGS[0]), None)
    assert frame.candidates.artifact_columns[0, 0] == 96
    assert np.isnan(frame.candidates.artifact_columns[1]).all()
    assert frame.latency_us[0] == 10.0
    assert frame.status.tolist() == ["ok", "timeout"]
    assert dataset.frame("eval").workloads == (B,)
    assert len(dataset.frame("train", "eval")) == 2 + len(CONFIGS)


def test_the_first_of_two_outcomes_counts(dataset: Dataset) -> None:
    dataset.append_measurements([record(A, CONFIGS[0], ok(10.0))], run=RUN)
    dataset.append_measurements(records(A, 50.0), run=RUN)
    for _ in range(2):
        assert dataset.recorded(A)[CONFIGS[0]] == ok(10.0)
        assert len(dataset.measurements()) == len(CONFIGS)
        dataset.compact()
        dataset = Dataset.open(dataset.path)


def test_anchors_are_kept_once_per_run_and_apart(dataset: Dataset) -> None:
    dataset.append_measurements(records(A), run=RUN)
    for run_id, latency_us in (("run-2", 11.0), ("run-3", 12.0), ("run-3", 99.0)):
        run = dataclasses.replace(RUN, run_id=run_id)
        dataset.append_measurements([record(A, CONFIGS[0], ok(latency_us))], run=run, role="anchor")
    dataset.compact()
    assert sorted(dataset.measurements("anchor").latency_us) == [11.0, 12.0]
    assert dataset.recorded(A)[CONFIGS[0]] == ok(10.0)
    assert len(dataset.frame("train")) == len(CONFIGS)
    assert {r.run_id for r in dataset.runs()} == {"run-1", "run-2", "run-3"}


def test_measured_says_what_a_resumed_run_may_skip(dataset: Dataset) -> None:
    assert dataset.measured(A) == set()
    failed = record(A, CONFIGS[3], Measurement("crashed", error="signal 6"))
    dataset.append_measurements([*records(A)[:2], failed], run=RUN, torch={A: ok(1.0)})
    dataset.append_measurements(records(B)[:1], run=RUN, role="anchor")
    for view in (dataset, Dataset.open(dataset.path)):
        assert view.measured(A) == {*CONFIGS[:2], CONFIGS[3]}
        assert view.measured(B) == set()


def test_rows_of_a_changed_kernel_are_dropped_by_name_and_measured_again(dataset: Dataset) -> None:
    dataset.append_artifacts([artifact(A, c) for c in CONFIGS])
    dataset.append_measurements(records(A), run=RUN)
    now = {"pointer": kernel_hash("pointer"), "tma": "of-another-day"}
    half = len(CONFIGS) // 2
    assert dataset.stale(now) == {"tma": half}
    frame = dataset.frame("train", kernel_hashes=now)
    assert {c.kernel for c in frame.candidates.configs} == {"pointer"}
    assert frame.dropped == {"kernel tma has changed": half}
    assert {c.kernel for c in dataset.measured(A, now)} == {"pointer"}
    assert dataset.stale({"pointer": now["pointer"]}) == {}

    config = CONFIGS[-1]
    new = TuningRecord(A, config, "key-of-the-new-kernel", ok(3.0))
    dataset.append_measurements([new], run=RUN)
    dataset.compact()
    assert dataset.recorded(A)[config] == ok(3.0)
    assert len(dataset.measurements()) == len(CONFIGS)
