"""Judges rankings: the held-out list, speed kept at k, the protocol."""
