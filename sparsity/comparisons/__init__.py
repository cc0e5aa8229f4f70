"""Comparisons of cut and compact models with the masked model."""
