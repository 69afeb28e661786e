"""Records timings of scaled products, each with all of its configurations: rows of a dataset.

There are two lists of products: one for training, scaled by rows, by blocks and in int8, with no
(n, k) of the eval list; and the eval list in the same forms. The command can be run again, after a
crash or later: it skips what is recorded. ``costmodel train`` on the training dataset makes the
model of scaled products, and ``bench_scaled_model.py`` judges it by both lists.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_lowprecision import compile_ahead
from common import at_exit_code, note
from scaled_problem import Scaled

import costmodel
from costmodel.autotune.dataset import KernelDataset
from costmodel.autotune.runner import BrokenContext
from costmodel.autotune.store import KernelStore
from costmodel.data.shards import CARD
from costmodel.evaluation.heldout import eval_workloads, is_held_out
from costmodel.gemm.workload import Workload
from costmodel.scaled.launch import tuned
from costmodel.validation import one_line

FORMS = ("row", "block", "int8")
BUCKETS = (16, 32, 64, 128, 512, 8192)
"""Values of m that together ask for all configurations."""
ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
LAYERS = (
    # DeepSeek-V3: MLA, the dense and the shared MLP, experts; whole and by tensor parallelism.
    (2112, 7168), (12288, 1536), (6144, 1536), (32768, 512), (16384, 512),
    (7168, 16384), (7168, 8192), (36864, 7168), (7168, 18432), (4096, 7168), (4608, 7168),
    (7168, 2304), (129280, 7168),
    # Llama 2 and 3.
    (5120, 5120), (15360, 5120), (13824, 5120), (5120, 13824), (10240, 8192), (8192, 28672),
    (57344, 8192), (14336, 8192), (8192, 7168), (2560, 8192), (5120, 8192), (3072, 8192),
    (8192, 3072), (128256, 2048), (16384, 16384),
    # Qwen 2.5 and 3, dense and of experts.
    (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (10240, 5120), (5120, 8192),
    (51200, 5120), (5120, 25600), (7168, 5120), (5120, 27648), (5120, 2048), (2048, 4096),
    (1536, 4096), (4096, 1536), (2048, 768),
    # Mixtral and Mistral.
    (6144, 6144), (8192, 6144), (32768, 6144), (6144, 16384), (14336, 4096), (3584, 4096),
    (12288, 5120),
)  # fmt: skip
_MOST_BYTES, _MOST_FLOPS = 2**30, 5e11


def training(count: int, seed: int = 0) -> list[Scaled]:
    """Draw products of layers and of random sizes; each form is drawn as often as the others."""
    rng = random.Random(seed)
    found: dict[Scaled, None] = {}
    while len(found) < count:
        n, k = rng.choice(LAYERS) if rng.random() < 0.6 else _random(rng)
        m = rng.choice(ROWS)
        large = max(n * k, m * n, m * k) > _MOST_BYTES or 2.0 * m * n * k > _MOST_FLOPS
        if not large and not is_held_out(Workload.dense(m, n, k)):
            found[Scaled(FORMS[len(found) % len(FORMS)], m, n, k)] = None
    return [*found]


def _random(rng: random.Random) -> tuple[int, int]:
    """Draw n and k: mostly of whole tiles, a few that TMA cannot read."""
    step = rng.choice((128, 128, 128, 64, 16, 1))
    return tuple(max(1, round(2 ** rng.uniform(9, 15) / step)) * step for _ in "nk")  # type: ignore[return-value]


def judging() -> list[Scaled]:
    """Return the eval list in each form, in random order, so that any part of it has all forms."""
    found = [Scaled(form, w.m, w.n, w.k) for w in eval_workloads() for form in FORMS]
    random.Random(0).shuffle(found)
    return [*dict.fromkeys(found)]


def record(problems: list[Scaled], seconds: float) -> Iterator[str]:
    """Time products until the seconds are over; yield what fails.

    Raises:
        BrokenContext, AcceleratorError: nothing more can be computed in this process.
    """
    begin = time.monotonic()
    compile_ahead(FORMS, BUCKETS)
    note(f"{time.monotonic() - begin:.1f} s until all compiles have begun")
    for i, problem in enumerate(problems):
        if (spent := time.monotonic() - begin) > seconds:
            note(f"the seconds are over: {i} of {len(problems)}")
            return
        if i % 25 == 0:
            note(f"{i} of {len(problems)} after {spent:.0f} s")
        try:
            tuned.run(*problem.operands(None, 1)[0][0], warmup=False)
        except (torch.AcceleratorError, BrokenContext):
            raise
        except Exception as error:
            yield f"{problem.form} {problem.m} {problem.n} {problem.k}: {one_line(error)}"
    note(f"{len(problems)} after {time.monotonic() - begin:.0f} s")


def main() -> None:
    """Record one of the lists, and make a dataset of it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path, help="for the timings; what it has is kept")
    arguments.add_argument("dataset", type=Path, help="folder of the dataset; it grows")
    arguments.add_argument("--seconds", type=float, default=120.0)
    arguments.add_argument("--count", type=int, default=600, help="products of training")
    arguments.add_argument("--judging", action="store_true", help="the eval list, instead")
    args = arguments.parse_args()
    os.environ["COSTMODEL_CACHE_DIR"] = str(args.folder.resolve())
    costmodel.set_mode("exhaustive")
    try:
        for failure in record(judging() if args.judging else training(args.count), args.seconds):
            note(failure)
    finally:
        make_dataset(args.folder, args.dataset, args.judging)


def make_dataset(folder: Path, place: Path, is_judging: bool) -> None:
    """Make a dataset of the timings in a folder, or add them to one that is there.

    The folder may also hold timings of ``bench_lowprecision.py --keep``.
    """
    entries = []
    for entry in KernelStore(folder / "kernels").entries():
        sizes = (entry.arguments[side] for side in "mnk")
        if is_judging or not is_held_out(Workload.dense(*sizes)):
            entries.append(entry)
    base = KernelDataset.read(place) if (place / CARD).exists() else None
    dataset = KernelDataset.of(
        entries, {"costmodel": f"costmodel {costmodel.__version__}"}, base=base
    )
    dataset.write(place)
    note(f"{place}: {len(dataset.rows['list'].unique())} lists, {len(dataset.rows)} rows")


if __name__ == "__main__":
    raise SystemExit(at_exit_code(main))
