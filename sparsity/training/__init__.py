"""One training step of a wrapped optimizer, and its state."""
