"""Judges rankings: the held-out list, speed kept at k, how models are compared."""
