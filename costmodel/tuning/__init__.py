"""Choosing a configuration for a workload: rank, time the best few, keep the winner."""
