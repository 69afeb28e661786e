"""Whatever lies where a file of ours should, and whatever is passed: an error of ours, or a miss.

Never a traceback of a library, wrong data, a hang, or code that runs.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import costmodel
from costmodel.artifact import Artifact
from costmodel.cache import WinnerCache, cache_directory
from costmodel.cli.output import print_table
from costmodel.config import GemmConfig
from costmodel.dataset import Dataset, RunInfo
from costmodel.errors import CorruptFile, CostModelError, FileError, InvalidInput, UnknownTarget
from costmodel.measurement import Measurement, TuningRecord
from costmodel.models.baselines import RuleHeuristic
from costmodel.ptx import PTX_FEATURES
from costmodel.shards import compaction_lock
from costmodel.shipped import recording
from costmodel.specialize import artifact_key, specialize
from costmodel.target import Target, Toolchain
from costmodel.tuner import tune
from costmodel.tuning_result import Costs, TuningResult
from costmodel.untrusted import parse_json
from costmodel.workload import CodeClass, Workload

TARGET = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
A, B = Workload.dense(1024, 4096, 1024), Workload.dense(64, 2048, 2048, bias=True)
CONFIGS = tuple(GemmConfig("pointer", 64, 64, 32, num_stages=s) for s in (2, 3, 4))
OK = Measurement("ok", 11.5, 11.0, 12.0, 9, 1755)
RUN = RunInfo("run-1", "GPU-a", "570.1", "2.11.0", "2026-11-27T12:00:00+00:00", 1980, 2619)
RESULT = TuningResult(
    workload=A, target=TARGET, model="xgb", model_hash="abc", reservation="", mode="auto", k=8,
    ranked=((CONFIGS[0], 12.0), (CONFIGS[1], None)),
    measured=((CONFIGS[0], OK), (CONFIGS[1], Measurement("timeout", error="over 60 s"))),
    torch=OK, config=CONFIGS[0], why="fastest", source="device (h100-sxm)", reliable=True,
    costs=Costs(0.1, 2.0, 0.3, 8, 2),
)  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 10**400, float("nan"), float("inf"), -1.5, "", "x" * 10, "../../etc", "\ud800",
    "__import__('os').abort()", [], {}, [[]], {"a": 1}, 2**63, 10**9,
)  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands in nested JSON: all of them."""
    yield path
    if isinstance(data, dict | list):
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, name))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    result = copy.deepcopy(data)
    place = result
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return result


READERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "result": (RESULT.to_dict(), TuningResult.from_dict),
    "config": (CONFIGS[0].to_dict(), GemmConfig.from_dict),
    "workload": (A.to_dict(), Workload.from_dict),
    "target": (TARGET.to_dict(), Target.from_dict),
}


@pytest.mark.parametrize("kind", READERS)
def test_any_value_in_any_place_is_refused_or_can_be_used(kind: str) -> None:
    data, read = READERS[kind]
    for place in places(data):
        for value in HOSTILE:
            try:
                found = read(changed(data, place, value))
            except CostModelError:
                continue
            assert len(str(found)) < 100_000, (place, value)
            json.dumps(found.to_dict(), allow_nan=False)
            hash(found.workload if kind == "result" else found)
            if kind == "result":
                assert found.costs.total_s >= 0 or place[0] == "costs"
                assert found.best_triton is None or found.best_triton[1].latency_us > 0


@pytest.mark.parametrize("value", [None, 5, "x", [], b"x"])
def test_what_is_no_object_is_refused(value: Any) -> None:
    for read in (read for _, read in READERS.values()):
        with pytest.raises(InvalidInput):
            read(value)


def test_numbers_that_json_lacks_are_null_in_a_result_and_kept_on_disk(tmp_path: Path) -> None:
    odd = dataclasses.replace(RESULT, ranked=((CONFIGS[0], float("inf")),))
    cache = WinnerCache(tmp_path)
    cache.put({"name": "odd"}, odd)
    found = cache.get({"name": "odd"})
    assert found is not None
    assert found.ranked == ((CONFIGS[0], None),)


# --- json -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "[" * 200_000, '{"a":' * 100_000, '{"a": NaN}', "[-Infinity]", "1e999", "1" * 5000,
     '{"a": 1, "a": 2}', "\x80", "{'a': 1}", "[1,]"],
)  # fmt: skip
def test_json_is_read_by_the_letter(text: str) -> None:
    with pytest.raises(InvalidInput, match="not JSON"):
        parse_json(text)
    with pytest.raises(InvalidInput, match="not JSON"):
        parse_json(text.encode("latin-1"))


# --- what may stand in the place of a file ---------------------------------------------------


def put_directory(path: Path) -> None:
    path.mkdir()


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_dangling_link(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def put_circle(path: Path) -> None:
    path.symlink_to(path.name)


def put_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**33)  # sparse: takes no space


IN_THE_WAY = (
    put_directory, put_pipe, put_endless_device, put_dangling_link, put_circle, put_huge_file,
)  # fmt: skip


@pytest.mark.parametrize("put", IN_THE_WAY)
def test_what_is_no_file_is_no_cache_entry(tmp_path: Path, put: Callable[[Path], None]) -> None:
    cache = WinnerCache(tmp_path)
    cache.put({"name": "w"}, RESULT)
    (path,) = tmp_path.iterdir()
    path.unlink()
    put(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert cache.get({"name": "w"}) is None
        assert cache.entries() == []
        cache.put({"name": "w"}, RESULT)
    if put is not put_directory and put is not put_circle:
        assert cache.get({"name": "w"}) is not None, "it is replaced, as any bad entry"


def artifact(config: GemmConfig) -> Artifact:
    spec = specialize(A, config)
    counts = {name: float(i) for i, name in enumerate(PTX_FEATURES)}
    return Artifact(
        artifact_key(spec, TARGET), spec, registers=96, spill_bytes=0, shared_bytes=65536,
        ptx_hash="ab", ptx=counts, compile_s=0.5,
    )  # fmt: skip


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    data = Dataset.create(tmp_path / "data", TARGET, {"repeats": 5})
    data.append_artifacts([artifact(c) for c in CONFIGS])
    for w in (A, B):
        records = [TuningRecord(w, c, artifact_key(specialize(w, c), TARGET), OK) for c in CONFIGS]
        data.append_measurements(records, run=RUN, torch={w: OK})
    return data


def read_all(path: Path) -> None:
    data = Dataset.open(path)
    data.frame()
    data.recorded(A)
    data.runs()
    list(data.artifacts().values())


@pytest.mark.parametrize("put", IN_THE_WAY)
@pytest.mark.parametrize("name", ["card.json", "artifacts-*", "measurements-*"])
def test_what_is_no_file_is_no_part_of_a_dataset(
    dataset: Dataset, name: str, put: Callable[[Path], None]
) -> None:
    path = next(dataset.path.glob(name))
    path.unlink()
    put(path)
    with pytest.raises(FileError, match=r"data"):
        read_all(dataset.path)
    if name != "card.json":
        with pytest.raises(FileError, match=r"data"):
            dataset.compact()


def test_a_place_where_no_dataset_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "data", tmp_path / ("x" * 500)):
        with pytest.raises(FileError, match=r"file|xxx"):
            Dataset.create(path, TARGET, {})


@pytest.mark.parametrize(
    "content",
    [b"[" * 200_000, b'{"schema": 1, "schema": 1}', b'{"schema": true}', b'{"schema": NaN}'],
)
def test_a_card_by_another_hand_is_refused(dataset: Dataset, content: bytes) -> None:
    (dataset.path / "card.json").write_bytes(content)
    with pytest.raises(CorruptFile, match=r"card\.json"):
        Dataset.open(dataset.path)


# --- values in tables ------------------------------------------------------------------------


def overwrite(dataset: Dataset, table: str, column: str, value: Any, row: int) -> None:
    """One value of one row, in a file that is sound otherwise."""
    path = min(dataset.path.glob(f"{table}-*"))  # the one of A
    rows = parquet.ParquetFile(path).read()
    field = rows.schema.field(column)
    values = rows.column(column).to_pylist()
    values[row] = value
    at = rows.schema.get_field_index(column)
    parquet.write_table(rows.set_column(at, field, pa.array(values, field.type)), path)


@pytest.mark.parametrize(
    ("column", "value"),
    [("latency_us", -1.0), ("latency_us", 0.0), ("latency_us", float("nan")),
     ("latency_us", float("inf")), ("m", 7), ("bias", True), ("dtype", "bfloat16"),
     ("driver", "other"), ("sm_clock_mhz", 1), ("num_stages", -1), ("maxnreg", None)],
)  # fmt: skip
def test_one_wrong_value_in_one_measured_row_is_refused(
    dataset: Dataset, column: str, value: Any
) -> None:
    overwrite(dataset, "measurements", column, value, 1)
    with pytest.raises(CorruptFile, match=r"no release writes|differ in"):
        read_all(dataset.path)


@pytest.mark.parametrize(
    ("column", "value"),
    [("registers", -1), ("kernel", "../../etc/passwd"), ("status", "fine"),
     ("ptx_count_" + PTX_FEATURES[0], float("inf")), ("ptx_count_" + PTX_FEATURES[0], -1.0)],
)  # fmt: skip
def test_one_wrong_value_in_one_artifact_is_refused(
    dataset: Dataset, column: str, value: Any
) -> None:
    overwrite(dataset, "artifacts", column, value, 1)
    with pytest.raises(CorruptFile, match="no release writes"):
        read_all(dataset.path)


def test_text_that_is_no_utf8_is_refused(dataset: Dataset) -> None:
    path = next(dataset.path.glob("measurements-*"))
    rows = parquet.ParquetFile(path).read()
    raw = pa.array([b"\xff\xfe"] * len(rows), pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(rows), raw.buffers()).dictionary_encode()
    at = rows.schema.get_field_index("error")
    parquet.write_table(rows.set_column(at, rows.schema.field("error"), text), path)
    with pytest.raises(CorruptFile, match=path.name):
        read_all(dataset.path)


def test_a_few_bytes_do_not_become_billions_of_rows(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("costmodel.shards._MOST_ROWS", 3)
    with pytest.raises(CorruptFile, match="4 rows, more than any dataset"):
        Dataset.open(dataset.path).measurements()


# --- several at once -------------------------------------------------------------------------

COMPACT = "import sys; from costmodel.dataset import Dataset; Dataset.open(sys.argv[1]).compact()"


def test_compacting_waits_for_who_compacts_already(dataset: Dataset) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with compaction_lock(dataset.path):
        other = subprocess.Popen(
            [sys.executable, "-c", COMPACT, str(dataset.path)], env=environment
        )
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(5)
        assert list(dataset.path.glob("measurements-*")), "the other one has not waited"
    assert other.wait(120) == 0
    assert not list(dataset.path.glob("measurements-*"))
    assert set(Dataset.open(dataset.path).recorded(A)) == set(CONFIGS)


def test_a_reader_lists_the_files_again_where_they_are_compacted_meanwhile(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    from costmodel import shards

    listed = shards.shard_paths

    def list_and_lose(directory: Path, table: str) -> list[Path]:
        found = listed(directory, table)
        monkeypatch.undo()
        Dataset.open(dataset.path).compact()
        return found

    monkeypatch.setattr(shards, "shard_paths", list_and_lose)
    assert set(Dataset.open(dataset.path).recorded(A)) == set(CONFIGS)


# --- arguments -------------------------------------------------------------------------------

NO_PATHS: tuple[Any, ...] = (5, None, [], b"x", object(), float("nan"), "a\0b", "x" * 5000)


@pytest.mark.parametrize("path", NO_PATHS, ids=lambda v: str(v)[:10].replace("\0", "0"))
def test_what_is_no_path(path: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: Dataset.open(path), lambda: costmodel.train(path),
        lambda: Dataset.create(path, TARGET, {}),
    ]  # fmt: skip
    if path is not None:  # which is the default model
        calls += [lambda: costmodel.use(path), lambda: costmodel.rank(A, TARGET, path, 1)]
    for call in calls:
        with pytest.raises(CostModelError, match=r"path|directory|too long"):
            call()


@pytest.mark.parametrize(
    "arguments",
    [{"workload": "1024x1024x1024"}, {"workload": None}, {"target": "h100-sxm"}, {"k": "8"},
     {"k": 1.5}, {"k": float("nan")}, {"k": True}, {"k": -1}, {"model": object()},
     {"configs": "tma"}, {"configs": [None]}, {"configs": 5}],
)  # fmt: skip
def test_rank_says_what_it_expects(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="expected"):
        costmodel.rank(**{"workload": A, "target": TARGET, "k": 1, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [{"k": "8"}, {"k": 1.5}, {"k": 0}, {"budget_s": float("nan")}, {"budget_s": "1"},
     {"budget_s": -1}, {"mode": []}, {"mode": 5}, {"model": 5}, {"runner": "replay"},
     {"workload": (1, 2, 3)}],
)  # fmt: skip
def test_tune_says_what_it_expects(dataset: Dataset, arguments: dict[str, Any]) -> None:
    runner = costmodel.ReplayRunner(dataset)
    with pytest.raises(InvalidInput, match="expected"):
        tune(**{"workload": A, "runner": runner, "model": RuleHeuristic(), **arguments})


def test_types_of_ours_say_what_they_expect() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: Workload(1, 1, 1, "float16"),  # type: ignore[arg-type]
        lambda: Workload.dense(1, 1, 1, []),  # type: ignore[arg-type]
        lambda: CodeClass(bias=10**9), lambda: CodeClass(wide="yes"),  # type: ignore[arg-type]
        lambda: CodeClass(a_align=16.0), lambda: CodeClass(activation=[]),  # type: ignore[arg-type]
        lambda: Target.named([]), lambda: costmodel.ReplayRunner("data"),  # type: ignore[arg-type]
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CostModelError, match="expected"):
            call()


@pytest.mark.parametrize("name", ["../../etc", "/tmp", "", "a/b", "h100\n"])
def test_a_target_is_no_path(name: str) -> None:
    with pytest.raises(UnknownTarget, match="expected a short name"):
        recording(name)


# --- the environment and the terminal --------------------------------------------------------


def test_a_tilde_in_the_cache_directory_is_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", "~/winners")
    assert cache_directory() == tmp_path / "winners"


def test_a_working_directory_that_is_gone_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", "relative")
    cache = WinnerCache()
    with pytest.warns(RuntimeWarning, match="working directory was removed"):
        cache.put({"name": "w"}, RESULT)
    assert cache.get({"name": "w"}) is None


def test_brackets_in_a_table_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("of [/here]", ["error"], [["expected [/] or [bold]"]])
    assert "of [/here]" in (out := capsys.readouterr().out)
    assert "expected [/] or [bold]" in out


def test_a_terminal_without_a_dash_prints_something_else() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-m", "costmodel", "rank", "64", "64", "64"]
    done = subprocess.run(
        [*command, "--target", "h100-sxm", "--top", "1"], env=environment, capture_output=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.isascii()
