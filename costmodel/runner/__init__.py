"""Timing configurations: on the device, or replayed from a recording."""

from __future__ import annotations

from costmodel.runner.replay import ReplayRunner

__all__ = ["ReplayRunner"]
