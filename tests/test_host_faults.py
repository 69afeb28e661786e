"""A machine without a folder to write, a process to start or a C compiler: products go on.

Each is one warning that says what to do. What was asked for explicitly is an error of costmodel's.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_launchers
import torch
from dispatch_fakes import H100, Bench, Machine, operands
from test_launchers import HERE

import costmodel
from costmodel.dispatch import dispatch, loading, resolve_launch
from costmodel.gemm.specialize import compile_for_device
from costmodel.hardware import nvidia
from costmodel.hardware.target import Target, Toolchain
from costmodel.launch.kernel import load
from costmodel.tuning.winners import DeviceProcess, Winners

pytestmark = [pytest.mark.fault("N3"), pytest.mark.slow]

with_stub_driver = test_launchers.with_stub_driver  # a fixture

ONCE = "meanwhile products are predicted, or computed by torch"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """One whose first products are timed and compiled by real processes."""
    found = Machine(monkeypatch, tmp_path)
    monkeypatch.setattr("costmodel.tuning.tuner.compile_for_device", compile_for_device)
    set_winners(monkeypatch, DeviceProcess)
    yield found
    costmodel.use(None)


def set_winners(monkeypatch: pytest.MonkeyPatch, bench_of: Callable[[int], Any]) -> None:
    known = dispatch.winners
    made = Winners(
        known.cache, target_of=known.target_of, process_of=bench_of, compile_=compile_for_device
    )
    monkeypatch.setattr(dispatch, "winners", made)


def product(m: int = 600) -> tuple[bool, list[str]]:
    """Whether a product is right, and its warnings."""
    a, b = operands(m, 128, 128)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = costmodel.matmul(a, b)
    right = torch.allclose(found.float(), a.float() @ b.float(), atol=0.05)
    return right, [str(w.message) for w in caught]


def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")


def fails(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", fails(OSError(errno.ENOSPC, "No space left")))


def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", fails(BlockingIOError(errno.EAGAIN, "try again")))


FAULTS = {no_files: "TMPDIR", full_disk: "free some space", no_processes: "ulimit"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_where_nothing_can_be_timed_the_product_is_predicted(
    machine: Any, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    fault(monkeypatch)
    right, told = product()
    assert right
    assert len(told) == 1, told
    assert FAULTS[fault] in told[0]
    assert ONCE in told[0]
    assert product(620) == (True, []), "another m of its bucket"
    assert product(900) == (True, []), "another bucket"
    assert machine.loaded, "a prediction that is loaded, not torch"
    kept = dispatch.winners.cache.entries()
    assert not [entry for entry in kept if entry.key["mode"] == "auto"], "not in place of timings"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_tuning_that_is_asked_for_says_why_not(
    machine: Any, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    fault(monkeypatch)
    with pytest.raises(costmodel.errors.HostError, match=FAULTS[fault]):
        costmodel.tune(600, 128, 128)


def test_a_warm_up_goes_on(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    no_files(monkeypatch)
    with pytest.warns(RuntimeWarning, match="TMPDIR") as caught:
        (result,) = costmodel.warmup([(600, 128, 128)])
    assert len(caught) == 1
    assert result is not None
    assert not result.timed
    assert product() == (True, [])


def test_the_background_goes_on(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    no_files(monkeypatch)
    a, b = operands(600, 128, 128)
    before = costmodel.stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        costmodel.matmul(a, b, mode="background")
        for _ in range(200):
            since = costmodel.stats().since(before)
            if since.background_done or since.background_failed:
                break
            time.sleep(0.05)
    assert (since.background_done, since.background_failed) == (1, 0)
    assert len(caught) == 1
    assert machine.loaded


def test_where_nothing_can_be_loaded_torch_computes(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton's cache below a file: its own NotADirectoryError, in this process."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    monkeypatch.setattr(loading, "load", load)
    set_winners(monkeypatch, lambda _: Bench())
    for m in (64, 600, 620):
        right, told = product(m)
        assert right
        assert len(told) == (m == 64), told
    with pytest.raises(costmodel.errors.HostError, match="TRITON_CACHE_DIR"):
        costmodel.pin("pointer 64x64x64 w4 s2 g8", 640, 128, 128)


@pytest.mark.parametrize("mode", ["auto", "never", "background"])
def test_where_the_assembler_does_not_run_torch_computes(
    machine: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The version of ptxas is a part of each key."""
    monkeypatch.setattr(nvidia, "ptxas_version", fails(OSError(errno.EACCES, "ptxas")))
    cache, device = dispatch.winners.cache, H100.device
    winners = Winners(cache, target_of=lambda _: Target(device, Toolchain.current()))
    monkeypatch.setattr(dispatch, "winners", winners)
    costmodel.set_mode(mode)
    right, told = product()
    assert (right, len(told)) == (True, 1)
    assert product(620) == (True, [])


def test_a_fault_that_passes_is_forgotten(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a full disk. Until the machine is asked again no call waits for it."""
    set_winners(monkeypatch, lambda _: Bench())
    attempts = []

    def load_nothing(*_: Any) -> Any:
        attempts.append(1)
        raise costmodel.errors.HostError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load", load_nothing)
        for told in (1, 0, 0):
            right, warned = product()
            assert right
            assert len(warned) == told
            resolved = machine.take_resolved()
            assert not resolved.is_final
            assert resolved.launch.config is resolved.launch.result.config is None
    assert len(attempts) == 1
    monkeypatch.setattr(resolve_launch, "_retry_at", time.monotonic())  # a minute later
    assert product() == (True, [])
    resolved = machine.take_resolved()
    assert resolved.is_final
    assert resolved.launch.config is not None


@pytest.mark.parametrize("error", [KeyError("a"), AssertionError("b"), RuntimeError("c")], ids=repr)
def test_other_errors_propagate(
    machine: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(subprocess, "Popen", fails(error))
    with pytest.raises(type(error)):
        product()


# --- in processes of their own ------------------------------------------------------------------


def limit_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def obey_permissions() -> None:
    """Have root obey the permissions of files, from its next program on."""
    drop_from_bounding_set, dac_override, dac_read_search = 24, 1, 2
    for capability in (dac_override, dac_read_search):
        ctypes.CDLL(None).prctl(drop_from_bounding_set, capability, 0, 0, 0)


def in_a_process(
    tmp_path: Path, environment: dict[str, str], *, driver: str = "none",
    limit: Callable[[], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-B", str(HERE / "host_fault_program.py"), str(tmp_path / "own"), driver],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True, text=True, check=False, preexec_fn=limit,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["wrong"] == []
    assert sum(ONCE in text for text in said["told"]) == 1, said["told"]
    return said


FOLDERS = {
    "home is nowhere": {"HOME": "/proc/nowhere"},
    "home is a file": {"HOME": "FILE"},
    "cache below a file": {"TRITON_CACHE_DIR": "FILE/triton"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FOLDERS)
def test_a_process_that_cannot_write_its_cache(tmp_path: Path, case: str) -> None:
    (tmp_path / "file").touch()
    file = str(tmp_path / "file")
    said = in_a_process(tmp_path, {k: v.replace("FILE", file) for k, v in FOLDERS[case].items()})
    assert set(said["chosen"]) == {"None"}
    assert "TRITON_CACHE_DIR" in said["error"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_home_of_another_user(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o555)
    os.chown(home, 12345, 12345)
    said = in_a_process(tmp_path, {"HOME": str(home)}, limit=obey_permissions)
    assert set(said["chosen"]) == {"None"}
    assert "PermissionError" in said["error"]


@pytest.mark.slow
def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    """No folder for temporary files either: Python looks for one by writing to it."""
    said = in_a_process(tmp_path, {"HOME": str(tmp_path)}, limit=limit_files)
    assert "TMPDIR" in said["error"]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [None, "/nowhere/cc", "false"])
def test_no_c_compiler(
    with_stub_driver: Any,
    tmp_path: Path,
    compiler: str | None,
) -> None:
    library = str(tmp_path / "driver")
    environment = {
        "LD_LIBRARY_PATH": library, "TRITON_LIBCUDA_PATH": library, "PATH": "/nowhere",
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    } | ({} if compiler is None else {"CC": compiler, "PATH": "/usr/bin:/bin"})  # fmt: skip
    said = in_a_process(tmp_path, environment, driver="driver")
    assert set(said["chosen"]) == {"None"}
    assert any("C compiler" in text and "CC" in text for text in said["told"]), said["told"]
