"""Models with ``replace_linear`` beside the same models without it, timed in turn on one GPU.

Three parts:

- ``stack``: four blocks as in Llama (hidden 4096, feed-forward 14336, 32 and 8 heads): eager, in a
  CUDA graph, under ``torch.compile`` and in a training step (without an optimizer).
- ``transformers``: Llama, Qwen2 and Qwen3 of random weights, eager: generate, prefill and training
  step. It is left out where the package is not installed.
- ``host``: the host time of a call of ``Linear``, and of ``matmul`` with batch dimensions. A Triton
  kernel and torch are pinned, one after the other.

``ratio`` is torch's time over ours: over 1 is a gain. ``host_ratio`` is ours over torch's. The
rounds of both take turns, and their medians count. ``tuning_s`` is the time of our first pass,
which tunes what is not known (and compiles, under ``torch.compile``). Peak memory is that of one
call; memory that our first passes have left allocated is not counted as torch's.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from bench_dispatch import host_us
from common import Results, Row, announce, at_exit_code, count, note, parser, seconds_left, versions
from model_pairs import Gpu, Pair, Sizes, Stack, peaks_of, times_in_turn, triton_layers, warm_up

import costmodel
from costmodel.cli.common import print_table
from costmodel.errors import CostModelError
from costmodel.evaluation.metrics import geomean
from costmodel.hardware.target import Target
from costmodel.nn import Linear

Call = Callable[[], object]
Shape = tuple[int, int]  # sequences x tokens

SHAPES: tuple[Shape, ...] = (
    (1, 1), (8, 1), (32, 1), (64, 1), (128, 1), (256, 1), (1, 512), (1, 777), (1, 2048),
)  # fmt: skip
FEWER: tuple[Shape, ...] = ((1, 1), (64, 1), (1, 512))  # in float16; under torch.compile
TRAINED: tuple[Shape, ...] = ((1, 512), (4, 512))
FAMILIES = ("Llama", "Qwen2", "Qwen3")
PROMPT: Shape = (4, 128)
PREFILL: Shape = (4, 512)
NEW_TOKENS = 128
CONFIG = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_HOST_NAMES = {
    "2 dimensions": "linear_nograd_2d", "3 dimensions": "linear_nograd_3d",
    "forward": "linear_grad", "forward and backward": "linear_training",
    "batches": "matmul_batches",
}  # fmt: skip
_SECONDS = {"stack": 250, "host": 20, "transformers": 150}  # on an H200, with empty caches


def name_of(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"


# --- the stack ------------------------------------------------------------------------------------


def stack_rows(pair: Pair, shapes: Sequence[Shape], gpu: Gpu, runs: int) -> Iterator[Row]:
    """Compare a stack eager and in a CUDA graph, without gradients."""
    for shape in shapes:
        x = input_of(pair, shape)
        sides = pair.calls(partial(without_gradients, x))
        first = warm_up(sides, gpu)
        layers = triton_layers(pair.ours, shape[0] * shape[1])
        eager = peaks_of(sides, gpu) | times_in_turn(sides, gpu, runs)
        yield {**head_of("eager", shape, x), **eager, **layers, **first}
        replays: list[Call] = []
        captures = [partial(keep_replay, replays, gpu, side) for side in sides]
        in_graph = peaks_of(captures, gpu) | times_in_turn(replays, gpu, runs)
        yield {**head_of("graph", shape, x), **in_graph, **layers}


def compiled_rows(pair: Pair, shapes: Sequence[Shape], gpu: Gpu, runs: int) -> Iterator[Row]:
    """Compare a stack under ``torch.compile``, each shape compiled for itself."""
    for shape in shapes:
        torch._dynamo.reset()  # else the second shape would be compiled with dynamic sizes
        x = input_of(pair, shape)
        sides = [partial(without_gradients, x, torch.compile(m)) for m in (pair.theirs, pair.ours)]
        found = compared(sides, gpu, runs)
        layers = triton_layers(pair.ours, shape[0] * shape[1])
        yield {**head_of("compile", shape, x), **found, **layers}


def trained_rows(pair: Pair, shapes: Sequence[Shape], gpu: Gpu, runs: int) -> Iterator[Row]:
    """Compare a training step of a stack: forward and backward; the gradients are dropped."""
    for shape in shapes:
        x = input_of(pair, shape)
        found = compared(pair.calls(partial(train, x, torch.randn_like(x))), gpu, runs)
        layers = triton_layers(pair.ours, shape[0] * shape[1])
        yield {**head_of("train", shape, x), **found, **layers}


def input_of(pair: Pair, shape: Shape) -> torch.Tensor:
    weight = next(pair.theirs.parameters())
    return torch.randn(*shape, weight.shape[-1], dtype=weight.dtype, device=weight.device)


def head_of(what: str, shape: Shape, x: torch.Tensor) -> Row:
    dtype = str(x.dtype).removeprefix("torch.")
    return {
        "group": "stack", "model": "stack", "what": what, "workload": name_of(shape),
        "dtype": dtype,
    }  # fmt: skip


def train(x: torch.Tensor, gradient: torch.Tensor, model: torch.nn.Module) -> None:
    model(x).backward(gradient)
    model.zero_grad(set_to_none=True)


def keep_replay(replays: list[Call], gpu: Gpu, call: Call) -> None:
    replays.append(gpu.capture(call))


@torch.no_grad()
def without_gradients(x: torch.Tensor, model: torch.nn.Module) -> None:
    model(x)


def compared(sides: Sequence[Call], gpu: Gpu, runs: int, at_least: int = 10) -> Row:
    first = warm_up(sides, gpu)
    return peaks_of(sides, gpu) | times_in_turn(sides, gpu, runs, at_least) | first


# --- transformers ---------------------------------------------------------------------------------


def transformers_rows(
    family: str, gpu: Gpu, runs: int, dtype: str = "bfloat16", tokens: int = NEW_TOKENS,
    **options: Any,
) -> Iterator[Row]:  # fmt: skip
    """Compare a model of the package transformers with random weights."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**CONFIG | options)
    with torch.device(gpu.device):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    pair = Pair.of(model.to(getattr(torch, dtype)).eval())

    def ids(shape: Shape) -> torch.Tensor:
        return torch.randint(1, config.vocab_size, shape, device=gpu.device)

    prompt, given = ids(PROMPT), ids(PREFILL)
    mask = torch.ones_like(prompt)

    @torch.no_grad()
    def generate(model: Any) -> None:
        model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)

    @torch.no_grad()
    def prefill(model: Any) -> None:
        model(given)

    def learn(model: Any) -> None:
        model(given, labels=given, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    whole = PREFILL[0] * PREFILL[1]
    for what, call, shape, rows in (
        ("generate", generate, (PROMPT[0], tokens), PROMPT[0]),
        ("prefill", prefill, PREFILL, whole),
        ("train", learn, PREFILL, whole),
    ):
        slow = what == "generate"  # a second or so each
        found = compared(pair.calls(call), gpu, min(runs, 5) if slow else runs, 1 if slow else 10)
        yield {
            "group": "transformers", "model": family, "what": what, "workload": name_of(shape),
            "dtype": dtype, **found, **triton_layers(pair.ours, rows),
        }  # fmt: skip


# --- the host -------------------------------------------------------------------------------------


@contextmanager
def pinned(products: Sequence[tuple[Any, Any, bool]], *, to_torch: bool) -> Iterator[str]:
    """Pin each product (a, b, with a bias or not) to torch, or to its predicted Triton kernel.

    Yields:
        What the first one is pinned to.
    """
    names = []
    try:
        for a, b, bias in products:
            config = costmodel.tune(a, b, mode="predict", include_torch=False).config
            if config is None:
                raise CostModelError(f"{tuple(a.shape)} @ {tuple(b.shape)}: no Triton kernel works")
            costmodel.pin("torch" if to_torch else config, a, b, bias=bias)
            names.append("torch" if to_torch else str(config))
        yield names[0]
    finally:
        for a, b, bias in products[: len(names)]:
            costmodel.unpin(a, b, bias=bias)


def host_rows(dtype: str = "float16", size: int = 1024) -> Iterator[Row]:
    """Time calls on the host, with 16 rows: so few that the GPU waits for the host."""
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": "cuda"}
    theirs = torch.nn.Linear(size, size, **options)
    ours = Linear.of(theirs)
    flat = torch.randn(16, size, **options)
    deep, other = flat.view(4, 4, size), torch.randn(size, size, **options)
    leaf, gradient = flat.clone().requires_grad_(), torch.randn_like(flat)
    weight = theirs.weight.detach()

    def quietly(call: Callable[[Any, Any], object], *operands: Any) -> Call:
        def called() -> None:
            with torch.no_grad():
                call(*operands)

        return called

    def step(layer: torch.nn.Module) -> Call:
        def called() -> None:
            layer(leaf).backward(gradient)
            leaf.grad = theirs.weight.grad = theirs.bias.grad = None

        return called

    def plain(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    cases: list[tuple[str, str, Any, Any]] = [
        ("linear", "2 dimensions", quietly(plain, theirs, flat), quietly(plain, ours, flat)),
        ("linear", "3 dimensions", quietly(plain, theirs, deep), quietly(plain, ours, deep)),
        ("linear", "forward", lambda: theirs(leaf), lambda: ours(leaf)),
        ("linear", "forward and backward", step(theirs), step(ours)),
        ("matmul", "batches", lambda: torch.matmul(deep, other),
         lambda: costmodel.matmul(deep, other)),
    ]  # fmt: skip
    products = [
        (flat, weight.T, True), (flat, other, False), (gradient, weight, False),
        (flat.T, gradient, False), (gradient.T, flat, False),
    ]  # fmt: skip
    for to_torch in (False, True):
        with pinned(products, to_torch=to_torch) as chosen:
            for model, what, by_torch, by_us in cases:
                few = what == "forward and backward"  # it queues several kernels, and takes longer
                sizes = {"total": 2500, "at_a_time": 50} if few else {}
                torch_us, ours_us = host_us((by_torch, by_us), torch.cuda.synchronize, **sizes)
                yield {
                    "group": "host", "model": model, "what": what, "workload": f"16x{size}x{size}",
                    "dtype": dtype, "pinned": "torch" if to_torch else "triton", "chosen": chosen,
                    "torch_us": round(torch_us, 2), "ours_us": round(ours_us, 2),
                    "host_ratio": round(ours_us / torch_us, 4),
                }  # fmt: skip


# --- all of it ------------------------------------------------------------------------------------


def all_rows(args: Any, gpu: Gpu) -> Iterator[Row]:
    """Make the rows of the parts that are asked for."""
    if args.only in (None, "host"):
        yield from host_rows()
    if args.only in (None, "stack"):
        for dtype in ("bfloat16", "float16"):
            with torch.device(gpu.device):
                pair = Pair.of(Stack(Sizes(), dtype=getattr(torch, dtype)))
            shapes = SHAPES if dtype == "bfloat16" else FEWER
            yield from stack_rows(pair, shapes[:: args.every], gpu, args.runs)
            if dtype == "bfloat16":
                compiled = SHAPES if args.compile_all else FEWER
                yield from trained_rows(pair, TRAINED[:: args.every], gpu, args.runs)
                yield from compiled_rows(pair, compiled[:: args.every], gpu, args.runs)
            del pair
            forget(gpu)
    if args.only in (None, "transformers"):
        try:
            import transformers  # noqa: F401 - not a dependency
        except ImportError as error:
            note(f"transformers is left out, it cannot be imported: {error}")
            return
        for family in FAMILIES[:: args.every]:
            yield from transformers_rows(family, gpu, args.runs)
            forget(gpu)


def forget(gpu: Gpu) -> None:
    """Free a model, so that it does not count in the peaks of the next one."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def summarize(rows: list[Row]) -> Row:
    """Return the worst of each kind: the least ratio, the largest ratio of host time and memory."""

    def worst(*kinds: str) -> float | None:
        return min(
            (r["ratio"] for r in rows if r.get("what") in kinds and "ratio" in r), default=None
        )

    decode = [
        r["ratio"] for r in rows if r["what"] == "graph" and r["workload"].endswith("x1")
    ]  # one token for each sequence
    found: Row = {
        "graph_worst": worst("graph"),
        "graph_decode_geomean": round(geomean(decode), 4) if decode else None,
        "eager_worst": worst("eager", "generate", "prefill"),
        "training_worst": worst("train"),
        "compile_worst": worst("compile"),
    }
    for row in rows:
        if row["group"] == "host":
            by = "" if row["pinned"] == "triton" else "_by_torch"
            found[f"{_HOST_NAMES[row['what']]}{by}_ratio"] = row["host_ratio"]
    peaks = [r["peak_ours_mib"] / r["peak_torch_mib"] for r in rows if r.get("peak_torch_mib")]
    found["peak_memory_worst"] = round(max(peaks), 4) if peaks else None
    found["tuning_s"] = round(sum(row.get("tuning_s", 0) for row in rows), 1)
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=list(_SECONDS), help="default: all parts")
    arguments.add_argument("--runs", type=count, default=9, help="rounds of each comparison")
    arguments.add_argument(
        "--compile-all", action="store_true", help="all shapes under torch.compile, not three"
    )
    args = arguments.parse_args()
    target = Target.current()
    seconds = sum(s for part, s in _SECONDS.items() if args.only in (None, part))
    deadline = announce(args.budget_s, seconds=seconds / args.every)
    if args.model is not None:
        costmodel.use(args.model)
    name = f"model-{args.only}" if args.only else "model"
    results = Results(name, target, args.results, versions(target), summarize)
    for row in all_rows(args, Gpu()):
        results.add(row)
        if seconds_left(deadline) <= 0:
            note("the budget is spent: the rest is left out")
            break
    columns = ("model", "what", "workload", "dtype", "torch_ms", "ours_ms", "ratio")
    timed = [[row[c] for c in columns] for row in results.rows if "ratio" in row]
    print_table("in turn", list(columns), timed)
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
