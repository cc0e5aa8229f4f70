"""Sums on the host, of parts that stay in the caches: to rounding, where XLA would compile."""

from __future__ import annotations

import math
from typing import TypeVar

import jax
import numpy as np

from sparsity.core import host

Array = TypeVar("Array", np.ndarray, jax.Array)


def sum_squares(x: np.ndarray, subtracted: np.ndarray | None = None) -> float:
    """Returns the sum of |x|^2, or of |x - subtracted|^2.

    Example:
      >>> sum_squares(np.array([3.0, 4.0])), sum_squares(np.array([3j, 4.0]), np.ones(2))
      (25.0, 19.0)
    """
    flat, other = x.reshape(-1), None if subtracted is None else subtracted.reshape(-1)
    parts = ((flat[at] if other is None else flat[at] - other[at]) for at in host.chunks(len(flat)))
    return sum(float(squared(_wide(part)).sum()) for part in parts)


def sum_rows(x: np.ndarray) -> np.ndarray:
    """Returns the sums over all axes but the last, or over the only one, in float32 at least.

    Example:
      >>> sum_rows(np.ones((2, 3, 2))), sum_rows(np.ones(3))
      (array([6., 6.]), array([3.]))
    """
    width = x.shape[-1] if x.ndim > 1 else 1
    rows = x.reshape(math.prod(x.shape[:-1]) if x.ndim > 1 else x.size, width)
    total = np.zeros(width, np.result_type(_wide(rows[:0]), np.float64))
    step = max(host.CHUNK // max(width, 1), 1)
    for start in range(0, len(rows), step):
        total += _wide(rows[start : start + step]).sum(axis=0)
    return total.astype(_wide(rows[:0]).dtype)


def squared(x: Array) -> Array:
    """Returns |x|^2, of an array of numpy or of jax."""
    xp = host.namespace([x])
    squares: Array = xp.square(x.real) + xp.square(x.imag) if xp.iscomplexobj(x) else xp.square(x)
    return squares


def _wide(x: np.ndarray) -> np.ndarray:
    """Returns an array of fractions, in 32 bits at least."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x
