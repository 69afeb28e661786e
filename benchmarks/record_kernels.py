"""Records timings of other people's tuned kernels: every configuration of each list, timed once.

Calls are made in processes, one process after another, so that a broken CUDA context or a hang
costs one call. Each call is made twice. The first time nothing is launched, and all its
configurations begin to compile. The second time, some calls later, they are timed. If the seconds
are over before all calls are done, run the same command again: it skips calls that are done, and
times no configuration of the others twice.

The output folder holds ``kernels`` (the files of `costmodel.autotune`'s store), ``lists.jsonl``
(which call has reached which kernel; versions of packages; with ``--wide``, the kernels' own lists)
and ``calls.jsonl`` (the outcome of each call). ``--pack`` puts all of it into one archive, and
``--dataset`` makes a dataset of it. With ``--seconds 0`` nothing is recorded first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from record_worker import DISTRIBUTIONS, lines_of, work
from recorded_calls import Call, by_turns, fla_calls, of_cases

_TRIES, _SHOWN = 2, 40

PACKAGES = ("fla", "flag_gems", "torchao", "tutorials")


def learned_calls(packages: list[str]) -> list[Call]:
    """Calls whose kernels a model may learn from, the widest variety first."""
    families: list[list[Call]] = []
    for package in packages:
        if package == "fla":
            families += fla_calls()
        else:
            short = {"flag_gems": "gems"}.get(package, package)
            families += getattr(import_module(f"recorded_{short}"), f"{short}_calls")()
    families += [calls for calls in of_cases() if calls[0].package in packages]
    return by_turns(families)


def judging_calls() -> list[Call]:
    """Calls whose kernels judge what was learned from others."""
    judges = import_module("recorded_judges").judges_calls()
    return by_turns([*judges, *of_cases(judges=True)])


def left_of(names: list[str], lines: list[dict[str, Any]], wide: int = 0) -> list[str]:
    """Return the calls not done with lists so wide, without those that ended too many processes."""
    done = {line["done"] for line in lines if "done" in line and line.get("wide", 0) >= wide}
    ended = Counter(line["ended"] for line in lines if "ended" in line)
    return [name for name in names if name not in done and ended[name] < _TRIES]


def watch(command: list[str], environment: dict[str, str], folder: Path, until: float,
          silent_s: float) -> None:  # fmt: skip
    """Run a process until it ends, says nothing for too long, or the time is over."""
    with (folder / "errors.txt").open("ab") as errors:
        process = subprocess.Popen(command, env=environment, stdout=errors, stderr=errors,
                                   start_new_session=True)  # fmt: skip
        begin = time.time()
        try:
            while process.poll() is None:
                time.sleep(1)
                files = [folder / "calls.jsonl", *folder.glob("kernels/*")]
                last = max((path.stat().st_mtime for path in files if path.exists()), default=0)
                if time.time() - max(last, begin) > silent_s or time.time() > until + 15:
                    break
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def record(names: list[str], folder: Path, args: argparse.Namespace) -> None:
    """Run processes until all is recorded or the time is over."""
    progress = folder / "calls.jsonl"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        environment = os.environ | {
            "TRITON_CACHE_DIR": f"{scratch}/triton",
            "COSTMODEL_CACHE_DIR": str(folder),
            "FLAGGEMS_DB_URL": f"sqlite:///{scratch}/gems.db",
            "FLA_CACHE_MODE": "disabled", "GEMS_VENDOR": "nvidia",
            "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
        }  # fmt: skip
        while time.time() < args.until and (left := left_of(names, lines_of(progress), args.wide)):
            listed = Path(scratch) / "calls.txt"
            listed.write_text("\n".join(left))
            command = [sys.executable, __file__, str(folder), "--worker", str(listed)]
            command += ["--until", str(args.until), "--wide", str(args.wide)]
            command += ["--judges"] if args.judges else ["--packages", *args.packages]
            known = len(lines_of(progress))
            watch(command, environment, folder, args.until, args.silent_s)
            lines = lines_of(progress)[known:]
            last = lines[-1] if lines else {}
            if "began" in last and time.time() < args.until:  # the process ended in this call
                with progress.open("a") as file:
                    file.write("\n" + json.dumps({"ended": last["began"]}) + "\n")
                print(f"a process ended in {last['began']}", flush=True)
            elif left_of(names, lines_of(progress), args.wide) == left:  # no progress
                print((folder / "errors.txt").read_text()[-2000:])
                break


def show(folder: Path) -> None:
    """Print how much is recorded, by package."""
    store = import_module("costmodel.autotune.store").KernelStore(folder / "kernels")
    found: dict[str, list[Any]] = {}
    for entry in store.entries():
        module = str(entry.key["name"]).split(".")[0]
        found.setdefault(DISTRIBUTIONS.get(module, module), []).append(entry)
    lines = lines_of(folder / "calls.jsonl")
    errors = {line["done"]: line["error"] for line in lines if line.get("error") and "done" in line}
    for name, error in sorted(errors.items())[:_SHOWN]:
        print(f"  {name}: {error.splitlines()[0][:120]}")
    print(f"{sum('done' in line for line in lines)} calls, {len(errors)} ended by an error")
    for package, entries in sorted(found.items()):
        kernels = len({entry.key["name"] for entry in entries})
        whole = sum(entry.chosen is not None for entry in entries)
        timed = sum(m.ok for entry in entries for m in entry.measured.values())
        print(f"{package}: {kernels} kernels, {len(entries)} lists, {whole} whole, {timed} timings")


def make_dataset(folder: Path, dataset: Path) -> None:
    """Make a dataset of a recording, or add it to one that is there."""
    parts = import_module("costmodel.autotune.dataset")
    store = import_module("costmodel.autotune.store").KernelStore(folder / "kernels")
    packages, listed = {}, {}
    for line in lines_of(folder / "lists.jsonl"):
        if "package" in line:
            packages[line["kernel"].split(".")[0]] = f"{line['package']} {line['version']}"
        if "listed" in line:
            listed[line["kernel"]] = line["listed"]
    base = parts.KernelDataset.read(dataset) if dataset.exists() else None
    parts.KernelDataset.of(store.entries(), packages, listed, base).write(dataset)


def pack(folder: Path, archive: Path) -> None:
    """Put a recording into one archive."""
    with tarfile.open(archive, "w:xz") as file:
        for name in ("kernels", "lists.jsonl", "calls.jsonl"):
            if (folder / name).exists():
                file.add(folder / name, name)


def unpack(archive: Path, folder: Path) -> None:
    """Put what an archive holds into a folder, to go on there."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path, help="for the recording; what it has is kept")
    arguments.add_argument("--seconds", type=float, default=540.0)
    arguments.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    arguments.add_argument("--judges", action="store_true", help="the kernels that judge, instead")
    arguments.add_argument("--only", default="", help="calls with this in their names")
    arguments.add_argument("--part", default="1/1", help="calls of one GPU among several: i/n")
    arguments.add_argument("--wide", type=int, default=0, help="lengthen lists to so many")
    arguments.add_argument("--silent-s", type=float, default=90.0, help="then a process hangs")
    arguments.add_argument("--resume", type=Path, help="an archive to go on with")
    arguments.add_argument("--pack", type=Path, help="an archive to write at the end")
    arguments.add_argument("--dataset", type=Path, help="make a dataset of it, or add to one")
    arguments.add_argument("--list", action="store_true", help="print the calls, make none")
    arguments.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    args.until = args.until or time.time() + args.seconds
    calls = judging_calls() if args.judges else learned_calls(args.packages)
    part, parts = (int(number) for number in args.part.split("/"))
    names = [call.name for call in calls if args.only in call.name][part - 1 :: parts]
    if args.list:
        print("\n".join(names))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.worker:
        work({call.name: call for call in calls}, args.worker.read_text().split("\n"),
             args.folder, args)  # fmt: skip
        return
    if args.resume:
        unpack(args.resume, args.folder)
    if args.seconds > 0:
        record(names, args.folder.resolve(), args)
    show(args.folder)
    if args.dataset:
        make_dataset(args.folder, args.dataset)
    if args.pack:
        pack(args.folder, args.pack)


if __name__ == "__main__":
    main()
