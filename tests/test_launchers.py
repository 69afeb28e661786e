"""Launchers are built ahead where Triton has one for each signature, and nothing depends on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton.backends.nvidia import driver

from costmodel.compile import triton_private
from costmodel.compile.triton_private import build_launchers
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import source, specialize
from costmodel.gemm.workload import Workload

HERE = Path(__file__).parent
WORKLOAD = Workload.dense(4096, 4096, 4096)


def source_of(kernel: str, block_k: int = 64) -> Any:
    config = GemmConfig(kernel, 64, 64, block_k)  # type: ignore[arg-type]
    return source(specialize(WORKLOAD, config))[0]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the C compiler is given."""
    texts: list[str] = []
    lock = threading.Lock()

    def build(name: str, src: str, folder: str, *_: object) -> str:
        with lock:
            texts.append(Path(src).read_text())
        made = Path(folder, f"{name}.so")
        made.write_bytes(b"machine code")
        return str(made)

    monkeypatch.setattr("triton.runtime.build._build", build)
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(triton_private, "_begun", set())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return texts


def test_each_kind_is_built_once(built: list[str], tmp_path: Path) -> None:
    sources = [source_of(kernel) for kernel in ("pointer", "tma", "tma_persistent")]
    build_launchers([*sources, *sources]).join()
    assert len(set(built)) == len(built) == 3
    build_launchers([source_of("tma", block_k=32)]).join()
    assert len(built) == 3, "the size of a block is nothing that C knows of"


def test_arguments_that_are_tuples_are_built_too(built: list[str]) -> None:
    signature = {"x": "*fp32", "shape": ("i32", "i32"), "BLOCK": "constexpr"}
    given = SimpleNamespace(signature=signature, constants={(2,): 64})
    build_launchers([given]).join()
    assert built == [driver.make_launcher({(2,): 64}, signature, None)]


@pytest.mark.fault("B13")
def test_an_emptied_cache_gets_them_anew(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "one", "two"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        build_launchers([source_of("pointer")]).join()
    assert len(built) == 2


@pytest.mark.parametrize(
    "broken",
    ["triton.backends.nvidia.driver.make_launcher", "triton.backends.nvidia.driver.library_dirs",
     "triton.runtime.build._build"],
)  # fmt: skip
def test_what_goes_wrong_goes_unnoticed_and_leaves_nothing_behind(
    built: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(broken, fail)
    build_launchers([source_of("pointer")]).join()
    assert built == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.fault("B31")
def test_a_program_that_is_interrupted_ends_while_launchers_are_built() -> None:
    program = """
import signal, sys, threading, time
from costmodel.compile import triton_private

begun = threading.Event()

def build(text):
    begun.set()
    time.sleep(3600)

triton_private._text, triton_private._build = str, build
signal.signal(signal.SIGALRM, lambda *_: sys.exit())
built = triton_private.build_launchers(["a launcher"])
assert begun.wait(60)
signal.setitimer(signal.ITIMER_REAL, 0.2)  # while they are waited for
built.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.fault("B40")
def test_a_triton_with_one_launcher_for_all_needs_none(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(driver, "make_launcher")
    build_launchers([source_of("pointer")]).join()
    assert built == []


# --- by Triton's own C code, and a driver that does nothing -------------------------------------


@pytest.fixture
def with_stub_driver(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Runs the program with caches that its runs share, and gives what it says."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("no C compiler, or no headers of Python: Triton's C code cannot be built")
    if not hasattr(driver, "make_launcher"):
        pytest.skip("this Triton has one launcher for all kernels")
    library = tmp_path / "driver"
    library.mkdir()
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    command += ["-o", str(library / "libcuda.so.1"), str(HERE / "stub_driver.c")]
    subprocess.run(command, check=True)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library), "TRITON_LIBCUDA_PATH": str(library),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"), "COSTMODEL_CACHE_DIR": str(tmp_path / "own"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip

    def run(what: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(HERE / "stub_driver_program.py"), what], env=environment,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said

    return run


@pytest.mark.fault("B40")
@pytest.mark.slow
def test_what_is_built_ahead_is_what_triton_loads(
    with_stub_driver: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """Built, and not loaded: before Triton's own C code, it would refuse tensor descriptors."""
    said = with_stub_driver("ahead")
    assert said["loaded"] == []
    assert said["maps"] is False
    for name in ("pointer", "split", "tma"):
        assert said[name] == {"wrapped": 0, "launches": 3, "programs": True}
    there = [*tmp_path.rglob("__triton_launcher*.so")]
    assert len(there) == said["built"] == 3, "Triton builds no other"


@pytest.mark.fault("B47")
@pytest.mark.slow
def test_a_recalled_binary_is_launched_without_tritons_wrappers(
    with_stub_driver: Callable[[str], dict[str, Any]],
) -> None:
    """What a later process takes from Triton's cache lacks nothing that the short way wants."""
    with_stub_driver("launch")
    said = with_stub_driver("launch")
    assert said["kernels"] == [], "a kernel was looked at: nothing was recalled"
    for name in ("pointer", "split", "tma"):
        assert said[name] == {"wrapped": 0, "launches": 3, "programs": True}


@pytest.mark.fault("B15")
@pytest.mark.slow
def test_no_thread_gets_the_launcher_that_another_one_loads(
    with_stub_driver: Callable[[str], dict[str, Any]],
) -> None:
    assert with_stub_driver("threads")["errors"] == []


@pytest.mark.fault("N7")
@pytest.mark.slow
def test_hooks_see_each_launch_while_they_are_set(
    with_stub_driver: Callable[[str], dict[str, Any]],
) -> None:
    """Before it and after it, by Triton's own C code, with its name, function and stream."""
    counts = [6, 0, 6, 0, 6, 0]
    assert with_stub_driver("hooks") == {"pointer": counts, "split": counts, "tma": counts}
