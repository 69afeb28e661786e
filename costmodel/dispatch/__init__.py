"""``matmul``: from a call to a launch, and what a program may say ahead of it."""
