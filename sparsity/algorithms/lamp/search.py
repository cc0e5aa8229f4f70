"""Search for the highest scores of LAMP in all layers together, without sorting the layers.

Scores never rise from one rank of a layer to the next, so a layer keeps its largest squares. The
search looks for the square at which the kept ones end:

1. A bracket of squares for each layer, (low, high], by float32 sums. A sample tells where it may
   be; passes count and add the squares above a few pivots, and narrow the brackets of all layers
   together. Nothing but speed depends on the brackets.
2. A last pass counts and adds exactly the squares above each bracket, and reads those inside. Only
   these are sorted. With the exact sum, their scores have the same bits as if all were sorted.
3. The mask keeps the weights above the brackets, and of those inside the ones of highest score. It
   is proved if all weights above score higher than the last kept one, and all below score lower.

If the proof fails, for example because many weights tie, layers are sorted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.algorithms.lamp.brackets import count_weights, find_brackets, split_into_rows
from sparsity.algorithms.lamp.scores import (
    ScaledLayer,
    count_bits,
    count_digit_bits,
    lamp_scores,
    read_score_dtype,
    score_ranks,
)
from sparsity.core import exact, exact_sums
from sparsity.core.exact import Words
from sparsity.core.kernels import use_flat
from sparsity.masks.positions import kept_positions
from sparsity.selection import Ranked, topk_masks

_ROOM = 4096, 16_384  # least and most weights of a layer to sample, and to sort
_SHARE = 256  # one in so many weights of the largest layer between these ends
_GROUP = 16  # layers of a switch: its time to compile grows with their square
_MARGIN = 1e-5  # of the proof, beyond the rounding of a quotient


class _InsideBracket(NamedTuple):
    """Weights inside the brackets, [layers, ...], or inside that of a layer.

    Attributes:
      num_above: number of weights above the bracket, int32.
      num_inside: number of weights inside, int32.
      sum_above: sum of the squares above.
      positions: int32[room], increasing; empty slots hold the size of the layer or more.
      squares: [room], anything in empty slots.
    """

    num_above: jax.Array
    num_inside: jax.Array
    sum_above: Words
    positions: jax.Array
    squares: jax.Array


def search_together(arrays: Sequence[jax.Array], k: Words) -> list[jax.Array] | None:
    """Returns uint8 masks of the k highest scores of all layers; `None`: a sort is needed.

    Ties go to the lowest index, of the first layer.

    Args:
      arrays: the weights of the layers.
      k: number of weights to keep, two words.
    """
    is_large = any(x.size > _ROOM[1] for x in arrays) and all(x.size for x in arrays)
    is_uniform = len({read_score_dtype(x) for x in arrays}) == 1
    is_local = jax.default_backend() == "cpu" and all(map(_is_local, arrays))
    if not (is_large and is_uniform and is_local):
        return None
    return search(arrays, (k[0].reshape(1), k[1].reshape(1)))[0]


@jax.jit
def search(arrays: Sequence[jax.Array], k: Words) -> tuple[list[jax.Array], jax.Array]:
    """Returns the masks, and whether the search proved them; otherwise sorting made them."""
    layers = [ScaledLayer.read(x) for x in arrays]
    sizes = count_weights(layers)
    least, most = _ROOM
    room = min(max(int(sizes.max()) // _SHARE, least), most)
    low, high = find_brackets(layers, exact.to_float(k)[0], room)
    parts = [_read_inside(*x, room) for x in zip(layers, low, high, strict=True)]
    inside: _InsideBracket = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    chosen, is_proved = _choose_inside(inside, low, high, sizes, (k[0][0], k[1][0]))

    def mask_by_search() -> list[jax.Array]:
        columns = layers, high, inside.positions, chosen, arrays
        return [
            (layer.squares() > end).astype(jnp.uint8).at[positions].max(mask, mode="drop")
            .reshape(array.shape)
            for layer, end, positions, mask, array in zip(*columns, strict=True)
        ]  # fmt: skip

    def mask_by_sorting() -> list[jax.Array]:
        all_ranked = [Ranked.wrap(x) for x in _score_by_sorting(arrays)]
        return topk_masks(all_ranked, k, together=True)

    masks: list[jax.Array] = lax.cond(is_proved, mask_by_search, mask_by_sorting)
    return masks, is_proved


def _choose_inside(
    inside: _InsideBracket, low: jax.Array, high: jax.Array, sizes: np.ndarray, k: Words
) -> tuple[jax.Array, jax.Array]:
    """Returns the mask of the slots to keep besides all weights above, and whether it is proved.

    The score of a weight is its square over the sum of the squares of its layer that rank no lower.
    So a weight above the bracket scores more than `high` over the sum above, and a weight below at
    most `low` over the sum above and inside. If these bounds of all layers lie on either side of
    the lowest score that is kept inside, the k highest scores are those above and the kept slots,
    provided that all weights inside have a slot.

    Args:
      inside: the weights inside the brackets.
      low: lower ends of the brackets, [layers].
      high: upper ends of the brackets, [layers].
      sizes: numbers of weights, [layers].
      k: number of weights to keep, of all layers.

    Returns:
      uint8[layers, room], and a bool scalar.
    """
    bits = np.array([count_bits(size) for size in sizes.tolist()])
    is_slot = inside.positions < sizes[:, None]
    scores, sums = _score_slots(jnp.where(is_slot, inside.squares, np.nan), bits, inside.sum_above)
    above, above_and_inside = (
        exact.total(x) for x in (inside.num_above, inside.num_above + inside.num_inside)
    )
    # The k-th weight must lie inside a bracket, or the slots do not decide.
    is_last_inside = ~exact.at_least(above, k) & exact.at_least(above_and_inside, k)
    num_needed = exact.minus(k, above)
    slots = Ranked.wrap(scores, is_slot.astype(jnp.uint8))
    [chosen] = topk_masks([slots], (num_needed[0][None], num_needed[1][None]), together=True)
    last = jnp.min(jnp.where(chosen > 0, scores, np.inf))
    # Scores at the ends: square / sum, for the weights just above and just below each bracket.
    least_above, most_below = (
        square / (exact.to_float(x) * 2.0**-bits).astype(np.float32)
        for square, x in ((high, inside.sum_above), (low, sums))
    )
    least_above = jnp.where(inside.num_above > 0, least_above, np.inf)
    is_above_kept = jnp.all(least_above * (1 - _MARGIN) > last)
    is_below_removed = jnp.all(most_below * (1 + _MARGIN) < last)
    is_ranked = is_last_inside & (is_above_kept & is_below_removed)
    return chosen, is_ranked & jnp.all(inside.num_inside <= chosen.shape[1])


def _score_slots(squares: jax.Array, bits: np.ndarray, above: Words) -> tuple[jax.Array, Words]:
    """Returns scores of squares[layers, n], and the sums of all squares.

    Args:
      squares: NaN for entries to leave out.
      bits: the numbers B, [layers].
      above: sums of the squares that are larger than these, [layers].
    """
    index = lax.broadcasted_iota(jnp.int32, squares.shape, 1)
    falling, order = lax.sort((-squares, index), num_keys=1, is_stable=True)
    ranked, sums = score_ranks(falling, bits[:, None], (above[0][:, None], above[1][:, None]))
    rows = np.arange(len(squares))[:, None]
    scores = jnp.zeros_like(squares).at[rows, order].set(ranked)
    return scores, (sums[0][:, -1], sums[1][:, -1])


def _is_local(x: jax.Array) -> bool:
    has_room = x.size + _ROOM[1] < 2**31  # positions are int32
    return has_room and use_flat(x) and jax.typeof(x).sharding.mesh.empty


def _score_by_sorting(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns `lamp_scores` of each layer; layers of a size share a program and its buffers."""
    indices_by_type: dict[Hashable, list[int]] = {}
    for i, x in enumerate(arrays):
        indices_by_type.setdefault((x.size, x.dtype), []).append(i)
    groups = [
        indices[start : start + _GROUP]
        for indices in indices_by_type.values()
        for start in range(0, len(indices), _GROUP)
    ]
    scores: dict[int, jax.Array] = {}
    for members in groups:
        if len(members) == 1:
            scores[members[0]] = lamp_scores(arrays[members[0]])
            continue
        layers = [arrays[i].reshape(-1) for i in members]
        branches = [lambda x, i=i: x[i] for i in range(len(members))]
        rows = lax.map(
            lambda i, b=branches, x=layers: lamp_scores(lax.switch(i, b, x)),
            jnp.arange(len(members)),
        )
        for row, i in enumerate(members):
            scores[i] = rows[row].reshape(arrays[i].shape)
    return [scores[i] for i in range(len(arrays))]


# ------------------------------------------------------------------ the exact sums
def _read_inside(layer: ScaledLayer, low: jax.Array, high: jax.Array, room: int) -> _InsideBracket:
    """Reads the weights with squares in (low, high]."""
    squares = split_into_rows(layer.squares())
    is_above, is_inside = squares > high, (squares > low) & ~(squares > high)
    digits = _split_digits(jnp.where(is_above, squares, 0), layer.weights.size)
    above, inside, *sums = (
        exact.total(x) for x in exact_sums.sums([is_above, is_inside, *digits], [1])
    )
    positions = kept_positions(is_inside.reshape(-1).astype(jnp.uint8), room)
    picked = layer.squares(layer.weights.at[positions].get(mode="clip"))
    counts = above[1].astype(jnp.int32), inside[1].astype(jnp.int32)
    sum_above = _join_digits(sums, count_digit_bits(layer.weights.size))
    return _InsideBracket(*counts, sum_above, positions, picked)


def _split_digits(squares: jax.Array, size: int) -> list[jax.Array]:
    """Returns digits of squares, int32, the highest first.

    A sum of `size` digits fits an int32, and a sum of so many squares fits 62 bits.
    """
    bits = count_digit_bits(size)
    digits, remainder = [], squares
    for _ in range(count_bits(size) // bits):
        remainder = remainder * 2.0**bits
        digit = jnp.trunc(remainder)
        remainder = remainder - digit
        digits.append(digit.astype(jnp.int32))
    return digits


def _join_digits(digits: Sequence[Words], bits: int) -> Words:
    """Returns the integer of some digits, the highest first."""
    total = digits[0]
    for digit in digits[1:]:
        total = exact.plus(exact.shift_left(total, bits), digit)
    return total
