"""Choice of channels by OSSCAR: the kept channels reconstruct the outputs of all channels best.

A channel is some inputs of each matrix that reads it. Each matrix has one table. For inputs that
are in, the table holds their inverse Gram matrix and the least-squares weights. For inputs that are
out, it holds the Gram matrix of their residuals on the inputs that are in, and the products of
these residuals with the missing part of the outputs. One pivot (a principal pivot transform) moves
a channel from one side to the other, a second one moves it back.

Source: Meng et al. 2024, arXiv 2403.12983. Comments carry the names of its code: weights W, the
Gram matrix XTX, and XTY, its products with the dense weights; S are the inputs that are in, c those
of a channel. The code computes inv(XTX_S) again for each exchange; here pivots update it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve

from sparsity.calibration.statistics.grams import compute_damping_shifts, dot


class ReaderMatrices(NamedTuple):
    """Matrices that read the channels of a group.

    Attributes:
      weights: [layers, matrices, outputs, inputs].
      grams: [layers, matrices, inputs, inputs].
      input_indices: int[channels, n], the inputs of each channel.
    """

    weights: jax.Array
    grams: jax.Array
    input_indices: jax.Array


class _State(NamedTuple):
    """Mask of the channels that are in, the tables of all readers, and the error."""

    inside: jax.Array
    # [matrices, inputs, inputs + outputs]. Of S: inv(XTX_S) and W_S = inv(XTX_S) XTY_S; of an input
    # c that is out: C = XTX_cc - XTX_cS inv(XTX_S) XTX_Sc and G = XTY_c - XTX_cS W_S.
    tables: list[jax.Array]
    error: jax.Array


class _ExchangeSearch(NamedTuple):
    """Best state so far, and the numbers of channels that go out and come in next."""

    state: _State
    out: jax.Array
    back: jax.Array  # 0 only in the first step


@jax.jit
def choose_channels(
    readers: Sequence[ReaderMatrices],
    num_kept: chex.Numeric,
    swap: chex.Numeric,
    damping: chex.Numeric,
) -> jax.Array:
    """Returns the mask of the kept channels of each layer, bool[layers, channels].

    Args:
      readers: all matrices that read the channels.
      num_kept: the number of channels that stay.
      swap: the number of channels that are exchanged at once at first.
      damping: added to the diagonals of the Grams, in units of their mean over live inputs.
    """
    input_indices = [reader.input_indices for reader in readers]
    channels = len(input_indices[0])
    num_exchanged = jnp.minimum(swap, jnp.minimum(num_kept, channels - num_kept))

    def switch_channel(state: _State, is_out: chex.Numeric) -> _State:
        """Takes out the channel that costs least, or brings in the channel that gains most."""
        changes = _compute_error_changes(state.tables, input_indices)
        ranked = jnp.where(state.inside == is_out, jnp.where(is_out, -changes, changes), -jnp.inf)
        # Among equals the lower index stays, or comes in.
        channel = jnp.argmax(jnp.where(is_out, ranked[::-1], ranked))
        channel = jnp.where(is_out, channels - 1 - channel, channel)
        tables = [
            _pivot(x, indices[channel])
            for x, indices in zip(state.tables, input_indices, strict=True)
        ]
        return _State(
            state.inside.at[channel].set(~state.inside[channel]),
            tables,
            state.error - ranked[channel],
        )

    def step(search: _ExchangeSearch) -> _ExchangeSearch:
        """Exchanges some channels; fewer the next time if that was no gain."""
        old_state, num_out, num_in = search
        new_state = lax.fori_loop(
            0, num_out + num_in, lambda i, state: switch_channel(state, i < num_out), old_state
        )
        rounding = jnp.sqrt(jnp.finfo(old_state.error.dtype).eps)  # lest exchanges never end
        is_better = (num_in == 0) | (new_state.error < old_state.error * (1 - rounding))
        state = jax.tree.map(functools.partial(jnp.where, is_better), new_state, old_state)
        num_next = jnp.where(
            num_in == 0, num_exchanged, jnp.where(is_better, num_out, num_out // 2)
        )
        return _ExchangeSearch(state, num_next, num_next)

    def choose_layer(matrices: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
        tables = [_make_table(weights, grams, damping) for weights, grams in matrices]
        error = jnp.zeros((), jnp.result_type(*tables))  # W solves the damped system exactly
        complete = _State(jnp.ones(channels, bool), tables, error)
        search = _ExchangeSearch(
            complete, jnp.asarray(channels - num_kept), jnp.zeros_like(num_exchanged)
        )
        return lax.while_loop(lambda search: search.out > 0, step, search).state.inside

    return lax.map(choose_layer, [(x.weights, x.grams) for x in readers])


def _make_table(weights: jax.Array, grams: jax.Array, damping: chex.Numeric) -> jax.Array:
    """Returns the table of matrices with all inputs in, scaled to unit norm."""
    inputs = grams.shape[-1]
    eye = jnp.eye(inputs, dtype=grams.dtype)
    diagonal = jnp.diagonal(grams, axis1=-2, axis2=-1)
    shift = compute_damping_shifts(grams, damping)
    scale = lax.rsqrt(diagonal + shift)
    jitter = jnp.sqrt(jnp.finfo(grams.dtype).eps)  # or rounding decides where data say nothing
    ridge = (shift * jnp.square(scale) + jitter)[..., None] * eye
    system = grams * scale[..., :, None] * scale[..., None, :] + ridge
    inverse = _invert_blocks(system)
    # Weights of dead inputs change no output, so they must not count in the errors.
    scaled = jnp.where(diagonal > 0, 1 / scale, 0)[..., None, :] * weights
    return jnp.concatenate([inverse, scaled.mT], -1)


def _compute_error_changes(
    tables: Sequence[jax.Array], input_indices: Sequence[jax.Array]
) -> jax.Array:
    """Returns by how much the error changes if a channel changes sides, [channels].

    The error grows if a channel goes out, by the sum of W_c^T inv(inv(XTX_S)_cc) W_c over matrices
    and outputs, and shrinks if a channel comes in, by the sum of G^T inv(C) G. A table holds both
    pairs in the same places, so that one formula serves channels on either side.
    """
    total = jnp.zeros((), jnp.result_type(*tables))
    for table, indices in zip(tables, input_indices, strict=True):
        inputs = table.shape[-2]
        blocks = table[:, indices[:, :, None], indices[:, None, :]]  # inv(XTX_S)_cc or C
        rows = table[:, indices, inputs:]  # W_c or G
        total = total + jnp.sum(dot(_invert_blocks(blocks), rows) * rows, (0, 2, 3))
    return total


def _pivot(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the table after inputs have changed sides."""
    columns = table[:, :, indices]
    inverse = _invert_blocks(columns[:, indices])
    rows = dot(inverse, table[:, indices])
    table = (table - dot(columns, rows)).at[:, indices].set(rows)
    table = table.at[:, :, indices].set(-dot(columns, inverse))
    return table.at[:, indices[:, None], indices].set(inverse)


def _invert_blocks(matrices: jax.Array) -> jax.Array:
    """Inverts positive definite matrices."""
    if matrices.shape[-1] == 1:
        return 1 / matrices
    eye = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), matrices.shape)
    return cho_solve((lax.linalg.cholesky(matrices, symmetrize_input=False), True), eye)
