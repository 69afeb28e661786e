"""The loop that makes a dataset."""
