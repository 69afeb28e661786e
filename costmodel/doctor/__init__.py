"""What is wrong with a set-up."""
