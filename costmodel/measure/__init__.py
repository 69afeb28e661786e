"""Timing configurations: on the device, or replayed from a recording."""
