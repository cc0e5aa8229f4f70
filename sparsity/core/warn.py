"""Warnings that show the line of the user's program, not a line of a library."""

from __future__ import annotations

import sys
import warnings

# Libraries that call each other between the user's line and a warning.
_LIBRARIES = {"sparsity", "jax", "jaxlib", "optax", "chex", "flax", "contextlib", "functools"}


def warn(message: str) -> None:
    """Warns at the innermost line outside of this package, of jax, and of libraries around it.

    Example:
      >>> with warnings.catch_warnings(record=True, action="always") as caught:
      ...     warn("All masks are ones.")
      >>> str(caught[0].message)
      'All masks are ones.'
    """
    frame, level = sys._getframe(), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
