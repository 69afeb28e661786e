"""Users' kernels in processes without a GPU: what they compile and bind is real, the GPU is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from autotune_fakes import machine_without_gpu

from costmodel.autotune import bundle
from costmodel.autotune.options import Options
from costmodel.hardware import installed
from costmodel.hardware.target import Target
from costmodel.measure import card
from costmodel.measure.replay import replayed_run

collect_kernels = bundle.collect_kernels


def collect_on_cpu(place: str, folder: Path, out: Path, number: int = 1, parts: int = 1) -> None:
    """Stand for ``collect_kernels``, where a launch takes as many microseconds as a block has."""
    with machine_without_gpu(out), pytest.MonkeyPatch.context() as patch:
        # The child process that times needs a GPU: this process times.
        patch.setattr(bundle, "Options", lambda **_: Options())
        collect_kernels(place, folder, out, number, parts)


def stand_in(name: str = "h100-sxm") -> None:
    """Make this process one that believes in a GPU, and times users' kernels as above.

    For the ``sitecustomize`` of a process of its own, since nothing is put back.
    """
    here: Any = Target
    here.current = staticmethod(lambda index=None: Target.named(name))
    bundle.collect_kernels = collect_on_cpu
    card.current_run = replayed_run
    installed.driver_cuda = lambda: 99000
