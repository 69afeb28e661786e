"""What a writer accepts, its reader reads; what it does not, it refuses before anything is lost."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest
from dataset_examples import CONFIGS, PROTOCOL, RUN, TARGET, A, B, artifact, ok, record, records
from hostile_examples import RESULT
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from costmodel.compile.compiler import ArtifactStatus
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, Role, Status
from costmodel.errors import InvalidInput
from costmodel.tuning.tuning_result import BucketPlan, Segment, TuningResult
from costmodel.tuning.winner_cache import WinnerCache

NAN, INF = float("nan"), float("inf")
NUMBERS = st.floats() | st.integers() | st.sampled_from([0, -0.0, 1e-46, 1e39, 10**400, None])
COUNTS = st.integers(0, 2**31 - 1) | NUMBERS
TEXTS = st.text(st.characters(exclude_categories=())) | st.none()


def dataset_in(folder: str | Path) -> Dataset:
    return Dataset.create(folder, TARGET, PROTOCOL)


# --- whatever is accepted comes back --------------------------------------------------------------


@pytest.mark.fault("N5")
@given(
    outcome=st.fixed_dictionaries(
        {"status": st.sampled_from([*get_args(Status), "fine"]), "latency_us": NUMBERS,
         "p10_us": NUMBERS, "p90_us": NUMBERS, "repeats": COUNTS, "clock_mhz": COUNTS,
         "error": st.text(st.characters(exclude_categories=()))}
    ),
    role=st.sampled_from([*get_args(Role), "spare"]), run_id=TEXTS, key=TEXTS,
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_row_that_is_recorded_is_read(
    outcome: Mapping[str, Any], role: Any, run_id: Any, key: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        data = dataset_in(folder)
        data.append_measurements(records(B), run=RUN)
        expected, told = len(CONFIGS), "expected"
        try:
            row = replace(record(A, CONFIGS[0], Measurement(**outcome)), artifact_key=key)
            data.append_measurements([row], run=replace(RUN, run_id=run_id), role=role)
            expected += 1
        except InvalidInput as error:
            told = str(error)
        assert "expected" in told
        assert len(Dataset.open(folder).measurements()) == expected
        data.compact()
        assert len(Dataset.open(folder).measurements()) == expected


@pytest.mark.fault("N5")
@given(
    values=st.fixed_dictionaries(
        {"status": st.sampled_from([*get_args(ArtifactStatus), "fine"]), "registers": COUNTS,
         "spill_bytes": COUNTS, "shared_bytes": COUNTS, "compile_s": NUMBERS, "error": TEXTS,
         "ptx_hash": TEXTS}
    )
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_an_artifact_that_is_recorded_is_read(values: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        data = dataset_in(folder)
        made = artifact(A, CONFIGS[0], **values)
        expected, told = [made.key], "expected"
        try:
            data.append_artifacts([made])
        except InvalidInput as error:
            expected, told = [], str(error)
        assert "expected" in told
        found = Dataset.open(folder).artifacts()
        assert [a.key for a in found.values()] == expected


@pytest.mark.fault("N5")
@given(
    predicted=NUMBERS.filter(lambda x: x is None or abs(x) < 2**63 or x != x),
    kept=st.floats() | st.none(), planned=st.floats() | st.none(), text=st.text(),
    spoilt=TEXTS.filter(lambda x: x is not None), seconds=st.floats(),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_winner_that_is_kept_is_found(
    predicted: Any, kept: Any, planned: Any, text: str, spoilt: str, seconds: float
) -> None:
    try:
        plan = BucketPlan((Segment(64, CONFIGS[0], planned),))
    except InvalidInput:
        plan = None
    result = replace(
        RESULT, ranked=((CONFIGS[0], predicted),), expected_kept=kept, plan=plan, why=text,
        caveat=spoilt, costs=replace(RESULT.costs, rank_s=seconds),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        cache = WinnerCache(folder)
        put = cache.put({"name": "it"}, result)
        found = WinnerCache(folder)
        assert (found.get({"name": "it"}) is not None) == put
        assert found.survey()[1] == []


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.fault("N5")
@pytest.mark.parametrize("status", ["ok", "too_slow"])
@pytest.mark.parametrize("us", [NAN, INF, -INF, 0.0, -1.0])
def test_a_time_that_cannot_be_is_no_measurement(status: Status, us: float) -> None:
    told = rf"{status}, with latency_us={us}: expected a time over 0; a failure has another status"
    with pytest.raises(InvalidInput, match=told):
        Measurement(status, us)
    result = RESULT.to_dict()
    result["measured"] = [result["measured"][0] | {"status": status, "latency_us": us}]
    with pytest.raises(InvalidInput, match="not a tuning result"):
        TuningResult.from_dict(result)


@pytest.mark.fault("N5")
@pytest.mark.parametrize(
    ("changes", "told"),
    [({"latency_us": 1e-46}, "expected a latency_us over 0 if ok or too_slow"),
     ({"latency_us": 1e39}, "expected a latency_us over 0 if ok or too_slow"),
     ({"repeats": 2**31}, "expected repeats as int32"), ({"p10_us": None}, "p10_us as float: None"),
     ({"status": "fine"}, "expected a status that is known")],
)  # fmt: skip
def test_what_no_column_holds_is_refused_with_its_whole_batch(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    data = dataset_in(tmp_path)
    rows = [*records(B), record(A, CONFIGS[0], replace(ok(10.0), **changes))]
    with pytest.raises(InvalidInput, match=f"cannot be recorded: .*{told}.*: mend what measured"):
        data.append_measurements(rows, run=RUN)
    assert len(Dataset.open(tmp_path).measurements()) == 0


@pytest.mark.fault("N5")
def test_a_device_that_cannot_be_starts_no_dataset(tmp_path: Path) -> None:
    broken = replace(TARGET, device=replace(TARGET.device, clock_mhz=0))
    with pytest.raises(InvalidInput, match="clock_mhz=0: expected a figure over 0"):
        Dataset.create(tmp_path / "data", broken, PROTOCOL)
    assert not (tmp_path / "data").exists()


@pytest.mark.fault("N5")
def test_a_result_that_could_not_be_read_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, key = WinnerCache(tmp_path), {"name": "it"}
    assert cache.put(key, RESULT)
    with caplog.at_level(logging.WARNING, "costmodel"):
        assert not cache.put(key, replace(RESULT, expected_kept=NAN))
    assert "is not kept, since it could not be read" in caplog.text
    found = cache.get(key)
    assert found is not None
    assert found.to_dict() == RESULT.to_dict(), "the one before stays"


# --- rows of earlier releases ---------------------------------------------------------------------


def spoil(data: Dataset, count: int) -> Path:
    """Write NaN into the first latencies of a file, as earlier releases did."""
    (path,) = data.path.glob("measurements-*")
    rows = parquet.ParquetFile(path).read()
    at = rows.schema.get_field_index("latency_us")
    values = [NAN] * count + rows.column(at).to_pylist()[count:]
    parquet.write_table(
        rows.set_column(at, rows.schema.field(at), pa.array(values, pa.float32())), path
    )
    return path


@pytest.mark.fault("N5")
def test_bad_rows_of_an_old_file_cost_those_rows_and_one_warning(tmp_path: Path) -> None:
    data = dataset_in(tmp_path)
    data.append_measurements(records(A), run=RUN)
    path = spoil(data, 3)
    data.append_measurements(records(B), run=RUN)
    again = Dataset.open(tmp_path)
    with pytest.warns(RuntimeWarning) as told:
        table = again.measurements()
    (warning,) = told
    expected = f"rows .* left out: 3 of {re.escape(str(path))}; .*latency_us over 0"
    assert re.match(expected, str(warning.message))
    assert len(table) == 2 * len(CONFIGS) - 3
    assert set(again.recorded(A)) == set(CONFIGS[3:])


@pytest.mark.fault("N5")
@pytest.mark.filterwarnings("ignore:rows that cannot be used")
def test_a_bad_row_is_measured_again_and_gone_once_compacted(tmp_path: Path) -> None:
    data = dataset_in(tmp_path)
    data.append_measurements(records(A), run=RUN)
    spoil(data, 1)
    again = Dataset.open(tmp_path)
    assert CONFIGS[0] not in again.measured()[A]
    again.append_measurements([record(A, CONFIGS[0], ok(77.0))], run=RUN)
    again.compact()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Dataset.open(tmp_path).recorded(A)[CONFIGS[0]].latency_us == 77.0
