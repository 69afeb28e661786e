"""File systems that fail while winners are kept: one warning at most, and the winner is there."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_dispatch
from test_cache import KEY, RESULT
from test_dispatch import H100, SIZES, Bench, find, key_of, winners_of

from costmodel.files import cached_fact
from costmodel.hardware import installed
from costmodel.hardware.target import Target
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

recording, bench = test_dispatch.recording, test_dispatch.bench  # fixtures

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ENAMETOOLONG)


class FailsHalfway(io.FileIO):
    """A file on a disk that takes some bytes and then no more."""

    error = errno.ENOSPC

    def write(self, data: Any) -> int:
        super().write(bytes(data)[: len(data) // 2])
        raise OSError(self.error, os.strerror(self.error))


def fail_halfway(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    real = builtins.open

    def fake(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if mode != "xb":
            return real(path, mode, *rest, **options)
        file = FailsHalfway(path, "xb")
        file.error = error
        return file

    monkeypatch.setattr(builtins, "open", fake)


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "cannot be used" in str(w.message)]


@pytest.mark.fault("B22")
@pytest.mark.parametrize("error", FULL, ids=errno.errorcode.get)
def test_a_write_that_fails_midway_is_one_warning_and_memory_only(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    winners = winners_of(bench, tmp_path)
    kept = find(winners, *SIZES[0])
    fresh = winners_of(bench, tmp_path)
    fail_halfway(monkeypatch, error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [find(fresh, *size) for size in SIZES]
        again = [find(fresh, *size) for size in SIZES]
    assert len(told(caught)) == 1, told(caught)
    assert os.strerror(error) in told(caught)[0]
    assert [a is b for a, b in zip(found, again, strict=True)] == [True] * len(SIZES)
    assert found[0].to_dict() == kept.to_dict(), "what could be read was"
    assert bench.uses == len(SIZES), "each is tuned once"
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1, "half a file was left, or the old one is gone"
    assert find(winners_of(bench, tmp_path), *SIZES[0]).to_dict() == kept.to_dict()


@pytest.mark.fault("B22", "B66")
def test_many_threads_give_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WinnerCache(tmp_path)
    fail_halfway(monkeypatch, errno.ENOSPC)
    barrier = threading.Barrier(8)

    def put(number: int) -> None:
        barrier.wait()
        cache.put({**KEY, "torch": str(number)}, RESULT)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(told(caught)) == 1


PUT = """
import json, os, sys
import platformdirs.unix
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.tuning_result import TuningResult
result = TuningResult.from_dict(json.load(sys.stdin))
if len(sys.argv) > 1:  # become a user without a name; here, since Python itself may be root's
    os.setgroups([])
    os.setgid(12345)
    os.setuid(12345)
cache = WinnerCache()
for turn in range(3):
    cache.put({"name": "w", "turn": turn}, result)
    cache.get({"name": "w", "turn": turn})
print(len(cache.entries()))
"""


def put_in_a_process(
    environment: dict[str, str], *arguments: str, limit: Callable[[], None] | None = None
) -> tuple[int, list[str]]:
    """How many entries it kept, and its warnings."""
    done = subprocess.run(
        # -B: with a limit of the size of files, Python would leave halves of its own
        [sys.executable, "-B", "-c", PUT, *arguments], input=json.dumps(RESULT.to_dict()),
        capture_output=True, text=True, check=False, preexec_fn=limit,
        env={"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "Warning" in line]
    return int(done.stdout), lines


@pytest.mark.fault("B22")
def test_a_file_that_the_system_cuts_off_is_one_warning(tmp_path: Path) -> None:
    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    count, lines = put_in_a_process({"COSTMODEL_CACHE_DIR": str(tmp_path)}, limit=limit)
    assert (count, len(lines)) == (0, 1), lines
    assert list(tmp_path.iterdir()) == [], "half a file was left"


@pytest.mark.fault("B22")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
@pytest.mark.parametrize("home", [None, "/", "/nowhere", "/proc"])
def test_a_user_without_a_name_or_a_home_is_one_warning(home: str | None) -> None:
    environment = {} if home is None else {"HOME": home}
    count, lines = put_in_a_process(environment, "somebody")
    assert (count, len(lines)) == (0, 1), lines


@pytest.mark.fault("B22")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_entries_of_another_user_are_no_trouble() -> None:
    """Unreadable ones are tuned anew and replaced, where the directory allows it."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o777)
        WinnerCache(folder).put({"name": "w", "turn": 0}, RESULT)
        (path,) = Path(folder).iterdir()
        path.chmod(0o600)
        assert put_in_a_process({"COSTMODEL_CACHE_DIR": folder}, "somebody") == (3, [])


@pytest.mark.fault("B21")
@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_a_read_that_fails_is_a_miss_and_no_end_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    cache = WinnerCache(tmp_path)
    cache.put(KEY, RESULT)

    def fail(path: Path, *mode: Any) -> Any:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        assert cache.get(KEY) is None
    assert cache.get(KEY) is not None


@pytest.mark.fault("B21")
def test_a_file_system_that_cannot_flush_a_directory_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def no_directories(path: Any, *rest: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", no_directories)
    cache = WinnerCache(tmp_path)
    cache.put(KEY, RESULT)
    assert cache.get(KEY) is not None


@pytest.mark.fault("B22")
@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EPERM], ids=errno.errorcode.get)
def test_what_cannot_be_removed_does_not_end_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    cache, other = WinnerCache(tmp_path), {**KEY, "torch": "2.12"}
    cache.put(KEY, RESULT)
    cache.put(other, RESULT)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        cache.discard(KEY)
    cache.discard(other)  # a second warning would be an error
    assert not cache.put({**KEY, "torch": "2.13"}, RESULT), "nothing more is written"
    assert cache.get(other) is not None
    assert len(cache.entries()) == 2


@pytest.mark.fault("B21")
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("what", ["folder", "files"])
def test_a_clear_during_a_write_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, times: int
) -> None:
    folder, real, left = tmp_path / "winners", os.replace, [times]

    def cleared(source: Path, target: Path) -> None:
        if left[0]:
            left[0] -= 1
            for path in folder.iterdir():
                path.unlink()
            if what == "folder":
                folder.rmdir()
        real(source, target)

    monkeypatch.setattr(os, "replace", cleared)
    cache = WinnerCache(folder)
    assert cache.put(KEY, RESULT)  # a warning would be an error
    assert cache.get(KEY) is not None
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@pytest.mark.fault("B21", "B22")
def test_a_folder_that_vanishes_again_and_again_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "replace", vanished)
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert not WinnerCache(tmp_path).put(KEY, RESULT)


@pytest.mark.fault("B22")
def test_a_relative_directory_stays_where_it_was_first_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the winners and for what is remembered beside them."""
    first, then = tmp_path / "first", tmp_path / "then"
    first.mkdir()
    then.mkdir()
    file = tmp_path / "file"
    file.touch()
    os.utime(file, (1, 1))
    name = f"kept-{tmp_path.name}"  # which no other test has
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", name)
    monkeypatch.setattr("costmodel.files._SETTLED_S", -1e9)
    monkeypatch.chdir(first)
    early = WinnerCache()
    early.put(KEY, RESULT)
    monkeypatch.chdir(then)
    assert cached_fact("fact", [file], lambda: {"a": "b"}) == {"a": "b"}
    assert WinnerCache().get(KEY) is not None
    assert list(then.iterdir()) == []
    assert {path.name for path in (first / name).iterdir()} >= {"remembered"}
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", f"{name}-2")
    assert WinnerCache().path == then / f"{name}-2", "another value is another folder"


# --- what is in a file ------------------------------------------------------------------------


@pytest.mark.fault("B16")
@pytest.mark.parametrize(
    "change",
    [{"sm_count": 10**6}, {"product": "NVIDIA H200"}, {"arch": 100}, {"l2_bytes": 1}],
    ids=str,
)
def test_a_winner_that_names_another_device_than_its_key_is_none(
    bench: Bench, tmp_path: Path, change: dict[str, Any]
) -> None:
    """The figures of its target are what a launch goes by."""
    winners = winners_of(bench, tmp_path)
    good = find(winners, *SIZES[0])
    (entry,) = winners.cache.entries()
    device = replace(H100.device, **change)
    winners.cache.put(entry.key, replace(good, target=Target(device, H100.toolchain)))
    assert find(winners_of(bench, tmp_path), *SIZES[0]).target == H100
    assert bench.uses == 2


# --- what a winner is of ----------------------------------------------------------------------

INSTALLED: tuple[tuple[str, Callable[[], str]], ...] = (
    ("hardware.target.driver_version", lambda: "570.1"),
    ("hardware.target.triton_build", lambda: "abc"),
    ("tuning.tuning_key.grid_hash", lambda: "abc"),
)  # fmt: skip


@pytest.mark.fault("B16")
@pytest.mark.parametrize(("name", "other"), INSTALLED, ids=[name for name, _ in INSTALLED])
def test_another_driver_build_or_grid_is_another_winner(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    other: Callable[[], str],
) -> None:
    find(winners_of(bench, tmp_path), *SIZES[0])
    winners: Winners = winners_of(bench, tmp_path)
    key = key_of(winners, *SIZES[0])
    before = winners.disk_key(key)
    monkeypatch.setattr(f"costmodel.{name}", other)
    assert winners.disk_key(key) != before
    find(winners, *SIZES[0])
    assert bench.uses == 2
    assert len(winners.cache.entries()) == 2


@pytest.mark.fault("B16")
@pytest.mark.parametrize(
    ("text", "version"),
    [("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n", "535.104.05"),
     ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
      "570.86.15"),
     ("something else 1.2 \n", ""), ("", "")],
)  # fmt: skip
def test_the_driver_is_told_by_its_kernel_module(text: str, version: str) -> None:
    assert installed._kernel_module(text) == version


@pytest.mark.fault("B16")
def test_the_build_is_that_of_the_installed_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "triton" / "_C" / "libtriton.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").touch()
    info = tmp_path / "triton-3.6.0.dist-info"
    info.mkdir()
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    build = installed.triton_build.__wrapped__
    assert build() == ""
    library.write_bytes(b"12345")
    assert build() == "5 bytes"
    (info / "RECORD").write_text("triton/_C/libtriton.so,sha256=a-b_c,5\nx,,\n")
    assert build() == "a-b_c"
