"""Binaries that are taken from Triton's cache without Triton: only if nothing has changed."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs

from costmodel.compile import triton_private
from costmodel.compile.triton_private import recalled
from costmodel.errors import CompileError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import artifact_key, source, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

WORKLOAD = Workload.dense(4096, 4096, 4096)
SPEC = specialize(WORKLOAD, GemmConfig("tma", 64, 64, 32, 4, 2))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, and costmodel's beside it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "costmodel"))
    return tmp_path / "triton"


def load() -> tuple[Any, bool]:
    """The binary, and whether Triton was asked for it."""
    target, asked = Target.named("h100-sxm"), []

    def make() -> Any:
        asked.append(True)
        return source(SPEC)

    kernel = recalled(artifact_key(SPEC, target), make, "the kernel", target, [])
    return kernel, bool(asked)


def test_it_is_what_triton_gives(folder: Path) -> None:
    (own, asked), (found, again) = load(), load()
    assert (asked, again) == (True, False)
    assert found.asm["cubin"] == own.asm["cubin"]
    assert found.metadata == own.metadata
    assert found.packed_metadata == own.packed_metadata
    assert found.hash == own.hash
    assert found.src.fn.arg_names == own.src.fn.arg_names
    assert found.src.signature == own.src.signature


def test_the_launcher_of_it_is_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes a launcher from a kernel's source: here there is only what it asks of it."""
    from triton.backends.nvidia import driver

    texts: list[str] = []

    def build(src: str, **_: object) -> Any:
        texts.append(src)
        return SimpleNamespace(launch=len)

    monkeypatch.setattr(driver, "compile_module_from_src", build)
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(driver, "PyCUtensorMap", object)  # as where there is a GPU
    for kernel, _ in (load(), load()):
        driver.CudaLauncher(kernel.src, kernel.metadata)
    assert texts[0] == texts[1]


@pytest.mark.fault("B49")
def test_a_later_process_does_not_import_the_kernel(folder: Path) -> None:
    load()
    code = (
        "import sys, test_recalled\n"
        "before = [name for name in sys.modules if name.startswith('costmodel.kernels.')]\n"
        "_, asked = test_recalled.load()\n"
        "kernels = [name for name in sys.modules if name.startswith('costmodel.kernels.')]\n"
        "import json; print(json.dumps([asked, kernels]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [False, []]


def cubin_of(folder: Path) -> Path:
    (path,) = folder.rglob("*.cubin")
    return path


def truncate(folder: Path) -> None:
    path = cubin_of(folder)
    path.write_bytes(path.read_bytes()[:-1])


def garble(folder: Path) -> None:
    path = cubin_of(folder)
    path.write_bytes(path.read_bytes()[::-1])


def foreign_metadata(folder: Path) -> None:
    path = cubin_of(folder).with_suffix(".json")
    path.write_text(path.read_text().replace('"num_warps": 4', '"num_warps": 8'))


def no_text(folder: Path) -> None:
    (path,) = (folder.parent / "costmodel").rglob("binary-*.json")
    data = json.loads(path.read_text())
    data["value"]["signature"] = "{"
    path.write_text(json.dumps(data))


def nothing_in_it(folder: Path) -> None:
    (path,) = (folder.parent / "costmodel").rglob("binary-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"value": {}}))


@pytest.mark.fault("B13", "B16")
@pytest.mark.parametrize(
    "change", [truncate, garble, foreign_metadata, no_text, nothing_in_it],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_what_is_not_as_it_was_is_left_to_triton(
    folder: Path, change: Callable[[Path], None]
) -> None:
    load()
    change(folder)
    assert load()[1]


@pytest.mark.fault("B13")
def test_an_emptied_cache_is_filled_again(folder: Path) -> None:
    own, _ = load()
    folder.rename(folder.with_name("gone"))
    kernel, asked = load()
    assert asked
    assert kernel.asm["cubin"] == own.asm["cubin"]
    assert not load()[1]


@pytest.mark.fault("B16")
def test_another_setting_is_another_binary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    assert load()[1]
    assert not load()[1]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder.with_name("other")))
    assert load()[1]
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    assert load()[1]


def test_what_does_not_compile_says_so_each_time(folder: Path) -> None:
    spec = specialize(WORKLOAD, GemmConfig("tma", 128, 128, 64, 4, 3, maxnreg=80))
    target = Target.named("h100-sxm")
    for _ in range(2):
        with pytest.raises(CompileError, match="the kernel does not compile"):
            recalled("key", functools.partial(source, spec), "the kernel", target, [])
    assert not [*(folder.parent / "costmodel").rglob("binary-*.json")]


def test_only_triton_and_ptxas_are_asked_to_forgive(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(triton_private, "cached_fact", lambda name, files, work_out: work_out())
    with pytest.raises(KeyError, match="a bug of ours"):
        recalled("key", make, "the kernel", Target.named("h100-sxm"), [])
