"""Under ``torch.compile`` a product that torch computes best is torch's own, with no operator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dispatch_fakes import MODEL, FakeLaunch, Machine
from test_layers import K, N, layer, random, torch_wins

import costmodel
from costmodel.dispatch import inductor

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Such a machine whose operator has a kernel for the CPU, and for which a CPU counts as one."""
    costmodel.matmul  # noqa: B018 - registers the operator
    library = torch.library.Library("costmodel", "FRAGMENT")
    on_cuda = costmodel.torch_ops._matmul._init_fn  # what the operator runs on a GPU
    torch.library.register_kernel("costmodel::matmul", "cpu", on_cuda, lib=library)
    monkeypatch.setattr(inductor, "_DEVICES", ("cpu",))
    found = Machine(monkeypatch, tmp_path)
    costmodel.use(MODEL)
    torch.compiler.reset()
    from torch._functorch import config as of_autograd
    from torch._inductor import config

    with (
        config.patch(fx_graph_cache=False),
        of_autograd.patch(enable_autograd_cache=False),
    ):  # whose graphs keep the choice of another test
        yield found
    costmodel.use(None)
    torch.compiler.reset()
    library._destroy()


@pytest.mark.parametrize(
    ("ours_us", "torch_us", "launches"),
    [(50.0, 1.0, 0), (20.0, 55.0, 0), (50.0, 70.0, 1)],
    ids=["torch is faster", "the host eats the gain", "the kernel is faster"],
)
@pytest.mark.parametrize("shape", [(4, K), (2, 3, K)])
def test_a_layer(
    ours_us: float, torch_us: float, launches: int, shape: tuple[int, ...], machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    machine.bench.latency_us = lambda _, config: torch_us if config is None else ours_us
    made, x = layer(), random(*shape)
    launched: list[int] = []
    launch = FakeLaunch.__call__

    def count(*arguments: object) -> None:
        launched.append(1)
        launch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeLaunch, "__call__", count)
    with torch.no_grad():
        found = torch.compile(made)(x)
    wanted = torch.nn.functional.linear(x.float(), made.weight.float(), made.bias.float())
    torch.testing.assert_close(found, wanted.half(), rtol=1e-2, atol=1e-2)
    assert len(launched) == launches


def test_its_gradients(machine: Machine) -> None:
    torch_wins(machine)
    a, b = random(4, K, grad=True), random(K, N, grad=True)
    torch.compile(costmodel.matmul)(a, b).sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(4, N).half() @ b.T, rtol=1e-2, atol=5e-2)
    torch.testing.assert_close(b.grad, a.T @ torch.ones(4, N).half(), rtol=1e-2, atol=5e-2)


def test_a_product_is_traced_while_another_thread_imports_inductor() -> None:
    script = """
import sys, threading, torch, costmodel
costmodel.matmul
a, b = (torch.empty(4, 4, device="meta", dtype=torch.float16) for _ in range(2))
importing = threading.Thread(target=__import__, args=["torch._inductor.lowering"])
importing.start()
while importing.is_alive():
    torch.ops.costmodel.matmul(a, b, None, "none", None, None, "auto")
torch.ops.costmodel.matmul(a, b, None, "none", None, None, "auto")
lowering = sys.modules["torch._inductor.lowering"]
assert torch.ops.costmodel.matmul.default in lowering.lowerings
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
