"""Costs of training steps on accelerators that are not there, read from compiled programs."""
