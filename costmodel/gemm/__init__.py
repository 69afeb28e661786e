"""The problem, the configurations, the kernel families, and which of them may run where."""
