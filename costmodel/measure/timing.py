"""The timing process, which answers one request at a time.

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
from typing import TYPE_CHECKING, Any

from costmodel.compile.triton_private import know_triton_key
from costmodel.data.measurement import NO_ROOM, Measurement, Measurements
from costmodel.measure.operands import NoRoom, Problem
from costmodel.measure.protocol import TimingProtocol
from costmodel.processes import Action

if TYPE_CHECKING:
    from costmodel.measure.session import Session

# How the driver and cuBLAS say that a device is full, or (in its exclusive mode) has no room for a
# second process.
_FULL = (
    "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED",
    "busy or unavailable",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One thing to time.

    Attributes:
        problem: its operands and launches.
        choice: what to time; None for the baseline.
        best_us: the best latency of the problem so far, for stopping early.
        compare: time these in turn instead of ``choice``, ``rounds`` times (finalists).
    """

    problem: Problem
    choice: Any
    best_us: float = inf
    compare: tuple[Any, ...] = ()
    rounds: int = 0


_session: Session | None = None
_make_session: Callable[[], Session]
_rehearsal: Problem


def start(protocol: TimingProtocol, device_index: int, rehearsal: Problem, preload: Action) -> None:
    """Set the process up. Called once in each new process.

    Args:
        rehearsal: a small problem, timed once so that later ones do not pay for what is slow the
            first time.
        preload: called once; it imports what launches will need.
    """
    global _make_session, _rehearsal

    from costmodel.measure.session import Session

    # Under TRITON_INTERPRET the kernels would run on the CPU, and their times would mean nothing.
    os.environ.pop("TRITON_INTERPRET", None)
    know_triton_key()
    preload()
    _rehearsal = rehearsal
    _make_session = partial(Session, protocol, device_index)
    with suppress(NoRoom):  # each request will ask again
        _started()


def _started() -> Session:
    """Return the session, begun if there is none.

    Raises:
        NoRoom: the device is full. It may have room later, and this process is kept.
    """
    global _session

    if _session is None:
        try:
            session = _make_session()
            # Do once, while nobody waits, what is slow the first time: cuBLAS, graphs, the check.
            session.measure(_rehearsal, None, inf)
        except RuntimeError as error:  # torch.OutOfMemoryError is of this kind
            if not any(text in str(error) for text in _FULL):
                raise
            raise NoRoom(str(error).splitlines()[0][:300]) from None
        _session = session
    return _session


def answer(request: Request | None) -> Measurements:
    """Answer a request by one measurement, or one for each of ``compare``.

    None means that no request comes soon: the device's memory is given back.
    """
    if request is None:
        if _session is not None:
            _session.rest()
        return []
    import torch

    try:
        session = _started()
        if request.compare:
            return session.compare(request.problem, request.compare, request.rounds)
        return [session.measure(request.problem, request.choice, request.best_us)]
    except NoRoom as error:
        return _out_of_resources(request, f"{NO_ROOM}: {error}")
    except torch.OutOfMemoryError as error:
        session.release()
        return _out_of_resources(request, f"device memory: {str(error)[:300]}")
    except RuntimeError as error:
        # An error of the device stays in its context: this process has to end.
        if "CUDA" not in str(error):
            raise
        print(f"{type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)
        os._exit(70)


def _out_of_resources(request: Request, error: str) -> Measurements:
    return [Measurement("out_of_resources", error=error)] * max(len(request.compare), 1)
