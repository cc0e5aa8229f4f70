"""Alias of `sparsity.masks.distributions`: programs for jaxpruner import this path."""

from sparsity.masks.distributions import (
    DISTRIBUTIONS,
    ERK,
    Distribution,
    FilterFn,
    Uniform,
    erk,
    uniform,
)

__all__ = ["DISTRIBUTIONS", "ERK", "Distribution", "FilterFn", "Uniform", "erk", "uniform"]
