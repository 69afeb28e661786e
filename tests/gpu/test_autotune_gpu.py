"""Users' own kernels, tuned on a GPU: results and arguments are as after one launch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import triton
from autotune_fakes import in_place_of_triton
from autotune_kernels import (
    bump,
    doubled,
    eighth,
    masked,
    matmul,
    piece,
    row_sum,
    set_blocks,
    tma_matmul,
)
from triton import Config, knobs
from triton.tools.tensor_descriptor import TensorDescriptor

import costmodel
from costmodel.autotune.store import KernelStore, config_name
from costmodel.data.measurement import Measurement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

N = 1 << 16
BLOCKS = [Config({"BLOCK": 256}, num_warps=2), Config({"BLOCK": 1024}, num_warps=4)]
TILES = [
    Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 32}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in ((32, 32, 4, 2), (64, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3))
]
TOO_MUCH = Config({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128}, num_warps=8, num_stages=4)


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test tunes anew: pytest's folder of winners is shared by all."""
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "costmodel"))


@pytest.fixture
def replaced() -> Iterator[None]:
    with in_place_of_triton():
        yield


def tuned(kernel: Any, configs: list[Any], key: tuple[str, ...] = ("n",), **options: Any) -> Any:
    return costmodel.autotune(list(configs), list(key), **options)(kernel)


def grid(meta: dict[str, Any]) -> tuple[int, ...]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def tiles(meta: dict[str, Any]) -> tuple[int, ...]:
    return triton.cdiv(meta["M"], meta["BLOCK_M"]), triton.cdiv(meta["N"], meta["BLOCK_N"])


def zeros(n: int = N) -> torch.Tensor:
    return torch.zeros(n, device="cuda")


def whole_numbers(*shape: int) -> torch.Tensor:
    """Such that sums of their products are exact: every order of summing gives the same."""
    return torch.randint(-2, 3, shape, device="cuda").half()


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a product and its bias; the last one is the right result."""
    a, b, bias = whole_numbers(200, 256), whole_numbers(256, 336), whole_numbers(336)
    return a, b, bias, a @ b + bias


def multiply(kernel: Any, a: torch.Tensor, b: torch.Tensor, bias: Any) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)
    kernel[tiles](a, b, c, bias, m, n, k)
    return c


def tune(kernel: Any, *args: Any) -> None:
    """Call twice: a first call may go on with the best of those that are compiled by then."""
    for _ in range(2):
        kernel[grid](*args)


def measured(config: Any) -> Measurement:
    """What is on disk about a configuration of the only call that was tuned."""
    (entry,) = KernelStore().entries()
    return entry.measured[config_name(config)]


def lines() -> int:
    """How many timings were written to disk."""
    path = KernelStore().path
    assert path is not None
    return sum(file.read_text().count('"measurement"') for file in path.glob("*.jsonl"))


# --- Results --------------------------------------------------------------------------------------


def test_a_product_is_as_by_tritons_tuner() -> None:
    a, b, bias, expected = operands()
    for by in (tuned(matmul, TILES, ("M", "N", "K")), triton.autotune(TILES, ["M"])(matmul)):
        assert torch.equal(multiply(by, a, b, bias), expected)
        assert torch.equal(multiply(by, a, b, bias), expected)  # the winner, again
        assert by.best_config in TILES
        assert torch.equal(multiply(by, a, b, None), expected - bias)  # without a tensor


def test_sums_are_as_by_tritons_tuner() -> None:
    x = whole_numbers(300, 1000).float()
    for by in (tuned(row_sum, BLOCKS), triton.autotune(BLOCKS, ["n"])(row_sum)):
        out = torch.full((300,), float("nan"), device="cuda")
        by[(300,)](x, out, 1000)
        assert torch.equal(out, x.sum(1))


@pytest.mark.parametrize("configs", [
    [Config({"BLOCK": 512}, maxnreg=registers) for registers in (32, 64)],
    [Config({"BLOCK": block}, num_ctas=2) for block in (512, 1024)],
], ids=["maxnreg", "num_ctas"])  # fmt: skip
def test_options_of_a_configuration_take_effect(configs: list[Any]) -> None:
    kernel, x = tuned(bump, configs), zeros()
    tune(kernel, x, None, N)
    assert x.eq(2).all()
    assert all(measured(config).ok for config in configs)


def test_descriptors_are_set_by_the_hooks_of_configurations() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("TMA needs compute capability 9.0")
    configs = [
        Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64}, num_warps=4, pre_hook=set_blocks)
        for m, n in ((64, 64), (64, 128), (128, 128))
    ]
    kernel = tuned(tma_matmul, configs, ("M", "N", "K"))
    a, b = whole_numbers(256, 256), whole_numbers(256, 384)
    for _ in range(2):
        c = torch.full((256, 384), float("nan"), device="cuda", dtype=torch.float16)
        described = [TensorDescriptor.from_tensor(x, [1, 1]) for x in (a, b, c)]
        kernel[tiles](*described, 256, 384, 256)
        assert torch.equal(c, a @ b)
    assert all(measured(config).ok for config in configs)


@pytest.mark.parametrize("n", [N, N - 5])
def test_heuristics_see_each_configuration(n: int) -> None:
    kernel, x = tuned(masked, BLOCKS), zeros()
    kernel[grid](x, n)
    assert x.sum() == n


def test_gluon_is_tuned() -> None:
    configs = [Config({"BLOCK": 1024, "WARPS": w}, num_warps=w) for w in (2, 4)]
    kernel, x = tuned(doubled, configs), torch.ones(N, device="cuda")
    tune(kernel, x, N)
    assert x.eq(4).all()
    assert all(measured(config).ok for config in configs)


# --- Arguments ------------------------------------------------------------------------------------


def test_what_a_kernel_changes_is_as_after_one_launch() -> None:
    kernel, x, total = tuned(bump, BLOCKS), zeros(), zeros(1)
    for turn in (1, 2, 3):
        kernel[grid](x, total, N)
        assert x.eq(turn).all()
        assert total.item() == N * turn * (turn + 1) / 2


def test_values_that_are_restored_are_as_after_one_launch() -> None:
    kernel, x, total = tuned(bump, BLOCKS, restore_value=["x_ptr", "total_ptr"]), zeros(), zeros(1)
    kernel[grid](x, total, N)
    assert x.eq(1).all()
    assert total.item() == N


@pytest.mark.parametrize("given", [True, False])
def test_zeroed_tensors_are_as_after_one_launch_and_may_be_none(given: bool) -> None:
    kernel, x = tuned(bump, BLOCKS, reset_to_zero=["total_ptr"]), zeros()
    total = zeros(1) if given else None
    kernel[grid](x, total, N)
    assert x.eq(1).all()
    assert total is None or total.item() == N


def test_hooks_are_called_before_and_after_each_launch_that_is_timed() -> None:
    told: list[Any] = []

    def before(args: dict[str, Any], reset_only: bool = False) -> None:
        if not reset_only:
            told.append(args["BLOCK"])

    def after(args: dict[str, Any], exception: Exception | None) -> None:
        told.append(exception)

    kernel = tuned(bump, BLOCKS, pre_hook=before, post_hook=after)
    x = zeros()
    tune(kernel, x, None, N)
    assert x.eq(2).all()
    assert {*told[::2]} == {256, 1024}
    assert {*told[1::2]} == {None}


def test_no_memory_is_kept() -> None:
    kernel, x, total = tuned(bump, BLOCKS), zeros(1 << 22), zeros(1)
    before = torch.cuda.memory_allocated()
    tune(kernel, x, total, 1 << 22)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# --- Configurations that fail ---------------------------------------------------------------------


def test_too_much_shared_memory_is_left_out_with_its_reason() -> None:
    a, b, bias, expected = operands()
    kernel = tuned(matmul, [TOO_MUCH, *TILES[:2]], ("M", "N", "K"), mode="exhaustive")
    for _ in range(2):
        assert torch.equal(multiply(kernel, a, b, bias), expected)
        assert kernel.best_config != TOO_MUCH
    assert measured(TOO_MUCH).status == "out_of_resources"
    assert "shared memory" in measured(TOO_MUCH).error


def test_if_all_fail_the_error_says_why() -> None:
    a, b, bias, _ = operands()
    more = Config({"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 128}, num_warps=8, num_stages=4)
    kernel = tuned(matmul, [TOO_MUCH, more], ("M", "N", "K"))
    with pytest.raises(costmodel.CompileError, match=r"none of 2 configurations .*shared memory"):
        multiply(kernel, a, b, bias)


@pytest.mark.fault("B09")
def test_half_a_result_never_wins() -> None:
    n = 1 << 24
    whole = [Config({"BLOCK": block, "PART": 1}) for block in (512, 1024)]
    part = Config({"BLOCK": 1024, "PART": 4})  # much faster, and wrong
    kernel = tuned(piece, [whole[0], part, whole[1]], check="agree")
    x, out = torch.ones(n, device="cuda"), zeros(n)
    tune(kernel, x, out, n)
    assert out.eq(1).all()
    assert kernel.best_config in whole
    assert measured(part).status == "wrong_result"


# --- Streams, graphs, threads ---------------------------------------------------------------------


@pytest.mark.fault("B05")
def test_in_a_capture_nothing_is_timed() -> None:
    kernel, x = tuned(bump, BLOCKS), zeros()

    def captured() -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel[grid](x, None, N)
        return graph

    before = costmodel.stats().timed
    graph = captured()
    assert kernel.best_config == BLOCKS[0]
    assert costmodel.stats().timed == before
    assert x.eq(0).all()
    graph.replay()
    assert x.eq(1).all()

    tune(kernel, x, None, N)  # outside it is tuned
    best, timed = kernel.best_config, costmodel.stats().timed
    assert timed > before
    graph = captured()
    assert (kernel.best_config, costmodel.stats().timed) == (best, timed)
    graph.replay()
    assert x.eq(4).all()


def test_on_a_stream_of_ones_own_it_waits_for_what_comes_before() -> None:
    kernel, x, stream = tuned(bump, BLOCKS), zeros(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        x.fill_(5)
        kernel[grid](x, None, N)
        y = x * 2
    stream.synchronize()
    assert y.eq(12).all()


def test_threads_tune_a_kernel_once() -> None:
    kernel, tensors, barrier = tuned(bump, BLOCKS), [zeros() for _ in range(8)], Barrier(8)

    def call(x: torch.Tensor) -> None:
        barrier.wait()
        kernel[grid](x, None, N)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, tensors))
    torch.cuda.synchronize()
    assert all(x.eq(1).all() for x in tensors)
    assert lines() < 8 * 2  # as many would be written if each of them timed


# --- Beside other tools ---------------------------------------------------------------------------


def test_hooks_of_profilers_see_each_launch_once() -> None:
    kernel, x, seen = tuned(bump, BLOCKS), zeros(), []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    tune(kernel, x, None, N)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        for _ in range(3):
            kernel[grid](x, None, N)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["bump"] * 3


def test_with_a_hook_that_is_set_it_is_tuned() -> None:
    kernel, x, seen = tuned(bump, BLOCKS), zeros(), []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        kernel[grid](x, None, N)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert x.eq(1).all()
    assert len(seen) > 3


def _in_a_graph(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel[grid](x + 1, out, x.numel())
        return out * 2

    compiled: Any = torch.compile(step, fullgraph=True)
    found: torch.Tensor = compiled(x)
    return found


def eighths() -> list[Any]:
    return [Config({"BLOCK": block}) for block in (256, 1024)]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor's own, when imported
def test_our_tuner_is_traced_by_torch_compile() -> None:
    x = torch.full((N,), 7.0, device="cuda")
    assert _in_a_graph(tuned(eighth, eighths()), x).eq(2).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_replaced_tuner_is_traced_by_torch_compile(replaced: None) -> None:
    kernel = triton.autotune(eighths(), ["n"])(eighth)
    x, out = torch.full((N,), 8.0, device="cuda"), zeros()
    assert _in_a_graph(kernel, x - 1).eq(2).all()
    tune(kernel, x, out, N)  # and outside of the graph it is ours
    assert out.eq(1).all()
    assert all(measured(config).ok for config in kernel.configs)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_frozen_configuration_is_traced_by_torch_compile() -> None:
    """As docs/own-kernels.md has it."""
    kernel, x, out = tuned(eighth, eighths()), torch.full((N,), 8.0, device="cuda"), zeros()
    frozen = kernel.frozen(x, out, N, grid=grid)
    assert out.eq(0).all()
    assert _in_a_graph(frozen, x - 1).eq(2).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_torch_compile_cannot_trace_is_tuned_outside_of_the_graph() -> None:
    """Hooks: torch breaks the graph there, and calls the tuner."""
    configs = eighths()
    for config in configs:
        config.pre_hook = lambda args: args["out_ptr"].zero_()
    kernel, x = tuned(eighth, configs), torch.full((N,), 7.0, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel[grid](x + 1, out, N)
        return out * 2

    compiled: Any = torch.compile(step)
    for _ in range(3):
        assert compiled(x).eq(2).all()
    assert all(measured(config).ok for config in configs)
