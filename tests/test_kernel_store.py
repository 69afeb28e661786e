"""The store of kernels' timings: nothing is lost to a kill, a race or a full disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodel.autotune.store import KernelStore, config_name
from costmodel.data.measurement import Measurement
from costmodel.errors import InvalidInput

FORK = multiprocessing.get_context("fork")
KEY = {"name": "package.module.my_kernel", "source": "12ab", "key": {"T": 4096}, "device": "h200"}


def ok(us: float) -> Measurement:
    return Measurement("ok", us, us, us, 9, 1980)


def start_writer(folder: Path, name: str, count: int, begin: Any) -> tuple[ForkProcess, int]:
    """Start a process that notes timings, and tells each by a byte in the pipe that is returned."""
    told, tell = os.pipe()

    def write() -> None:
        store = KernelStore(folder)
        begin.wait()
        for i in range(count):
            store.note(KEY, f"{name}:{i}", Measurement("ok", 1.0 + i, error="x" * 3000))
            os.write(tell, b".")

    process = FORK.Process(target=write)
    process.start()
    os.close(tell)
    return process, told


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.jsonl")
    return path


@pytest.fixture(autouse=True)
def _no_other_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A folder with two timings and a choice under KEY."""
    store = KernelStore(tmp_path)
    store.note(KEY, "slow", ok(20.0))
    store.note(KEY, "fast", ok(10.0))
    store.choose(KEY, "fast", "timed all")
    return tmp_path


def test_another_process_reads_what_was_written(filled: Path) -> None:
    kept = KernelStore(filled).read(KEY)
    assert kept.measured == {"slow": ok(20.0), "fast": ok(10.0)}
    assert (kept.chosen, kept.why) == ("fast", "timed all")
    assert kept.when.startswith("20")


def test_the_last_line_of_a_configuration_counts(filled: Path) -> None:
    store = KernelStore(filled)
    store.note(KEY, "slow", ok(5.0))
    store.choose(KEY, "slow", "timed again")
    kept = KernelStore(filled).read(KEY)
    assert (kept.measured["slow"], kept.chosen) == (ok(5.0), "slow")


def test_a_failure_is_kept_with_its_reason(tmp_path: Path) -> None:
    KernelStore(tmp_path).note(KEY, "big", Measurement("out_of_resources", error="shared memory"))
    kept = KernelStore(tmp_path).read(KEY).measured["big"]
    assert (kept.status, kept.error) == ("out_of_resources", "shared memory")
    assert kept.latency_us != kept.latency_us


def test_keys_do_not_mix(filled: Path) -> None:
    other = KEY | {"key": {"T": 8192}}
    store = KernelStore(filled)
    assert store.read(other).measured == {}
    store.note(other, "fast", ok(1.0))
    assert store.read(KEY).measured["fast"] == ok(10.0)
    assert [e.key["key"] for e in store.entries()].count({"T": 8192}) == 1


def test_a_file_under_the_name_of_another_key_is_not_believed(filled: Path) -> None:
    content = only_file(filled).read_bytes()
    other = KEY | {"device": "h100"}
    store = KernelStore(filled / "copy")
    store.note(other, "x", ok(1.0))
    only_file(filled / "copy").write_bytes(content)
    assert KernelStore(filled / "copy").read(other).measured == {}
    assert len(KernelStore(filled / "copy").survey()[1]) == 1


@pytest.mark.parametrize("before", ["nothing", "a foreign file", "half a key"])
def test_sixteen_processes_append_at_once(tmp_path: Path, before: str) -> None:
    if before != "nothing":
        KernelStore(tmp_path).note(KEY, "lost", ok(1.0))
        path = only_file(tmp_path)
        path.write_bytes(b"\xff" if before == "a foreign file" else path.read_bytes()[:40])
    begin = FORK.Barrier(16)
    for process, told in [start_writer(tmp_path, f"w{i}", 12, begin) for i in range(16)]:
        process.join(60)
        os.close(told)
        assert process.exitcode == 0
    lines = only_file(tmp_path).read_bytes().split(b"\n")[1 if before != "half a key" else 2 :]
    assert all(isinstance(json.loads(line), dict) for line in lines)
    expected = {f"w{w}:{i}": 1.0 + i for w in range(16) for i in range(12)}
    measured = KernelStore(tmp_path).read(KEY).measured
    assert {name: m.latency_us for name, m in measured.items()} == expected


def test_a_kill_loses_no_timing_that_was_noted(tmp_path: Path) -> None:
    moments = random.Random(20)
    noted: set[str] = set()
    for kill in range(20):
        begin = FORK.Event()
        process, told = start_writer(tmp_path, str(kill), 1000, begin)
        begin.set()
        time.sleep(moments.uniform(0.005, 0.03))
        process.kill()
        process.join()
        noted |= {f"{kill}:{i}" for i in range(len(os.read(told, 10_000)))}
        os.close(told)
        assert noted <= set(KernelStore(tmp_path).read(KEY).measured)
    assert len(noted) > 20


def test_a_line_cut_at_any_byte_costs_that_line_alone(filled: Path) -> None:
    store, path = KernelStore(filled), only_file(filled)
    whole = path.read_bytes()
    start = whole.rindex(b"\n")
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        kept = KernelStore(filled).read(KEY)
        assert (set(kept.measured), kept.chosen) == ({"slow", "fast"}, None)
        store.note(KEY, "next", ok(3.0))
        store.choose(KEY, "next", "after the cut")
        kept = KernelStore(filled).read(KEY)
        assert (set(kept.measured), kept.chosen) == ({"slow", "fast", "next"}, "next")


def test_a_first_line_cut_at_any_byte_is_a_miss_and_written_anew(filled: Path) -> None:
    path = only_file(filled)
    first = path.read_bytes().split(b"\n")[1]
    for end in range(len(first)):
        path.write_bytes(b"\n" + first[:end])
        KernelStore(filled).note(KEY, "next", ok(3.0))
        assert set(KernelStore(filled).read(KEY).measured) == {"next"}


OLDER = json.dumps({"schema": 0, "key": KEY}) + '\n{"config": "a", "measurement": {}}'
NO_ENTRIES = {
    "empty": b"", "brackets": b"[]", "list": b"\n[]\n[1]", "text": b"hello\nworld",
    "binary": bytes(range(256)), "zeros": b"\0" * 4096, "older": OLDER.encode(),
    "deep": b"[" * 100_000, "no key": b'{"schema": 1}', "number": b"1",
    "infinite": b'{"schema": 1, "key": {"name": 1e999}}',
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ENTRIES)
def test_what_is_no_entry_is_a_miss_and_becomes_one(
    filled: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    only_file(filled).write_bytes(NO_ENTRIES[name])
    store = KernelStore(filled)
    assert store.survey() == ([], [only_file(filled)])
    caplog.clear()
    assert store.read(KEY).measured == {}
    assert len(caplog.records) == (1 if name != "empty" else 0)
    store.note(KEY, "new", ok(1.0))
    assert KernelStore(filled).read(KEY).measured == {"new": ok(1.0)}
    assert KernelStore(filled).survey()[1] == []


BAD_LINES = (
    b"null", b'"text"', b"{}", b'{"config": 1, "measurement": {}}', b'{"chosen": 3}', b"\xff\xfe",
    b'{"config": "bad", "measurement": {"status": "ok"}}',
    b'{"config": "bad", "measurement": {"status": "ok", "latency_us": NaN}}',
    b'{"config": "bad", "measurement": {"status": "ok", "latency_us": -1}}',
    b'{"config": "bad", "measurement": {"status": "unheard of", "latency_us": 1}}',
)  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_foreign_line_is_skipped(filled: Path, line: bytes) -> None:
    with only_file(filled).open("ab") as file:
        file.write(b"\n" + line)
    KernelStore(filled).note(KEY, "next", ok(1.0))
    kept = KernelStore(filled).read(KEY)
    assert (set(kept.measured), kept.chosen) == ({"slow", "fast", "next"}, "fast")


def test_a_directory_in_place_of_the_file_is_survived(filled: Path) -> None:
    path = only_file(filled)
    path.unlink()
    path.mkdir()
    store = KernelStore(filled)
    with pytest.warns(RuntimeWarning, match="this process only"):
        store.note(KEY, "a", ok(1.0))
    assert store.read(KEY).measured == {"a": ok(1.0)}


def test_a_folder_that_cannot_be_written_is_one_warning_and_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = KernelStore(tmp_path / "file" / "kernels")
    with pytest.warns(RuntimeWarning, match="COSTMODEL_CACHE_DIR"):
        store.note(KEY, "a", ok(1.0))
    store.note(KEY, "b", ok(2.0))  # another warning would be an error
    store.choose(KEY, "a", "faster")
    kept = store.read(KEY)
    assert (kept.measured, kept.chosen) == ({"a": ok(1.0), "b": ok(2.0)}, "a")


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Let no file of this process become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_counts_beside_what_was_written_before(filled: Path) -> None:
    store = KernelStore(filled)
    store.note(KEY, "a", ok(1.0))
    room = only_file(filled).stat().st_size + 20  # for a part of a line
    with full_disk(room), pytest.warns(RuntimeWarning, match="No space left"):
        store.note(KEY, "b", ok(2.0))
    assert set(store.read(KEY).measured) == {"slow", "fast", "a", "b"}
    assert set(KernelStore(filled).read(KEY).measured) == {"slow", "fast", "a"}


def test_a_folder_that_was_removed_is_made_again(filled: Path) -> None:
    store = KernelStore(filled)
    assert (store.clear("no such"), store.clear("my_kernel"), store.entries()) == (0, 1, [])
    store.note(KEY, "slow", ok(20.0))
    only_file(filled).unlink()
    filled.rmdir()
    store.note(KEY, "a", ok(1.0))
    assert KernelStore(filled).read(KEY).measured == {"a": ok(1.0)}


def test_the_folder_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    KernelStore().note(KEY, "a", ok(1.0))
    assert only_file(tmp_path / "kernels").name.startswith("package.module.my_kernel-")


def test_three_hundred_timings_are_read_fast(tmp_path: Path) -> None:
    store = KernelStore(tmp_path)
    for i in range(300):
        store.note(KEY, config_name(triton.Config({"BLOCK": i}, num_warps=8)), ok(1.0 + i))
    text = json.dumps(dict.fromkeys(map(str, range(40)), 1.5))
    times, plain = list[float](), list[float]()
    for _ in range(9):
        begin = time.process_time()
        assert len(store.read(KEY).measured) == 300
        times.append(time.process_time() - begin)
        begin = time.process_time()
        assert [json.loads(text) for _ in range(300)]
        plain.append(time.process_time() - begin)
    assert min(times) < 3 * min(plain)  # whatever else this machine is doing


# --- Names and keys -------------------------------------------------------------------------------

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(PLAIN | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5)
CONFIGS = st.builds(
    triton.Config,
    st.dictionaries(st.text(), VALUES, max_size=4),
    num_warps=st.integers(1, 32),
    num_stages=st.integers(0, 9),
    num_ctas=st.integers(1, 16),
    maxnreg=st.none() | st.integers(1, 255),
)
KEYS = st.dictionaries(
    st.text(), VALUES | st.dictionaries(st.text(), VALUES), min_size=1, max_size=4
)
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(config=CONFIGS, key=KEYS)
def test_any_key_and_configuration_are_read_as_written(
    tmp_path: Path, config: triton.Config, key: dict[str, Any]
) -> None:
    name = config_name(config)
    assert json.loads(name)["kwargs"] == config.kwargs
    KernelStore(tmp_path).note(key, name, ok(2.0))
    KernelStore(tmp_path).choose(key, name, "the last one")
    kept = KernelStore(tmp_path).read(key)
    assert (kept.measured[name], kept.chosen) == (ok(2.0), name)
    assert key in [entry.key for entry in KernelStore(tmp_path).entries()]


@quick
@given(one=CONFIGS, other=CONFIGS)
def test_names_are_equal_where_configurations_are(one: triton.Config, other: triton.Config) -> None:
    if one != other:
        assert config_name(one) != config_name(other)
    turned = triton.Config(
        dict(reversed(one.kwargs.items())), one.num_warps, one.num_stages, one.num_ctas, one.maxnreg
    )
    assert config_name(turned) == config_name(one)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_lacks_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(InvalidInput, match="finite"):
        config_name(triton.Config({"X": value}))
    with pytest.raises(InvalidInput, match="finite"):
        KernelStore(tmp_path).note(KEY | {"key": {"X": value}}, "a", ok(1.0))
    with pytest.raises(InvalidInput, match="finite"):
        KernelStore(tmp_path).read(KEY | {"key": {"X": object()}})
    assert list(tmp_path.iterdir()) == []


@triton.jit
def activation(x):  # type: ignore[no-untyped-def]
    return x


class Opaque:
    """A value that is shown by its address."""


def test_no_address_is_in_a_name() -> None:
    def name() -> str:
        values = {"A": Opaque(), "B": lambda x: x, "C": activation, "D": tl.float16, "E": ok}
        return config_name(triton.Config(values, pre_hook=lambda _: None))

    assert name() == name()
    assert "0x" not in name()
    assert "activation" in name()


def test_what_is_compiled_otherwise_has_another_name(tmp_path: Path) -> None:
    files = [tmp_path / "a.ptx", tmp_path / "b.ptx", tmp_path / "c.ttir", tmp_path / "none.ptx"]
    for file, text in zip(files, ("a", "b", "a"), strict=False):
        file.write_text(text)
    configs = [
        triton.Config({}), triton.Config({}, maxnreg=1),
        *(triton.Config({}, pre_hook=hook) for hook in (print, ok)),
        *(triton.Config({"D": d}) for d in ("fp16", tl.float16, torch.float16, tl.float32, 1, 1.0)),
        *(triton.Config({}, ir_override=str(file)) for file in files),
    ]  # fmt: skip
    assert len({config_name(c) for c in configs}) == len(configs)
    copy = tmp_path / "copy.ptx"
    copy.write_text("a")
    same = [config_name(triton.Config({}, ir_override=str(f))) for f in (files[0], copy)]
    assert same[0] == same[1]
