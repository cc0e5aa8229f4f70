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

from sparsity.core import exact
from sparsity.core.exact import Words
from sparsity.core.kernels import at_runtime, use_flat
from sparsity.masks.lamp_scores import (
    LampScores,
    ScaledLayer,
    count_bits,
    count_digit_bits,
    float_type,
    lamp_scores,
    score_ranks,
)
from sparsity.masks.positions import kept_positions
from sparsity.selection import Ranked, Scores, topk_masks

_ROOM = 4096, 16_384  # least and most weights of a layer to sample, and to sort
_SHARE = 256  # one in so many weights of the largest layer between these ends
_GROUP = 16  # layers of a switch, whose time to compile grows with the square of them
_ROWS = 1024  # of a layer: float32 sums of a row are then exact to about 1e-5
_TEETH = np.array([-8, -3, -1, 0, 1, 3, 8], np.float32)  # pivots, in deviations of a sampled rank
_PARTS = np.arange(1, 8, dtype=np.float32) / 8  # pivots of a later pass in a bracket
_FULL = 0.75  # of the room for weights inside a bracket: counts of a pass are float32
_PASSES = 8  # at most: then layers are sorted
_SLACK = 1e-4  # relative error of a score from float32 sums
_MARGIN = 1e-5  # of the proof, beyond the rounding of a quotient


class _Inside(NamedTuple):
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


class _Brackets(NamedTuple):
    """Brackets of all layers, float32[layers].

    Attributes:
      low: lower ends, which are outside.
      high: upper ends, which are inside.
      counts: about how many weights lie inside.
    """

    low: jax.Array
    high: jax.Array
    counts: jax.Array


# ------------------------------------------------------------------ the masks
def select_together(leaves: Sequence[LampScores], k: Words) -> list[jax.Array]:
    """Returns uint8 masks of the k highest scores of all layers.

    Ties go to the lowest index, of the first layer.

    Args:
      leaves: the layers.
      k: number of weights to keep, two words of uint32[1].
    """
    arrays = [leaf.weights for leaf in leaves]
    is_large = any(x.size > _ROOM[1] for x in arrays) and all(x.size for x in arrays)
    is_uniform = len({float_type(x) for x in arrays}) == 1
    is_local = jax.default_backend() == "cpu" and all(map(_is_local, arrays))
    if is_large and is_uniform and is_local:
        masks: list[jax.Array] = search(arrays, k)[0]
        return masks
    return topk_masks(_rank([leaf.compute() for leaf in leaves]), k, across_leaves=True)


@jax.jit
def search(arrays: Sequence[jax.Array], k: Words) -> tuple[list[jax.Array], jax.Array]:
    """Returns the masks, and whether the search proved them; otherwise sorting made them."""
    layers = ScaledLayer.read(arrays)
    sizes = _count_weights(layers)
    least, most = _ROOM
    room = min(max(int(sizes.max()) // _SHARE, least), most)
    low, high = _find_brackets(layers, exact.to_float(k)[0], room)
    parts = [_read_inside(*x, room) for x in zip(layers, low, high, strict=True)]
    inside: _Inside = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    chosen, is_proved = _choose_inside(inside, low, high, sizes, (k[0][0], k[1][0]))

    def by_search() -> list[jax.Array]:
        columns = layers, high, inside.positions, chosen, arrays
        return [
            (layer.squares() > end).astype(jnp.uint8).at[at].max(mask, mode="drop")
            .reshape(array.shape)
            for layer, end, at, mask, array in zip(*columns, strict=True)
        ]  # fmt: skip

    def by_sorting() -> list[jax.Array]:
        return topk_masks(_rank(_sorted_scores(arrays)), k, across_leaves=True)

    masks: list[jax.Array] = lax.cond(is_proved, by_search, by_sorting)
    return masks, is_proved


def _choose_inside(
    inside: _Inside, low: jax.Array, high: jax.Array, sizes: np.ndarray, k: Words
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
    is_last_inside = ~exact.at_least(above, k) & exact.at_least(above_and_inside, k)
    need = exact.minus(k, above)
    slots = Ranked(Scores.wrap(scores), is_slot.astype(jnp.uint8))
    [chosen] = topk_masks([slots], (need[0][None], need[1][None]), across_leaves=True)
    last = jnp.min(jnp.where(chosen > 0, scores, np.inf))
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
    place = lax.broadcasted_iota(jnp.int32, squares.shape, 1)
    falling, order = lax.sort((-squares, place), num_keys=1, is_stable=True)
    ranked, sums = score_ranks(falling, bits[:, None], (above[0][:, None], above[1][:, None]))
    rows = np.arange(len(squares))[:, None]
    scores = jnp.zeros_like(squares).at[rows, order].set(ranked)
    return scores, (sums[0][:, -1], sums[1][:, -1])


def _rank(scores: Sequence[jax.Array]) -> list[Ranked]:
    """Returns scores in one dtype."""
    dtype = jnp.result_type(*scores)
    return [Ranked(Scores.wrap(x.astype(dtype))) for x in scores]


def _is_local(x: jax.Array) -> bool:
    has_room = x.size + _ROOM[1] < 2**31  # positions are int32
    return has_room and use_flat(x) and jax.typeof(x).sharding.mesh.empty


def _count_weights(layers: Sequence[ScaledLayer]) -> np.ndarray:
    """Returns the numbers of weights, int32[layers]."""
    return np.array([layer.weights.size for layer in layers], np.int32)


def _sorted_scores(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns `lamp_scores` of each layer; layers of a size share a program and its buffers."""
    alike: dict[Hashable, list[int]] = {}
    for i, x in enumerate(arrays):
        alike.setdefault((x.size, x.dtype), []).append(i)
    groups = [
        each[at : at + _GROUP] for each in alike.values() for at in range(0, len(each), _GROUP)
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
        for place, i in enumerate(members):
            row = lax.dynamic_index_in_dim(rows, at_runtime(place), 0, keepdims=False)
            scores[i] = row.reshape(arrays[i].shape)
    return [scores[i] for i in range(len(arrays))]


# ------------------------------------------------------------------ the exact sums
def _read_inside(layer: ScaledLayer, low: jax.Array, high: jax.Array, room: int) -> _Inside:
    """Reads the weights with squares in (low, high]."""
    squares = _in_rows(layer.squares())
    is_above, is_inside = squares > high, (squares > low) & ~(squares > high)
    digits = _split_digits(jnp.where(is_above, squares, 0), layer.weights.size)
    above, inside, *sums = (exact.total(x) for x in exact.sums([is_above, is_inside, *digits], [1]))
    positions = kept_positions(is_inside.reshape(-1).astype(jnp.uint8), room)
    picked = layer.squares(layer.weights.at[positions].get(mode="clip"))
    counts = above[1].astype(jnp.int32), inside[1].astype(jnp.int32)
    sum_above = _join_digits(sums, count_digit_bits(layer.weights.size))
    return _Inside(*counts, sum_above, positions, picked)


def _in_rows(x: jax.Array) -> jax.Array:
    """Returns x[n] as rows, for threads to share."""
    most = min(_ROWS, len(x))
    return x.reshape(next(rows for rows in range(most, 0, -1) if len(x) % rows == 0), -1)


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


# ------------------------------------------------------------------ the brackets
def _find_brackets(
    layers: Sequence[ScaledLayer], k: jax.Array, room: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the ends of the brackets, each [layers]; a small layer lies inside as a whole."""
    is_large = _count_weights(layers) > room
    low = jnp.full(len(layers), -1, jnp.float32)
    first = _sample_pivots(layers, k, room)

    def is_wide(state: tuple[jax.Array, _Brackets]) -> jax.Array:
        passes, brackets = state
        return (passes < _PASSES) & jnp.any((brackets.counts > room * _FULL) & is_large)

    def step(state: tuple[jax.Array, _Brackets]) -> tuple[jax.Array, _Brackets]:
        passes, brackets = state
        ends = jnp.stack([brackets.low, brackets.high], axis=1)
        # In the order of the floats, which is about that of logarithms.
        start, stop = (lax.bitcast_convert_type(x, jnp.int32) for x in jnp.clip(ends.T, 0, 1))
        width = (stop - start).astype(jnp.float32)
        places = start[:, None] + (width[:, None] * _PARTS).astype(jnp.int32)
        pivots = lax.bitcast_convert_type(places, jnp.float32)
        pivots = jnp.concatenate([ends, jnp.where(passes == 0, first, pivots)], axis=1)
        return passes + 1, _narrow_brackets(layers, pivots, k)

    start = jnp.int32(0), _Brackets(low, low + np.inf, low + np.inf)
    _, (low, high, _) = lax.while_loop(is_wide, step, start)
    return jnp.where(is_large, low, -1), jnp.where(is_large, high, np.inf)


def _sample_pivots(layers: Sequence[ScaledLayer], k: jax.Array, room: int) -> jax.Array:
    """Returns pivots[layers, n] about the squares of the last kept weights, by samples.

    Each entry of a sample stands for `share` weights of its layer. The score of an entry is about
    its square over `share` times the sum of the squares of the sample that are no lower. The scores
    of all samples, each counted `share` times, give the score of the k-th weight, and so the rank
    of the last kept weight in each sample. Pivots are the squares of the sample at this rank, and
    at some deviations of the rank below and above.
    """
    samples, counts = [], []
    for layer in layers:
        stride = -(-layer.weights.size // room) | 1  # odd: not in step with rows
        weights = lax.optimization_barrier(layer.weights[::stride])
        sample = layer.squares(weights).astype(jnp.float32)
        counts.append(len(sample))
        samples.append(jnp.pad(jnp.where(jnp.isnan(sample), 0, sample), (0, room - len(sample))))
    count = np.array(counts, np.int32)[:, None]
    share = _count_weights(layers).astype(np.float32)[:, None] / count.astype(np.float32)
    squares = -jnp.sort(-jnp.stack(samples), axis=1)
    sums = jnp.cumsum(squares, axis=1) * share
    scores = squares / jnp.where(sums == 0, 1, sums)
    last = _find_last_score(scores, np.where(np.arange(room) < count, share, 0), k)
    rank = jnp.sum(scores >= last, axis=1, keepdims=True, dtype=jnp.int32)
    rank = jnp.minimum(rank, count).astype(jnp.float32)
    deviation = jnp.sqrt(rank * (1 - rank / count.astype(np.float32)) + 1)
    places = jnp.round(rank + deviation * _TEETH).astype(jnp.int32)
    pivots = jnp.take_along_axis(squares, jnp.clip(places, 0, count - 1), axis=1)
    return jnp.where(places < 0, np.inf, jnp.where(places >= count, -1, pivots))


def _find_last_score(scores: jax.Array, weights: np.ndarray, k: jax.Array) -> jax.Array:
    """Returns the score at which the weights of scores that are no lower reach k, a scalar."""
    falling, ordered = lax.sort(
        (-scores.reshape(-1), jnp.asarray(weights.astype(np.float32).reshape(-1))), num_keys=1
    )
    at = jnp.sum(jnp.cumsum(ordered) < k, dtype=jnp.int32)
    return -falling[jnp.minimum(at, len(falling) - 1)]


def _narrow_brackets(layers: Sequence[ScaledLayer], pivots: jax.Array, k: jax.Array) -> _Brackets:
    """Returns the brackets between the pivots next to the square of the last kept weight.

    At a pivot the score is about the pivot over the sum of the squares above: the score of the last
    weight above, and of the first below.
    """
    squares = (_in_rows(layer.squares().astype(jnp.float32)) for layer in layers)
    tables = [_count_above(x, row) for x, row in zip(squares, pivots, strict=True)]
    counts, sums = (jnp.stack(x).astype(jnp.float32) for x in zip(*tables, strict=True))
    scores = jnp.where(counts > 0, pivots / jnp.maximum(sums, 1e-37), np.inf)
    scores = jnp.where(pivots < 0, -1, scores)
    sizes = _count_weights(layers).astype(np.float32)[:, None]
    floor, ceiling = _bound_last_score(scores, counts, sizes, k)
    is_below, is_above = scores <= floor, scores > ceiling
    low = jnp.max(jnp.where(is_below, pivots, -1), axis=1)
    high = jnp.min(jnp.where(is_above, pivots, np.inf), axis=1)
    reached = jnp.min(jnp.where(is_below, counts, sizes), axis=1)
    return _Brackets(low, high, reached - jnp.max(jnp.where(is_above, counts, 0), axis=1))


def _bound_last_score(
    scores: jax.Array, counts: jax.Array, sizes: np.ndarray, k: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a lower and an upper bound of the k-th highest score, two scalars.

    Take the score t of some pivot. In each layer, weights above a pivot whose score exceeds t score
    more than t themselves; weights below a pivot whose score does not exceed t do not. So at least
    `fewest` and at most `most` weights score more than t. If `fewest` reaches k, the k-th highest
    score is no lower than t; if `most` stays below k, it is no higher.

    Args:
      scores: scores at the pivots, [layers, n].
      counts: numbers of weights above the pivots, [layers, n].
      sizes: numbers of weights, [layers, 1].
      k: number of weights to keep, of all layers.
    """
    t = scores.reshape(-1)
    exceeds = scores > t[:, None, None]
    fewest = jnp.sum(jnp.max(jnp.where(exceeds, counts, 0), axis=2), axis=1)
    most = jnp.sum(jnp.min(jnp.where(exceeds, sizes, counts), axis=2), axis=1)
    floor = jnp.max(jnp.where(fewest >= k, t, -1)) * (1 - _SLACK)
    ceiling = jnp.min(jnp.where(most < k, t, np.inf)) * (1 + _SLACK)
    return floor, ceiling


def _count_above(squares: jax.Array, pivots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns numbers and sums of squares[rows, width] above pivots[n], int32[n] and float32[n]."""
    stored, pivots = lax.optimization_barrier((squares, pivots))
    masks = [stored > pivot for pivot in pivots]
    n = len(masks)
    rows = lax.reduce(
        [x.astype(jnp.int32) for x in masks] + [jnp.where(x, stored, 0) for x in masks],
        [np.int32(0)] * n + [np.float32(0)] * n,
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        (1,),
    )
    counts = [jnp.sum(x, dtype=jnp.int32) for x in rows[:n]]
    return jnp.stack(counts), jnp.stack([jnp.sum(x) for x in rows[n:]])
