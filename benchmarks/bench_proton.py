"""Record a Proton session of products, and show its tree: `costmodel bench --proton [M N K]`.

Each product is a scope, in which torch multiplies, then costmodel. Both are given the flops and
bytes of the product, which yield speed and share of the roofline. The file is Proton's own:
``proton-viewer -m time/us,tflop/s FILE`` shows it too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Row, at_exit_code, count, note

from costmodel.cli.common import print_table
from costmodel.errors import InvalidInput
from costmodel.files import read_json
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Device, Target

SHAPES = ((4096, 4096, 4096), (64, 4096, 14336), (1000, 1000, 1000))
KIND = "float16"
_NS = "time (ns)"

Calls = Mapping[str, Callable[[], object]]


def record(products: Mapping[Workload, Calls], repeats: int) -> None:
    """Run the calls of each product in scopes of their own; a session must be open."""
    import triton.profiler as proton

    for workload, calls in products.items():
        metrics = {"flops": repeats * workload.flops(), "bytes": repeats * workload.bytes()}
        with proton.scope(f"{workload.m}x{workload.n}x{workload.k}"):
            for name, call in calls.items():
                with proton.scope(name, {k: float(v) for k, v in metrics.items()}):
                    for _ in range(repeats):
                        call()


def totals(node: Mapping[str, Any]) -> Row:
    """Return the metrics of a node and all below it. A scope's flops hold for its kernels."""
    below = [totals(child) for child in node["children"]]
    own = node["metrics"]
    found = {
        name: own.get(name) or sum(child[name] for child in below)
        for name in ("flops", "bytes", "count")
    }
    return {**found, _NS: own.get(_NS, 0) + sum(child[_NS] for child in below)}


def tree(node: Mapping[str, Any], device: Device, depth: int = 0) -> Iterator[Row]:
    """Walk a node and all below it, in the order of Proton's file."""
    found, us = totals(node), totals(node)[_NS] / 1e3
    timed = us > 0 and found["flops"] > 0
    least_us = device.roofline_us(found["flops"], found["bytes"], KIND)
    yield {
        "scope": "  " * depth + node["frame"]["name"],
        "launches": found["count"],
        "us": us or None,
        "tflops": found["flops"] / us / 1e6 if timed else None,
        "gbs": found["bytes"] / us / 1e3 if timed else None,
        "roofline_pct": 100 * least_us / us if timed else None,
    }
    for child in node["children"]:
        yield from tree(child, device, depth + 1)


def read_tree(path: Path, device: Device) -> list[Row]:
    """Read the tree of one of Proton's files, the root first.

    Raises:
        CorruptFile: it is not a file of Proton's.
    """
    root, *_ = read_json(path, list[Any])
    return [row for child in root["children"] for row in tree(child, device)]


def calls_of(workload: Workload) -> Calls:
    """Return the calls that multiply, by torch and by costmodel, both warm."""
    import torch

    import costmodel

    a = torch.randn(workload.m, workload.k, dtype=torch.float16, device="cuda")
    b = torch.randn(workload.k, workload.n, dtype=torch.float16, device="cuda")
    calls: Calls = {
        "torch.matmul": lambda: torch.matmul(a, b),
        "costmodel.matmul": lambda: costmodel.matmul(a, b),
    }
    for call in calls.values():
        call()
    found = costmodel.result_for(a, b)
    note(f"{workload.m}x{workload.n}x{workload.k}: {found.chosen if found else 'torch'}")
    return calls


def sizes(numbers: Sequence[int]) -> list[Workload]:
    """Return the products of these sizes, three numbers each; without numbers, a few products.

    Raises:
        InvalidInput: there are not three numbers for each.
    """
    if len(numbers) % 3:
        raise InvalidInput(f"{len(numbers)} sizes: expected M N K, three numbers for each product")
    given = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return [Workload.dense(m, n, k, KIND) for m, n, k in list(given) or SHAPES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", type=count, nargs="*", help="M N K of each product")
    parser.add_argument("--out", type=Path, default=Path("costmodel-proton"),
                        help="file to write, without its ending")  # fmt: skip
    parser.add_argument("--repeats", type=count, default=20)
    args = parser.parse_args()
    workloads, target = sizes(args.sizes), Target.current()

    import torch
    import triton.profiler as proton

    products = {workload: calls_of(workload) for workload in workloads}
    torch.cuda.synchronize()
    session = proton.start(str(args.out), hook="triton")
    record(products, args.repeats)
    torch.cuda.synchronize()
    proton.finalize(session, "hatchet")
    file = args.out.with_name(f"{args.out.name}.hatchet")
    rows = read_tree(file, target.device)
    columns = ["scope", "launches", "us", "tflops", "gbs", "roofline_pct"]
    print_table("Proton", columns, [[row[name] for name in columns] for row in rows])
    note(f"times are of all {args.repeats} repeats; the session is in {file}")


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
