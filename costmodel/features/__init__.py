"""What a model sees of a configuration on a workload."""
