"""From a configuration to its binary, and to what its PTX shows; no GPU needed."""
