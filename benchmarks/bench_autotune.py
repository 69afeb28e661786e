"""What tuning other people's Triton kernels costs: Triton's own tuner against costmodel's.

Parts: ``gla`` and ``gdr`` are the first calls of two operations of Flash Linear Attention, forward
and backward.
``kernels``: each drawn kernel is tuned by stock and by ours, each in a process of its own with
empty caches; in a third both winners are timed in turn, and stock's again beside itself.
``launch``: the host time of a warm call, and a process that finds its caches filled.

The kernels are drawn from those that the calls reach (`autotune_kernels.csv`), by a seed and so
that their lists together stay under a cap: a configuration costs stock up to a second. fla-core,
flag-gems and liger-kernel, with what they import (einops, sqlalchemy), must be on PYTHONPATH.
"""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common import Results, Row, announce, at_exit_code, note, parser, seconds_left, versions

from costmodel.autotune.dataset import role_of
from costmodel.cli.common import print_table
from costmodel.evaluation.metrics import geomean
from costmodel.files import read_json
from costmodel.hardware.target import Target

SEED, DRAWN, CAP, SHORTEST = 0, 32, 400, 4
PARTS = ("gla", "gdr", "kernels", "launch")
LIST = Path(__file__).with_name("autotune_kernels.csv")
_OPERATIONS = {"gla": "fla_chunk_gla", "gdr": "fla_chunk_gated_delta_rule"}
_STOCK_S = {"gla": 248.6, "gdr": 54.4}
"""Measured on an H200 before; --stock-gla and --stock-gdr measure again."""
_BROKEN = 3


@dataclass(frozen=True)
class Listed:
    """A kernel that the calls reach, and how many configurations stock would time."""

    kernel: str
    case: str
    configs: int


def read_list(path: Path = LIST) -> tuple[list[Listed], list[Listed]]:
    """All kernels of the list, and those drawn, in the order of the draw."""
    with path.open() as file:
        lines = list(csv.DictReader(file))
    found = [Listed(line["kernel"], line["case"], int(line["configs"])) for line in lines]
    places = {int(line["drawn"]): kernel for kernel, line in zip(found, lines, strict=True)}
    return found, [places[place] for place in sorted(places) if place > 0]


def draw(
    kernels: Iterable[Listed], seed: int = SEED, number: int = DRAWN, cap: int = CAP
) -> list[Listed]:
    """Kernels in random order, each taken if the shortest of the later ones still fit as well.

    The first of each package come before all others, so that no package is left out.
    """
    order = [kernel for kernel in kernels if kernel.configs >= SHORTEST]
    order.sort(key=lambda kernel: kernel.kernel)
    random.Random(seed).shuffle(order)
    first = {kernel.kernel.split(".")[0]: kernel for kernel in reversed(order)}.values()
    order.sort(key=lambda kernel: kernel not in first)
    taken: list[Listed] = []
    for i, kernel in enumerate(order):
        missing = number - len(taken) - 1
        shortest = sorted(other.configs for other in order[i + 1 :])[: max(missing, 0)]
        used = sum(other.configs for other in taken) + kernel.configs + sum(shortest)
        if missing >= 0 and used <= cap:
            taken.append(kernel)
    return taken


@dataclass
class Caches:
    """Folders of one way of tuning, empty at first."""

    folder: Path

    def environment(self, side: str) -> dict[str, str]:
        return os.environ | {
            "TRITON_CACHE_DIR": str(self.folder / side / "triton"),
            "COSTMODEL_CACHE_DIR": str(self.folder / side / "costmodel"),
            "FLAGGEMS_DB_URL": f"sqlite:///{self.folder / f'{side}.db'}",
            "FLA_CACHE_MODE": "disabled",
            "GEMS_VENDOR": "nvidia",
        }

    def run(
        self,
        side: str,
        cases: Sequence[str],
        deadline: float,
        *,
        caches: str = "",
        kernels: Sequence[str] = (),
        winners: Row | None = None,
    ) -> list[Row]:
        """Lines of a worker; what breaks a process is left out, and the next case goes on."""
        out = self.folder / f"{side}.jsonl"
        out.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("autotune_worker.py")), side]
        options = ["--untuned", str(self.folder / "untuned"), "--out", str(out)]
        options += ["--until", str(time.time() + seconds_left(deadline))]
        if winners is not None:
            (self.folder / "winners.json").write_text(json.dumps(winners))
            options += ["--winners", str(self.folder / "winners.json")]
        if kernels:
            options += ["--kernels", *kernels]
        left = list(cases)
        while left and seconds_left(deadline) > 0:
            run_limited([*command, *left, *options], self.environment(caches or side), deadline)
            done = {line["finished"] for line in lines_of(out) if "finished" in line}
            remaining = [case for case in left if case not in done]
            if remaining == left:  # it ended in this case, and would again
                note(f"{side}: {left[0]} left out, its process ended")
                remaining = left[1:]
            left = remaining
        return lines_of(out)


def run_limited(command: Sequence[str], environment: dict[str, str], deadline: float) -> None:
    """Run a process until it ends or the budget is spent; the end of its errors is shown."""
    limit_s = max(seconds_left(deadline) + 5, 5)
    # A file, and no pipe: children that outlive a stopped process would keep the pipe open.
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, timeout=limit_s,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            note("the budget is spent: a process was stopped")
            return
        errors.seek(0)
        lines = errors.read().splitlines()
    for line in lines:
        if "Error" in line:
            note(line[:300])
    if done.returncode not in (0, _BROKEN):
        note("\n".join(lines[-6:]))


def lines_of(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_kernel(lines: Iterable[Row]) -> dict[str, Row]:
    return {line["kernel"]: line for line in lines if "kernel" in line}


def operation(part: str, folder: Path, deadline: float, stock: bool) -> Row:
    """A row of an operation's first call: ours, again in a second process, and stock."""
    caches, case = Caches(folder), _OPERATIONS[part]
    row: Row = {
        "part": part, "case": case, "stock_s": _STOCK_S[part], "stock_measured": "before",
        "again_s": None, "single_s": None,
    }  # fmt: skip
    ours = caches.run("ours", [case], deadline)
    found = by_kernel(ours)
    row |= total(ours, "ours") | {"kernels": len(found), "error": error_of(ours)}
    row["of"] = sum(line["listed"] for line in found.values())
    if found:
        again = caches.run("again", [case], deadline, caches="ours")
        row |= total(again, "again")
        winners = {name: {"ours": line["winner"]} for name, line in found.items()}
        single = caches.run("single", [case], deadline, caches="ours", winners=winners)
        row["single_s"] = total(single, "single")["single_s"]
    if stock:
        lines = caches.run("stock", [case], deadline)
        row |= total(lines, "stock") | {"stock_measured": "now"}
    return row


def total(lines: Sequence[Row], side: str) -> Row:
    """Seconds of the call, and what was compiled and timed for it."""
    prefix = "" if side == "ours" else f"{side}_"
    seconds = [line["seconds"] for line in lines if "finished" in line]
    return {
        f"{side}_s": sum(seconds) if seconds else None,
        f"{prefix}compiled": sum(line["compiled"] for line in by_kernel(lines).values()),
        f"{prefix}timed": sum(line["timed"] for line in by_kernel(lines).values()),
    }


def error_of(lines: Iterable[Row]) -> str | None:
    return next((line["error"] for line in lines if line.get("error")), None)


def drawn_kernels(drawn: Sequence[Listed], folder: Path, deadline: float) -> list[Row]:
    """Rows of the drawn kernels: both tuners, then both winners in turn."""
    caches = Caches(folder)
    names = [kernel.kernel for kernel in drawn]
    cases = list(dict.fromkeys(kernel.case for kernel in drawn))
    stock_deadline = deadline - 0.35 * max(seconds_left(deadline), 0)
    stock = by_kernel(caches.run("stock", cases, stock_deadline, kernels=names))
    cases = [case for case in cases if any(line["case"] == case for line in stock.values())]
    ours = by_kernel(caches.run("ours", cases, deadline, kernels=names))
    winners = {
        name: {"stock": stock[name]["winner"], "ours": ours[name]["winner"]}
        for name in names if name in stock and name in ours
    }  # fmt: skip
    timed: dict[str, Row] = {}
    if winners:
        # Stock has compiled every configuration, so that nothing is left to compile here.
        timed = by_kernel(caches.run("compare", cases, deadline, caches="stock",
                                     kernels=list(winners), winners=winners))  # fmt: skip
    return [row_of(kernel, stock, ours, timed) for kernel in drawn]


def row_of(
    kernel: Listed, stock: dict[str, Row], ours: dict[str, Row], timed: dict[str, Row]
) -> Row:
    """A kernel's row; what was not reached is None."""
    name = kernel.kernel
    theirs, own, us = stock.get(name, {}), ours.get(name, {}), timed.get(name, {})
    same = bool(own) and bool(theirs) and own["winner"] == theirs["winner"]
    kept = noise = None
    if us:
        kept = 100.0 if same else 100 * us["stock_us"] / us["ours_us"]
        noise = 100 * us["stock_us"] / us["stock_again_us"]
    return {
        "part": "kernels", "kernel": name, "case": own.get("case", kernel.case),
        "key": own.get("key"),
        "held_out": role_of(name.split(":")[0]) == "eval", "seed": SEED,
        "stock_s": theirs.get("seconds"), "ours_s": own.get("seconds"),
        "compiled": own.get("compiled"), "timed": own.get("timed"),
        "of": theirs.get("compiled") or kernel.configs, "kept_pct": kept, "noise_pct": noise,
        "same": same, "stock_us": us.get("stock_us"), "ours_us": us.get("ours_us"),
        "stock_winner": theirs.get("winner"), "ours_winner": own.get("winner"),
    }  # fmt: skip


def launches(folder: Path, deadline: float) -> list[Row]:
    """Rows of warm calls, and of a second process with all caches filled."""
    caches = Caches(folder)
    found: dict[str, dict[str, Row]] = {}
    winners: Row = {}
    for mode in ("first", "second", "single"):
        out = folder / f"launch-{mode}.jsonl"
        command = [sys.executable, str(Path(__file__).with_name("autotune_launch.py")), mode]
        command += ["--out", str(out), "--winners", json.dumps(winners)]
        run_limited(command, caches.environment("launch"), deadline)
        found[mode] = by_kernel(lines_of(out))
        winners |= {k: line["winner"] for k, line in found[mode].items() if "winner" in line}
    return [
        {
            "part": "launch", "kernel": name,
            **{f"{side}_us": us for side, us in line["warm_us"].items()},
            "first_s": line["seconds"],
            **{f"second_{k}": v for k, v in found["second"].get(name, {}).items() if k != "kernel"},
            "single_seconds": found["single"].get(name, {}).get("seconds"),
        }
        for name, line in found["first"].items()
    ]  # fmt: skip


def summarize(rows: list[Row]) -> Row:
    """Ratios of summed seconds over the drawn kernels, what was kept, and the two operations."""
    kernels = [row for row in rows if row["part"] == "kernels"]
    tuned = [row for row in kernels if row["stock_s"] and row["ours_s"]]
    kept = [row["kept_pct"] for row in kernels if row["kept_pct"]]
    noise = [row["noise_pct"] for row in kernels if row["noise_pct"]]
    stock_s, ours_s = (sum(row[f"{side}_s"] for row in tuned) for side in ("stock", "ours"))
    summary: Row = {
        "kernels": len(tuned), "configurations": sum(row["of"] for row in tuned),
        "compiled": sum(row["compiled"] for row in tuned),
        "timed": sum(row["timed"] for row in tuned),
        "stock_s": stock_s or None, "ours_s": ours_s or None,
        "wall_ratio_first_key": stock_s / ours_s if ours_s else None,
        "wall_ratio_later_keys": None,
        "kept_geomean_pct": geomean(kept) if kept else None,
        "kept_worst_pct": min(kept) if kept else None,
        "noise_worst_pct": min(min(n, 1e4 / n) for n in noise) if noise else None,
    }  # fmt: skip
    for part in _OPERATIONS:
        row = next((row for row in rows if row["part"] == part), {})
        summary[f"{part}_s"] = row.get("ours_s")
        summary[f"{part}_stock_s"] = row.get("stock_s")
        summary[f"{part}_again_s"] = row.get("again_s")
        summary[f"{part}_single_s"] = row.get("single_s")
    for row in rows:
        if row["part"] == "launch":
            for side in ("stock", "ours", "plain"):
                summary[f"{row['kernel']}_{side}_us"] = row[f"{side}_us"]
    return summary


def packages() -> dict[str, str]:
    """Versions of the packages whose kernels are tuned."""
    found = {}
    for name in ("fla-core", "flag-gems", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not found"
    return found


def kept_rows(path: Path, parts: Sequence[str]) -> list[Row]:
    """Rows of other parts from an earlier run, which this one adds to."""
    if not path.exists():
        return []
    rows: list[Row] = read_json(path)["rows"]
    return [row for row in rows if row["part"] not in parts]


def show(results: Results) -> None:
    columns = [
        "kernel",
        "of",
        "stock_s",
        "ours_s",
        "compiled",
        "timed",
        "kept_pct",
        "noise_pct",
    ]
    lines = [tuple(row[c] for c in columns) for row in results.rows if row["part"] == "kernels"]
    if lines:
        print_table("first key", columns, lines)
    results.show()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    for part, case in _OPERATIONS.items():
        arguments.add_argument(f"--stock-{part}", action="store_true",
                               help=f"measure stock's {case} again")  # fmt: skip
    args = arguments.parse_args()
    target = Target.current()
    drawn = read_list()[1][:: args.every]
    expected = {"gla": 60.0, "gdr": 30.0, "kernels": 300.0, "launch": 40.0}
    deadline = announce(args.budget_s, seconds=sum(expected[part] for part in args.only))
    software = versions(target, **packages())
    results = Results("autotune", target, args.results, software, summarize)
    results.add(*kept_rows(results.path, args.only))
    for part in args.only:
        if seconds_left(deadline) <= 0:
            note(f"the budget is spent: {part} and what follows is left out")
            break
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            if part in _OPERATIONS:
                stock = getattr(args, f"stock_{part}")
                results.add(operation(part, Path(folder), deadline, stock))
            elif part == "kernels":
                results.add(*drawn_kernels(drawn, Path(folder), deadline))
            else:
                results.add(*launches(Path(folder), deadline))
    show(results)


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
