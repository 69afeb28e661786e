"""Dictionaries that must not grow without limit."""

from __future__ import annotations

from typing import Any


def drop_oldest(kept: dict[Any, Any], limit: int) -> None:
    """Drop the oldest entries until at most ``limit`` are left; under the caller's lock."""
    while len(kept) > limit:
        kept.pop(next(iter(kept)), None)
