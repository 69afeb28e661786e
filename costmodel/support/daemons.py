"""Many answers, each found by a daemon thread, and how many such threads there is room for.

Neither by concurrent.futures nor by joblib: once the main thread has ended these take no work, and
cannot be imported, though other threads serve on; and the interpreter waits for what they have.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Daemons", "usable_cores"]

T = TypeVar("T")
R = TypeVar("R")

_CGROUPS = Path("/sys/fs/cgroup")


class Daemons(Generic[T, R]):
    """Daemon threads that apply a function to items; the interpreter ends without waiting for them.

    Args:
        function: of one item; called in several threads at once.
        items: begun in this order.
        at_once: threads at most.
        name: of the threads.
    """

    def __init__(
        self, function: Callable[[T], R], items: Iterable[T], at_once: int, name: str
    ) -> None:
        self._function, self._todo = function, deque(items)
        self._count = len(self._todo)
        self._at_once, self._name = min(at_once, self._count), name
        self._answers: SimpleQueue[R | _Raised] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def answers(self) -> Iterator[R]:
        """Start, and give each answer as soon as it is there, or raise what the function raised."""
        # At its end the interpreter kills the children of the items at hand: no others may follow.
        atexit.register(self.cancel)
        self._start()
        for _ in range(self._count):
            answer = self._answers.get()
            if isinstance(answer, _Raised):
                raise answer.error
            yield answer

    def cancel(self) -> None:
        """Begin no further items. Whoever waits for an answer to one gets an error."""
        self._todo.clear()
        self._answers.put(_Raised(RuntimeError("cancelled: the program ends, or its user left")))

    def join(self) -> None:
        """Wait for the items that were begun."""
        atexit.unregister(self.cancel)
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        for _ in range(self._at_once):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this process may have no more threads
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while True:
            try:
                item = self._todo.popleft()
            except IndexError:
                return
            try:
                self._answers.put(self._function(item))
            except BaseException as error:  # whoever waits would wait for ever
                self._answers.put(_Raised(error))


@dataclass(frozen=True, slots=True)
class _Raised:
    """What was raised in place of an answer."""

    error: BaseException


def usable_cores() -> int:
    """The cores that this process may use: by affinity, container and joblib's variable."""
    own = _number(os.environ.get("LOKY_MAX_CPU_COUNT", ""))
    limits = (len(os.sched_getaffinity(0)), _quota(), own)
    return min(math.ceil(limit) for limit in limits if limit is not None)


def _quota() -> float | None:
    """Cores' worth of time that the container may use; None: all that there is."""
    first_version = [f"cpu/cpu.cfs_{part}_us" for part in ("quota", "period")]
    for names in (["cpu.max"], first_version):
        try:
            texts = [(_CGROUPS / name).read_text() for name in names]
        except OSError:
            continue
        fields = " ".join(texts).split()
        quota, period = map(_number, fields) if len(fields) == 2 else (None, None)
        return quota / period if quota and period else None
    return None


def _number(text: str) -> int | None:
    """A positive number; None for what is none, as "max" and "-1"."""
    return int(text) if text.strip().isdigit() and int(text) > 0 else None
