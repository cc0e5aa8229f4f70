"""Proofs that removing channels of a model gives the same results as masking them."""
