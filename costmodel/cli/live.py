"""Shows the progress of a collection on stderr: a live line, plain lines if it is no terminal, or
with --json one event per line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from costmodel.cli.common import note
from costmodel.files import Named
from costmodel.reports import shown

if TYPE_CHECKING:
    from costmodel.collect import Job, Progress


class LiveView:
    """Shows the progress of this process, or of the processes of several GPUs together."""

    def __init__(self, as_json: bool):
        self._as_json, self._start = as_json, time.monotonic()
        self._events: dict[str, Named] = {}  # the last one of each GPU

    def job(self, job: Job, progress: Progress) -> None:
        """Show that a workload is recorded."""
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        counts = {k: None if v != v else v for k, v in asdict(progress).items()}
        self._show({"event": "job", "gpu": gpu, "workload": str(job.workload), **counts})

    def line(self, text: str) -> None:
        """Show an event that another process wrote, or print its line if it is no event."""
        try:
            self._show(json.loads(text))
        except ValueError:
            note(text.strip())

    def _show(self, event: Named) -> None:
        self._events[event["gpu"]] = event
        total, seconds = self.total(), time.monotonic() - self._start
        left_s = seconds * (total["jobs"] / total["jobs_done"] - 1)
        rate = total["rows"] / seconds
        if self._as_json:
            more = {"rows_per_s": round(rate, 1), "left_s": round(left_s, 1)}
            note(json.dumps(event | more))
            return
        failed = (f"{n} {status}; " for status, n in total["statuses"].items() if status != "ok")
        text = (
            f"{total['jobs_done']}/{total['jobs']} workloads; {total['rows']} rows, {rate:.0f} a "
            f"second; {''.join(failed)}{left_s / 60:.1f} min left; {event['workload']}: best "
            f"{shown(event['best_us'])} us, torch {shown(event['torch_us'])} us"
        )
        if sys.stderr.isatty():  # overwrite the line before
            print(
                f"\r\x1b[K{text[: Console(stderr=True).width]}", end="", file=sys.stderr, flush=True
            )
        else:
            note(text)

    def total(self) -> Named:
        """Return the counts of all GPUs together."""
        names = "jobs jobs_done rows ok_rows compiled compile_failures"
        every = [*self._events.values()]
        statuses: Counter[str] = sum((Counter(e["statuses"]) for e in every), Counter())
        return {
            **{name: sum(e[name] for e in every) for name in names.split()},
            "statuses": {**statuses},
        }
