"""From a Triton source to its binary and the counts of its PTX; needs no GPU, for any kernel."""
