"""From a workload to the configuration to launch: rank, time the best few, choose."""
