"""``matmul`` on the CPU by a kernel that sees what one on a GPU sees: memory, and no tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_fakes import FakeLaunch, Machine

import costmodel

M, N, K = 640, 24, 16


def memory_of(x: torch.Tensor) -> Any:
    address = x.data_ptr()
    assert address, "a kernel was launched on no memory"
    size = x.element_size()
    span = (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * size
    kind = {torch.float16: np.float16, torch.float32: np.float32}[x.dtype]
    return np.ndarray(
        tuple(x.shape), kind, (ctypes.c_char * span).from_address(address),
        strides=tuple(s * size for s in x.stride()),
    )  # fmt: skip


def kernel(
    self: FakeLaunch,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    product = memory_of(a).astype(np.float32) @ memory_of(b).astype(np.float32)
    product = product if bias is None else product + memory_of(bias).astype(np.float32)
    with np.errstate(over="ignore"):
        memory_of(out)[...] = product
    LAUNCHED.append(self.plan.workload.m)


LAUNCHED: list[int] = []


def machine_of_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Machine]:
    """Such a machine, for a fixture; the operator is there too."""
    monkeypatch.setattr(FakeLaunch, "__call__", kernel)
    LAUNCHED.clear()
    costmodel.matmul  # noqa: B018 - registers the operator
    library = torch.library.Library("costmodel", "FRAGMENT")
    on_cuda = costmodel.torch_ops._matmul._init_fn  # what the operator runs on a GPU
    torch.library.register_kernel("costmodel::matmul", "cpu", on_cuda, lib=library)
    yield Machine(monkeypatch, folder)
    library._destroy()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def pair(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return random(M, K, dtype=dtype), random(K, N, dtype=dtype)


def known(a: torch.Tensor, b: torch.Tensor, **options: Any) -> None:
    """Have the launch of such plain operands kept, so that a look-up could take it for another."""
    costmodel.matmul(a, b, **options)
    launched = len(LAUNCHED)
    costmodel.matmul(a, b, **options)
    assert len(LAUNCHED) == launched + 1


class Elsewhere(torch.Tensor):
    """A subclass that keeps its numbers in another tensor, as quantised weights do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def inner(x: Any) -> Any:
            return x.inner if isinstance(x, Elsewhere) else x

        return function(*map(inner, args), **{k: inner(v) for k, v in (kwargs or {}).items()})
