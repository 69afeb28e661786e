"""A lock for each key that is in use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from costmodel.errors import CostModelError


class KeyedLocks:
    """One thread at a time finds the winner of a key; a lock goes with the last that wants it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: dict[Any, _Shared] = {}
        self._thread = threading.local()

    def __len__(self) -> int:
        return len(self._shared)

    @contextmanager
    def alone(self, key: Any) -> Iterator[None]:
        """Keep other threads from the same key.

        Raises:
            CostModelError: this thread holds a lock already, and might wait for itself.
        """
        if getattr(self._thread, "holds_one", False):
            raise CostModelError(
                "a winner was asked for while one is being found, as by a model that multiplies "
                "with costmodel: multiply with torch there"
            )
        with self._lock:
            shared = self._shared.setdefault(key, _Shared())
            shared.users += 1
        try:
            with shared.lock:
                self._thread.holds_one = True
                try:
                    yield
                finally:
                    self._thread.holds_one = False
        finally:
            with self._lock:
                shared.users -= 1
                if not shared.users:
                    del self._shared[key]


class _Shared:
    """A lock, and how many threads have or want it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
