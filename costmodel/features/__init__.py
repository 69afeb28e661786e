"""The columns by which a model sees a configuration on a workload."""
