"""``matmul``: from a call to a launch, and what a program can set up before its calls."""
