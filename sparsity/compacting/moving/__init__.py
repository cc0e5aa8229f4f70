"""Mask updates of compact models, slice by slice."""
