"""Launchers are built ahead where Triton has one for each signature, and nothing depends on it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from triton.backends.nvidia import driver

from costmodel import launchers
from costmodel.config import GemmConfig
from costmodel.launchers import building_launchers
from costmodel.specialize import source, specialize
from costmodel.workload import Workload

WORKLOAD = Workload.dense(4096, 4096, 4096)


def source_of(kernel: str, block_k: int = 64) -> Any:
    config = GemmConfig(kernel, 64, 64, block_k)  # type: ignore[arg-type]
    return source(specialize(WORKLOAD, config))[0]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the C compiler is given."""
    texts: list[str] = []
    lock = threading.Lock()

    def build(src: str, **_: object) -> None:
        assert driver.PyCUtensorMap is not None, "what is loaded now takes that type for good"
        with lock:
            texts.append(src)

    def load() -> None:
        monkeypatch.setattr(driver, "PyCUtensorMap", object)

    monkeypatch.setattr(driver, "PyCUtensorMap", None)
    monkeypatch.setattr(driver, "CudaUtils", load)
    monkeypatch.setattr("triton.runtime.build.compile_module_from_src", build)
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(launchers, "_begun", set())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return texts


def test_each_kind_is_built_once(built: list[str], tmp_path: Path) -> None:
    sources = [source_of(kernel) for kernel in ("pointer", "tma", "tma_persistent")]
    with building_launchers([*sources, *sources]):
        pass
    assert len(set(built)) == len(built) == 3
    with building_launchers([source_of("tma", block_k=32)]):
        pass
    assert len(built) == 3, "the size of a block is nothing that C knows of"


def test_an_emptied_cache_gets_them_anew(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "one", "two"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        with building_launchers([source_of("pointer")]):
            pass
    assert len(built) == 2


def test_it_is_what_triton_asks_for(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text, so that Triton finds it: by Triton's own class, with a binary's own facts."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    def build(src: str, **_: object) -> Any:
        built.append(src)
        raise InterruptedError

    for kernel in ("pointer", "tma"):
        config = GemmConfig(kernel, 64, 64, 32, 4, 2)  # type: ignore[arg-type]
        src, options = source(specialize(WORKLOAD, config))
        with building_launchers([src]):
            compiled = triton_compile(src, target=GPUTarget("cuda", 90, 32), options=options)
        monkeypatch.setattr(driver, "compile_module_from_src", build)
        with pytest.raises(InterruptedError):
            driver.CudaLauncher(compiled.src, compiled.metadata)
        ahead, wanted = built[-2:]
        assert ahead == wanted


@pytest.mark.parametrize("broken", ["make_launcher", "library_dirs", "CudaUtils"])
def test_what_goes_wrong_goes_unnoticed(
    built: list[str], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(driver, broken, fail)
    with building_launchers([source_of("pointer")]):
        pass
    assert built == []


def test_what_is_loaded_already_is_not_loaded_again(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second type of tensor maps would be foreign to the launchers that are there."""

    def load() -> None:
        raise AssertionError("loaded again")

    monkeypatch.setattr(driver, "PyCUtensorMap", object)
    monkeypatch.setattr(driver, "CudaUtils", load)
    with building_launchers([source_of("tma")]):
        pass
    assert len(built) == 1


def test_a_triton_with_one_launcher_for_all_needs_none(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(driver, "make_launcher")
    with building_launchers([source_of("pointer")]):
        pass
    assert built == []
