"""What compiles knows nothing of matrices: a kernel of a user's own, in this process and a pool."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from test_house import PACKAGE, imports

from costmodel.compile.compile_pool import CompilePool
from costmodel.compile.compiler import Artifact, compile_source
from costmodel.compile.ptx import PTX_FEATURES


@triton.jit  # type: ignore[untyped-decorator]
def double(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def make_source(block: int) -> tuple[Any, dict[str, Any]]:
    """Return the Triton source and compile options."""
    from triton.compiler import ASTSource

    signature = {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    return ASTSource(double, signature, {"BLOCK": block}), {"num_warps": 4}


def compile_block(block: int) -> Artifact:
    make = functools.partial(make_source, block)
    return compile_source(make, 90, f"double-{block}", block)


@pytest.mark.slow
def test_a_kernel_that_is_no_product_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    here = importlib.import_module("test_compile_source")
    with CompilePool(1) as pool:
        futures = {
            block: pool.submit(
                f"double-{block}", block, functools.partial(here.compile_block, block)
            )
            for block in (128, 100)
        }
        made = {block: future.result() for block, future in futures.items()}
    assert made[128].ok
    assert made[128].key == "double-128"
    assert made[128].spec == 128
    assert set(made[128].ptx) == set(PTX_FEATURES)
    assert made[128].ptx["all_st_global"] > 0
    assert made[100].status == "compile_error"
    assert "power of 2" in made[100].error


# The files of these folders that are GEMM's: its runner, and recordings of it.
GEMM_FILES = {"device.py", "replay.py"}


@pytest.mark.parametrize(
    "files", ["compile/*.py", "measure/*.py", "tuning/cache.py", "tuning/search.py"]
)
def test_what_compiles_times_searches_and_keeps_imports_nothing_of_gemm(files: str) -> None:
    of_gemm = tuple(f"costmodel.{name}" for name in ("gemm", "launch", "dispatch", "tuning"))
    found = [
        f"{path.name}:{line} imports {name}"
        for path in PACKAGE.glob(files)
        if path.name not in GEMM_FILES
        for line, name in imports(path)
        if name.startswith(of_gemm)
    ]
    assert found == []
