"""The processes of the benchmark ``autotune``, each with caches of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Row, note, seconds_left

_BROKEN = 3  # exit code of a worker


@dataclass
class Caches:
    """Folders of caches, one for each way of tuning, empty at first."""

    folder: Path

    def environment(self, side: str) -> dict[str, str]:
        return os.environ | {
            "TRITON_CACHE_DIR": str(self.folder / side / "triton"),
            "COSTMODEL_CACHE_DIR": str(self.folder / side / "costmodel"),
            "FLAGGEMS_DB_URL": f"sqlite:///{self.folder / f'{side}.db'}",
            "FLA_CACHE_MODE": "disabled",
            "GEMS_VENDOR": "nvidia",
            "COSTMODEL_MODE": "exhaustive" if side == "everything" else "auto",
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
        keys: bool = False,
    ) -> list[Row]:
        """Return the lines of a worker; a case that ends its process is left out."""
        out = self.folder / f"{side}.jsonl"
        out.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("autotune_worker.py")), side]
        options = ["--untuned", str(self.folder / "untuned"), "--out", str(out)]
        options += ["--until", str(time.time() + seconds_left(deadline))]
        if winners is not None:
            (self.folder / "winners.json").write_text(json.dumps(winners))
            options += ["--winners", str(self.folder / "winners.json")]
        if keys:
            options += ["--keys"]
        if kernels:
            options += ["--kernels", *kernels]
        left = list(cases)
        while left and seconds_left(deadline) > 0:
            run_limited([*command, *left, *options], self.environment(caches or side), deadline)
            done = {line["finished"] for line in lines_of(out) if "finished" in line}
            remaining = [case for case in left if case not in done]
            if remaining == left:  # the process ended in this case, and would end again
                note(f"{side}: {left[0]} left out, its process ended")
                remaining = left[1:]
            left = remaining
        return lines_of(out)


def run_limited(command: Sequence[str], environment: dict[str, str], deadline: float) -> None:
    """Run a process until it ends or the budget is spent; show the last lines of its errors."""
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
    """Return the first line of each kernel: later ones, of a case begun again, had full caches."""
    found: dict[str, Row] = {}
    for line in lines:
        if "kernel" in line:
            found.setdefault(line["kernel"], line)
    return found
