"""The product as an operator of torch's. Its kernel is for GPUs: here the CPU has one by torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from hypothesis import given, settings
from hypothesis import strategies as st

import costmodel
from costmodel.dispatch import calls
from costmodel.dispatch.calls import multiply_batches
from costmodel.dispatch.check import Call
from costmodel.errors import GradientError, InvalidInput, LayoutError, ShapeError, UnsupportedDtype
from costmodel.launch.fast import activated
from costmodel.nn import Linear, replace_linear
from costmodel.torch_ops import external_matmul

ON_THE_CPU = """
import torch, costmodel
from costmodel.errors import DeviceError

a, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5)
plain = lambda a, b: costmodel.matmul(a, b)
epilogue = lambda a, b: costmodel.matmul(a * 2, b, activation="relu") + 1
module = costmodel.nn.Linear.of(torch.nn.Linear(3, 5))
calls = {"eager": plain, "operator": lambda a, b: torch.ops.costmodel.matmul(
    a, b, None, "none", None, None, None)}
for name, call in {"plain": plain, "epilogue": epilogue, "module": lambda a, b: module(a)}.items():
    calls[name] = torch.compile(call, backend="aot_eager")
calls["inductor"] = torch.compile(plain)
for name, call in calls.items():
    for x in (a, a.detach()):
        try:
            call(x, b)
        except DeviceError as error:
            assert "a is on cpu: expected an NVIDIA GPU" in str(error), (name, error)
        else:
            raise SystemExit(f"{name} computed something")
"""


@pytest.mark.slow
def test_on_a_cpu_it_refuses_as_the_eager_call_does() -> None:
    """In a process of its own: here the operator has a kernel for the CPU."""
    subprocess.run([sys.executable, "-c", ON_THE_CPU], check=True, timeout=300)


OUT_DTYPES: list[torch.dtype | None] = []
ACTIVATIONS = ["none", "relu", "gelu", "silu"]


def by_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str | None,
) -> torch.Tensor:
    OUT_DTYPES.append(out_dtype)
    if out_dtype is torch.float32:
        a, b = a.float(), b.float()
    product = a @ b if bias is None else a @ b + bias
    return activated(product, activation).to(out_dtype or a.dtype).clone()


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu() -> Iterator[None]:
    costmodel.matmul  # noqa: B018 - registers the operator
    library = torch.library.Library("costmodel", "FRAGMENT")
    torch.library.register_kernel("costmodel::matmul", "cpu", by_torch, lib=library)
    yield
    library._destroy()


def random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)


# --- the operator -------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_it_passes_torchs_own_checks(activation: str, with_bias: bool, grad: bool) -> None:
    bias = random(5, grad=grad) if with_bias else None
    arguments = (random(4, 3, grad=grad), random(3, 5, grad=grad), bias, activation, None, None,
                 "auto")  # fmt: skip
    torch.library.opcheck(torch.ops.costmodel.matmul.default, arguments)


def test_no_mode_is_a_mode_too() -> None:
    """Which one holds is looked up when the operator runs, not when it is traced."""
    a, b = random(4, 3, grad=True), random(3, 5)
    arguments = (a, b, None, "none", None, None, None)
    torch.library.opcheck(torch.ops.costmodel.matmul.default, arguments)


@pytest.mark.fault("B17")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_finite_differences(activation: str) -> None:
    a, b, bias = (random(*s, dtype=torch.float64, grad=True) for s in ((4, 3), (3, 5), (5,)))

    def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Any:
        return torch.ops.costmodel.matmul(a, b, bias, activation, None, None, "auto")

    assert torch.autograd.gradcheck(product, (a, b, bias))
    if activation != "relu":  # which has a corner
        assert torch.autograd.gradgradcheck(product, (a, b, bias))


@pytest.mark.fault("B17")
def test_a_gradient_with_no_strides_is_no_trouble() -> None:
    a, b = random(4, 3, grad=True), random(3, 5)
    torch.ops.costmodel.matmul(a, b, None, "none", None, None, "auto").sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(4, 5) @ b.T)
    assert b.grad is None


def test_the_fake_kernel_knows_the_result() -> None:
    a, b = (torch.empty(s, device="meta", dtype=torch.float16) for s in ((4, 3), (3, 5)))
    found = torch.ops.costmodel.matmul(a, b, None, "none", None, torch.float32, "auto")
    assert (found.shape, found.dtype) == ((4, 5), torch.float32)
    with pytest.raises(ShapeError, match=r"a\[4, 3\] @ b\[4, 3\]"):
        torch.ops.costmodel.matmul(a, a, None, "none", None, None, "auto")


# --- torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (2, 2, 4, 3), (3,)])
def test_it_compiles_without_a_break(shape: tuple[int, ...]) -> None:
    def step(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return costmodel.matmul(x * 2, w, bias=bias, activation="relu") + 1

    x, w, bias = random(*shape), random(3, 5), random(5)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(x, w, bias)
    torch.testing.assert_close(found, torch.relu(x * 2 @ w + bias) + 1)


@pytest.mark.fault("B17")
def test_a_compiled_layer_is_trained() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 5)
    ours = Linear.of(plain, activation="silu")
    compiled: Any = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = random(2, 4, 3)
    compiled(x).square().sum().backward()
    found = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()
    torch.nn.functional.silu(plain(x)).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("with_bias", [False, True])
def test_an_output_gives_its_type_to_a_compiled_product(with_bias: bool) -> None:
    """As it does to any other: half operands are not rounded before they are widened."""
    a, b = (1000 * random(4, 3)).half(), (1000 * random(3, 5)).half()
    bias = random(5) if with_bias else None
    out = torch.zeros(4, 5)
    OUT_DTYPES.clear()
    step = torch.compile(costmodel.matmul, fullgraph=True, backend="eager")
    assert step(a, b, out=out, bias=bias) is out
    assert [torch.float32] == OUT_DTYPES
    product = a.float() @ b.float()
    torch.testing.assert_close(out, product if bias is None else product + bias)


@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")  # what fails is not traced
def test_an_output_of_another_shape_is_no_less_wrong_where_it_is_compiled() -> None:
    torch._dynamo.reset()
    with pytest.raises(ShapeError, match=r"expected \[4, 5\]"):
        torch.compile(costmodel.matmul, backend="eager")(
            random(4, 3), random(3, 5), out=torch.zeros(2, 4, 5)
        )
    torch._dynamo.reset()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_autocast_holds_where_it_is_compiled(fullgraph: bool) -> None:
    a, b = random(4, 3), random(3, 5)

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return costmodel.matmul(a, b)

    found = torch.compile(step, fullgraph=fullgraph, backend="eager")(a, b)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, a.bfloat16() @ b.bfloat16())


def kept_for_backward(run: Callable[[], torch.Tensor]) -> list[tuple[int, ...]]:
    """The shapes of what is kept until a gradient is asked for."""
    kept: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sorted(kept)


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)])
def test_no_more_is_kept_for_a_gradient_than_torch_keeps(wants: tuple[bool, bool]) -> None:
    a, b = random(4, 3, grad=wants[0]), random(3, 5, grad=wants[1])
    bias = random(5, grad=True)
    operator = torch.ops.costmodel.matmul
    ours = kept_for_backward(lambda: operator(a, b, bias, "none", None, None, None))
    assert ours == kept_for_backward(lambda: torch.addmm(bias, a, b))


@pytest.mark.fault("B17")
def test_what_is_not_kept_may_be_written_to() -> None:
    """An input under a frozen weight, and a weight whose input wants no gradient."""
    frozen = random(3, 5)
    x = random(4, 3, grad=True)
    hidden = 2 * x
    product = torch.ops.costmodel.matmul(hidden, frozen, None, "none", None, None, None)
    hidden.add_(1)
    product.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * torch.ones(4, 5) @ frozen.T)
    weight, given = random(3, 5, grad=True), random(4, 3)
    product = torch.ops.costmodel.matmul(given, weight, None, "none", None, None, None)
    with torch.no_grad():
        weight.add_(1)
    product.sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, given.T @ torch.ones(4, 5))


def test_a_model_cannot_be_traced() -> None:
    step: Any = torch.compile(
        lambda a, b: costmodel.matmul(a, b, model="some/folder"), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"costmodel\.use"):
        step(random(4, 3), random(3, 5))


@pytest.mark.fault("B17")
def test_out_has_no_gradient() -> None:
    a, b = random(4, 3, grad=True), random(3, 5)
    with pytest.raises(GradientError, match="leave out away"):
        costmodel.matmul(a, b, out=torch.empty(4, 5))


def test_inductor_is_given_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("costmodel.torch_ops.matmul", lambda a, b, out: asked.append((a, b, out)))
    external_matmul(1, 2, out=3)  # type: ignore[arg-type]
    assert asked == [(1, 2, 3)]


# --- batches ------------------------------------------------------------------------------------


def two_matrices(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    assert a.ndim == b.ndim == 2
    return torch.mm(a, b, out=out)


sides = st.integers(0, 4)


@settings(deadline=None)
@given(st.lists(sides, max_size=4), st.lists(sides, max_size=1), sides, st.booleans())
def test_batches_are_as_torch_has_them(
    lead: list[int], columns: list[int], k: int, transposed: bool
) -> None:
    a, b = random(*lead, k), random(k, *columns)
    if transposed and len(lead) == 1:
        a = random(k, *lead).T
    expected = torch.matmul(a, b)
    torch.testing.assert_close(multiply_batches(two_matrices, Call(a, b)), expected)
    if expected.ndim:
        out = torch.full_like(expected, float("nan"))
        assert multiply_batches(two_matrices, Call(a, b, out)) is out
        torch.testing.assert_close(out, expected)


def test_batches_on_both_sides_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "check_kinds", lambda *_: None)
    a, b, bias = random(2, 1, 4, 3), random(5, 3, 6), random(6)
    expected = torch.relu(a @ b + bias)
    found = multiply_batches(two_matrices, Call(a, b, None, bias, "relu"))
    torch.testing.assert_close(found, expected)
    out = torch.empty_like(expected)
    assert multiply_batches(two_matrices, Call(a, b, out, bias, "relu")) is out
    torch.testing.assert_close(out, expected)
    with pytest.raises(UnsupportedDtype, match="out_dtype"):
        multiply_batches(two_matrices, Call(a, b, out_dtype=torch.float64))
    with pytest.raises(UnsupportedDtype, match=r"out is torch\.float32"):
        multiply_batches(two_matrices, Call(a.half(), b.half(), out))


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(ShapeError, match="expected vectors"):
        multiply_batches(two_matrices, Call(torch.tensor(1.0), random(3, 5)))
    with pytest.raises(ShapeError, match=r"expected \[2, 4, 5\]"):
        multiply_batches(two_matrices, Call(random(2, 4, 3), random(3, 5), torch.empty(2, 5, 4)))
    out = torch.empty(4, 2, 5).transpose(0, 1)
    with pytest.raises(LayoutError, match="no rows of one matrix"):
        multiply_batches(two_matrices, Call(random(2, 4, 3), random(3, 5), out))


# --- the layer ----------------------------------------------------------------------------------


def test_a_layer_takes_over_the_parameters() -> None:
    plain = torch.nn.Linear(3, 5, bias=False).eval()
    ours = Linear.of(plain, mode="predict")
    assert ours.weight is plain.weight
    assert ours.bias is None
    assert not ours.training
    assert ours.state_dict().keys() == plain.state_dict().keys()
    Linear(3, 5, bias=False).load_state_dict(plain.state_dict())
    for bad in ({"activation": "tanh"}, {"mode": "fastest"}):
        with pytest.raises(InvalidInput):
            Linear(3, 5, **bad)  # type: ignore[arg-type]


def test_layers_are_replaced_wherever_they_are() -> None:
    shared = torch.nn.Linear(4, 4)
    module = torch.nn.Sequential(
        shared, torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(4, 2), shared, shared)
    )
    weights = dict(module.state_dict())
    assert replace_linear(module) == 2
    assert module[0] is module[2][1] is module[2][2]
    assert [type(layer) for layer in (module[0], module[2][0])] == [Linear, Linear]
    assert all(weights[name] is not None for name in module.state_dict())
    assert replace_linear(module) == 0


def _hooked(layer: torch.nn.Linear) -> None:
    layer.register_forward_hook(lambda *_: None)


def _own_forward(layer: torch.nn.Linear) -> None:
    layer.forward = lambda x: x  # type: ignore[method-assign]


def _without_parameter(layer: torch.nn.Linear) -> None:
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)


def _with_parameter(layer: torch.nn.Linear) -> None:
    layer.gain = torch.nn.Parameter(torch.ones(3))


def _with_buffer(layer: torch.nn.Linear) -> None:
    layer.register_buffer("scale", torch.ones(3))


def _with_module(layer: torch.nn.Linear) -> None:
    layer.adapter = torch.nn.Identity()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Complex modules:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        _hooked,
        _own_forward,
        _without_parameter,
        _with_parameter,
        _with_buffer,
        _with_module,
        torch.nn.Linear.double,
        lambda layer: layer.to(torch.complex64),
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        torch.nn.utils.parametrizations.weight_norm,
        lambda layer: torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5),
    ],
)
def test_layers_with_something_of_their_own_stay(change: Callable[[torch.nn.Linear], Any]) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    layer: Any = module[0]
    change(layer)
    assert replace_linear(module) == 1
    assert module[0] is layer
    assert type(module[1]) is Linear


@pytest.mark.parametrize("patch", [_own_forward, lambda layer: layer.compile(backend="eager")])
def test_a_layer_is_not_called_through_the_one_that_it_was_made_of(
    patch: Callable[[torch.nn.Linear], Any],
) -> None:
    layer = torch.nn.Linear(3, 3)
    patch(layer)
    made = Linear.of(layer)
    assert not {"forward", "_compiled_call_impl"} & vars(made).keys()
    module = torch.nn.Sequential(layer)
    assert replace_linear(module) == 0
    assert module[0] is layer


def test_what_a_layer_is_marked_with_goes_along() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3))
    module[0].tag = ["mine"]  # type: ignore[assignment]
    assert replace_linear(module) == 1
    assert module[0].tag == ["mine"]
    assert [*module.state_dict()] == ["0.weight", "0.bias"]


def test_a_layer_is_one_call_in_a_graph_of_fx() -> None:
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(Linear(3, 3), torch.nn.ReLU()))
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called[-1] is costmodel.matmul  # after the view of the weight


@pytest.mark.parametrize("wrong", [3, None, torch.nn.Linear(3, 3)])
def test_what_cannot_be_replaced_in_place_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="module is"):
        replace_linear(wrong)
