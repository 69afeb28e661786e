"""Datasets: what is written is read back."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from dataset_examples import CONFIGS, PROTOCOL, RUN, TARGET, A, B, artifact, ok, record, records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodel.compile.compiler import Artifact, ArtifactStatus
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import NO_ROOM, Measurement, TuningRecord
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import kernel_hash, specialize
from costmodel.gemm.workload import Workload


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
    assert read.measurements().runs == (RUN,)
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
    columns, hashes = read.artifacts().columns([failed.key, good.key, "unknown"])
    assert hashes.tolist() == ["", "ab12", ""]
    assert columns[1].tolist() == [96, 8, 65536, *range(len(PTX_FEATURES))]
    assert np.isnan(columns[[0, 2]]).all()


@pytest.mark.fault("B12")
@pytest.mark.parametrize("order", list(itertools.permutations(["ok", "compile_error", "timeout"])))
@pytest.mark.parametrize("compacted", [False, True])
def test_a_binary_that_failed_in_a_bad_moment_is_replaced(
    dataset: Dataset, order: tuple[ArtifactStatus, ...], compacted: bool
) -> None:
    """By the one that compiled, whichever came first and whoever wrote it."""
    good = artifact(A, CONFIGS[0])
    for status in order:
        writer = Dataset.open(dataset.path)
        writer.append_artifacts(
            [good if status == "ok" else Artifact(good.key, good.spec, status, "no")]
        )
        dataset.append_artifacts([Artifact(good.key, good.spec, "crashed", "no")])
    if compacted:
        dataset.compact()
    assert dict(Dataset.open(dataset.path).artifacts()) == {good.key: good}


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
    assert frame.candidates.has_artifact.tolist() == [True, False]
    assert frame.candidates.ptx_hash.tolist() == ["ab12", ""]
    assert frame.candidates.artifact_columns[0, 0] == 96
    assert np.isnan(frame.candidates.artifact_columns[1]).all()
    assert frame.latency_us[0] == 10.0
    assert frame.status.tolist() == ["ok", "timeout"]
    assert dataset.frame("eval").workloads == (B,)
    assert len(dataset.frame("train", "eval")) == 2 + len(CONFIGS)


@pytest.mark.parametrize("compacted", [False, True])
def test_what_a_full_card_gave_is_no_outcome(dataset: Dataset, compacted: bool) -> None:
    full = Measurement("out_of_resources", error=f"{NO_ROOM}: 1 MiB are free")
    too_large = Measurement("out_of_resources", error="shared memory")
    dataset.append_measurements(
        [record(A, CONFIGS[0], full), record(A, CONFIGS[1], too_large)], run=RUN, torch={A: full}
    )
    if compacted:
        dataset.compact()
    read = Dataset.open(dataset.path)
    assert read.measured()[A] == {CONFIGS[1]}
    assert read.recorded(A).keys() == {CONFIGS[1]}
    assert read.torch(A) is None
    read.append_measurements([record(A, CONFIGS[0], ok(5.0))], run=RUN, torch={A: ok(1.0)})
    assert (read.recorded(A)[CONFIGS[0]], read.torch(A)) == (ok(5.0), ok(1.0))


@pytest.mark.parametrize("compacted", ["never", "at the end", "each time"])
def test_the_version_that_was_recorded_last_counts(dataset: Dataset, compacted: str) -> None:
    """Also where it is an earlier one, whose edit was taken back."""
    history = [("v1", 10.0), ("v1", 11.0), ("v2", 20.0), ("v2", 21.0), ("v1", 30.0), ("v1", 31.0)]
    for rows, expected in ((history, 30.0), (history[:4], 20.0), (history[:2], 10.0)):
        data = Dataset.create(dataset.path / f"{len(rows)}", TARGET, PROTOCOL)
        for key, latency_us in rows:
            row = TuningRecord(A, CONFIGS[0], key, ok(latency_us))
            data.append_measurements([row, record(A, CONFIGS[1], ok(1.0))], run=RUN)
            if compacted == "each time":
                data.compact()
        if compacted == "at the end":
            data.compact()
        found = Dataset.open(data.path).recorded(A)
        assert found == {CONFIGS[0]: ok(expected), CONFIGS[1]: ok(1.0)}


def test_anchors_are_kept_once_per_run_and_apart(dataset: Dataset) -> None:
    dataset.append_measurements(records(A), run=RUN)
    for run_id, latency_us in (("run-2", 11.0), ("run-3", 12.0), ("run-3", 99.0)):
        run = dataclasses.replace(RUN, run_id=run_id)
        dataset.append_measurements([record(A, CONFIGS[0], ok(latency_us))], run=run, role="anchor")
    dataset.compact()
    assert sorted(dataset.measurements("anchor").latency_us) == [11.0, 12.0]
    assert dataset.recorded(A)[CONFIGS[0]] == ok(10.0)
    assert len(dataset.frame("train")) == len(CONFIGS)
    assert {r.run_id for r in dataset.measurements().runs} == {"run-1", "run-2", "run-3"}


@pytest.mark.fault("B31")
def test_measured_says_what_a_resumed_run_may_skip(dataset: Dataset) -> None:
    assert dataset.measured() == {}
    failed = record(A, CONFIGS[3], Measurement("crashed", error="signal 6"))
    dataset.append_measurements([*records(A)[:2], failed], run=RUN, torch={A: ok(1.0)})
    dataset.append_measurements(records(B)[:1], run=RUN, role="anchor")
    for view in (dataset, Dataset.open(dataset.path)):
        assert view.measured() == {A: {*CONFIGS[:2], CONFIGS[3]}}


def test_rows_of_a_changed_kernel_are_dropped_by_name_and_measured_again(dataset: Dataset) -> None:
    dataset.append_artifacts([artifact(A, c) for c in CONFIGS])
    dataset.append_measurements(records(A), run=RUN)
    now = {"pointer": kernel_hash("pointer"), "tma": "of-another-day"}
    half = len(CONFIGS) // 2
    frame = dataset.frame("train", kernel_hashes=now)
    assert {c.kernel for c in frame.candidates.configs} == {"pointer"}
    assert frame.dropped == {"kernel tma has changed": half}
    assert {c.kernel for c in dataset.measured(now)[A]} == {"pointer"}
    assert dataset.frame(kernel_hashes={"pointer": now["pointer"]}).dropped == {}

    config = CONFIGS[-1]
    new = TuningRecord(A, config, "key-of-the-new-kernel", ok(3.0))
    dataset.append_measurements([new], run=RUN)
    dataset.compact()
    assert dataset.recorded(A)[config] == ok(3.0)
    assert len(dataset.measurements()) == len(CONFIGS)
