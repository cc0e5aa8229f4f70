"""Refits: the kept weights take over from the pruned ones, layer by layer."""
