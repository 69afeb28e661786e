"""A collection on one machine: each of its GPUs times a part of the work, in a process of its own.

Every such process is ``costmodel collect --part i/n`` on the same work list. So one GPU, the GPUs
of a machine and the tasks of a job array all work in the same way.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any

from costmodel.collect import Jobs, collect
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Runner
from costmodel.errors import CostModelError
from costmodel.measure.card import collecting, current_run
from costmodel.measure.device import DeviceRunner
from costmodel.measure.replay import ReplayRunner, replayed_run

_DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class Timer(ExitStack):
    """Times on the first GPU of this process, which it reserves, or replays a recording.

    Args:
        recording: a dataset that answers in place of a GPU; None: the GPU.
        cache: the folder of Triton's cache that holds the binaries; default: Triton's own.
    """

    def __init__(self, recording: Dataset | None, cache: Path | None = None):
        super().__init__()
        if cache is not None:
            os.environ["TRITON_CACHE_DIR"] = str(cache)
        self._known: ArtifactTable | None = None
        self._runner: Runner
        if recording is not None:
            self._run, self._runner = replayed_run(), ReplayRunner(recording)
            self._known = recording.artifacts()
            return
        self._run = current_run()
        self.enter_context(collecting(self._run.device_uuid))
        self._runner = runner = self.enter_context(DeviceRunner())
        runner.start()

    def collect(
        self, jobs: Jobs, dataset: Dataset, known: ArtifactTable | None, **options: Any
    ) -> None:
        """Collect; see :func:`costmodel.collect.collect`."""
        collect(jobs, dataset, self._runner, self._run, known=known or self._known, **options)


def visible_gpus(environment: Mapping[str, str], count: Callable[[], int]) -> list[str]:
    """Return the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    Indices, UUIDs and the names of MIG parts stay as they are. A process that torchrun started may
    use the GPU of its rank only.

    Args:
        environment: of this process.
        count: returns the driver's number of GPUs; called if the variable is not set.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    found = [*map(str, range(count()))] if named is None else [x.strip() for x in named.split(",")]
    found = [*filter(None, takewhile("-1".__ne__, found))]  # CUDA ignores all from -1 on
    rank = environment.get("LOCAL_RANK", "")
    return found[int(rank) : int(rank) + 1] if rank.isdigit() else found


def collect_on_each(
    gpus: Sequence[str], place: tuple[int, int], n_jobs: int, on_line: Callable[[str], None]
) -> None:
    """Run this command once per GPU, all at once, and wait for all. They die with this process.

    Args:
        place: number and count of this machine's part; each GPU times a part of it.
        n_jobs: compiling processes for each GPU.
        on_line: called with each line that a command writes to stderr, mostly a JSON event.

    Raises:
        CostModelError: a collection failed; the others have run to their end.
    """
    number, parts = place
    library, children = ctypes.CDLL(None), dict[str, subprocess.Popen[bytes]]()
    ours, theirs = os.pipe()
    try:
        for i, gpu in enumerate(gpus):
            part = f"{number + i * parts}/{parts * len(gpus)}"  # for any count on other machines
            own = ["--json", f"--part={part}", f"--jobs={n_jobs}"]  # the last of two alike counts
            children[gpu] = subprocess.Popen(
                [sys.executable, "-m", "costmodel", *sys.argv[1:], *own],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                stdout=subprocess.DEVNULL,
                stderr=theirs,
                preexec_fn=lambda: library.prctl(_DIES_WITH_PARENT, signal.SIGKILL),
            )
        os.close(theirs)
        with open(ours) as lines:
            for line in lines:
                on_line(line)
        failed = [gpu for gpu, child in children.items() if child.wait()]
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    if failed:
        raise CostModelError(
            f"GPU {', '.join(failed)} did not finish (the reason is above); what was measured is "
            f"kept: run this again to go on"
        )
