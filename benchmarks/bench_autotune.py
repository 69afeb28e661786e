"""Cost of tuning other people's Triton kernels: Triton's own tuner against costmodel's.

Triton's own tuner is called stock, costmodel's is called ours. Parts:
``gla`` and ``gdr``: the first calls of two operations of Flash Linear Attention, forward and
backward. All caches are empty then, and ours has started its compiling processes.
``kernels``: each drawn kernel is tuned by stock and by ours, each in a process of its own with
empty caches. A third process times both winners in turn, and stock's a second time.
``keys``: eight of the drawn kernels are tuned for five keys, one after another; fewer of them if
the time is not enough. The first key is not counted.
``lists``: ours against itself without a model (mode ``exhaustive``, which times all), for lists of
32 and more: at the first key, and at the fifth where there are sizes for it.
``launch``: the host time of a warm call, and a process that finds its caches filled.

Each part is written as soon as it is measured, and other parts stay as they were: a run may be made
in pieces. With ``--stock-before`` stock's times are taken from the file, and only ours is measured.

The kernels are drawn by a seed from those that the calls reach (`autotune_kernels.csv`). Their
lists together stay under a cap, since a configuration costs stock up to a second. fla-core,
flag-gems and liger-kernel, with what they import (einops, sqlalchemy), must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autotune_draw import SEED, Listed, keyed_kernels, read_list
from autotune_keys import KEYS
from autotune_processes import Caches, by_kernel, lines_of, run_limited
from common import Results, Row, announce, at_exit_code, note, parser, seconds_left, versions

from costmodel.autotune.dataset import role_of
from costmodel.cli.common import print_table
from costmodel.evaluation.metrics import geomean
from costmodel.files import read_json
from costmodel.hardware.target import Target

LONG = 32  # configurations
EXPECTED_S = {"gla": 45.0, "gdr": 30.0, "kernels": 270.0, "keys": 150.0, "lists": 110.0,
              "launch": 40.0}  # fmt: skip
"""Seconds of each part, on an H200 with 16 cores."""
PARTS = tuple(EXPECTED_S)
FURTHER = range(2, 6)
"""Keys of a kernel that part ``keys`` counts."""
_OPERATIONS = {"gla": "fla_chunk_gla", "gdr": "fla_chunk_gated_delta_rule"}
_STOCK_S = {"gla": 248.6, "gdr": 54.4}
"""Measured on an H200 before; --stock-gla and --stock-gdr measure again."""


def operation(part: str, folder: Path, deadline: float, stock: bool) -> Row:
    """Time an operation's first call: by ours, again in a second process, and by stock."""
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


def drawn_kernels(
    part: str, drawn: Sequence[Listed], folder: Path, deadline: float, before: Sequence[Row] = ()
) -> Iterator[list[Row]]:
    """Give the rows after each step: with stock's times, with ours, with the winners' times.

    Args:
        part: ``keys`` for five keys of each kernel, else one.
        before: earlier rows to take stock's times from; if there are none, stock is measured.
    """
    caches, keys = Caches(folder), part == "keys"
    names = [kernel.kernel for kernel in drawn]
    cases = list(dict.fromkeys(kernel.case for kernel in drawn))
    if keys:  # a row for each: their cases reach the kernel once a key
        drawn = [Listed(f"{k.kernel}#{n}", k.case, k.configs) for k in drawn for n in FURTHER]
    stock = {row["kernel"]: stock_of(row) for row in before if row["stock_s"]}
    if not stock:
        stock_deadline = deadline - 0.35 * max(seconds_left(deadline), 0)
        found = caches.run("stock", cases, stock_deadline, kernels=names, keys=keys)
        stock = by_kernel(found)
    yield [row_of(part, kernel, stock, {}, {}) for kernel in drawn]
    cases = [case for case in cases if any(line["case"] == case for line in stock.values())]
    ours = by_kernel(caches.run("ours", cases, deadline, kernels=names, keys=keys))
    yield [row_of(part, kernel, stock, ours, {}) for kernel in drawn]
    labels = [kernel.kernel for kernel in drawn]
    winners = {
        name: {"stock": stock[name]["winner"], "ours": ours[name]["winner"]}
        for name in labels if name in stock and name in ours
    }  # fmt: skip
    if winners:
        # Stock has compiled every configuration, so that nothing is left to compile here.
        timed = by_kernel(caches.run("compare", cases, deadline, caches="stock", keys=keys,
                                     kernels=names, winners=winners))  # fmt: skip
        yield [row_of(part, kernel, stock, ours, timed) for kernel in drawn]


def stock_of(row: Row) -> Row:
    """Return what stock's process would write, from a row of an earlier run."""
    return {
        "seconds": row["stock_s"], "winner": row["stock_winner"], "case": row["case"],
        "compiled": row["of"], "measured": "before",
    }  # fmt: skip


def long_lists(kernels: Iterable[Listed], folder: Path, deadline: float) -> Iterator[list[Row]]:
    """Give the rows of ours with and without a model; cases with five keys come first."""
    found = sorted((k for k in kernels if k.configs >= LONG), key=lambda k: k.case not in KEYS)
    caches, names = Caches(folder), [kernel.kernel for kernel in found]
    cases = list(dict.fromkeys(kernel.case for kernel in found))
    all_deadline = deadline - 0.4 * max(seconds_left(deadline), 0)
    lines = caches.run("everything", cases, all_deadline, kernels=names, keys=True)
    done = [case for case in cases if any(line.get("finished") == case for line in lines)]
    everything = by_kernel(lines)
    ours = by_kernel(caches.run("ours", done, deadline, kernels=names, keys=True))
    yield [
        {
            "part": "lists", "kernel": label.split("#")[0], "case": line["case"],
            "key": line["key"], "number": number_of(label), "of": line["listed"],
            "everything_s": line["seconds"], "everything_timed": line["timed"],
            "ours_s": ours[label]["seconds"], "timed": ours[label]["timed"],
        }
        for label, line in everything.items() if label in ours
    ]  # fmt: skip


def number_of(label: str) -> int:
    """Return the number of the key that a label names."""
    return int(label.partition("#")[2] or 1)


def row_of(
    part: str,
    kernel: Listed,
    stock: dict[str, Row],
    ours: dict[str, Row],
    timed: dict[str, Row],
) -> Row:
    """Return a kernel's row; what was not measured is None."""
    name = kernel.kernel
    theirs, own, us = stock.get(name, {}), ours.get(name, {}), timed.get(name, {})
    same = bool(own) and bool(theirs) and own["winner"] == theirs["winner"]
    kept = noise = None
    if us:
        kept = 100.0 if same else 100 * us["stock_us"] / us["ours_us"]
        noise = 100 * us["stock_us"] / us["stock_again_us"]
    return {
        "part": part, "kernel": name, "case": own.get("case", kernel.case),
        "key": own.get("key"), "number": number_of(name),
        "held_out": role_of(name.split(":")[0]) == "eval", "seed": SEED,
        "stock_measured": theirs.get("measured", "now"),
        "stock_s": theirs.get("seconds"), "ours_s": own.get("seconds"),
        "compiled": own.get("compiled"), "timed": own.get("timed"),
        "of": (part == "kernels" and theirs.get("compiled")) or kernel.configs,
        "kept_pct": kept, "noise_pct": noise,
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
    """Return ratios of summed seconds, the speed that was kept, and the two operations' times."""
    kernels, keys, lists = ([row for row in rows if row["part"] == part] for part in
                            ("kernels", "keys", "lists"))  # fmt: skip
    tuned = [row for row in kernels if row["stock_s"] and row["ours_s"]]
    first = [row for row in lists if row["number"] == 1]
    fifth = [row for row in lists if row["number"] == 5]
    kept = [row["kept_pct"] for row in kernels if row["kept_pct"]]
    noise = [row["noise_pct"] for row in kernels if row["noise_pct"]]
    stock_s, ours_s = (sum(row[f"{side}_s"] for row in tuned) for side in ("stock", "ours"))
    summary: Row = {
        "kernels": len(tuned), "configurations": sum(row["of"] for row in tuned),
        "compiled": sum(row["compiled"] for row in tuned),
        "timed": sum(row["timed"] for row in tuned),
        "stock_s": stock_s or None, "ours_s": ours_s or None,
        "wall_ratio_first_key": stock_s / ours_s if ours_s else None,
        "wall_ratio_later_keys": ratio(keys, "stock_s"),
        "kept_later_keys_pct": geomean_or_none(row["kept_pct"] for row in keys),
        "lists_ratio_first_key": ratio(first, "everything_s"),
        "lists_ratio_fifth_key": ratio(fifth, "everything_s"),
        "kept_geomean_pct": geomean_or_none(kept),
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


def ratio(rows: Iterable[Row], side: str) -> float | None:
    """Divide the summed seconds of a side by those of ours, over rows that have both."""
    both = [row for row in rows if row[side] and row["ours_s"]]
    return sum(row[side] for row in both) / sum(row["ours_s"] for row in both) if both else None


def geomean_or_none(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value]
    return geomean(there) if there else None


def packages() -> dict[str, str]:
    """Versions of the packages whose kernels are tuned."""
    found = {}
    for name in ("fla-core", "flag-gems", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not found"
    return found


def earlier_rows(path: Path) -> list[Row]:
    """Rows of an earlier run."""
    rows: list[Row] = read_json(path)["rows"] if path.exists() else []
    return rows


def show(results: Results) -> None:
    columns = ["kernel", "of", "stock_s", "ours_s", "timed", "kept_pct", "noise_pct"]
    lists = ["kernel", "number", "of", "everything_s", "ours_s", "timed"]
    for part, names in (("kernels", columns), ("keys", columns), ("lists", lists)):
        lines = [tuple(row[c] for c in names) for row in results.rows if row["part"] == part]
        if lines:
            print_table(part, names, lines)
    results.show()


def rows_of(
    part: str, args: Namespace, before: list[Row], folder: Path, deadline: float
) -> Iterator[list[Row]]:
    """Give the rows of a part each time that more of it is measured."""
    listed, drawn = read_list()
    drawn = drawn[:: args.every]
    if part in _OPERATIONS:
        yield [operation(part, folder, deadline, getattr(args, f"stock_{part}"))]
    elif part in ("kernels", "keys"):
        drawn = keyed_kernels(drawn) if part == "keys" else drawn
        before = [row for row in before if row["part"] == part and args.stock_before]
        yield from drawn_kernels(part, drawn, folder, deadline, before)
    elif part == "lists":
        yield from long_lists(listed[:: args.every], folder, deadline)
    else:
        yield launches(folder, deadline)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    for part, case in _OPERATIONS.items():
        arguments.add_argument(f"--stock-{part}", action="store_true",
                               help=f"measure stock's {case} again")  # fmt: skip
    arguments.add_argument("--stock-before", action="store_true",
                           help="take what stock took from the results file")  # fmt: skip
    args = arguments.parse_args()
    target = Target.current()
    deadline = announce(args.budget_s, seconds=sum(EXPECTED_S[part] for part in args.only))
    software = versions(target, **packages())
    results = Results("autotune", target, args.results, software, summarize)
    before = earlier_rows(results.path)
    results.rows += before
    for part in args.only:
        left_s = seconds_left(deadline)
        if left_s <= 0:
            note(f"the budget is spent: {part} and what follows is left out")
            break
        note(f"{part}: about {EXPECTED_S[part]:.0f} s, {left_s:.0f} s are left")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for rows in rows_of(part, args, before, Path(folder), deadline):
                results.rows = [row for row in results.rows if row["part"] != part]
                results.add(*rows)
    show(results)


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
