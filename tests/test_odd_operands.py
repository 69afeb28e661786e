"""Operands that are more than their memory, and calls that torch watches."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_fakes import MODEL, Machine
from memory_fakes import LAUNCHED, Elsewhere, K, M, N, known, machine_of_memory, pair, random
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import costmodel
from costmodel.dispatch.calls import key_of
from costmodel.errors import CostModelError, InvalidInput, LayoutError, ShapeError

# No model has learned float32: the rules rank.
pytestmark = pytest.mark.filterwarnings("ignore:.*was trained on:RuntimeWarning")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    yield from machine_of_memory(monkeypatch, tmp_path)


# --- what has been kept of an output ------------------------------------------------------------


@pytest.mark.fault("B17")
@pytest.mark.parametrize("first", [True, False])
def test_writing_to_what_autograd_has_kept_is_noticed_as_it_is_of_torch(first: bool) -> None:
    a, b = pair()
    out, weight = torch.ones(M, N), torch.ones(M, N, requires_grad=True)
    if not first:
        known(a, b, out=torch.ones(M, N))
    loss = (weight * out).sum()
    version = out._version
    with torch.no_grad():
        costmodel.matmul(a, b, out=out)
    assert out._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- tensors that are not what their memory says ------------------------------------------------


def negated(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, as the imaginary part of conjugate ones: in memory they are negative."""
    found = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert found.is_neg()
    return found


@pytest.mark.parametrize("which", ["a", "b", "bias", "out"])
def test_a_negative_view_is_multiplied_with_its_sign(which: str) -> None:
    a, b = pair()
    plain = {"a": a, "b": b, "bias": random(N), "out": torch.zeros(M, N)}
    expected = torch.addmm(plain["bias"], a, b)
    # The same strides without the sign come first.
    same = torch.complex(torch.zeros_like(plain[which]), plain[which]).imag
    given = plain | {which: same}
    if which != "bias":  # a bias is contiguous
        known(given["a"], given["b"], bias=given["bias"], out=given["out"])
    given[which] = negated(plain[which])
    found = costmodel.matmul(given["a"], given["b"], bias=given["bias"], out=given["out"])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(given["out"].clone(), expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, None],
        lambda x: x.unsqueeze(-1),
        lambda x: torch.as_strided(x, (M, 1), (1, 1)),
    ],
)
def test_a_negative_view_may_have_any_strides(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    z = torch.complex(torch.zeros(2 * M), random(2 * M))
    b = random(1, N)
    plain, negative = view(z.imag), view(z.conj().imag)
    assert negative.is_neg()
    assert negative.stride() == plain.stride()
    known(plain, b)
    torch.testing.assert_close(costmodel.matmul(negative, b), negative @ b)


@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_a_subclass_whose_numbers_are_elsewhere_is_multiplied_by_torch(which: str) -> None:
    a, b = pair()
    known(a, b)
    launched = len(LAUNCHED)
    for _ in range(2):
        found = costmodel.matmul(
            Elsewhere(a) if which != "b" else a, Elsewhere(b) if which != "a" else b
        )
        torch.testing.assert_close(found, a @ b)
    assert len(LAUNCHED) == launched


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def test_a_subclass_with_memory_of_its_own_is_a_tensor_like_others() -> None:
    a, b = pair()
    costmodel.matmul(a.as_subclass(Named), b.as_subclass(Named))
    assert LAUNCHED == [M]


def test_a_fake_tensor_gives_a_fake_one() -> None:
    a, b = pair()
    known(a, b)
    launched = len(LAUNCHED)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (a, b)]
        found = costmodel.matmul(*fakes)
    assert (found.shape, found.dtype) == ((M, N), a.dtype)
    assert type(found) is type(fakes[0])
    assert len(LAUNCHED) == launched


# --- calls that are watched ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["real", "fake", "symbolic"])
def test_a_tracer_sees_the_operator(how: str) -> None:
    a, b = pair()
    known(a, b)
    traced = make_fx(lambda a, b: costmodel.matmul(a, b), tracing_mode=how)(a, b)
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert any("costmodel.matmul" in target for target in targets)
    other = a + 1
    torch.testing.assert_close(traced(other, b), other @ b)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("known_before", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_what_torchscript_traces_has_any_number_of_rows(grad: bool, known_before: bool) -> None:
    """Sizes are tensors to it; the trace is checked by another, without gradients."""
    a, b = pair()
    if known_before:
        known(a, b)
    traced = torch.jit.trace(lambda a: costmodel.matmul(a, b), (a.requires_grad_(grad),))
    torch.testing.assert_close(traced(a), a @ b)
    torch.testing.assert_close(traced(a[:100]), a[:100] @ b)


@pytest.mark.fault("B17")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_torchscript_traces_has_its_forward_gradients() -> None:
    a, b = pair()

    def tangent(a: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda x: costmodel.matmul(x, b), (a,), (torch.ones_like(a),))[1]

    traced = torch.jit.trace(tangent, (a,), check_trace=False)
    torch.testing.assert_close(traced(a), torch.ones_like(a) @ b)


def test_a_mode_sees_the_operator_and_the_numbers_are_right() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    a, b = pair()
    known(a, b)
    with Watch():
        found = costmodel.matmul(a, b)
    torch.testing.assert_close(found, a @ b)
    assert any("costmodel.matmul" in name for name in seen)


def test_modes_that_are_switched_off_see_nothing() -> None:
    a, b = pair()
    with FlopCounterMode(display=False), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        torch.testing.assert_close(costmodel.matmul(a, b), a @ b)


def test_a_model_may_be_named_where_calls_are_counted() -> None:
    a, b = pair(torch.float16)
    with FlopCounterMode(display=False):
        found = costmodel.matmul(a, b, model=MODEL)
    torch.testing.assert_close(found, a @ b, rtol=1e-2, atol=1e-2)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return costmodel.matmul(a, b)


@pytest.mark.fault("B17")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in its own files
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, a, b: torch.func.jvp(f, (a, b), (a + 1, b - 1)),
        lambda f, a, b: torch.func.vjp(f, a, b)[1](torch.ones(M, N)),
        lambda f, a, b: torch.func.grad(lambda a, b: f(a, b).square().sum(), (0, 1))(a, b),
        lambda f, a, b: torch.func.vmap(f, (0, None))(torch.stack([a, -a]), b),
        lambda f, a, b: torch.func.vmap(f)(torch.stack([a, -a]), torch.stack([b, b + 1])),
        lambda f, a, b: torch.func.jacfwd(lambda b: f(a[:2], b))(b[:, :2]),
        lambda f, a, b: torch.func.functionalize(f)(a, b),
    ],
    ids=["jvp", "vjp", "grad", "vmap", "vmap both", "jacfwd", "functionalize"],
)
def test_transforms_of_torch_func_are_those_of_torchs_own_product(
    transform: Callable[..., Any],
) -> None:
    a, b = pair()
    known(a, b)
    torch.testing.assert_close(transform(product, a, b), transform(torch.matmul, a, b))


@pytest.mark.fault("B17")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_gradients_are_not_lost() -> None:
    a, b = pair()
    known(a, b)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, a + 1)
        found = forward_ad.unpack_dual(costmodel.matmul(dual, b))
        expected = forward_ad.unpack_dual(torch.mm(dual, b))
        plain = costmodel.matmul(a, b)
    assert found.tangent is not None
    torch.testing.assert_close(tuple(found), tuple(expected))
    torch.testing.assert_close(plain, a @ b)


@pytest.mark.fault("B15", "B17")
def test_forward_gradients_of_another_thread_are_no_matter() -> None:
    a, b = pair()
    known(a, b)
    inside, done = threading.Event(), threading.Event()

    def differentiate() -> None:
        with forward_ad.dual_level():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=differentiate)
    thread.start()
    assert inside.wait(60)
    before = costmodel.stats()
    costmodel.matmul(a, b)
    done.set()
    thread.join()
    assert costmodel.stats().since(before).prepared == 0


@pytest.mark.fault("B17")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_tangent_that_comes_in_the_backward_is_not_lost(activation: str | None) -> None:
    a, b = pair()
    a, b = a.requires_grad_(), b.requires_grad_()
    direction, tangent = random(M, N), random(M, N) + 1

    def backward_of(y: torch.Tensor) -> Any:
        def gradients(v: torch.Tensor) -> Any:
            return torch.autograd.grad(y, (a, b), v, retain_graph=True)

        return torch.func.jvp(gradients, (direction,), (tangent,))

    expected = torch.mm(a, b)
    expected = expected if activation is None else torch.nn.functional.gelu(expected)
    found = costmodel.matmul(a, b, activation=activation)
    torch.testing.assert_close(backward_of(found), backward_of(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.fault("B17")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_gradients_are_compiled_too() -> None:
    a, b = pair()

    def derivative(a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.func.jvp(lambda x: costmodel.matmul(x, b), (a,), (a + 1,))[1]

    found = torch.compile(derivative, fullgraph=True, backend="eager")(a, b)
    torch.testing.assert_close(found, (a + 1) @ b)


# --- what else a call may come with -------------------------------------------------------------


@pytest.mark.parametrize("options", [{"activation": ["relu"]}, {"mode": {}}, {"mode": ["auto"]}])
def test_an_option_that_cannot_be_hashed_is_refused_like_others(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="expected one of"):
        costmodel.matmul(*pair(), **options)


def test_an_output_of_other_items_beside_an_input_is_refused() -> None:
    """Equal strides in items are not equal in bytes: columns beside one another overlap."""
    memory = torch.zeros(4096, dtype=torch.float32)
    out = memory[: 32 * 64].view(32, 64)[:, :8]
    a = memory.view(torch.float16)[64 * 8 :].as_strided((32, 16), (64, 1))
    with pytest.raises(LayoutError, match="shares memory"):
        costmodel.matmul(a, random(16, 8, dtype=torch.float16), out=out)


def test_a_call_under_way_does_not_keep_what_was_meanwhile_forgotten(
    machine: Machine,
) -> None:
    a, b = pair(torch.float16)
    timing, changed = threading.Event(), threading.Event()

    def before() -> None:
        timing.set()
        assert changed.wait(60)

    machine.bench.before = before
    thread = threading.Thread(target=costmodel.matmul, args=(a, b))
    thread.start()
    assert timing.wait(60)
    costmodel.set_mode("predict")
    changed.set()
    thread.join()
    costmodel.matmul(a, b)
    result = costmodel.result_for(a, b)
    assert result is not None
    assert result.mode == "predict"


@pytest.mark.parametrize("shape", [(2, 3, M, N), (M, N + 1), (N,)])
def test_batches_on_both_sides_want_an_output_of_their_shape(shape: tuple[int, ...]) -> None:
    a, b = random(3, M, K), random(3, K, N)
    with pytest.raises(ShapeError, match=r"expected \[3, 640, 24\]"):
        costmodel.matmul(a, b, out=torch.zeros(shape))


@pytest.mark.parametrize("shape", [(M, N), (1,), (3,), (5, 1, 1, 1)])
def test_batches_on_both_sides_want_a_bias_of_a_row(shape: tuple[int, ...]) -> None:
    a, b = random(3, M, K), random(3, K, N)
    with pytest.raises(ShapeError, match=r"bias has shape .*: expected \[24\]"):
        costmodel.matmul(a, b, bias=torch.zeros(shape))
    torch.testing.assert_close(costmodel.matmul(a, b, bias=random(N)), a @ b + random(N))


def test_a_model_that_was_saved_again_is_another_one(tmp_path: Path) -> None:
    """Also where a copy of it, or a clock, gives its files the same time."""
    card = tmp_path / "card.json"
    a, b = pair()

    def key() -> Any:
        return key_of(a, b, None, None, None, None, None, None, tmp_path)

    keys = [key()]
    for text in ("one", "another"):
        (tmp_path / "new").write_text(text)
        os.utime(tmp_path / "new", ns=(10**18, 10**18))
        os.replace(tmp_path / "new", card)
        keys.append(key())
    assert len({*keys}) == 3
    assert key() == keys[-1]


@pytest.mark.fault("B52")
def test_nothing_is_chosen_while_triton_interprets(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CostModelError, match="TRITON_INTERPRET is set"):
        costmodel.matmul(*pair())
    assert machine.bench.timed == []
    assert machine.loaded == []
