"""Training step of a wrapped optimizer, and the state of the optimizer."""
