"""A tuned kernel in ``torch.compile``, which times whole lists itself: it gets the best alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fake_driver import FakeDriver, fake_driver
from triton.runtime.autotuner import Autotuner as StockAutotuner

import costmodel
from costmodel.autotune import tuner as module
from costmodel.autotune.tuner import autotune, frozen


@triton.jit  # type: ignore[untyped-decorator]
def twice(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=block // 32) for block in (64, 128, 256)]


def grid_of(x: torch.Tensor) -> Callable[[Any], tuple[int]]:
    return lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A GPU on which everything is tuned already: the larger ``n``, the larger the best block."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)  # of the compiler

    def tuning(tuner: Any, options: Any, key: Any, args: Any, kwargs: Any) -> Any:
        assert (kwargs["warmup"], callable(kwargs["grid"])) == (False, True)
        best = tuner.configs[min(args[1] // 1000, 2)]
        return SimpleNamespace(known=lambda: best, shared=lambda config: config)

    monkeypatch.setattr(module, "Tuning", tuning)
    with fake_driver() as fake:
        yield fake
    torch.compiler.reset()


def traced(kernel: Any, x: torch.Tensor) -> list[tuple[int, ...]]:
    """The grids with which a compiled function launches a kernel, one for each configuration."""
    grids = []

    def backend(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            if "grid" in node.kwargs:
                grids.extend(node.kwargs["grid"])
        return lambda *args: (args[0],)

    @torch.compile(backend=backend, fullgraph=True, dynamic=False)
    def function(x: torch.Tensor) -> torch.Tensor:
        kernel[grid_of(x)](x, x.numel())
        return x + 1

    function(x)
    return grids


def test_a_compiled_function_has_the_best_configuration_alone(driver: FakeDriver) -> None:
    kernel, x, small = autotune(CONFIGS, ["n"])(twice), torch.zeros(2048), torch.zeros(512)
    assert traced(kernel, x) == [(32, 1, 1), (16, 1, 1), (8, 1, 1)]
    best = kernel.frozen(x, 2048, grid=grid_of(x))
    assert traced(best, x) == [(8, 1, 1)]
    assert traced(kernel.frozen(small, 512, grid=grid_of(small)), small) == [(8, 1, 1)]
    assert [config.num_warps for config in best.configs] == [8]
    assert driver.launches == []


def test_a_stock_tuner_can_be_frozen(driver: FakeDriver) -> None:
    kernel, x = triton.autotune(CONFIGS, ["n"])(twice), torch.zeros(1024)
    best = frozen(kernel, x, 1024, grid=grid_of(x))
    assert traced(best, x) == [(8, 1, 1)]
    assert isinstance(best, StockAutotuner)
    assert kernel.configs == CONFIGS


def test_what_is_frozen_launches_outside_too(driver: FakeDriver) -> None:
    kernel, x = autotune(CONFIGS, ["n"])(twice), torch.zeros(1024)
    kernel.frozen(x, 1024, grid=grid_of(x))[grid_of(x)](x, 1024)
    assert [grid for _, grid, _ in driver.launches] == [(8, 1, 1)]


def test_a_list_of_one_is_frozen_as_it_is(driver: FakeDriver) -> None:
    kernel, x = autotune(CONFIGS[:1], ["n"])(twice), torch.zeros(512)
    assert traced(kernel.frozen(x, 512, grid=grid_of(x)), x) == [(8, 1, 1)]


def test_the_pruning_leaves_all_to_inductor(driver: FakeDriver) -> None:
    """It has no arguments yet, by which kernels could be compiled."""
    pruning = costmodel.prune_configs_by(top_k=1)
    kernel = triton.autotune(CONFIGS, ["n"], prune_configs_by=pruning)(twice)
    assert traced(kernel, torch.zeros(2048)) == [(32, 1, 1), (16, 1, 1), (8, 1, 1)]
