"""Remeasure every table and plot: `costmodel bench all`.

On a GPU each benchmark of ``list.toml`` runs by itself, and its results replace the file in
``results/``. One that is done is not run again until a source changes, so that a stopped run goes
on where it stopped. A benchmark starts only if the rest of ``--budget-s`` is enough.

With ``--no-gpu`` all results that follow from the shipped data are recomputed. A file is left as it
is if its figures are the same again. Files with times of the machine are left out, as these would
differ.

With ``--check 0.1`` a tenth of each, drawn by ``--seed``, is measured again and compared; nothing
is written. At the end the tables of README and docs are brought up to date.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import PART, Row, at_exit_code, note

from costmodel.cli.common import print_table
from costmodel.errors import InvalidInput
from costmodel.files import read_json, write_json
from costmodel.hardware.target import Target

HERE = Path(__file__).resolve().parent
DONE = ".done"  # not .json, so that it is no results file
_SAME = 1e-6  # relative: sums differ in their last digits between processors
_GENEROUS = 2.0  # times what a benchmark takes


@dataclass(frozen=True)
class Bench:
    """An entry of ``list.toml``, which says what each field is."""

    name: str
    run: str
    answers: str
    minutes: float
    writes: str = ""
    gpu: bool = False
    times: bool = False
    packages: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    noise_pct: float = 0.0

    @property
    def lacking(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


def read_list() -> list[Bench]:
    """Read the list of benchmarks."""
    entries = tomllib.loads((HERE / "list.toml").read_text(encoding="utf-8"))
    return [
        Bench(name, **{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
        for name, entry in entries.items()
    ]


# --- Running ------------------------------------------------------------------------------------


def measure(bench: Bench, folder: Path, options: Sequence[str] = ()) -> int:
    """Run a benchmark, whose results go to a folder; returns its exit code."""
    script, *arguments = (part.format(root=HERE.parent) for part in bench.run.split())
    command = [sys.executable, str(HERE / script), *arguments, "--results", str(folder), *options]
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def sources() -> str:
    """Return a hash of all that figures may depend on: code, models and the list."""
    root, found = HERE.parent, hashlib.sha256()
    for pattern in ("costmodel/**/*.py", "kernels/*.py", "models/*/card.json", "benchmarks/*.*"):
        for path in sorted(root.glob(pattern)):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


class Done:
    """The benchmarks that have run with these sources, on disk beside their results."""

    def __init__(self, folder: Path, device: str, *, again: bool = False) -> None:
        self._path = folder / DONE
        self._head = {"sources": sources(), "device": device}
        found = read_json(self._path, dict[str, Any]) if self._path.is_file() else {}
        here = {name: found.get(name) for name in self._head} == self._head
        self.names: list[str] = found["done"] if here and not again else []

    def add(self, name: str) -> None:
        """Keep a name, on disk too."""
        self.names.append(name)
        write_json(self._path, {**self._head, "done": self.names})


def why_left_out(bench: Bench, args: argparse.Namespace, done: Done, left_s: float) -> str:
    """Say why a benchmark is not run; empty if it is."""
    if args.check:
        if not bench.key:
            return "has no figures to compare"
        bench_s = 60 * max(bench.minutes * args.check, min(bench.minutes, 0.7))
    else:
        bench_s = 60 * bench.minutes
        if bench.name in done.names:
            return "done; --again runs it once more"
        if not bench.writes:
            return "writes no results: run it by its name"
    if bench.gpu and bench.lacking:
        return f"needs {', '.join(bench.lacking)}, which is not installed"
    if bench_s > left_s:
        return f"takes {bench_s / 60:.1f} min, and {left_s / 60:.1f} are left: run it again"
    return ""


# --- Comparing ----------------------------------------------------------------------------------


def same(old: Any, new: Any) -> bool:
    """Return True if two values of JSON agree; the last digits of floats may differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(same(old[k], new[k]) for k in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(same, old, new))
    if isinstance(old, float) and isinstance(new, int | float):
        return math.isclose(old, new, rel_tol=_SAME, abs_tol=_SAME)
    return bool(old == new)


def _named(rows: Sequence[Row], bench: Bench) -> dict[tuple[str, ...], Row]:
    """Return the rows that have figures to compare, by their keys."""
    return {
        tuple(str(row.get(column)) for column in bench.key): row
        for row in rows
        if row.get("group") != "overall"
    }


def _figures(row: Row, bench: Bench) -> Iterator[float]:
    for path in bench.figures:
        value: Any = row
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        yield value if isinstance(value, int | float) else math.nan


def deviations_pct(bench: Bench, old: Sequence[Row], new: Sequence[Row]) -> list[float]:
    """Return how far each figure of a second run is from the first; what one lacks is left out.

    Figures that differ by more than the noise are told on stderr.
    """
    before, found = _named(old, bench), []
    for key, row in _named(new, bench).items():
        both = zip(_figures(before.get(key, {}), bench), _figures(row, bench), strict=True)
        for name, (was, now) in zip(bench.figures, both, strict=True):
            if was and math.isfinite(was * now):
                found.append(100 * abs(now / was - 1))
                if found[-1] > bench.noise_pct:
                    note(f"{' '.join(key)}, {name}: {now:.4g}, was {was:.4g}")
    return found


def agreement(bench: Bench, found_pct: Sequence[float]) -> Row:
    """Say how many figures are within the noise; the run agrees if nine of ten are."""
    within = sum(x <= bench.noise_pct for x in found_pct)
    return {
        "figures": len(found_pct), "within": within, "noise_pct": bench.noise_pct,
        "median_pct": median(found_pct) if found_pct else None,
        "worst_pct": max(found_pct, default=None),
        "agrees": bool(found_pct) and within >= 0.9 * len(found_pct),
    }  # fmt: skip


# --- The run ------------------------------------------------------------------------------------


def one(bench: Bench, args: argparse.Namespace, done: Done, left_s: float) -> tuple[str, bool]:
    """Run a benchmark; return its outcome, and whether that is good."""
    options = []
    if bench.gpu:
        seconds = min(left_s, 60 * bench.minutes * _GENEROUS)
        options = ["--budget-s", f"{seconds:.0f}"]
    if args.check:
        every = round(1 / args.check)
        first = random.Random(f"{args.seed} {bench.name}").randrange(every)
        options += ["--every", str(every), "--first", str(first)]
    with tempfile.TemporaryDirectory() as name:
        code = measure(bench, Path(name), options)
        if code == PART and not args.check:
            return "stopped by its budget: not kept", False
        if code not in (0, PART):
            return f"failed, exit code {code}", False
        (made,) = Path(name).glob("*.json")
        shipped = args.results / made.name
        if args.check:
            return compared(bench, shipped, made)
        outcome = written(bench, shipped, made)
    done.add(bench.name)
    return outcome, True


def compared(bench: Bench, shipped: Path, made: Path) -> tuple[str, bool]:
    """Compare a share that was measured again with what is shipped."""
    if not shipped.is_file():
        return f"no {shipped.name} to compare with", False
    rows = [read_json(path, dict[str, Any])["rows"] for path in (shipped, made)]
    found = agreement(bench, deviations_pct(bench, *rows))
    if not found["figures"]:
        return "no row in common", False
    text = (
        f"{found['within']} of {found['figures']} figures within {bench.noise_pct:g} %, "
        f"median {found['median_pct']:.1f} %, worst {found['worst_pct']:.1f} %"
    )
    return text, found["agrees"]


def written(bench: Bench, shipped: Path, made: Path) -> str:
    """Replace results by new ones, unless they hold the same figures."""
    new = read_json(made, dict[str, Any])
    old = read_json(shipped, dict[str, Any]) if shipped.is_file() else {"rows": []}
    rows = old["rows"]
    if bench.lacking:  # their rows cannot be made again
        names = {row.get("name") for row in new["rows"]}
        rows = [row for row in rows if row.get("name") in names]
    if not bench.gpu and same(rows, new["rows"]):
        return ", without ".join(["the same figures", *bench.lacking])
    if len(rows) < len(old["rows"]) and not bench.gpu:
        raise InvalidInput(
            f"{bench.name}: the figures differ, and rows of {', '.join(bench.lacking)} would be "
            f"lost: install it, then run again"
        )
    shipped.write_bytes(made.read_bytes())
    return f"written to {shipped.name}"


def parse() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("costmodel bench all", None, __doc__, formatter_class=plain)
    parser.add_argument("--no-gpu", action="store_true", help="only what follows from data")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds in all")
    parser.add_argument("--check", type=float, metavar="SHARE", help="compare so much, such as 0.1")
    parser.add_argument("--seed", type=int, default=0, help="of --check")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if args.check is not None and not 0 < args.check <= 1:
        parser.error(f"--check {args.check}: expected a share over 0 and up to 1, such as 0.1")
    if args.check and args.no_gpu:
        parser.error("--check measures: leave out --no-gpu, which compares every figure")
    return args


def chosen(args: argparse.Namespace) -> list[Bench]:
    """Return what is to be run, in the order of the list."""
    every = read_list()
    names = [bench.name for bench in every]
    if unknown := [name for name in args.only or () if name not in names]:
        raise InvalidInput(
            f"no benchmark {', '.join(unknown)}: expected some of {', '.join(names)}"
        )
    found = [bench for bench in every if args.only is None or bench.name in args.only]
    if args.no_gpu:
        return [bench for bench in found if not (bench.gpu or bench.times)]
    return [bench for bench in found if bench.gpu] if args.check else found


def main() -> int:
    args = parse()
    device = "no GPU" if args.no_gpu else Target.current().device.name
    deadline, todo = time.monotonic() + args.budget_s, chosen(args)
    args.results = args.results.resolve()
    args.results.mkdir(parents=True, exist_ok=True)
    done, rows, good = Done(args.results, device, again=args.again), [], True
    for i, bench in enumerate(todo):
        begin = time.monotonic()
        outcome = why_left_out(bench, args, done, deadline - begin)
        if not outcome:
            note(f"{i + 1} of {len(todo)}: {bench.name}, about {bench.minutes:g} min")
            outcome, fine = one(bench, args, done, deadline - begin)
            good &= fine
        rows.append([bench.name, f"{time.monotonic() - begin:.0f} s", outcome])
    print_table("bench all", ["benchmark", "took", "outcome"], rows)
    changed = any(outcome.startswith("written") for *_, outcome in rows)
    if args.results == HERE / "results" and not args.check:
        command = [sys.executable, str(HERE / "tables.py"), *([] if changed else ["--check"])]
        good &= subprocess.run(command, check=False).returncode == 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
