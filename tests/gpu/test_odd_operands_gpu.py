"""On a GPU: operands that are more than their memory, autocast, and an output that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import costmodel
from costmodel.dispatch import dispatch
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:.*rules of thumb rank:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, in its own files
]

M, N, K = 96, 64, 80


@pytest.fixture(autouse=True)
def _predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "winners", Winners(WinnerCache(tmp_path)))
    costmodel.set_mode("predict")
    yield
    costmodel.set_mode(None)


def pair(dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = (M, K), (K, N)
    a, b = (torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes)
    return a, b


def known(a: torch.Tensor, b: torch.Tensor) -> None:
    """Have the launch of such plain operands kept."""
    torch.testing.assert_close(costmodel.matmul(a, b), a @ b, rtol=2e-2, atol=2e-2)
    assert costmodel.result_for(a, b) is not None


@pytest.mark.parametrize("types", [(32, 32), (16, 32), (32, 16)])
def test_autocast_gives_what_it_gives_of_torch(types: tuple[int, int]) -> None:
    dtypes = {16: torch.float16, 32: torch.float32}
    a, b = (x.to(dtypes[bits]) for x, bits in zip(pair(), types, strict=True))
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            found, expected = costmodel.matmul(a, b), torch.matmul(a, b)
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.fault("B17")
def test_a_module_is_trained_under_autocast() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(K, N), torch.nn.LayerNorm(N), torch.nn.Linear(N, 32)
    ).cuda()
    x = pair(torch.float32)[0]

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = step()
    assert costmodel.nn.replace_linear(model) == 2
    for found, theirs in zip(step(), expected, strict=True):
        allowed = float(theirs.abs().max()) / 20
        torch.testing.assert_close(found, theirs, rtol=0, atol=allowed)


@pytest.mark.fault("B17")
def test_writing_to_what_autograd_has_kept_is_noticed() -> None:
    a, b = pair()
    out = torch.ones(M, N, dtype=torch.float16, device="cuda")
    weight = torch.ones_like(out, requires_grad=True)
    costmodel.matmul(a, b, out=out)
    loss = (weight * out).sum()
    costmodel.matmul(a, b, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_negative_view_is_multiplied_with_its_sign() -> None:
    a, b = pair(torch.float32)
    plain = torch.complex(torch.zeros_like(a), a).imag
    known(plain, b)
    negated = torch.complex(torch.zeros_like(a), -a).conj().imag
    assert negated.is_neg()
    assert negated.stride() == plain.stride()
    torch.testing.assert_close(costmodel.matmul(negated, b), a @ b, rtol=1e-3, atol=1e-3)


@pytest.mark.fault("B17")
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, a, b: torch.func.jvp(f, (a, b), (a + 1, b - 1)),
        lambda f, a, b: torch.func.grad(lambda a, b: f(a, b).square().sum(), (0, 1))(a, b),
        lambda f, a, b: torch.func.vmap(f, (0, None))(torch.stack([a, -a]), b),
        lambda f, a, b: torch.func.functionalize(f)(a, b),
    ],
    ids=["jvp", "grad", "vmap", "functionalize"],
)
def test_transforms_are_those_of_torchs_own_product(transform: Callable[..., Any]) -> None:
    a, b = pair(torch.float32)
    known(a, b)
    found = transform(lambda a, b: costmodel.matmul(a, b), a, b)
    torch.testing.assert_close(found, transform(torch.matmul, a, b), rtol=1e-3, atol=1e-2)


@pytest.mark.fault("B17")
def test_forward_gradients_are_not_lost() -> None:
    a, b = pair(torch.float32)
    known(a, b)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, a + 1)
        found = forward_ad.unpack_dual(costmodel.matmul(dual, b)).tangent
    assert found is not None
    torch.testing.assert_close(found, (a + 1) @ b, rtol=1e-3, atol=1e-2)


def test_tracers_see_the_operator_and_fakes_stay_fake() -> None:
    a, b = pair()
    known(a, b)
    traced = make_fx(lambda a, b: costmodel.matmul(a, b))(a, b)
    assert "costmodel.matmul" in traced.code
    torch.testing.assert_close(traced(a + 1, b), (a + 1) @ b, rtol=2e-2, atol=2e-2)
    with FakeTensorMode() as mode:
        found = costmodel.matmul(mode.from_tensor(a), mode.from_tensor(b))
    assert found.shape == (M, N)
    assert found.device == a.device


@pytest.mark.fault("B08")
def test_one_row_that_lies_far_from_the_next() -> None:
    """As the last token of a long context: its stride is never used, and too large to pass on."""
    b = pair()[1]
    a = torch.empty_strided((1, K), (2**33, 1), dtype=torch.float16, device="cuda").fill_(0.5)
    torch.testing.assert_close(costmodel.matmul(a, b), a @ b, rtol=2e-2, atol=2e-2)


def test_a_frozen_weight_keeps_no_activation() -> None:
    x = pair()[0].requires_grad_()
    frozen = pair()[1]
    hidden = 2 * x
    found = costmodel.matmul(hidden, frozen)
    with torch.no_grad():
        hidden.zero_()  # of no matter: it is not asked for again
    found.sum().backward()
    assert x.grad is not None
    expected = 2 * torch.ones(M, N, dtype=torch.float16, device="cuda") @ frozen.T
    torch.testing.assert_close(x.grad, expected, rtol=2e-2, atol=0.2)
