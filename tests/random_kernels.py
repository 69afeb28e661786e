"""Random kernels that move four pointers about and write through some of them.

As a program, in Triton's interpreter: runs the kernels of a file, and prints what each has changed.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

ARGUMENTS = ("a", "b", "c", "d")
COUNTS = range(4)
"""Values of the kernels' argument `n`, on which branches and loops depend."""

HELPERS = """
import triton
import triton.language as tl

@triton.jit
def later(x, y):
    return y + 1

@triton.jit
def crossed(x, y):
    return y, x

@triton.jit
def put(x, y):
    tl.store(x, tl.load(y) + 3.0)
    return y

@triton.jit(noinline=True)
def put_apart(x, y):
    tl.store(y, tl.load(x) + 4.0)
    return x

@triton.jit
def either(x, y, n):
    if n > 1:
        r = x
    else:
        r = y
    return r
"""


def random_source(count: int) -> str:
    """Write the source of kernels named `kernel0`, `kernel1` and so on."""
    kernels = []
    for i in range(count):
        rng = random.Random(i)
        body = ["p, q, r, s = a, b, c, d", "i = tl.arange(0, 4)", *_block(rng, 2)]
        lines = [f"def kernel{i}(a, b, c, d, n):", *(f"    {line}" for line in body)]
        kernels.append("\n".join(["@triton.jit", *lines]))
    return "\n\n".join([HELPERS, *kernels]) + "\n"


def _block(rng: random.Random, depth: int) -> list[str]:
    return [line for _ in range(rng.randint(1, 4)) for line in _statement(rng, depth)]


def _statement(rng: random.Random, depth: int) -> list[str]:
    """Write one statement: most of them move pointers, about a third write."""
    x, y, z = (rng.choice("pqrs") for _ in range(3))
    other = rng.choice([c for c in "pqrs" if c != x])
    plain = [
        f"{x}, {other} = {other}, {x}",
        f"{x} = {y} + 1",
        f"{x} = {y}",
        f"{x} = tl.where(n > 1, {y}, {z})",
        f"{x} = later({y}, {z})",
        f"{x}, {other} = crossed({y}, {z})",
        f"{x} = either({y}, {z}, n)",
        f"tl.store({x}, tl.load({y}) + 1.0)",
        f"tl.store({x} + i, tl.load({y} + i) + 1.0)",
        f"tl.atomic_add({x}, 1.0)",
        f"{x} = put({y}, {z})",
        f"{x} = put_apart({y}, {z})",
    ]
    kind = rng.choice(["plain", "plain", "if", "for", "while"]) if depth else "plain"
    if kind == "plain":
        return [rng.choice(plain)]
    inner = [f"    {line}" for line in _block(rng, depth - 1)]
    if kind == "if":
        other_branch = [f"    {line}" for line in _block(rng, depth - 1)]
        return [f"if n > {rng.randint(0, 2)}:", *inner, "else:", *other_branch]
    if kind == "for":
        return ["for _ in range(n):", *inner]
    turn = f"turn{depth}"
    return [f"{turn} = 0", f"while {turn} < n:", *inner, f"    {turn} += 1"]


def load(path: Path) -> dict[str, Any]:
    """Import the kernels of a file, by name."""
    spec = importlib.util.spec_from_file_location("random_kernels_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: fn for name, fn in vars(module).items() if name.startswith("kernel")}


def changed_by(kernel: Any) -> list[str]:
    """Run a kernel on memory, and say which arguments' memory has changed for some `n`."""
    import torch

    changed: set[str] = set()
    for n in COUNTS:
        tensors = {name: torch.rand(1024) for name in ARGUMENTS}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        kernel[(1,)](*tensors.values(), n)
        changed |= {name for name in ARGUMENTS if not tensors[name].equal(before[name])}
    return sorted(changed)


if __name__ == "__main__":
    kernels = load(Path(sys.argv[1]))
    print(json.dumps({name: changed_by(kernel) for name, kernel in kernels.items()}))
