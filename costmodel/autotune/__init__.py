"""Tunes any Triton kernel: a drop-in for ``triton.autotune``."""
