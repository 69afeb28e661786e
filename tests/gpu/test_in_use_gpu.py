"""A small language model whose layers were replaced, in the loops that people put it in."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import costmodel
from costmodel import GemmConfig
from costmodel.nn import Linear, replace_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Inductor's own, when it is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

WORDS, WIDTH, LENGTH = 512, 128, 64
PRODUCTS = 5  # that differ: qkv, out, up, down, head


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """Its head shares the weight of the embedding."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.reentrant = reentrant

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def pair(dtype: torch.dtype = torch.bfloat16, reentrant: bool | None = None) -> tuple[Any, Any]:
    """The same model twice, the second one with our layers."""
    torch.manual_seed(0)
    plain = Model(reentrant).cuda().to(dtype)
    ours = copy.deepcopy(plain)
    assert replace_linear(ours, mode="predict") == 9
    assert ours.head.weight is ours.embedding.weight
    return plain, ours


def words(batch: int = 4, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(WORDS, (batch, length), device="cuda", generator=generator)


def loss_of(model: Callable[..., torch.Tensor], text: torch.Tensor) -> torch.Tensor:
    said = model(text[:, :-1]).float()
    return functional.cross_entropy(said.flatten(0, 1), text[:, 1:].flatten())


def train(model: Model, steps: int = 12, *, autocast: bool = False, scale: bool = False,
          through: Callable[..., torch.Tensor] | None = None) -> list[float]:  # fmt: skip
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=scale, init_scale=256.0)
    text, losses = words(length=LENGTH + 1), []
    for _ in range(steps):
        optimizer.zero_grad()
        half = torch.float16 if scale else torch.bfloat16
        with torch.autocast("cuda", half) if autocast else nullcontext():
            loss = loss_of(model if through is None else through, text)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def learned_alike(found: list[float], expected: list[float]) -> None:
    assert found[-1] < found[0] - 1
    assert found == pytest.approx(expected, abs=0.05)


@pytest.fixture
def no_makeshift() -> Iterator[None]:
    before = costmodel.stats()
    yield
    assert costmodel.stats().since(before).makeshifts == 0


@pytest.mark.fault("B17")
@pytest.mark.parametrize("how", ["bfloat16", "autocast", "scaled", "float32", "checkpoint",
                                 "reentrant", "compile", "compile autocast"])  # fmt: skip
def test_it_is_trained_as_by_torch(how: str) -> None:
    options: dict[str, Any] = {"autocast": "autocast" in how or how == "scaled",
                               "scale": how == "scaled"}  # fmt: skip
    dtype = torch.float32 if options["autocast"] or how == "float32" else torch.bfloat16
    reentrant = {"checkpoint": False, "reentrant": True}.get(how)
    plain, ours = pair(dtype, reentrant)
    through = torch.compile(ours, fullgraph=True) if "compile" in how else None
    learned_alike(train(ours, through=through, **options), train(plain, **options))


@pytest.mark.fault("B41")
def test_training_takes_no_more_memory_with_time() -> None:
    _, ours = pair()
    train(ours, 3)
    before = torch.cuda.memory_allocated()
    train(ours, 40)
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.fault("B05")
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_with_graphs_of_cuda_it_answers_alike(
    dynamic: bool | None, no_makeshift: None
) -> None:
    plain, ours = pair()
    fast = torch.compile(ours, mode="reduce-overhead", fullgraph=True, dynamic=dynamic)
    with torch.inference_mode():
        for turn in range(8):
            text = words(1 + turn % 2, 32, seed=turn)
            near(fast(text), plain(text))


@pytest.mark.fault("B05")
@pytest.mark.parametrize(("k", "config"), [
    (4096, GemmConfig("pointer", 64, 64, 64, 4, 3, split_k=4)),
    (1001, GemmConfig("tma", 64, 64, 64, 4, 3, repack=True)),
], ids=["split", "repack"])  # fmt: skip
def test_what_a_launch_keeps_is_of_no_pool_of_a_graph(k: int, config: GemmConfig) -> None:
    """Partial sums and copies: memory of such a pool is another's when the graph is replayed."""
    weight = torch.randn(k, 256, device="cuda", dtype=torch.float16) / k**0.5
    given = [torch.randn(64, k, device="cuda", dtype=torch.float16) for _ in range(6)]
    costmodel.pin(config, given[0], weight)
    step = torch.compile(
        lambda x: costmodel.matmul(x, weight) + 1, mode="reduce-overhead", fullgraph=True
    )
    with torch.inference_mode():
        for x in given:
            near(step(x), x @ weight + 1, 0.01)
    pool: Any = torch.cuda.MemPool()
    stream: Any = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        found = costmodel.matmul(given[0], weight)
    stream.synchronize()
    near(found, given[0] @ weight, 0.01)
    del found
    assert sum(segment["allocated_size"] for segment in pool.snapshot()) == 0
    costmodel.unpin(given[0], weight)


@pytest.mark.fault("B05", "B17")
def test_graphed_with_its_gradients_it_is_trained_alike(no_makeshift: None) -> None:
    plain, ours = pair()
    graphed: Any = torch.cuda.make_graphed_callables(ours.blocks[0], (example(grad=True),))
    for seed in range(3):
        x, y = example(seed, grad=True), example(seed, grad=True)
        weight = example(9)
        for module, value in ((graphed, x), (plain.blocks[0], y)):
            module.zero_grad()
            (module(value) * weight).sum().backward()
        near(x.grad, y.grad)
        for p, q in zip(ours.blocks[0].parameters(), plain.blocks[0].parameters(), strict=True):
            near(p.grad, q.grad, 0.2)


def example(seed: int = 0, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(4, LENGTH, WIDTH, device="cuda", generator=generator).to(torch.bfloat16)
    return x.requires_grad_(grad)


def near(found: torch.Tensor | None, expected: torch.Tensor | None, atol: float = 0.06) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, atol=atol, rtol=0.03)


@pytest.mark.fault("B17")
def test_gradients_of_single_samples() -> None:
    plain, ours = (model.float() for model in pair())
    text = words(3, 33)

    def loss(model: Model) -> Any:
        def of(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
            call = lambda x: torch.func.functional_call(model, parameters, (x,))  # noqa: E731
            return loss_of(call, sample[None])

        parameters = {k: v.detach() for k, v in model.named_parameters()}
        return torch.func.vmap(torch.func.grad(of), (None, 0))(parameters, text)

    found, expected = loss(ours), loss(plain)
    for name, value in expected.items():
        near(found[name], value, 1e-3)


@pytest.mark.fault("B17")
def test_a_penalty_on_gradients() -> None:
    """Which takes gradients of gradients."""
    results = []
    for model in pair(torch.float32):
        x = example().float().requires_grad_()
        y = model.blocks[0].up(x).square().mean()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()
        results.append(model.blocks[0].up.weight.grad)
    near(results[1], results[0], 1e-3)


def test_it_is_exported_copied_and_saved() -> None:
    plain, ours = pair()
    text = words()
    with torch.no_grad():
        expected = plain(text)
        near(torch.export.export(ours, (text,)).module()(text), expected)
        near(copy.deepcopy(ours)(text), expected)
        file = BytesIO()
        torch.save(ours, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert isinstance(again.blocks[0].up, Linear)
        assert again.blocks[0].up.mode == "predict"
        near(again(text), expected)
        other = Model().cuda().to(torch.bfloat16)
        other.load_state_dict(ours.state_dict())
        near(other(text), expected)
        near(ours.half()(text), expected.half())


@pytest.mark.parametrize("training", [False, True])
def test_torchs_own_transformer_with_our_layers(training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).cuda().to(torch.bfloat16).train(training)
    ours = copy.deepcopy(plain)
    assert replace_linear(ours, mode="predict") == 4
    with torch.set_grad_enabled(training):
        near(ours(example()), plain(example()))


@pytest.mark.fault("B15")
def test_threads_serve_on_streams_of_their_own() -> None:
    plain, ours = pair()
    faults: list[BaseException] = []

    def serve(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
                for turn in range(10):
                    text = words(1 + (seed + turn) % 3, 16 + 8 * seed, seed=seed)
                    near(ours(text), plain(text))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_profiler_sees_the_kernels() -> None:
    _, ours = pair()
    text = words()
    with torch.no_grad():
        ours(text)
        with torch.profiler.profile() as profile:
            ours(text)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert sum("gemm_" in name for name in names) >= 1


@pytest.mark.fault("B49")
def test_while_it_is_tuned_it_answers() -> None:
    """By ``background``: the answers stay right through the switch of what computes them."""
    plain, ours = pair()
    for module in ours.modules():
        if isinstance(module, Linear):
            module.mode = "background"
    text = words(16, 64)  # 1,024 tokens: what is timed
    before = costmodel.stats()
    deadline = time.monotonic() + 120
    with torch.inference_mode():
        expected = plain(text)
        while costmodel.stats().since(before).background_done < PRODUCTS:
            near(ours(text), expected)
            assert time.monotonic() < deadline
        near(ours(text), expected)
    assert costmodel.stats().since(before).background_failed == 0
