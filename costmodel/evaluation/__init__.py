"""How good a ranking is: what is held out, what is kept at k, how sure it may be."""
