"""The timing process: what runs beside the GPU, one request at a time.

It is a child that may die of a kernel; :mod:`costmodel.measure.device` is the parent's side.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf

from costmodel.compile.triton_private import know_triton_key
from costmodel.data.measurement import NO_ROOM, Measurement
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.kernel_code import import_kernels
from costmodel.gemm.workload import Workload
from costmodel.measure.operands import NoRoom
from costmodel.measure.protocol import TimingProtocol
from costmodel.measure.session import Session

__all__ = ["Request", "answer", "start"]


# How the driver and cuBLAS say that a device is full, or (in its exclusive mode) has no room for a
# second process.
_FULL = (
    "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED",
    "busy or unavailable",
)  # fmt: skip
_REHEARSAL = Workload.dense(64, 64, 64)


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
_make_session: Callable[[], Session]


def start(protocol: TimingProtocol, device_index: int, seed: int) -> None:
    """Set the process up. Called once in each fresh one."""
    global _make_session

    # Under TRITON_INTERPRET the kernels would run on the CPU, and what that takes means nothing.
    os.environ.pop("TRITON_INTERPRET", None)
    know_triton_key()
    import_kernels()
    _make_session = partial(Session, protocol, device_index, seed)
    with suppress(NoRoom):  # each request will ask again
        _started()


def _started() -> Session:
    """The session, begun if there is none.

    Raises:
        NoRoom: the device is full. It may have room later, and this process is kept.
    """
    global _session

    if _session is None:
        try:
            session = _make_session()
            # What is slow the first time is done while nobody waits: cuBLAS, graphs, the check.
            session.measure(_REHEARSAL, None, inf)
        except RuntimeError as error:  # torch.OutOfMemoryError is of this kind
            if not any(text in str(error) for text in _FULL):
                raise
            raise NoRoom(str(error).splitlines()[0][:300]) from None
        _session = session
    return _session


def answer(request: Request | None) -> list[Measurement]:
    """Time what is asked: one measurement, or one for each of ``compare``.

    None asks for nothing, now or soon: the device's memory is given back.
    """
    if request is None:
        if _session is not None:
            _session.rest()
        return []
    try:
        return _answer(request)
    except NoRoom as error:
        return _out_of_resources(request, f"{NO_ROOM}: {error}")


def _answer(request: Request) -> list[Measurement]:
    import torch

    workload, config = request.workload, request.config
    try:
        session = _started()
        if request.compare:
            return session.compare(workload, request.compare, request.rounds)
        return [session.measure(workload, config, request.best_us)]
    except torch.OutOfMemoryError as error:
        session.release()
        return _out_of_resources(request, f"device memory: {str(error)[:300]}")
    except RuntimeError as error:
        # An error of the device stays in its context: this process has to go.
        if "CUDA" not in str(error):
            raise
        print(f"{type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)
        os._exit(70)


def _out_of_resources(request: Request, error: str) -> list[Measurement]:
    return [Measurement("out_of_resources", error=error)] * max(len(request.compare), 1)
