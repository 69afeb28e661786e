"""The problem, the machine, the configurations, and which of them may run where."""
