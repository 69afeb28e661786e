"""Kernels timed in a child on a GPU: what is wild or endless there costs its configuration only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import Config
from triton.tools.tensor_descriptor import TensorDescriptor

import costmodel
from costmodel.autotune import isolated
from costmodel.autotune.store import KernelStore, config_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

N = 1 << 22
WILD, ENDLESS = 128, 256


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "costmodel"))
    monkeypatch.setattr(isolated, "LIMIT_S", 8.0)


@triton.jit
def faulty(x_ptr, out_ptr, go_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if BLOCK == 128:
        at += 1 << 40
    if BLOCK == 256:
        going = tl.load(go_ptr, volatile=True)
        while going != 0:
            going = tl.load(go_ptr, volatile=True)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=mask), mask=mask)


@triton.jit
def repeated(x_ptr, out_ptr, n, TIMES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    for _ in range(TIMES):
        x = tl.sin(x)
    tl.store(out_ptr + at, x, mask=at < n)


@triton.jit
def row_sums(x_ptr, out_ptr, n, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * BLOCK, n, SPLIT * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * n + at, mask=at < n, other=0.0)
    if SPLIT == 1:
        tl.store(out_ptr + row, tl.sum(total))
    else:
        tl.atomic_add(out_ptr + row, tl.sum(total))


@triton.jit
def copied(x, out, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    out.store([row, 0], x.load([row, 0]))


@triton.jit
def through_addresses(addresses_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    tl.store(x + at, 1.0, mask=at < n)


def grid(meta: dict[str, Any]) -> tuple[int, ...]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def tuned(kernel: Any, configs: list[Config], **options: Any) -> Any:
    return costmodel.autotune(configs, [], isolate="timing", **options)(kernel)


def statuses() -> dict[str, str]:
    """The outcomes on disk, by the name of the configuration."""
    (entry,) = KernelStore().entries()
    return {name: m.status for name, m in entry.measured.items()}


def test_wild_and_endless_configurations_cost_themselves_only() -> None:
    configs = [Config({"BLOCK": block}) for block in (64, WILD, ENDLESS, 512, 1024)]
    kernel, x = tuned(faulty, configs), torch.randn(N, device="cuda")
    out, go = torch.zeros_like(x), torch.ones(1, dtype=torch.int32, device="cuda")
    kernel[grid](x, out, go, N)
    assert torch.equal(out, 2 * x)  # the context is whole, and the kernel has run
    found = [statuses()[config_name(config)] for config in configs]
    assert found[1:3] == ["crashed", "timeout"]
    assert {found[0], *found[3:]} <= {"ok", "too_slow"}
    assert kernel.best_config.kwargs["BLOCK"] in (64, 512, 1024)
    torch.cuda.synchronize()


def test_a_child_times_as_this_process_does() -> None:
    configs = [Config({"TIMES": times, "BLOCK": 512}) for times in (48, 16, 4)]
    x = torch.randn(N, device="cuda")
    found = []
    for isolate in ("", "timing"):
        KernelStore().clear()
        kernel = costmodel.autotune(configs, [], isolate=isolate)(repeated)
        out = torch.zeros_like(x)
        kernel[grid](x, out, N)
        assert kernel.best_config.kwargs["TIMES"] == 4
        found.append({c.kwargs["TIMES"]: us[0] for c, us in kernel.configs_timings.items()})
    here, there = found
    for times in (4, 16):
        assert there[times] == pytest.approx(here[times], rel=0.25)


def test_what_hooks_zero_agrees_in_the_child() -> None:
    def clear(named: dict[str, Any]) -> None:
        named["out_ptr"].zero_()

    configs = [
        Config({"SPLIT": split, "BLOCK": 256}, pre_hook=clear if split > 1 else None)
        for split in (1, 2, 4)
    ]
    x = torch.randint(-2, 3, (300, 1 << 13), device="cuda").float()
    out = torch.full((300,), 7.0, device="cuda")
    kernel = tuned(row_sums, configs, check="agree")
    kernel[lambda meta: (300, meta["SPLIT"])](x, out, 1 << 13)
    assert torch.equal(out, x.sum(1))
    assert set(statuses().values()) <= {"ok", "too_slow"}


def test_reset_to_zero_is_done_in_the_child_and_once_here() -> None:
    """As by Triton: before the launch that follows the tuning, and before no later one."""
    configs = [Config({"SPLIT": split, "BLOCK": 256}) for split in (2, 4)]
    x = torch.ones(300, 1 << 13, device="cuda")
    out = torch.full((300,), 7.0, device="cuda")
    kernel = tuned(row_sums, configs, reset_to_zero=["out_ptr"], check="agree")
    for turn in (1, 2):
        kernel[lambda meta: (300, meta["SPLIT"])](x, out, 1 << 13)
        assert torch.equal(out, turn * x.sum(1))
    assert set(statuses().values()) <= {"ok", "too_slow"}


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="needs TMA"
)
def test_descriptors_are_made_in_the_child() -> None:
    def set_rows(named: dict[str, Any]) -> None:
        for name in ("x", "out"):
            named[name].block_shape = [named["ROWS"], 64]

    configs = [Config({"ROWS": rows}, pre_hook=set_rows) for rows in (16, 64, 128)]
    x = torch.randn(1 << 14, 64, device="cuda").half()
    out = torch.zeros_like(x)
    described = [TensorDescriptor.from_tensor(tensor, [1, 64]) for tensor in (x, out)]
    kernel = tuned(copied, configs)
    kernel[lambda meta: ((1 << 14) // meta["ROWS"],)](*described)
    assert torch.equal(out, x)
    assert set(statuses().values()) <= {"ok", "too_slow"}


def test_what_cannot_be_made_again_is_timed_here_with_a_warning() -> None:
    configs = [Config({"BLOCK": block}) for block in (256, 1024)]
    x = torch.zeros(4096, device="cuda")
    addresses = torch.tensor([x.data_ptr()], device="cuda")
    kernel = tuned(through_addresses, configs)
    with pytest.warns(RuntimeWarning, match="timed in this process: .* makes pointers of numbers"):
        kernel[grid](addresses, 4096)
    assert x.min() == 1
    assert set(statuses().values()) <= {"ok", "too_slow"}
