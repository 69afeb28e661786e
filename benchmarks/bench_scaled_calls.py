"""Time of a warm call of ``scaled_mm`` and ``int_mm`` on the host, beside torch's functions.

The products are so short that the GPU waits for the host. The configuration is predicted, so that
a kernel of Triton is launched: the host's time of torch in its place is torch's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from bench_dispatch import host_us
from common import Results, Row, announce, at_exit_code, drawn, parser, until, versions
from torch.nn import functional

import costmodel
from costmodel.hardware.target import Target
from costmodel.scaled.launch import tuned

M, N, K = 32, 1024, 1024
FORMS = ("row", "block", "tensor", "int32")


def calls(form: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the same product by costmodel and by torch."""
    if form == "int32":
        a, b = (torch.ones(x, K, dtype=torch.int8, device="cuda") for x in (M, N))
        return (
            functools.partial(costmodel.int_mm, a, b.T),
            functools.partial(torch._int_mm, a, b.T),
        )
    kinds = functional.ScalingType
    a, b = (torch.ones(x, K, device="cuda").to(torch.float8_e4m3fn) for x in (M, N))
    shapes: tuple[tuple[int, ...], ...] = {"row": ((M, 1), (1, N)), "tensor": ((1,), (1,))}.get(
        form, ((K // 128, M), (N // 128, K // 128))
    )
    scales = [torch.ones(shape, device="cuda") for shape in shapes]
    recipes = [kinds.RowWise if form == "row" else kinds.TensorWise] * 2
    if form == "block":
        scales = [scale.T for scale in scales]
        recipes = [kinds.BlockWise1x128, kinds.BlockWise128x128]
    given = (a, b.T, scales[0], recipes[0], scales[1], recipes[1])
    return (
        functools.partial(costmodel.scaled_mm, *given),
        functools.partial(functional.scaled_mm, *given),
    )


def host_row(form: str) -> Row:
    """Return the host's time of a call by costmodel and by torch."""
    ours, torchs = calls(form)
    torch.testing.assert_close(ours(), torchs())
    chosen = str(tuned.best_config)
    ours_us, torch_us = host_us((ours, torchs), torch.cuda.synchronize)
    return {"form": form, "chosen": chosen, "ours_us": ours_us, "torch_us": torch_us,
            "ratio": ours_us / torch_us}  # fmt: skip


def summarize(rows: list[Row]) -> Row:
    """The slowest beside torch stands for all."""
    return {"worst_ratio": max(row["ratio"] for row in rows)}


def main() -> None:
    args = parser(__doc__).parse_args()
    target = Target.current()
    deadline = announce(args.budget_s, seconds=20)
    costmodel.set_mode("predict")
    results = Results("scaled_calls", target, args.results, versions(target), summarize)
    for form in until(deadline, drawn(FORMS, args)):
        results.add(host_row(form))
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
