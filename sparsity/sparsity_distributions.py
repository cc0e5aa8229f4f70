"""Alias of `sparsity.masks.distributions`: programs for jaxpruner import this path."""

from sparsity.masks.distributions import (
    DISTRIBUTIONS as DISTRIBUTIONS,
    ERK as ERK,
    Distribution as Distribution,
    FilterFn as FilterFn,
    Uniform as Uniform,
    erk as erk,
    uniform as uniform,
)
