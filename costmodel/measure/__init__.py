"""Timing configurations: on the device, or replayed from a recording."""

from __future__ import annotations

from costmodel.measure.replay import ReplayRunner

__all__ = ["ReplayRunner"]
