"""The Python of README and docs runs: on a CPU, with stand-ins for the GPU that it asks for.

All blocks of a page run one after another with the same names, as a reader would paste them. Triton
binds kernels and their front end runs, but launches do nothing; for products torch computes.
"""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import dispatch_fakes
import kernel_datasets
import pyarrow.parquet as pq
import pytest
import torch
import triton
import triton.language as tl
from autotune_fakes import machine_without_gpu
from pages import ROOT, Block, blocks_of, pages

from costmodel.scaled import product
from costmodel.scaled.launch import tuned

PAGES = {page: [b for b in blocks_of(page) if b.kind == "python"] for page in pages()}
INTERPRETED = "docs/debugging.md"
"""Its blocks are run by Triton's interpreter, as the page says."""


def given(page: str) -> dict[str, Any]:
    """Names that the blocks of a page take from their reader's program."""
    if page == "docs/in-a-model.md":
        layer = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16)
        model = torch.nn.Sequential(layer)
        return {"model": model, "serve": partial(call_model, model)}  # nothing is tuned then
    if page == "docs/low-precision.md":  # scales of a checkpoint
        return {"scales": torch.ones(32, 56), "row_scales": torch.ones(4096)}
    if page == "docs/collecting.md":
        duckdb = SimpleNamespace(sql=check_columns)
        return {"torch": torch, "triton": triton, "scale": triton.jit(scale), "duckdb": duckdb}
    if page == "docs/kernel-model.md":
        known = zip(kernel_datasets.NAMES, kernel_datasets.SIZES, strict=True)
        binaries = {name: kernel_datasets.binary_of(*size) for name, size in known}
        return {"configs": [*binaries], "arguments": kernel_datasets.ARGUMENTS,
                "binaries": binaries}  # fmt: skip
    return {}


@torch.no_grad()
def call_model(model: torch.nn.Module) -> None:
    """A request of a reader's program."""
    for tokens in (16, 12):
        model(torch.zeros(tokens, 4096, dtype=torch.bfloat16))


def scale(x_ptr, n, BLOCK: tl.constexpr = 64):  # type: ignore[no-untyped-def]
    """A kernel of the reader's own."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def check_columns(sql: str) -> None:
    """Fail if a query names a column that datasets have not."""
    have = pq.read_schema(ROOT / "datasets" / "h200-sxm" / "measurements.parquet").names
    words = re.findall(r"[a-z_]+", re.sub(r"'[^']*'", "", sql))
    sql_words = {"select", "count", "min", "from", "group", "by", "order", "where"}
    assert set(words) - sql_words <= set(have)


def launched(checked: Any, tensors: dict[str, Any], **options: Any) -> torch.Tensor:
    """Launch a scaled product whose arguments were checked, without asking for a GPU."""
    call = checked(**tensors, **options)
    tuned.run(*call, warmup=False)
    return cast(torch.Tensor, call[5])  # out


@pytest.fixture
def stand_ins(tmp_path: Path) -> Iterator[Any]:
    """What makes this process a machine for a block: for kernels or for products, when asked."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "cache"))
        patch.setattr(torch, "compile", lambda f=None, **_: f or (lambda made: made))
        patch.setattr(product, "_launched", launched)
        properties = SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        begun = set()

        def begin(kind: str) -> None:
            if kind in begun:
                return
            begun.add(kind)
            if kind == "products":
                dispatch_fakes.Machine(patch, tmp_path / "winners")
            else:
                machine = stack.enter_context(machine_without_gpu(tmp_path / "kernels"))
                machine.us = lambda launch: 1.0 + launch.options["num_stages"]

        yield begin
        tuned.__dict__.pop("_costmodel", None)  # what it knows of the stand-ins
        tuned.cache.clear()


def run(block: Block, names: dict[str, Any], file: Path) -> None:
    """Run a block as a module of a file, which Triton reads its kernels from."""
    text = block.text.replace('device="cuda"', 'device="cpu"')
    text = text.replace('Path("MODEL")', f'Path("{ROOT / "models" / "kernels-h200-sxm"}")')
    file.write_text(text)
    linecache.checkcache(str(file))
    exec(compile(text, str(file), "exec"), names)


@pytest.mark.parametrize("page", [p for p, found in PAGES.items() if found and p != INTERPRETED])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, stand_ins: Any) -> None:
    module = ModuleType("example_of_a_page")
    vars(module).update(given(page))
    for number, block in enumerate(PAGES[page]):
        about_kernels = re.search(r"triton|frozen|double|scaled|Scaled", block.text)
        stand_ins("kernels" if about_kernels else "products")
        run(block, vars(module), tmp_path / f"block_{number}.py")
        if "def call()" in block.text:
            module.call()


@pytest.mark.parametrize("block", PAGES[INTERPRETED], ids=str)
def test_what_is_for_the_interpreter_runs_there(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "my_kernel.py"
    file.write_text(block.text)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
