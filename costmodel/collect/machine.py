"""A collection on one machine: each of its GPUs times a part of the work, in a process of its own.

Every such process is ``costmodel collect --part i/n`` on the same work list, so that one GPU, the
GPUs of a machine and the tasks of an array of jobs do the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from costmodel.errors import CostModelError

_DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def visible_gpus(environment: Mapping[str, str], count: Callable[[], int]) -> list[str]:
    """Return the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    Indices, UUIDs and the names of MIG parts stay as they are. A process that torchrun started has
    the one of its rank.

    Args:
        environment: of this process.
        count: asks the driver, where the variable is not set.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    found = [*map(str, range(count()))] if named is None else [x.strip() for x in named.split(",")]
    if "-1" in found:  # CUDA looks no further
        found = found[: found.index("-1")]
    found = [*filter(None, dict.fromkeys(found))]
    rank = environment.get("LOCAL_RANK", "")
    return found[int(rank) : int(rank) + 1] if rank.isdigit() else found


def collect_on_each(
    gpus: Sequence[str],
    command: Sequence[str],
    part: tuple[int, int],
    on_event: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run one collection a GPU, all at once, and wait for all.

    Args:
        command: of ``costmodel collect``, without --part.
        part: of the whole list; each GPU gets a part of it.
        on_event: called with the GPU and each event of its collection.

    Raises:
        CostModelError: a collection failed; the others have gone on to their end.
    """
    number, parts = part
    failed: dict[str, str] = {}

    def watch(gpu: str, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        last = ""
        for line in process.stderr:
            try:
                on_event(gpu, json.loads(line))
            except ValueError:  # a warning or an error in words
                last = line.strip()
                on_event(gpu, {"event": "note", "text": last})
        if process.wait():
            failed[gpu] = last

    with _children(
        gpus, command, lambda i: f"{(number - 1) * len(gpus) + i + 1}/{parts * len(gpus)}"
    ) as children:
        threads = [threading.Thread(target=watch, args=child) for child in children.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        gpu, why = next(iter(failed.items()))
        raise CostModelError(
            f"{len(failed)} of {len(gpus)} GPUs did not finish, GPU {gpu}: {why}; what they have "
            f"measured is kept: run this again to go on"
        )


@contextmanager
def _children(
    gpus: Sequence[str], command: Sequence[str], part_of: Callable[[int], str]
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start the processes, and end them with the block. They die with this process, too."""
    library = ctypes.CDLL(None)
    base = [sys.executable, "-m", "costmodel", "collect", "--json", *command]
    children: dict[str, subprocess.Popen[str]] = {}
    try:
        for i, gpu in enumerate(gpus):
            children[gpu] = subprocess.Popen(
                [*base, "--part", part_of(i)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: library.prctl(_DIES_WITH_PARENT, signal.SIGKILL),
            )
        yield children
    finally:
        for child in children.values():
            child.kill()
            child.wait()
