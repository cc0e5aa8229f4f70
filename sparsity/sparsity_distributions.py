"""Distributions by the import path of jaxpruner; see `sparsity.masks.distributions`."""

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
