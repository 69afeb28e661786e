"""What is kept in dictionaries that may not grow for ever."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

__all__ = ["SharedRoom", "drop_oldest"]


def drop_oldest(kept: dict[Any, Any], limit: int) -> None:
    """Drop what was put in first until no more than ``limit`` are left; under the caller's lock."""
    while len(kept) > limit:
        kept.pop(next(iter(kept)), None)


class SharedRoom:
    """Room for so many entries in any number of dictionaries together; the oldest go first.

    For any number of threads. Whoever looks an entry up asks its dictionary, at no other cost.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.RLock()  # the handler of a signal may launch something too
        self._entries: deque[tuple[dict[Any, Any], Any]] = deque()

    def put(self, kept: dict[Any, Any], key: Any, value: Any) -> None:
        """Keep an entry in a dictionary that nothing else adds to or takes from."""
        with self._lock:
            if key not in kept:  # another thread may have been faster
                self._entries.append((kept, key))
            kept[key] = value
            while len(self._entries) > self._limit:
                oldest, its_key = self._entries.popleft()
                oldest.pop(its_key, None)
