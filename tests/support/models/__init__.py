"""Build tiny checkpoints, and compute the tokens that they must give."""
