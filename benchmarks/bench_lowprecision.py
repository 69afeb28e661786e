"""fp8 and int8 products beside torch's, cold caches: 64 shapes and six forms of scales.

The first of three fresh processes tunes each shape of each form exhaustively. Then each of the
three times the best kernel of our own and torch in turn. Where torch has no such product, torch's
bfloat16 is timed instead. A shape that fails has a row with the reason. The shapes are those of
models, and no (n, k) of the eval list is among them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from common import Results, Row, announce, at_exit_code, count, note, parser, until, versions
from scaled_problem import Scaled, error_of
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
from costmodel.validation import one_line

WEIGHTS = {
    "deepseek-v3 qkv_a": (2112, 7168), "deepseek-v3 o": (7168, 16384),
    "deepseek-v3 experts up": (4096, 7168), "deepseek-v3 kv_b": (32768, 512),
    "llama3-70b up, 4 ways": (14336, 8192), "qwen2.5-7b qkv": (4608, 3584),
    "qwen3-32b qkv": (10240, 5120), "mixtral-8x7b up, 2 ways": (14336, 4096),
}  # fmt: skip
COMPILED = 3968, 7168
"""An (n, k) that is compiled ahead. It is not one of the shapes, so that each shape is tuned."""
ROWS = (1, 8, 16, 64, 128, 512, 2048, 8192)
FIRST = ("row", "block", "tensor", "int8")
FORMS = (*FIRST, "int32", "row_fast")
"""Scales of fp8 by rows, blocks and the tensor; int8 with scales and without; row_fast leaves
all sums to the tensor cores, in torch too."""
ROUNDS = 5
BASELINE_FROM = 1024
BASELINE = triton.Config(
    {"kernel": "pointer", "block_m": 64, "block_n": 128, "step": 128, "splits": 1, "swap": False},
    num_warps=4, num_stages=2,
)  # fmt: skip
"""The algorithm of vLLM's Triton kernel for block scales, with the configuration that vLLM takes
for shapes without a file."""
WRONG = 0.02
"""The error that a result may have, over the largest element: bfloat16 rounds to 0.004."""
SMALL = 128
"""Up to this m a product takes as long as its weight takes to be read."""


def choices_of(call: tuple[Any, ...]) -> list[Any]:
    """Return the configurations worth timing for a call."""
    return tuned.early_config_prune([], dict(zip(Kernels.arg_names, call, strict=True)))


def launcher(config: Any) -> Callable[[Any], None]:
    """Return a function of operands that launches a configuration."""
    kernels, options = Kernels(), config.all_kwargs()
    return lambda operands: kernels.run(*operands[0], **options)


def by_torch(operands: Any) -> torch.Tensor:
    """Multiply by torch's own function, which makes the result; int8 scales take more passes."""
    call = dict(zip(Kernels.arg_names, operands[0], strict=True))
    a, b, scales = call["a"], call["b"].T, (call["scale_a"], call["scale_b"])
    if a.dtype != torch.int8:
        recipes = [ScalingType(call[name]) for name in ("recipe_a", "recipe_b")]
        return torch.nn.functional.scaled_mm(
            a, b, scales[0], recipes[0], scales[1], recipes[1], use_fast_accum=call["fast"]
        )
    exact = torch._int_mm(a, b)
    return exact if scales[0] is None else (exact * scales[0] * scales[1]).bfloat16()


def tuned_row(problem: Scaled, keep: Path | None = None) -> Row:
    """Tune a shape and check our best kernel; return the choice, and the fastest of ours."""
    operands = problem.operands(None, 1)[0]
    call = operands[0]
    with a_cache_of_its_own(keep):
        tuned.run(*call, warmup=False)
    times = {c: t[0] for c, t in tuned.configs_timings.items() if t[0] < float("inf")}
    ours = [c for c in times if c.kwargs["kernel"] not in ("torch", "deep_gemm")]
    best = min(ours, key=times.__getitem__)
    launcher(best)(operands)
    error = error_of(problem, call)
    if not error < WRONG:
        raise CostModelError(f"{best} is off by {error:.3g} of the largest element")
    return {
        "config": f"{best}", "error": round(error, 6), "timed": len(times),
        "chosen": tuned.best_config.kwargs["kernel"],
        "by_torch": any(c.kwargs["kernel"] == "torch" for c in times),  # torch can compute this
        "nearest": [[f"{c}", round(1e3 * times[c], 2)] for c in sorted(ours, key=times.get)[:4]],
    }  # fmt: skip


def timed(session: Session, problem: Scaled, known: Row) -> Row:
    """Time the best kernel of :func:`tuned_row` beside torch; return the whole row."""
    best = next(c for c in choices_of(problem.operands(None, 1)[0][0]) if f"{c}" == known["config"])
    choices = {"ours": launcher(best)}
    if known["by_torch"]:
        choices["torch"] = by_torch
    if problem.form == "block" and problem.m >= BASELINE_FROM:
        choices["baseline"] = launcher(BASELINE)
    if problem.has_bfloat16:
        choices["bfloat16"] = lambda operands: torch.mm(*operands[1])
    found = session.compare(problem, list(choices.values()), ROUNDS)
    us = {name: _us(each) for name, each in zip(choices, found, strict=True)}
    us["default"] = us["torch" if known["chosen"] == "torch" else "ours"]
    return shape_of(problem) | known | with_ratios({"us": us}, problem)


def with_ratios(row: Row, problem: Scaled) -> Row:
    us = row["us"]
    ops = 2.0 * problem.m * problem.n * problem.k
    return row | {
        "speedup": round(us["torch"] / us["ours"], 4) if "torch" in us else None,
        "tflops": round(ops / us["ours"] / 1e6, 1),
        "over_default": round(us["torch"] / us["default"], 4) if "torch" in us else None,
    }  # fmt: skip


def shape_of(problem: Scaled) -> Row:
    return {"form": problem.form, "m": problem.m, "n": problem.n, "k": problem.k}


def merged(processes: list[list[Row]]) -> list[Row]:
    """Merge the rows of all processes into one for each shape.

    Times and ratios are means; ``worst`` and ``worst_default`` are those of the worst process.
    """
    found: dict[Scaled, list[Row]] = {}
    for row in [row for rows in processes for row in rows]:
        found.setdefault(Scaled(row["form"], row["m"], row["n"], row["k"]), []).append(row)
    result = []
    for problem, rows in found.items():
        good = [row for row in rows if "failure" not in row]
        if len(good) < len(rows):
            result.append(next(row for row in rows if "failure" in row))
            continue
        us = {name: round(geomean([r["us"][name] for r in rows]), 4) for name in rows[0]["us"]}
        row = with_ratios({**rows[0], "us": us, "processes": len(rows)}, problem)
        if row["speedup"]:
            row["worst"] = min(r["speedup"] for r in rows)
            row["worst_default"] = min(r["over_default"] for r in rows)
        result.append(row)
    return result


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
                found[f"{form}_{name}_worst"] = min(
                    r.get("worst", r["speedup"]) for r in mine if r["speedup"]
                )
                found[f"{form}_{name}_count"] = len(over)
        slower = [r["us"]["baseline"] / r["us"]["ours"] for r in good
                  if r["form"] == form and "baseline" in r["us"]]  # fmt: skip
        if slower:
            found[f"{form}_over_baseline_geomean"] = round(geomean(slower), 4)
        alone = [r for r in good if r["form"] == form and "bfloat16" in r["us"]]
        if alone:
            against = [r["us"]["bfloat16"] / r["us"]["ours"] for r in alone]
            found[f"{form}_over_bfloat16_geomean"] = round(geomean(against), 4)
    defaults = [r.get("worst_default", r["over_default"]) for r in good if r["over_default"]]
    if defaults:
        found["default_worst"] = min(defaults)
    if any("processes" in r for r in good):
        found["processes"] = min(r["processes"] for r in good)
    return found


def problems(forms: list[str]) -> Iterator[Scaled]:
    """Give all shapes in a random order, so that any part of it has shapes of each kind.

    The forms outside FIRST come after all shapes of the others.
    """
    shapes = [(m, n, k) for n, k in WEIGHTS.values() for m in ROWS]
    random.Random(0).shuffle(shapes)
    parts = [f for f in forms if f in FIRST], [f for f in forms if f not in FIRST]
    return (Scaled(f, m, n, k) for part in parts for m, n, k in shapes for f in part)


@contextmanager
def a_cache_of_its_own(keep: Path | None = None) -> Iterator[None]:
    """Use an empty cache, so that a tuning knows nothing of other shapes or of earlier runs.

    Args:
        keep: a folder that the timings are copied to.
    """
    before = os.environ.get("COSTMODEL_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COSTMODEL_CACHE_DIR"] = folder
        try:
            yield
            if keep is not None:
                shutil.copytree(Path(folder) / "kernels", keep / "kernels", dirs_exist_ok=True)
        finally:
            del os.environ["COSTMODEL_CACHE_DIR"]
            if before is not None:
                os.environ["COSTMODEL_CACHE_DIR"] = before


def compile_ahead(forms: Iterable[str], sizes: Iterable[int] = ROWS) -> None:
    """Begin to compile what each m will need, so that the GPU need not wait."""
    n, k = COMPILED
    for form in forms:
        for m in sizes:
            try:
                call = Scaled(form, m, n, k).operands(None, 1)[0][0]
                by_name = {config_name(c): c for c in choices_of(call)}
                Compiling(KernelCall(tuned, call, {"warmup": False}), by_name).begin_all()
            except Exception as error:  # the row of the shape will say so
                note(f"{form} m={m}: {one_line(error)}")


def main() -> None:
    """Time all shapes within the budget, in processes one after another; print a short table."""
    options = parser(__doc__)
    options.add_argument("--forms", default=",".join(FORMS), help="which, separated by commas")
    options.add_argument("--without", default="", help="kernels to leave out: pointer, tma, warps")
    options.add_argument("--processes", type=count, default=3, help="the first one tunes")
    options.add_argument("--keep", type=Path, help="folder for the tuner's timings, to learn from")
    options.add_argument("--known", type=Path, help=argparse.SUPPRESS)  # rows of the first process
    arguments = options.parse_args()
    target = Target.current()
    results = Results("lowprecision", target, arguments.results, versions(target), summarize)
    if arguments.processes > 1:
        results.add(*merged(in_processes(arguments, results.path.name)))
    else:
        one_process(arguments, results)
    results.show()
    rows = [r for r in results.rows if "failure" not in r]
    sizes = sorted({r["m"] for r in rows})
    forms = [form for form in FORMS if form in arguments.forms.split(",")]
    table = [[form, *(mean_over(rows, form, m) for m in sizes)] for form in forms]
    print_table("torch's time over ours, mean of all n x k", ["form", *map(str, sizes)], table)


def in_processes(arguments: argparse.Namespace, name: str) -> list[list[Row]]:
    """Run this script in fresh processes; return the rows of each."""
    end, rows = time.monotonic() + arguments.budget_s, []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.processes):
            left = end - time.monotonic()
            # The first one also tunes, and takes twice as long as one that only times.
            share = 2 / (arguments.processes + 1) if i == 0 else 1 / (arguments.processes - i)
            command = [sys.executable, __file__, "--processes", "1", "--forms", arguments.forms]
            command += ["--results", f"{folder}/{i}", "--budget-s", str(max(left * share, 1.0))]
            command += ["--every", str(arguments.every)]
            if i:
                command += ["--known", f"{folder}/0/{name}"]
            else:
                command += ["--without", arguments.without]
                command += ["--keep", str(arguments.keep)] if arguments.keep else []
            note(f"process {i + 1} of {arguments.processes}")
            subprocess.run(command, stdout=subprocess.DEVNULL)
            path = Path(folder, str(i), name)
            if path.exists():  # it may lack rows: the budget was spent, or the context broke
                rows.append(json.loads(path.read_text())["rows"])
            elif not i:
                break
    return rows


def one_process(arguments: argparse.Namespace, results: Results) -> None:
    """Time all shapes, or those that an earlier process has tuned."""
    without = arguments.without.split(",")
    tuned.early_config_prune = lambda _, named, **__: [
        c for c in prune([], named) if c.kwargs["kernel"] not in without
    ]
    forms = [form for form in FORMS if form in arguments.forms.split(",")]
    everything = list(problems(forms))[:: arguments.every]
    known: dict[Scaled, Row] = {}
    if arguments.known:
        for row in json.loads(arguments.known.read_text())["rows"]:
            if "failure" not in row:
                known[Scaled(row["form"], row["m"], row["n"], row["k"])] = row
        everything = [problem for problem in everything if problem in known]
    deadline = announce(arguments.budget_s, seconds=(0.12 if known else 0.35) * len(everything))
    if not known:
        compile_ahead(forms)
    costmodel.set_mode("exhaustive")
    session = Session(TimingProtocol(), torch.cuda.current_device())
    for problem in until(deadline, everything):
        try:
            found = known.get(problem) or tuned_row(problem, arguments.keep)
            results.add(timed(session, problem, found))
        except torch.AcceleratorError:  # nothing more can be computed in this process
            results.add(shape_of(problem) | {"failure": "the CUDA context is broken"})
            raise
        except Exception as error:
            text = one_line(f"{type(error).__name__}: {error}")
            results.add(shape_of(problem) | {"failure": text})


def mean_over(rows: list[Row], form: str, m: int) -> object:
    found = [r["speedup"] for r in rows if r["form"] == form and r["m"] == m and r["speedup"]]
    return round(geomean(found), 3) if found else "-"


if __name__ == "__main__":
    raise SystemExit(at_exit_code(main))
