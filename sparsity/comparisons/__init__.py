"""Comparisons of the updates of cut and compact models with those of the masked model."""
