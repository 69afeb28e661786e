"""Datasets: what is written is read back, a kill loses nothing, and nothing foreign gets in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from costmodel.artifact import Artifact
from costmodel.config import GemmConfig
from costmodel.dataset import Dataset, RunInfo
from costmodel.errors import CorruptFile, FileError, MissingData, MixedData, WrongVersion
from costmodel.kernel_code import kernel_hash
from costmodel.measurement import Measurement, TuningRecord
from costmodel.ptx import PTX_FEATURES
from costmodel.specialize import artifact_key, specialize
from costmodel.target import Target, Toolchain
from costmodel.workload import Workload

TARGET = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
PROTOCOL: dict[str, Any] = {"repeats": 5, "cold_cache": True, "pause_us": [20, 40]}
RUN = RunInfo("run-1", "GPU-aaaa", "570.1", "2.11.0", "2026-11-27T12:00:00+00:00", 1980, 2619)
CONFIGS = tuple(
    GemmConfig(kernel, m, 128, 64, num_warps=w, num_stages=s)
    for kernel in ("pointer", "tma")
    for m in (64, 128)
    for w in (4, 8)
    for s in (3, 4)
)


def ok(latency_us: float) -> Measurement:
    return Measurement("ok", latency_us, latency_us - 0.25, latency_us + 0.25, 9, 1755)


def record(workload: Workload, config: GemmConfig, measurement: Measurement) -> TuningRecord:
    key = artifact_key(specialize(workload, config), TARGET)
    return TuningRecord(workload, config, key, measurement)


def records(workload: Workload, first_us: float = 10.0) -> list[TuningRecord]:
    return [record(workload, c, ok(first_us + i)) for i, c in enumerate(CONFIGS)]


def artifact(workload: Workload, config: GemmConfig, **changes: Any) -> Artifact:
    spec = specialize(workload, config)
    values = {
        "registers": 96, "spill_bytes": 8, "shared_bytes": 65536, "ptx_hash": "ab12",
        "ptx": {name: float(i) for i, name in enumerate(PTX_FEATURES)}, "compile_s": 0.7,
    }  # fmt: skip
    return Artifact(artifact_key(spec, TARGET), spec, **(values | changes))


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset.create(tmp_path / "data", TARGET, PROTOCOL)


A, B = Workload.dense(64, 4000, 1024), Workload.dense(333, 779, 555, "bfloat16", bias=True)

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


def test_compacting_leaves_one_file_a_table_and_a_card_that_counts(dataset: Dataset) -> None:
    dataset.append_artifacts([artifact(A, CONFIGS[0])])
    dataset.append_measurements(records(A), run=RUN, torch={A: ok(1.0)})
    dataset.append_measurements(
        [record(B, CONFIGS[0], Measurement("timeout"))], run=RUN, role="eval"
    )
    dataset.compact()
    names = sorted(p.name for p in dataset.path.iterdir())
    assert names == ["artifacts.parquet", "card.json", "measurements.parquet"]
    card = json.loads((dataset.path / "card.json").read_text())
    assert card["counts"]["rows"]["train"] == {"ok": len(CONFIGS) + 1}
    assert card["counts"]["rows"]["eval"] == {"timeout": 1}
    assert card["counts"]["workloads"] == {"train": 1, "eval": 1, "anchor": 0}
    assert card["counts"]["devices"] == ["GPU-aaaa"]
    assert card["kernels"] == {"pointer": [kernel_hash("pointer")]}
    assert card["protocol"] == PROTOCOL
    dataset.append_measurements(records(B, 30.0), run=RUN)
    assert len(Dataset.open(dataset.path).measured(B)) == len(CONFIGS)


def test_a_crash_while_compacting_doubles_nothing(dataset: Dataset) -> None:
    dataset.append_measurements(records(A), run=RUN)
    dataset.append_measurements(records(B), run=RUN)
    shards = {p.name: p.read_bytes() for p in dataset.path.glob("measurements-*")}
    dataset.compact()
    for name, content in shards.items():  # as if killed before the old shards were removed
        (dataset.path / name).write_bytes(content)
    assert len(Dataset.open(dataset.path).measurements()) == 2 * len(CONFIGS)


def test_an_extract_is_a_dataset_of_the_chosen_workloads(dataset: Dataset, tmp_path: Path) -> None:
    dataset.append_artifacts([artifact(w, c) for w in (A, B) for c in CONFIGS])
    dataset.append_measurements(records(A), run=RUN, torch={A: ok(1.0)})
    dataset.append_measurements(records(B), run=RUN)
    part = dataset.extract(tmp_path / "sample", [A])
    assert part.workloads() == [A]
    assert part.recorded(A) == dataset.recorded(A)
    assert part.torch(A) == ok(1.0)
    assert set(part.artifacts()) == {artifact(A, c).key for c in CONFIGS}


# --- killed writers -------------------------------------------------------------------------

_WRITER = textwrap.dedent(
    """
    import os, signal, sys
    from costmodel.config import GemmConfig
    from costmodel.dataset import Dataset, RunInfo
    from costmodel.measurement import Measurement, TuningRecord
    from costmodel.target import Target, Toolchain
    from costmodel.workload import Workload

    path, die = sys.argv[1:]
    target = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
    data = Dataset.create(path, target, {"repeats": 5, "cold_cache": True, "pause_us": [20, 40]})
    run = RunInfo(str(os.getpid()), "GPU-aaaa", "570.1", "2.11.0", "2026-11-27")
    configs = [GemmConfig("tma", 128, 128, 64, num_stages=s) for s in range(1, 9)]
    replace = os.replace
    def kill_around(source, to):
        if die == "after":
            replace(source, to)
        os.kill(os.getpid(), signal.SIGKILL)
    for m in range(1, 13):
        workload = Workload.dense(m, 4000, 1024)
        todo = [c for c in configs if c not in data.measured(workload)]
        if m == 5 and die in ("before", "after"):
            os.replace = kill_around
        for half in (todo[:4], todo[4:]):
            rows = [TuningRecord(workload, c, "k", Measurement("ok", 1.0 * m)) for c in half]
            data.append_measurements(rows, run=run)
            print(m, len(half), flush=True)
    """
)


def run_writer(path: Path, die: str = "never", kill_after_s: float | None = None) -> Counter[int]:
    """Run a writing process; the rows per m that it said were written before it ended."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), die], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            process.kill()
        lines += process.stdout.readlines()
    expected = 0 if die == "never" and kill_after_s is None else -signal.SIGKILL
    assert process.returncode == expected
    written: Counter[int] = Counter()
    for m, rows in (map(int, line.split()) for line in lines if line.endswith("\n")):
        written[m] += rows
    return written


@pytest.mark.parametrize(
    ("die", "kill_after_s"), [("before", None), ("after", None), ("never", 0.0), ("never", 0.02)]
)
def test_a_killed_writer_loses_and_doubles_nothing(
    tmp_path: Path, die: str, kill_after_s: float | None
) -> None:
    written = run_writer(tmp_path / "d", die, kill_after_s)
    assert written
    data = Dataset.open(tmp_path / "d")
    for m, rows in written.items():
        assert len(data.measured(Workload.dense(m, 4000, 1024))) >= rows
    if die == "before":
        assert list(data.path.glob(".*.tmp"))  # a half-written file was left, and did no harm
    run_writer(tmp_path / "d")
    rows = parquet_rows(tmp_path / "d")
    assert Counter(rows) == {(m, s): 1 for m in range(1, 13) for s in range(1, 9)}


def parquet_rows(path: Path) -> list[tuple[int, int]]:
    tables = [parquet.ParquetFile(p).read() for p in path.glob("measurements-*.parquet")]
    return [
        (row["m"], row["num_stages"])
        for table in tables
        for row in table.select(["m", "num_stages"]).to_pylist()
    ]


def test_two_writers_at_once_are_both_kept(dataset: Dataset) -> None:
    other = Dataset.create(dataset.path, TARGET, PROTOCOL)
    for i, config in enumerate(CONFIGS):
        writer = dataset if i % 2 else other
        writer.append_measurements([record(A, config, ok(10.0 + i))], run=RUN)
    assert Dataset.open(dataset.path).measured(A) == set(CONFIGS)


# --- refusals -------------------------------------------------------------------------------


def other_target(**changes: Any) -> Target:
    device, toolchain = TARGET.device, TARGET.toolchain
    if set(changes) <= {"triton", "ptxas"}:
        return Target(device, dataclasses.replace(toolchain, **changes))
    return Target(dataclasses.replace(device, **changes), toolchain)


@pytest.mark.parametrize(
    ("target", "protocol", "field"),
    [
        (other_target(product="NVIDIA H200"), PROTOCOL, "device.product"),
        (other_target(arch=100), PROTOCOL, "device.arch"),
        (other_target(sm_count=114), PROTOCOL, "device.sm_count"),
        (other_target(triton="3.7.0"), PROTOCOL, "toolchain.triton"),
        (other_target(ptxas="13.0"), PROTOCOL, "toolchain.ptxas"),
        (TARGET, PROTOCOL | {"repeats": 6}, "protocol.repeats"),
        (TARGET, PROTOCOL | {"new": 1}, "protocol.new"),
        (TARGET, {}, "protocol.cold_cache"),
    ],
)
def test_what_must_not_mix_is_refused_by_name(
    dataset: Dataset, tmp_path: Path, target: Target, protocol: dict[str, Any], field: str
) -> None:
    with pytest.raises(MixedData, match=field):
        Dataset.create(dataset.path, target, protocol)
    # Nor does a shard that was copied in.
    other = Dataset.create(tmp_path / "other", target, protocol)
    other.append_measurements(records(A), run=RUN)
    (shard,) = other.path.glob("measurements-*")
    shutil.copy(shard, dataset.path)
    with pytest.raises(MixedData, match=field):
        dataset.measurements()


def test_the_same_target_and_protocol_go_on(dataset: Dataset) -> None:
    dataset.append_measurements(records(A), run=RUN)
    again = Dataset.create(dataset.path, other_target(clock_mhz=1755), dict(PROTOCOL))
    assert again.measured(A) == set(CONFIGS)


def test_missing_data_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"costmodel collect.*--data DIR"):
        Dataset.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"schema": "1"}', b'{"schema": 1}', b"\x00\xff\x80PAR1", b'{"schema": 1'],
)
def test_a_card_that_is_none_is_refused(dataset: Dataset, content: bytes) -> None:
    (dataset.path / "card.json").write_bytes(content)
    with pytest.raises(CorruptFile, match=r"card\.json"):
        Dataset.open(dataset.path)


@pytest.mark.parametrize("content", [b"", b"[]", b"\x00\xff\x80PAR1", "truncated", "cut in half"])
@pytest.mark.parametrize("table", ["measurements", "artifacts"])
def test_a_broken_shard_is_named(dataset: Dataset, table: str, content: bytes | str) -> None:
    dataset.append_measurements(records(A), run=RUN)
    dataset.append_artifacts([artifact(A, c) for c in CONFIGS])
    (shard,) = dataset.path.glob(f"{table}-*")
    whole = shard.read_bytes()
    if isinstance(content, str):
        content = whole[:-9] if content == "truncated" else whole[: len(whole) // 2]
    shard.write_bytes(content)
    with pytest.raises(CorruptFile, match=shard.name):
        getattr(Dataset.open(dataset.path), table)()


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=40, deadline=None)
def test_a_flipped_byte_gives_the_rows_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int
) -> None:
    data = Dataset.create(tmp_path_factory.mktemp("d"), TARGET, PROTOCOL)
    data.append_measurements(records(A), run=RUN)
    (shard,) = data.path.glob("measurements-*")
    content = bytearray(shard.read_bytes())
    content[at % len(content)] ^= flip
    shard.write_bytes(content)
    with contextlib.suppress(FileError):
        assert Dataset.open(data.path).recorded(A) == {r.config: r.measurement for r in records(A)}


def test_foreign_parquet_is_refused(dataset: Dataset) -> None:
    parquet.write_table(pa.table({"a": [1]}), dataset.path / "measurements-0.parquet")
    with pytest.raises(CorruptFile, match=r"measurements-0\.parquet"):
        dataset.measurements()


def rewrite(path: Path, table: pa.Table | None = None, **header: Any) -> None:
    """Write a shard again with other rows, or with other fields in its header."""
    old = parquet.ParquetFile(path).read()
    found = json.loads(old.schema.metadata[b"costmodel"]) | header
    table = (old if table is None else table).replace_schema_metadata(
        {b"costmodel": json.dumps(found).encode()}
    )
    parquet.write_table(table, path)


def test_newer_schemas_are_refused(dataset: Dataset) -> None:
    dataset.append_artifacts([artifact(A, CONFIGS[0])])
    dataset.append_measurements(records(A), run=RUN)
    (shard,) = dataset.path.glob("measurements-*")
    rewrite(shard, schema=99)
    with pytest.raises(WrongVersion, match="99"):
        dataset.measurements()
    (shard,) = dataset.path.glob("artifacts-*")
    rewrite(shard, ptx_schema=99)
    with pytest.raises(WrongVersion, match=r"ptx_schema.*costmodel compile"):
        Dataset.open(dataset.path).artifacts()
    card = json.loads((dataset.path / "card.json").read_text())
    (dataset.path / "card.json").write_text(json.dumps(card | {"schema": 99}))
    with pytest.raises(WrongVersion, match="99"):
        Dataset.open(dataset.path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("block_m", 7),
        ("status", "splendid"),
        ("dtype", "int3"),
        ("m", -1),
        ("kernel", "__import__"),
    ],
)
def test_values_that_no_release_writes_are_refused(
    dataset: Dataset, column: str, value: object
) -> None:
    dataset.append_measurements(records(A), run=RUN)
    (shard,) = dataset.path.glob("measurements-*")
    table = parquet.ParquetFile(shard).read()
    at, kind = table.schema.get_field_index(column), table.schema.field(column)
    rewrite(shard, table.set_column(at, kind, pa.array([value] * len(table), kind.type)))
    with pytest.raises(CorruptFile, match=str(value)):
        dataset.measurements()


def test_a_missing_column_is_refused(dataset: Dataset) -> None:
    dataset.append_measurements(records(A), run=RUN)
    (shard,) = dataset.path.glob("measurements-*")
    rewrite(shard, parquet.ParquetFile(shard).read().drop_columns(["latency_us"]))
    with pytest.raises(CorruptFile, match="latency_us"):
        dataset.measurements()


# --- budgets --------------------------------------------------------------------------------


def test_200_000_rows_stay_small_and_load_fast(dataset: Dataset) -> None:
    rng = random.Random(0)
    space = [
        GemmConfig(k, m, n, b, num_warps=w, num_stages=s, group_m=g, split_k=p)
        for k in ("pointer", "tma")
        for m in (64, 128, 256)
        for n in (64, 128, 256)
        for b in (32, 64, 128)
        for w in (4, 8)
        for s in (3, 4, 5)
        for g in (4, 8)
        for p in (1, 4)
    ]
    keys = [f"{rng.getrandbits(96):024x}" for _ in range(20_000)]
    shapes = [
        Workload.dense(m, 8 * rng.randint(2, 16_000), 8 * rng.randint(2, 4_000)) for m in range(500)
    ]
    for i in range(20):
        batch = [
            TuningRecord(
                workload,
                config,
                rng.choice(keys),
                Measurement(
                    "ok", (us := rng.lognormvariate(4, 1)), us * rng.uniform(0.98, 1),
                    us * rng.uniform(1, 1.02), rng.randint(5, 20), rng.randint(1400, 1980),
                ),
            )
            for workload in shapes[25 * i : 25 * i + 25]
            for config in rng.sample(space, 400)
        ]  # fmt: skip
        dataset.append_measurements(batch, run=RUN)
    dataset.compact()
    assert (dataset.path / "measurements.parquet").stat().st_size < 8e6
    start = time.process_time()
    table = Dataset.open(dataset.path).measurements()
    assert time.process_time() - start < 2
    assert len(table) == 200_000
