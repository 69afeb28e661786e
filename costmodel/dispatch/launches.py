"""The launches of earlier calls, kept for the next calls of the same kind."""

from __future__ import annotations

import threading
from typing import Any

from costmodel.dispatch.check import Spans
from costmodel.dispatch.outputs import NewOutput
from costmodel.launch.fast import Launch
from costmodel.validation import drop_oldest

Entry = tuple[Launch, Spans, NewOutput]
"""A launch, the memory spans of its operands, and what makes an output."""


class Launches:
    """A bounded number of launches by key. The oldest goes first.

    Attributes:
        get: looks up a key. It is the dictionary's own method, so that a warm call pays for nothing
            else.
    """

    def __init__(self, at_most: int = 4096) -> None:
        self._at_most = at_most
        self._lock = threading.Lock()
        self.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self) -> dict[Any, Entry]:
        """Return what :meth:`put` needs; call it before anything is looked up for the launch."""
        return self._entries

    def put(self, key: Any, entry: Entry, begun: dict[Any, Entry]) -> None:
        """Keep a launch, unless all launches were cleared since it was begun."""
        with self._lock:
            if begun is self._entries:
                begun[key] = entry
                drop_oldest(begun, self._at_most)

    def clear(self) -> None:
        """Forget all launches, those that are being made now included."""
        with self._lock:
            self._entries: dict[Any, Entry] = {}
            self.get = self._entries.get
