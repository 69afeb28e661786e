"""Loading a binary, and launching it on operands."""
