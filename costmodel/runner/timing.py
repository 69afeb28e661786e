"""The timing process: what runs beside the GPU, one request at a time.

It is a child that may die of a kernel; :mod:`costmodel.runner.device` is the parent's side.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from math import inf

from costmodel.config import GemmConfig
from costmodel.measurement import Measurement
from costmodel.runner.protocol import TimingProtocol
from costmodel.runner.session import Session
from costmodel.workload import Workload

__all__ = ["Request", "answer", "start"]


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to time.

    Attributes:
        workload: the problem.
        config: what to time; None for ``torch.matmul``.
        best_us: the best latency of the workload so far, for stopping early.
        compare: time these in turn instead of ``config``, ``rounds`` times (finalists).
    """

    workload: Workload
    config: GemmConfig | None
    best_us: float = inf
    compare: tuple[GemmConfig | None, ...] = ()
    rounds: int = 0


_session: Session | None = None


def start(protocol: TimingProtocol, device_index: int, seed: int) -> None:
    """Set the process up. Called once in each fresh one."""
    global _session
    # Under TRITON_INTERPRET the kernels would run on the CPU, and what that takes means nothing.
    os.environ.pop("TRITON_INTERPRET", None)
    _session = Session(protocol, device_index, seed)


def answer(request: Request) -> list[Measurement]:
    """Time what is asked: one measurement, or one for each of ``compare``."""
    assert _session is not None, "start() comes first"
    import torch

    workload, config = request.workload, request.config
    try:
        if request.compare:
            return _session.compare(workload, request.compare, request.rounds)
        return [_session.measure(workload, config, request.best_us)]
    except torch.OutOfMemoryError as error:
        _session.release()
        bad = Measurement("out_of_resources", error=f"device memory: {str(error)[:300]}")
        return [bad] * max(len(request.compare), 1)
    except RuntimeError as error:
        # An error of the device stays in its context: this process has to go.
        if "CUDA" not in str(error):
            raise
        print(f"{type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)
        os._exit(70)
