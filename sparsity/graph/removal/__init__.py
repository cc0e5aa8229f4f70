"""Proofs that a model without some channels computes what masking them gives."""
