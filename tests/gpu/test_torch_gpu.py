"""Gradients, ``torch.compile``, batches and layers on a GPU, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import costmodel
from costmodel.nn import Linear, replace_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def random(*shape: int, grad: bool = False) -> torch.Tensor:
    x = torch.randn(shape, device="cuda", dtype=torch.float16) / shape[-1] ** 0.25
    return x.requires_grad_(grad)


def near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)


@pytest.mark.fault("B17")
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_gradients_are_torchs(activation: str | None) -> None:
    torch.manual_seed(0)
    ours = [random(64, 96, grad=True), random(96, 128, grad=True), random(128, grad=True)]
    torchs = [x.detach().clone().requires_grad_() for x in ours]
    found = costmodel.matmul(*ours[:2], bias=ours[2], activation=activation, mode="predict")
    expected = torch.addmm(torchs[2], *torchs[:2])
    if activation:
        expected = getattr(torch.nn.functional, activation)(expected)
    near(found, expected)
    weight = random(64, 128)
    for result in (found, expected):
        (result * weight).sum().backward()
    for x, y in zip(ours, torchs, strict=True):
        near(x.grad, y.grad)


def test_the_operator_passes_torchs_checks() -> None:
    arguments = (random(64, 96, grad=True), random(96, 128), None, "relu", None, None, "predict")
    torch.library.opcheck(torch.ops.costmodel.matmul.default, arguments, atol=2e-2, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor's own, when imported
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles_without_a_break(backend: str) -> None:
    def step(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return costmodel.matmul(x * 2, w, bias=bias, activation="gelu", mode="predict") + 1

    x, w, bias = random(2, 64, 96), random(96, 128), random(128)
    found = torch.compile(step, fullgraph=True, backend=backend)(x, w, bias)
    near(found, torch.nn.functional.gelu(x * 2 @ w + bias) + 1)


@pytest.mark.parametrize("shapes", [((96,), (96, 32)), ((3, 5, 96), (96, 32)), ((3, 5, 96), (96,)),
                                    ((4, 1, 8, 96), (3, 96, 32))], ids=str)  # fmt: skip
def test_batches_are_as_torch_has_them(shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = (random(*shape) for shape in shapes)
    expected = a @ b
    near(costmodel.matmul(a, b, mode="predict"), expected)
    out = torch.full_like(expected, float("nan"))
    assert costmodel.matmul(a, b, out=out, mode="predict") is out
    near(out, expected)


@pytest.mark.fault("B17")
def test_layers_are_trained_as_torchs_are() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 32)).cuda().half()
    ours = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 32)).cuda().half()
    ours.load_state_dict(plain.state_dict())
    assert replace_linear(ours, mode="predict") == 2
    assert isinstance(ours[0], Linear)
    x = random(2, 48, 96)
    for module in (plain, ours):
        module(x).square().sum().backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        near(p.grad, q.grad)
