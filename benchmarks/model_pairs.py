"""A model beside the same one with ``replace_linear``: both on the same weights, timed in turn."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from common import Row
from torch.nn import functional as F

import costmodel
from costmodel.nn import Linear, replace_linear

__all__ = ["Gpu", "Pair", "Sizes", "Stack", "peaks_of", "times_in_turn", "triton_layers", "warm_up"]

Call = Callable[[], object]

_ROUND_S = 0.03  # so long that the wait at its end does not count
_MIB = 2**20


class Sizes(NamedTuple):
    """The sizes of a stack of blocks."""

    hidden: int = 4096
    feed_forward: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 4


class Block(torch.nn.Module):
    """A block as in Llama, without the rotary positions."""

    def __init__(self, sizes: Sizes, **options: Any) -> None:
        super().__init__()
        hidden, self.head = sizes.hidden, sizes.hidden // sizes.heads
        linear: Any = partial(torch.nn.Linear, bias=False, **options)
        self.before = torch.nn.RMSNorm(hidden, **options)
        self.between = torch.nn.RMSNorm(hidden, **options)
        self.q, self.o = linear(hidden, hidden), linear(hidden, hidden)
        self.k = linear(hidden, sizes.kv_heads * self.head)
        self.v = linear(hidden, sizes.kv_heads * self.head)
        self.gate, self.up = (linear(hidden, sizes.feed_forward) for _ in range(2))
        self.down = linear(sizes.feed_forward, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Stack(torch.nn.Sequential):
    """Blocks, one after the other."""

    def __init__(self, sizes: Sizes, **options: Any) -> None:
        super().__init__(*(Block(sizes, **options) for _ in range(sizes.layers)))


@dataclass(frozen=True)
class Pair:
    """A model with the layers of torch, and one with ours that shares its weights."""

    theirs: torch.nn.Module
    ours: torch.nn.Module

    @classmethod
    def of(
        cls, model: torch.nn.Module, replace: Callable[[torch.nn.Module], object] = replace_linear
    ) -> Pair:
        """Copy a model without its parameters, which are shared; replace the layers of the copy."""
        shared: dict[int, Any] = {id(p): p for p in model.parameters()}
        ours = copy.deepcopy(model, shared)
        replace(ours)
        return cls(model, ours)

    def calls(self, call: Callable[[torch.nn.Module], object]) -> tuple[Call, Call]:
        """Return the same call of both."""
        return partial(call, self.theirs), partial(call, self.ours)


class Gpu:
    """The functions of a GPU that a comparison needs; memory is in bytes.

    Attributes:
        kept: memory that our warm-ups have left allocated; it is not counted as torch's.
    """

    device = "cuda"

    def __init__(self) -> None:
        self.kept = 0

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self, call: Call) -> int:
        """Return the most that is allocated while a call runs."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated()

    def capture(self, call: Call) -> Call:
        """Return the replay of a CUDA graph of a call."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def warm_up(sides: Sequence[Call], gpu: Gpu) -> Row:
    """Run torch's call and ours twice each; return our first pass's time, and what it tuned."""
    before = costmodel.stats()
    kept = took = 0.0
    for side in sides:  # ours is the last
        gpu.synchronize()
        held, begin = gpu.allocated(), time.perf_counter()
        side()
        gpu.synchronize()
        took, kept = time.perf_counter() - begin, gpu.allocated() - held
        side()
    gpu.kept += max(int(kept), 0)
    return {"tuning_s": round(took, 3), "tuned": costmodel.stats().since(before).tuned}


def peaks_of(sides: Sequence[Call], gpu: Gpu) -> Row:
    """Return the peak memory of torch's call and of ours, in MiB, with the weights."""
    by_torch, ours = (gpu.peak(side) for side in sides)
    return {
        "peak_torch_mib": round((by_torch - gpu.kept) / _MIB, 2),
        "peak_ours_mib": round(ours / _MIB, 2),
    }


def times_in_turn(sides: Sequence[Call], gpu: Gpu, runs: int, at_least: int = 10) -> Row:
    """Return the median time of torch's call and of ours over rounds in which they take turns.

    Args:
        runs: number of rounds. Each times both; which one comes first alternates.
        at_least: calls that are timed together, with one wait for the GPU at their end.
    """

    def timed(side: Call, times: int) -> float:
        gpu.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            side()
        gpu.synchronize()
        return (time.perf_counter() - begin) / times

    once = timed(sides[0], min(at_least, 3))
    times = max(at_least, min(math.ceil(_ROUND_S / once), 1000)) if at_least > 1 else 1
    found: list[list[float]] = [[], []]
    for run in range(runs):
        for which in (0, 1) if run % 2 == 0 else (1, 0):
            found[which].append(timed(sides[which], times))
    by_torch, ours = (median(of_side) for of_side in found)
    return {
        "torch_ms": round(1e3 * by_torch, 5),
        "ours_ms": round(1e3 * ours, 5),
        "ratio": round(by_torch / ours, 4),
    }


def triton_layers(model: torch.nn.Module, rows: int) -> Row:
    """Count our layers, and those for which a Triton kernel is chosen at so many rows."""
    chosen: dict[Any, bool] = {}
    total = by_triton = 0
    for layer in model.modules():
        if not isinstance(layer, Linear):
            continue
        weight, bias = layer.weight, layer.bias
        kind = weight.shape, weight.dtype, bias is None
        if kind not in chosen:
            with torch.no_grad():
                x = weight.new_empty((rows, layer.in_features))
                costmodel.matmul(
                    x, weight.T, bias=bias
                )  # only a product that was computed has a result
                result = costmodel.result_for(x, weight.T, bias=bias)
            chosen[kind] = result is not None and result.config is not None
        total += 1
        by_triton += chosen[kind]
    return {"triton_layers": by_triton, "layers": total}
