"""fp8 and int8 products beside torch's, cold caches, in one run: 64 shapes and six forms of scales.

Each shape of each form is tuned exhaustively, then the best kernel of our own and torch are timed
in turn. Where torch has nothing, bfloat16 by torch stands beside it. A shape that fails is a row
with the reason. The shapes are of models, and none is a (n, k) of the eval list.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from common import Results, Row, announce, at_exit_code, note, parser, until, versions
from torch.nn.functional import ScalingType

import costmodel
from costmodel.autotune.call import KernelCall
from costmodel.autotune.compiling import Compiling
from costmodel.autotune.store import config_name
from costmodel.cli.common import print_table
from costmodel.data.measurement import Measurement
from costmodel.errors import CostModelError
from costmodel.evaluation.metrics import geomean
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol
from costmodel.measure.session import Session
from costmodel.scaled.configs import prune
from costmodel.scaled.launch import Kernels, tuned
from costmodel.scaled.product import int_call, scaled_call
from costmodel.validation import one_line

WEIGHTS = {
    "deepseek-v3 qkv_a": (2112, 7168), "deepseek-v3 o": (7168, 16384),
    "deepseek-v3 experts up": (4096, 7168), "deepseek-v3 kv_b": (32768, 512),
    "llama3-70b up, 4 ways": (14336, 8192), "qwen2.5-7b qkv": (4608, 3584),
    "qwen3-32b qkv": (10240, 5120), "mixtral-8x7b up, 2 ways": (14336, 4096),
}  # fmt: skip
COMPILED = 3968, 7168
"""An (n, k) of which all is compiled ahead; no shape, so that each shape is tuned."""
ROWS = (1, 8, 16, 64, 128, 512, 2048, 8192)
FIRST = ("row", "block", "tensor", "int8")
FORMS = (*FIRST, "int32", "row_fast")
"""Scales of fp8 by rows, blocks and the tensor; int8 with scales and without; row_fast leaves
all sums to the tensor cores, in torch too."""
ROUNDS = 5
BASELINE_FROM = 1024
BASELINE = triton.Config(
    {"kernel": "pointer", "block_m": 64, "block_n": 128, "step": 128, "splits": 1, "swap": False},
    num_warps=4, num_stages=3,
)  # fmt: skip
"""The algorithm and the usual tile of vLLM's Triton kernel of block scales, for large m."""
WRONG = 0.02
"""What a result may be off, of the largest element: bfloat16 rounds to 0.004."""
SMALL = 128
"""Up to this m a product takes as long as its weight takes to be read."""


@dataclass(frozen=True)
class Scaled:
    """A product to time: the problem of a ``costmodel.measure.session.Session``."""

    form: str
    m: int
    n: int
    k: int
    device: str = "cuda"

    precision = "bfloat16"

    @property
    def has_bfloat16(self) -> bool:
        """True where torch computes no such product."""
        return (self.form == "block" and self.m == 1) or (self.is_int and self.m <= 16)

    @property
    def is_int(self) -> bool:
        return self.form.startswith("int")

    @property
    def terms(self) -> int:
        return self.k

    @property
    def set_bytes(self) -> int:
        operands = (self.m + self.n) * self.k * (3 if self.has_bfloat16 else 1)
        return operands + 8 * self.m * self.n

    @property
    def check_bytes(self) -> int:
        return 8 * (self.m + self.n) * self.k + 8 * self.m * self.n

    def operands(self, draw: Any, count: int) -> list[Any]:
        """Return so many sets: the arguments of a launch, and bfloat16 operands or None."""
        return [self._set() for _ in range(count)]

    def _set(self) -> tuple[tuple[Any, ...], Any]:
        a, b = self._matrix(self.m), self._matrix(self.n)
        wide = (a.bfloat16(), b.bfloat16().T) if self.has_bfloat16 else None
        if self.form == "int32":
            return int_call(a, b.T), wide
        scales = self._scales()
        recipe = {"tensor": (0, 0), "block": (4, 5)}.get(self.form, (1, 1))
        fast = self.form == "row_fast"
        return scaled_call(a, b.T, scales[0], recipe[0], scales[1], recipe[1], fast=fast), wide

    def _matrix(self, rows: int) -> torch.Tensor:
        if self.is_int:
            shape = (rows, self.k)
            return torch.randint(-128, 128, shape, dtype=torch.int8, device=self.device)
        values = torch.randn(rows, self.k, device=self.device, dtype=torch.bfloat16)
        return values.to(torch.float8_e4m3fn)

    def _scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw scales in the layouts that torch asks for."""
        blocks = -(-self.k // 128)
        if self.form == "tensor":
            return self._uniform(1), self._uniform(1)
        if self.form == "block":
            padded = -(-blocks // 4) * 4
            return self._uniform(blocks, self.m).T, self._uniform(-(-self.n // 128), padded).T
        return self._uniform(self.m, 1), self._uniform(1, self.n)

    def _uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device) + 0.5

    def output(self, operands: Any) -> torch.Tensor:
        return operands[0][5]  # type: ignore[no-any-return]

    def reference(self, operands: Any) -> torch.Tensor:
        """Nothing: what is timed here is checked beforehand, by :func:`error_of`."""
        return torch.zeros(1, device=self.device)


def error_of(problem: Scaled, call: tuple[Any, ...]) -> float:
    """Return how far a result is off float32 of the dequantised operands, of the largest one.

    Only some rows are checked: the others are the same work.
    """
    a, b, sa, sb, out = *call[:4], call[5]
    rows = torch.linspace(0, problem.m - 1, min(problem.m, 64)).long().to(a.device)
    left = a.view(torch.uint8)[rows].view(a.dtype).float()  # torch indexes no fp8 everywhere
    right = b.float()
    if problem.form == "block":
        left *= sa[rows].repeat_interleave(128, 1)[:, : problem.k]
        wide = sb.T.repeat_interleave(128, 0)[: problem.n]
        right *= wide.repeat_interleave(128, 1)[:, : problem.k]
    elif sa is not None:
        left *= sa[rows] if sa.numel() > 1 else sa
        right *= sb.T if sb.numel() > 1 else sb
    exact = left.double() @ right.T.double() if problem.is_int else left @ right.T
    return float((out[rows].double() - exact).abs().max() / exact.abs().max())


def launcher(config: Any) -> Callable[[Any], None]:
    """Return a function of operands that launches a configuration."""
    kernels, options = Kernels(), config.all_kwargs()
    return lambda operands: kernels.run(*operands[0], **options)


def by_torch(operands: Any) -> torch.Tensor:
    """Multiply by torch's own function, which makes the result; int8 scales are more passes."""
    call = dict(zip(Kernels.arg_names, operands[0], strict=True))
    a, b, scales = call["a"], call["b"].T, (call["scale_a"], call["scale_b"])
    if a.dtype != torch.int8:
        recipes = [ScalingType(call[name]) for name in ("recipe_a", "recipe_b")]
        return torch.nn.functional.scaled_mm(
            a, b, scales[0], recipes[0], scales[1], recipes[1], use_fast_accum=call["fast"]
        )
    exact = torch._int_mm(a, b)
    return exact if scales[0] is None else (exact * scales[0] * scales[1]).bfloat16()


def timed(session: Session, problem: Scaled) -> Row:
    """Tune a shape, time our best kernel beside torch; return its row."""
    operands = problem.operands(None, 1)[0]
    call = operands[0]
    with a_cache_of_its_own():
        tuned.run(*call, warmup=False)
    chosen = tuned.best_config
    times = {c: t[0] for c, t in tuned.configs_timings.items() if t[0] < float("inf")}
    ours = [c for c in times if c.kwargs["kernel"] not in ("torch", "deep_gemm")]
    best = min(ours, key=times.__getitem__)
    launcher(best)(operands)
    error = error_of(problem, call)
    if not error < WRONG:
        raise CostModelError(f"{best} is off by {error:.3g} of the largest element")
    choices = {"ours": launcher(best)}
    if any(c.kwargs["kernel"] == "torch" for c in times):  # it computes this
        choices["torch"] = by_torch
    if problem.form == "block" and problem.m >= BASELINE_FROM:
        choices["baseline"] = launcher(BASELINE)
    if problem.has_bfloat16:
        choices["bfloat16"] = lambda operands: torch.mm(*operands[1])
    del operands, call
    found = session.compare(problem, list(choices.values()), ROUNDS)
    us = {name: _us(each) for name, each in zip(choices, found, strict=True)}
    us["default"] = us["torch" if chosen.kwargs["kernel"] == "torch" else "ours"]
    ops = 2.0 * problem.m * problem.n * problem.k
    return {
        "form": problem.form, "m": problem.m, "n": problem.n, "k": problem.k, "us": us,
        "speedup": round(us["torch"] / us["ours"], 4) if "torch" in us else None,
        "tflops": round(ops / us["ours"] / 1e6, 1), "config": f"{best}", "error": round(error, 6),
        "over_default": round(us["torch"] / us["default"], 4) if "torch" in us else None,
        "timed": len(times),
        "nearest": [[f"{c}", round(1e3 * times[c], 2)] for c in sorted(ours, key=times.get)[:4]],
    }  # fmt: skip


def _us(measurement: Measurement) -> float:
    return round(measurement.latency_us, 4)


def summarize(rows: list[Row]) -> Row:
    """Return the mean and the worst of torch's time over ours, by form and size of m."""
    found: Row = {"rows": len(rows), "failed": sum("failure" in row for row in rows)}
    good = [row for row in rows if "failure" not in row]
    for form in FORMS:
        for name, is_small in (("small", True), ("large", False)):
            mine = [r for r in good if r["form"] == form and (r["m"] <= SMALL) == is_small]
            over = [r["speedup"] for r in mine if r["speedup"]]
            if over:
                found[f"{form}_{name}_geomean"] = round(geomean(over), 4)
                found[f"{form}_{name}_worst"] = min(over)
                found[f"{form}_{name}_count"] = len(over)
        slower = [r["us"]["baseline"] / r["us"]["ours"] for r in good
                  if r["form"] == form and "baseline" in r["us"]]  # fmt: skip
        if slower:
            found[f"{form}_over_baseline_geomean"] = round(geomean(slower), 4)
        alone = [r for r in good if r["form"] == form and "bfloat16" in r["us"]]
        if alone:
            against = [r["us"]["bfloat16"] / r["us"]["ours"] for r in alone]
            found[f"{form}_over_bfloat16_geomean"] = round(geomean(against), 4)
    defaults = [r["over_default"] for r in good if r["over_default"]]
    if defaults:
        found["default_worst"] = min(defaults)
    return found


def problems(forms: list[str]) -> Iterator[Scaled]:
    """Give all shapes in an order in which any part of them has of each kind.

    The last forms come when the first have all shapes.
    """
    shapes = [(m, n, k) for n, k in WEIGHTS.values() for m in ROWS]
    random.Random(0).shuffle(shapes)
    parts = [f for f in forms if f in FIRST], [f for f in forms if f not in FIRST]
    return (Scaled(f, m, n, k) for part in parts for m, n, k in shapes for f in part)


@contextmanager
def a_cache_of_its_own() -> Iterator[None]:
    """Let nothing that is known of other shapes, or from before, have a say in a tuning."""
    before = os.environ.get("COSTMODEL_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COSTMODEL_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["COSTMODEL_CACHE_DIR"]
            if before is not None:
                os.environ["COSTMODEL_CACHE_DIR"] = before


def compile_ahead(forms: Iterable[str], sizes: Iterable[int] = ROWS) -> None:
    """Begin to compile what each size of m will ask for, so that the GPU need not wait."""
    n, k = COMPILED
    for form in forms:
        for m in sizes:
            try:
                call = Scaled(form, m, n, k).operands(None, 1)[0][0]
                named = dict(zip(Kernels.arg_names, call, strict=True))
                by_name = {config_name(c): c for c in prune(tuned.configs, named)}
                Compiling(KernelCall(tuned, call, {"warmup": False}), by_name).begin_all()
            except Exception as error:  # the shape itself will say so
                note(f"{form} m={m}: {one_line(error)}")


def main() -> None:
    """Time all shapes within the budget; print a short table."""
    options = parser(__doc__)
    options.add_argument("--forms", default=",".join(FORMS), help="which, separated by commas")
    options.add_argument("--without", default="", help="kernels to leave out: pointer, tma, warps")
    arguments: argparse.Namespace = options.parse_args()
    without = arguments.without.split(",")
    tuned.configs = [c for c in tuned.configs if c.kwargs["kernel"] not in without]
    forms = [form for form in FORMS if form in arguments.forms.split(",")]
    target = Target.current()
    everything = list(problems(forms))[:: arguments.every]
    deadline = announce(arguments.budget_s, seconds=0.35 * len(everything))
    results = Results("lowprecision", target, arguments.results, versions(target), summarize)
    compile_ahead(forms)
    costmodel.set_mode("exhaustive")
    session = Session(TimingProtocol(), torch.cuda.current_device(), seed=0)
    for problem in until(deadline, everything):
        shape = {"form": problem.form, "m": problem.m, "n": problem.n, "k": problem.k}
        try:
            results.add(timed(session, problem))
        except torch.AcceleratorError:  # nothing more can be computed in this process
            results.add(shape | {"failure": "the CUDA context is broken"})
            raise
        except Exception as error:
            results.add(shape | {"failure": one_line(f"{type(error).__name__}: {error}")})
    results.show()
    rows = [r for r in results.rows if "failure" not in r]
    sizes = sorted({r["m"] for r in rows})
    table = [[form, *(mean_over(rows, form, m) for m in sizes)] for form in forms]
    print_table("torch's time over ours, mean of all n x k", ["form", *map(str, sizes)], table)


def mean_over(rows: list[Row], form: str, m: int) -> object:
    found = [r["speedup"] for r in rows if r["form"] == form and r["m"] == m and r["speedup"]]
    return round(geomean(found), 3) if found else "-"


if __name__ == "__main__":
    raise SystemExit(at_exit_code(main))
