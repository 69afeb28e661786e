"""Layers, batches and gradients are as torch's, and look nothing up again after the first call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_fakes import H100, MODEL, FakeLaunch, Machine
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import costmodel
from costmodel.dispatch import dispatch
from costmodel.dispatch.gradients import is_gain
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import Workload
from costmodel.launch.fast import activated
from costmodel.nn import Linear, replace_linear
from costmodel.tuning.tuning_result import TuningResult

pytestmark = pytest.mark.fault("N10")

K, N = 520, 48  # a side over 512: smaller products are not timed
WORKLOAD = Workload.dense(64, 64, 64)
SHAPES = [(4, K), (2, 3, K), (2, 1, 3, K), (K,)]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    yield from _machine(monkeypatch, tmp_path)


def _machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Machine]:
    found = Machine(monkeypatch, folder)
    found.bench.latency_us = lambda _, config: 900.0 if config is None else 500.0
    costmodel.use(MODEL)
    yield found
    costmodel.use(None)


def torch_wins(machine: Machine) -> None:
    machine.bench.latency_us = lambda _, config: 1.0 if config is None else 50.0


def random(*shape: int, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) / 4).half().requires_grad_(grad)


def layer(**options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear.of(torch.nn.Linear(K, N).half(), **options)


def expected(made: Linear, x: Tensor) -> Tensor:
    return functional.linear(x.float(), made.weight.float(), made.bias.float()).half()


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


class Counted:
    """How many launches and first calls there were."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launches = self.first_calls = 0
        launch, first = FakeLaunch.__call__, dispatch._first_call

        def launched(*arguments: Any) -> None:
            self.launches += 1
            launch(*arguments)

        def begun(*arguments: Any) -> Tensor:
            self.first_calls += 1
            return first(*arguments)

        patch.setattr(FakeLaunch, "__call__", launched)
        patch.setattr(dispatch, "_first_call", begun)


@pytest.fixture
def counted(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_layer_looks_up_its_launch_once(
    shape: tuple[int, ...], grad: bool, counted: Counted
) -> None:
    made, x = layer(), random(*shape, grad=grad)
    with torch.set_grad_enabled(grad):
        close(made(x), expected(made, x))
        first_calls = counted.first_calls
        for _ in range(3):
            close(made(x), expected(made, x))
    assert counted.first_calls == first_calls
    assert counted.launches == 4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grad", [False, True])
def test_where_torch_wins_a_layer_is_torchs_own(
    shape: tuple[int, ...], grad: bool, machine: Machine, counted: Counted
) -> None:
    torch_wins(machine)
    made, x = layer(), random(*shape, grad=grad)
    with torch.set_grad_enabled(grad):
        made(x)
        first_calls = counted.first_calls
        assert torch.equal(made(x), functional.linear(x, made.weight, made.bias))
    assert (counted.first_calls, counted.launches) == (first_calls, 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_batch_looks_up_its_launch_once(
    shape: tuple[int, ...], grad: bool, counted: Counted
) -> None:
    a, b = random(*shape, grad=grad), random(K, N)
    wanted = (a.float() @ b.float()).half()
    close(costmodel.matmul(a, b), wanted)
    first_calls = counted.first_calls
    for _ in range(3):
        close(costmodel.matmul(a, b), wanted)
    assert (counted.first_calls, counted.launches) == (first_calls, 4)


@pytest.mark.parametrize("grad", [False, True])
def test_two_batches_are_torchs_from_the_first_call_on(grad: bool, counted: Counted) -> None:
    a, b = random(2, 3, K, grad=grad), random(2, K, N)
    for _ in range(3):
        assert torch.equal(costmodel.matmul(a, b, activation="relu"), torch.relu(a @ b))
    assert (counted.first_calls, counted.launches) == (1, 0)


def _pruned(made: Linear) -> None:
    made.weight.data, made.bias.data = made.weight.data[: N // 2], made.bias.data[: N // 2]


def _moved(made: Linear) -> None:
    made.weight.data = made.weight.data.clone() * 2


def _retyped(made: Linear) -> None:
    made.bfloat16()


def _reordered(made: Linear) -> None:
    made.weight.data = made.weight.data.T.contiguous().T


def _replaced(made: Linear) -> None:
    made.weight = torch.nn.Parameter(random(N, K) * 3)


def _without_bias(made: Linear) -> None:
    made.bias = None


@pytest.mark.parametrize(
    "change", [_pruned, _moved, _retyped, _reordered, _replaced, _without_bias]
)
@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_layer_that_is_changed_computes_what_it_has_become(
    change: Callable[[Linear], None], by_torch: bool, grad: bool, machine: Machine
) -> None:
    if by_torch:
        torch_wins(machine)
    made, x = layer(), random(2, 3, K)
    with torch.set_grad_enabled(grad):
        made(x)
        made(x)
        change(made)
        x = x.to(made.weight.dtype)
        bias = None if made.bias is None else made.bias.float()
        wanted = functional.linear(x.float(), made.weight.float(), bias).to(x.dtype)
        for _ in range(2):
            close(made(x), wanted)


def test_a_square_weight_that_is_transposed_in_place(machine: Machine) -> None:
    made, x = Linear.of(torch.nn.Linear(K, K).half()), random(2, 3, K)
    with torch.no_grad():
        made(x)
        made(x)
        made.weight.data = made.weight.data.T
        close(made(x), expected(made, x))


def test_an_activation_that_is_set_later_is_applied() -> None:
    made, x = layer(), random(2, 3, K)
    with torch.no_grad():
        made(x)
        made.activation = "relu"
        close(made(x), torch.relu(expected(made, x)))


@pytest.mark.parametrize("by_torch", [False, True])
def test_the_rows_of_a_batch_may_be_apart(by_torch: bool, machine: Machine) -> None:
    if by_torch:
        torch_wins(machine)
    made, long = layer(), random(4, 6, K)
    with torch.no_grad():
        for x in (long[:, :3], long[::2, :3].contiguous(), long[:, :3], long.transpose(0, 1)):
            close(made(x), expected(made, x))
            close(costmodel.matmul(x, made.weight.T), (x.float() @ made.weight.float().T).half())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_gradients_are_torchs(shape: tuple[int, ...], activation: str | None) -> None:
    made = layer(activation=activation)
    for _ in range(2):  # the first call, and the one that knows its launch
        x = random(*shape, grad=True)
        made.zero_grad()
        (made(x) * 2).sum().backward()
        found = x.grad, made.weight.grad, made.bias.grad
        y = x.detach().float().requires_grad_()
        weight, bias = (p.detach().float().requires_grad_() for p in (made.weight, made.bias))
        product = functional.linear(y, weight, bias)
        (2 * activated(product, activation or "none")).sum().backward()
        for mine, theirs in zip(found, (y.grad, weight.grad, bias.grad), strict=True):
            assert mine is not None
            assert theirs is not None
            torch.testing.assert_close(mine.float(), theirs, rtol=3e-2, atol=3e-2)


def test_the_gradient_of_a_gradient_is_torchs() -> None:
    x, b = random(4, K, grad=True), random(K, N, grad=True)
    for _ in range(2):
        (of_x,) = torch.autograd.grad(costmodel.matmul(x, b).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(of_x.float().sum(), b)
        y, c = (t.detach().float().requires_grad_() for t in (x, b))
        (of_y,) = torch.autograd.grad((y @ c).square().sum(), y, create_graph=True)
        (wanted,) = torch.autograd.grad(of_y.sum(), c)
        torch.testing.assert_close(found.float(), wanted, rtol=5e-2, atol=5e-1)


def test_torch_func_over_layers_that_are_known() -> None:
    """An autograd function without ``setup_context`` fails there."""
    made, x = layer(), random(4, K)
    made(x)
    made(x)
    parameters = dict(made.named_parameters())

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(made, given, (x,)).float().square().sum()

    found = torch.func.grad(loss)(parameters)
    wanted = torch.autograd.grad(
        functional.linear(x, *made.parameters()).float().square().sum(), [*made.parameters()]
    )
    for mine, theirs in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("ours_us", "torch_us", "launches"),
    [(20.0, 24.0, 0), (180.0, 209.0, 0), (150.0, 220.0, 1), (300.0, 310.0, 1)],
)
def test_a_gain_that_the_host_eats_is_no_gain_under_gradients(
    ours_us: float, torch_us: float, launches: int, machine: Machine, counted: Counted
) -> None:
    machine.bench.latency_us = lambda _, config: torch_us if config is None else ours_us
    made, x = layer(), random(4, K)
    made(x)
    assert counted.launches == launches
    with torch.no_grad():
        made(x)
    assert counted.launches == launches + 1


def test_settings_of_the_process_reach_layers_that_are_known(
    machine: Machine, counted: Counted
) -> None:
    made, x = layer(), random(4, K)
    with torch.no_grad():
        made(x)
        torch_wins(machine)
        machine.restart()
        costmodel.set_mode("exhaustive")
        made(x)
    assert counted.launches == 1


def test_a_model_keeps_no_weights_alive() -> None:
    import gc
    import weakref

    module = torch.nn.Sequential(torch.nn.Linear(K, N).half())
    assert replace_linear(module) == 1
    module(random(2, 3, K)).sum().backward()
    weight = weakref.ref(module[0].weight)
    del module
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(("predicted_us", "gain"), [(5.0, False), (260.0, True), (None, True)])
def test_a_gain_that_is_only_predicted(predicted_us: float | None, gain: bool) -> None:
    config = SearchSpace.of(WORKLOAD, H100).configs[0]
    result = TuningResult.unranked(WORKLOAD, H100, "predict", config, "predicted")
    assert is_gain(replace(result, ranked=((config, predicted_us),))) == gain


def test_a_layer_that_knows_its_launches_is_copied_and_saved(tmp_path: Path) -> None:
    made, x = layer(), random(2, 3, K)
    with torch.no_grad():
        wanted = made(x)
        made(x)
        torch.save(made, tmp_path / "layer.pt")
        for other in (copy.deepcopy(made), torch.load(tmp_path / "layer.pt", weights_only=False)):
            close(other(x), wanted)
            other.weight.data.zero_()
            close(made(x), wanted)
            close(other(x), other.bias.expand(2, 3, N))


@pytest.mark.parametrize("by_torch", [False, True])
def test_what_was_chosen_alone_does_not_hold_in_a_process_group(
    by_torch: bool, machine: Machine, counted: Counted, tmp_path: Path
) -> None:
    if by_torch:
        torch_wins(machine)
    made, x = layer(), random(4, K)
    with torch.no_grad():
        for _ in range(3):
            made(x)
        first_calls = counted.first_calls
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1
        )
        try:
            close(made(x), expected(made, x))
        finally:
            torch.distributed.destroy_process_group()
    assert counted.first_calls > first_calls


@pytest.mark.parametrize("known_by", [torch.no_grad, torch.enable_grad])
def test_a_bias_that_alone_is_trained_has_its_gradient(known_by: Any) -> None:
    made, x = layer().requires_grad_(False), random(4, K)
    with known_by():
        made(x)
        made(x)
    made.bias.requires_grad_(True)
    made(x).sum().backward()
    close(made.bias.grad, torch.full((N,), 4.0).half())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("by_torch", [False, True])
def test_the_first_call_may_be_checkpointed(
    shape: tuple[int, ...], activation: str | None, by_torch: bool, machine: Machine
) -> None:
    """What the recomputation saves has to look as what the first call saved."""
    if by_torch:
        torch_wins(machine)
    made, x = layer(activation=activation), random(*shape, grad=True)
    b = random(K, N, grad=True)
    for call in (made, lambda a: costmodel.matmul(a, b, activation=activation)):
        for _ in range(2):
            checkpoint(call, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("bias", [False, True])
def test_two_batches_with_a_bias(bias: bool) -> None:
    a, b, c = random(2, 3, K), random(2, K, N), random(N) if bias else None
    wanted = a @ b if c is None else a @ b + c
    for _ in range(2):
        assert torch.equal(costmodel.matmul(a, b, bias=c), wanted)


def test_what_autocast_has_cast_is_not_known_outside() -> None:
    made, x = Linear(K, N, bias=False), random(4, K)
    with torch.no_grad():
        with torch.autocast("cpu", torch.float16):
            for _ in range(2):
                close(made(x), (x.float() @ made.weight.T).half())
        with pytest.raises(costmodel.errors.UnsupportedDtype):
            made(x)


def test_operands_that_torch_func_does_not_wrap_and_that_require_grad() -> None:
    made, x, y = layer(), random(4, K, grad=True), random(K, N)
    for call in (lambda: made(x), lambda: costmodel.matmul(x, y), lambda: made(x[None])):
        for _ in range(2):
            call()
        found = torch.func.grad(lambda s, call=call: (call().float() * s).sum())(torch.ones(()))
        torch.testing.assert_close(found, call().float().sum(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_parametrized_weight_is_computed_once_a_call(by_torch: bool, machine: Machine) -> None:
    if by_torch:
        torch_wins(machine)

    class Counting(torch.nn.Module):
        calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            self.calls += 1
            return weight * 2

    made, x, counting = layer(), random(4, K), Counting()
    torch.nn.utils.parametrize.register_parametrization(made, "weight", counting)
    for _ in range(3):
        before = counting.calls
        made(x).sum().backward()
        assert counting.calls == before + 1


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.filterwarnings("error", "ignore::DeprecationWarning")
def test_a_trace_of_a_known_layer(by_torch: bool, machine: Machine) -> None:
    if by_torch:
        torch_wins(machine)
    made, x = layer(), random(2, 3, K)
    with torch.no_grad():
        made(x)
        made(x)
        # Sums of a processor differ by where operands lie in memory.
        traced = torch.jit.trace(made, (x,), check_tolerance=1e-2)
        other = random(3, 4, K)
        close(traced(other), expected(made, other))


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_gradients_of_many_results_at_once(activation: str | None) -> None:
    """Torch wraps them in tensors without memory."""
    made, x = layer(activation=activation), random(2, 3, K)
    grads = random(5, 2, 3, N)
    for _ in range(2):
        product = made(x)
        (found,) = torch.autograd.grad(
            product, made.weight, grads, is_grads_batched=True, retain_graph=True
        )
        for mine, grad in zip(found, grads, strict=True):
            (wanted,) = torch.autograd.grad(product, made.weight, grad, retain_graph=True)
            torch.testing.assert_close(mine, wanted, rtol=3e-2, atol=3e-2)


def test_a_known_layer_launches_nothing_on_what_has_no_memory(counted: Counted) -> None:
    made, x = layer(), random(4, K)
    with torch.no_grad():
        made(x)
        zeros: Tensor = torch._efficientzerotensor((4, K), dtype=x.dtype)
        close(made(zeros), made.bias.expand(4, N))
        with pytest.raises(costmodel.errors.LayoutError):
            made(x.to_sparse())
    assert counted.launches == 1
