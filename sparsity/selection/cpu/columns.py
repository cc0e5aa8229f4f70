"""Slices along the last axes, copied so that the entries of a slice lie side by side.

A pass over columns takes ten times as long as one over rows, and a search takes about six passes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.kernels import at_runtime
from sparsity.selection.keys import key_range
from sparsity.selection.scores import EntryScores, Ranked


def in_rows(ranked: Ranked) -> Ranked:
    """Returns the parameter with its last axes among the leading ones, `ranked` if it has none.

    Keys and eligibility are copied as one array, which 0 marks as not eligible: XLA:CPU transposes
    an array of bytes slower than one of int32.
    """
    if not ranked.last_axes:
        return ranked
    batch_axes, mask = ranked.batch_axes + ranked.last_axes, ranked.eligible()
    key_dtype, _, top, _ = key_range(ranked.dtype)
    if mask is None or top == np.iinfo(key_dtype).max:  # no key is free to mark an entry
        where = None if mask is None else _move(ranked, mask.astype(jnp.uint8))
        return Ranked.wrap(_move(ranked, ranked.compute()), where, batch_axes)
    marked = _move(ranked, jnp.where(mask, _exchange(ranked.keys()), 0))
    return Ranked.wrap(EntryScores(_exchange, (marked,)), marked, batch_axes)


def _exchange(keys: jax.Array) -> jax.Array:
    """Exchanges the key 0 with the highest integer, which is no key; undoes itself."""
    return keys ^ jnp.array(np.iinfo(keys.dtype).max, keys.dtype)


def _move(ranked: Ranked, x: jax.Array) -> jax.Array:
    """Copies x with its last axes behind the batch axes."""

    def copy(x: jax.Array) -> jax.Array:
        # As a vector: of a matrix XLA would change the strides and leave the entries in place.
        return x.transpose(ranked.order).reshape(-1)

    # A branch stores its inputs and its outputs: XLA:CPU copies a stored array five times as
    # fast as a computed one, and would copy once for each kernel that reads the copy.
    zero = jnp.zeros((), x.dtype)  # 0 times a boolean is an integer
    flat = lax.cond(at_runtime(1) > 0, copy, lambda x: zero * x.reshape(-1), x)
    return flat.reshape([ranked.shape[axis] for axis in ranked.order])
