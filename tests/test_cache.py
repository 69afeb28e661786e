"""The cache of winners: nothing in its directory may crash a program or be believed wrongly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.data.measurement import Measurement
from costmodel.errors import InvalidInput
from costmodel.files import cache_directory
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.tuning.tuning_result import Costs, TuningResult
from costmodel.tuning.winner_cache import WinnerCache

CONFIG = GemmConfig("tma", 128, 128, 64, 8, 4)
RESULT = TuningResult(
    workload=Workload.dense(64, 4096, 1024),
    target=Target.named("h100-sxm", Toolchain("3.6.0", "12.8")),
    model="xgb",
    model_hash="abc",
    caveat="",
    mode="auto",
    k=8,
    ranked=((CONFIG, 12.0), (replace(CONFIG, num_stages=3), None)),
    measured=((CONFIG, Measurement("ok", 11.5, 11.0, 12.0, 9, 1755)),
              (replace(CONFIG, num_stages=3), Measurement("timeout", error="over 60 s"))),
    torch=Measurement("ok", 13.0, 12.0, 14.0, 9),
    config=CONFIG,
    why="fastest",
    source="device (h100-sxm)",
    reliable=True,
    costs=Costs(0.1, 2.0, 0.3, 8, 2),
)  # fmt: skip
KEY = {"name": "33-64x4096x1024-h100-sxm", "m": (33, 64), "triton": "3.6.0", "torch": "2.11"}


@pytest.fixture
def cache(tmp_path: Path) -> WinnerCache:
    return WinnerCache(tmp_path / "winners")


def only_file(cache: WinnerCache) -> Path:
    assert cache.path is not None
    (path,) = cache.path.iterdir()
    return path


def test_what_is_put_is_got_by_another_process(cache: WinnerCache) -> None:
    assert cache.get(KEY) is None
    cache.put(KEY, RESULT)
    found = WinnerCache(cache.path).get(KEY)
    assert found is not None
    assert found.to_dict() == RESULT.to_dict()
    assert only_file(cache).name.startswith("33-64x4096x1024-h100-sxm-")


@pytest.mark.fault("B16")
def test_the_file_holds_the_whole_key_readable(cache: WinnerCache) -> None:
    cache.put(KEY, RESULT)
    data = json.loads(only_file(cache).read_text())
    assert data["key"] == {**KEY, "m": [33, 64]}
    (entry,) = cache.entries()
    assert entry.key == data["key"]
    assert entry.result.config == CONFIG


@pytest.mark.fault("B16")
@pytest.mark.parametrize("name", ["triton", "torch", "m"])
def test_any_other_key_is_a_miss(cache: WinnerCache, name: str) -> None:
    cache.put(KEY, RESULT)
    assert cache.get({**KEY, name: "other"}) is None
    assert cache.get({k: v for k, v in KEY.items() if k != name}) is None


@pytest.mark.fault("B16")
def test_a_file_under_the_wrong_name_is_not_believed(cache: WinnerCache) -> None:
    cache.put(KEY, RESULT)
    mine = only_file(cache)
    other = {**KEY, "triton": "3.7.0"}
    cache.put(other, RESULT)
    assert cache.path is not None
    (theirs,) = (p for p in cache.path.iterdir() if p != mine)
    os.replace(mine, theirs)
    assert cache.get(other) is None


BAD: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "a list": lambda data: b"[]",
    "a number": lambda data: b"7",
    "binary": lambda data: b"\x80\x04\x95\x00\xff",
    "deeply nested": lambda data: b"[" * 100_000,
    "an illegal block": lambda data: data.replace(b'"block_m": 128', b'"block_m": 7'),
    "code as a value": lambda data: data.replace(b'"tma"', b"\"__import__('os')\""),
    "no result": lambda data: data.replace(b'"result"', b'"results"'),
    "another schema": lambda data: data.replace(b'"schema": 2', b'"schema": 1'),
    "an unknown status": lambda data: data.replace(b'"timeout"', b'"fine"'),
}


@pytest.mark.fault("B13")
@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_ignored_and_replaced(cache: WinnerCache, fault: str) -> None:
    cache.put(KEY, RESULT)
    path = only_file(cache)
    path.write_bytes(BAD[fault](path.read_bytes()))
    assert cache.get(KEY) is None
    assert cache.entries() == []
    cache.put(KEY, RESULT)
    assert cache.get(KEY) is not None
    assert only_file(cache) == path


def test_discard_and_clear(cache: WinnerCache) -> None:
    cache.discard(KEY)
    assert cache.clear() == (0, 0)
    cache.put(KEY, RESULT)
    cache.discard(KEY)
    assert cache.get(KEY) is None
    cache.put(KEY, RESULT)
    cache.put({**KEY, "torch": "2.12"}, RESULT)
    assert cache.clear() == (2, 0)
    assert cache.entries() == []


def test_what_cannot_be_removed_is_not_counted(
    cache: WinnerCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    cache.put(KEY, RESULT)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert cache.clear() == (0, 0)
    assert cache.get(KEY) is not None


def test_the_variable_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "elsewhere"))
    cache = WinnerCache()
    assert not (tmp_path / "elsewhere").exists(), "nothing is touched before it is needed"
    cache.put(KEY, RESULT)
    assert only_file(cache).parent == tmp_path / "elsewhere"


@pytest.mark.fault("B22")
def test_no_home_is_one_warning_and_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "USER", "XDG_CACHE_HOME", "COSTMODEL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    # As for a user without an entry in passwd: nothing to put in place of the tilde.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(InvalidInput, match="COSTMODEL_CACHE_DIR"):
        cache_directory()
    cache = WinnerCache()
    with pytest.warns(RuntimeWarning, match="this process only"):
        cache.put(KEY, RESULT)
    cache.put(KEY, RESULT)  # a second warning would be an error
    assert cache.get(KEY) is None
    assert cache.path is None
    assert cache.entries() == []
    assert cache.clear() == (0, 0)
    assert not Path("~").exists()


@pytest.mark.fault("B22")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_of_somebody_else_can_be_read(cache: WinnerCache) -> None:
    cache.put(KEY, RESULT)
    assert cache.path is not None
    cache.path.chmod(0o500)
    try:
        readonly = WinnerCache(cache.path)
        assert readonly.get(KEY) is not None
        with pytest.warns(RuntimeWarning, match="cannot be used"):
            readonly.put(KEY, RESULT)
    finally:
        cache.path.chmod(0o700)


WRITER = """
import json, sys
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.tuning_result import TuningResult
cache = WinnerCache(sys.argv[1])
result = TuningResult.from_dict(json.loads(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for turn in range(int(sys.argv[4])):
    for key in ({"name": "same"}, {"name": "own", "of": sys.argv[3]}):
        cache.put(key, result)
        found = cache.get(key)
        assert found is not None and found.config == result.config
"""


def writer(cache: WinnerCache, name: str, turns: int) -> subprocess.Popen[str]:
    arguments = [str(cache.path), json.dumps(RESULT.to_dict()), name, str(turns)]
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.fault("B21")
@pytest.mark.slow
def test_sixteen_processes_write_and_read_at_once(cache: WinnerCache) -> None:
    processes = [writer(cache, str(i), 10) for i in range(16)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        go(process)
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert len(cache.entries()) == 17
    assert cache.path is not None
    assert len(list(cache.path.iterdir())) == 17, "a temporary file was left"


@pytest.mark.fault("B21")
def test_a_killed_writer_loses_nothing_and_leaves_no_lock(cache: WinnerCache) -> None:
    cache.put({"name": "same"}, RESULT)
    process = writer(cache, "victim", 1_000_000)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    go(process)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert cache.get({"name": "same"}) is not None
    assert all(entry.result.config == CONFIG for entry in cache.entries())
    cache.put({"name": "same"}, replace(RESULT, config=None))
    found = cache.get({"name": "same"})
    assert found is not None
    assert found.chosen == "torch"
    cache.clear()
    assert cache.path is not None
    assert list(cache.path.iterdir()) == []
