"""Shows how far a collection is: a live line on a terminal, else plain lines, or JSON events."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from costmodel.cli.common import note
from costmodel.reports import shown

if TYPE_CHECKING:
    from costmodel.collect import Job, Progress

_COUNTED = ("jobs", "jobs_done", "rows", "ok_rows", "compiled", "compile_failures")


class LiveView:
    """Shows the progress of one process, or of those of several GPUs together, on stderr.

    Args:
        as_json: an event a line, for machines.
    """

    def __init__(self, as_json: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        live = sys.stderr.isatty() and not as_json
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not live)
        self._task = self._bar.add_task("compiling", total=None)
        self._as_json, self._start = as_json, time.monotonic()
        self._last: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def job(self, job: Job, progress: Progress) -> None:
        """Show that a workload is recorded."""
        self.event("", {"event": "job", "workload": str(job.workload), **asdict(progress)})

    def event(self, gpu: str, event: dict[str, Any]) -> None:
        """Show an event of a GPU's process."""
        if event.get("event") != "job":
            note(f"GPU {gpu}: {event.get('text', event)}")
            return
        self._last[gpu] = event
        total = self.total()
        seconds = time.monotonic() - self._start
        done = max(total["jobs_done"], 1)
        left_s = seconds * (total["jobs"] - done) / done
        rate = total["rows"] / max(seconds, 1e-9)
        if self._as_json:
            plain = {k: None if v != v else v for k, v in event.items()}
            plain |= {"gpu": gpu, "rows_per_s": round(rate, 1), "left_s": round(left_s, 1)}
            print(json.dumps(plain), file=sys.stderr, flush=True)
            return
        failed = ", ".join(f"{n} {kind}" for kind, n in total["statuses"].items() if kind != "ok")
        where = f"{event['workload']} on GPU {gpu}" if gpu else event["workload"]
        text = (
            f"{total['jobs_done']}/{total['jobs']} workloads; {total['rows']} rows, {rate:.0f} a "
            f"second; {f'{failed}; ' if failed else ''}{where}: best {shown(event['best_us'])} us, "
            f"torch {shown(event['torch_us'])}"
        )
        self._bar.update(
            self._task, total=total["jobs"], completed=total["jobs_done"], description=text
        )
        if self._bar.disable:
            note(f"{text}; {left_s / 60:.1f} min left")

    def total(self) -> dict[str, Any]:
        """Return the counts of all GPUs together."""
        every = [*self._last.values()]
        statuses: Counter[str] = sum((Counter(e["statuses"]) for e in every), Counter())
        return {**{k: sum(e[k] for e in every) for k in _COUNTED}, "statuses": dict(statuses)}
