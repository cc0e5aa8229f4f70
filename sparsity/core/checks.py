"""What arguments are."""

from typing import Any

import jax


def is_traced(x: Any) -> bool:
    """Whether the value of x is not known yet."""
    return isinstance(x, jax.core.Tracer)
