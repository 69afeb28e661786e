"""What is kept in dictionaries that may not grow for ever."""

from __future__ import annotations

from typing import Any

__all__ = ["drop_oldest"]


def drop_oldest(kept: dict[Any, Any], limit: int) -> None:
    """Drop what was put in first until no more than ``limit`` are left; under the caller's lock."""
    while len(kept) > limit:
        kept.pop(next(iter(kept)), None)
