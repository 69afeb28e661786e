"""Recorded rows, on disk and as columns."""
