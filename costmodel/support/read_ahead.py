"""An iterable that is read in a thread, so that its items are made while others are in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

__all__ = ["ReadAhead"]

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Reads an iterable from ``with`` on, whether its items are asked for or not.

    Iterating gives lists: all items that are there, as soon as there is one. What the iterable
    raises is raised there, after the items before it. Leaving the block early does not wait: the
    thread closes a generator when it has the item at hand.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self._made: SimpleQueue[T | _End] = SimpleQueue()
        self._left = threading.Event()
        self._began = self._ended = 0.0

    @property
    def seconds(self) -> float:
        """Wall seconds until the iterable came to its end, or until now."""
        return (self._ended or time.perf_counter()) - self._began

    def __enter__(self) -> ReadAhead[T]:
        self._began = time.perf_counter()
        threading.Thread(target=self._read, name="costmodel-read-ahead", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def __iter__(self) -> Iterator[list[T]]:
        end = None
        while end is None:
            batch = []
            item = self._made.get()
            try:
                while not isinstance(item, _End):
                    batch.append(item)
                    item = self._made.get_nowait()
                end = item
            except Empty:
                pass
            if batch:
                yield batch
        if end.error is not None:
            raise end.error

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                self._made.put(item)
                if self._left.is_set():
                    break
            if isinstance(self._items, Generator):
                self._items.close()
        except BaseException as caught:  # it is the other thread's to handle
            error = caught
        self._ended = time.perf_counter()
        self._made.put(_End(error))


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error
