"""Squares relative to the larger squares of their layer: scores of LAMP, ranked without sorting.

**Scores.** A square is a float, scaled so that the largest of its layer lies in [1/4, 1]. Sums of
squares are integers: a summand is cut to a multiple of 2**-B, where B = 62 - log2(size) rounded
down to whole digits. So the bits of a score depend neither on the order of the sum nor on the mesh,
and scores never rise from one rank to the next.

**Masks.** A sample of each layer tells about which square its last kept weight has. Passes count
and add the squares above a few pivots, and narrow the brackets of all layers together. The last
pass adds exactly the squares above the brackets. Only the weights inside are sorted; their scores
follow from the exact sum. A mask holds if all weights above a bracket score higher than the last
kept one, and all below score lower. If that fails, for example because many weights tie, layers are
sorted.

Source: Lee et al. 2021, "Layer-adaptive sparsity for the magnitude-based pruning", equation 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact, sharding
from sparsity.core.exact import Words
from sparsity.core.kernels import compute_once, use_flat
from sparsity.masks.positions import kept_positions
from sparsity.selection import LazyScores, Ranked, Scores, topk_masks

_FEW = 4096, 16_384  # least and most weights of a layer to sample, and to sort
_SHARE = 256  # one in so many weights between these ends
_ROWS = 1024  # of a layer: float32 sums of a row are then exact to about 1e-5
_TEETH = np.array([-8, -3, -1, 0, 1, 3, 8], np.float32)  # pivots, in deviations of a sampled rank
_PARTS = np.arange(1, 8, dtype=np.float32) / 8  # pivots of a later pass in a bracket
_FULL = 0.75  # of the room for weights inside a bracket: counts of a pass are float32
_PASSES = 8  # at most: then layers are sorted
_SLACK = 1e-4  # relative error of a score from float32 sums
_MARGIN = 1e-5  # of the proof, beyond the rounding of a quotient

_State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # passes, low, high, counts between


@dataclasses.dataclass(frozen=True, eq=False)
class LampScores(LazyScores):
    """Scores of a layer by `lamp_scores`, computed where a scope needs the array.

    Attributes:
      weights: array of any shape, real or complex.
    """

    weights: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape

    @property
    def size(self) -> int:
        return self.weights.size

    def compute(self) -> jax.Array:
        """Returns the scores as an array."""
        scores = sharding.shard_like(self.weights, lamp_scores, self.weights)
        return sharding.place_like(self.weights, scores)


@jax.jit  # a scan over the ranks is hundreds of operations
def lamp_scores(weights: jax.Array) -> jax.Array:
    """Returns the square of each weight over the sum of the squares that rank no lower.

    Args:
      weights: array of any shape, real or complex.

    Returns:
      Scores in [0, 1] of the same shape, at least float32; the same bits on any mesh. A weight of 0
      scores 0, a weight that is not finite scores NaN.

    Example:
      >>> lamp_scores(jnp.array([1.0, -3.0, 2.0, 2.0]))
      Array([0.05555556, 1.        , 0.30769232, 0.23529412], dtype=float32)
    """
    if not weights.size:
        return jnp.zeros(weights.shape, jnp.promote_types(jnp.abs(weights).dtype, jnp.float32))
    layer = _Layer.read(weights)
    squares = layer.squares(weights.reshape(-1))
    zero = jnp.zeros((), jnp.uint32)
    return _scores(squares, weights.size, (zero, zero))[0].reshape(weights.shape)


def select_together(leaves: Sequence[LampScores], k: Words) -> list[jax.Array]:
    """Returns uint8 masks of the k highest scores of all layers.

    Ties go to the lowest index, of the first layer.

    Args:
      leaves: the layers.
      k: number of weights to keep, two words of uint32[1].
    """
    arrays = [leaf.weights for leaf in leaves]
    is_large = any(x.size > _FEW[1] for x in arrays) and all(x.size for x in arrays)
    if jax.default_backend() == "cpu" and is_large and all(map(_is_local, arrays)):
        masks: list[jax.Array] = search(arrays, k)[0]
        return masks
    return topk_masks(_ranked([leaf.compute() for leaf in leaves]), k, together=True)


def _ranked(scores: Sequence[jax.Array], where: Sequence[jax.Array] | None = None) -> list[Ranked]:
    """Returns scores in one dtype."""
    dtype = jnp.result_type(*scores)
    masks = [None] * len(scores) if where is None else where
    pairs = zip(scores, masks, strict=True)
    return [Ranked(Scores.wrap(x.astype(dtype)), mask) for x, mask in pairs]


def _is_local(x: jax.Array) -> bool:
    return use_flat(x) and jax.typeof(x).sharding.mesh.empty


@jax.jit
def search(arrays: Sequence[jax.Array], k: Words) -> tuple[list[jax.Array], jax.Array]:
    """Returns the masks, and whether the search proved them; otherwise sorting made them."""
    layers = [_Layer.read(x) for x in arrays]
    flat = [x.reshape(-1) for x in arrays]
    total_kept = exact.to_float(k)[0]
    low, high = _brackets(layers, flat, total_kept)
    few = [_few(x.size) for x in flat]
    low = jnp.stack([v if x.size > m else -1 for v, x, m in zip(low, flat, few, strict=True)])
    high = jnp.stack([v if x.size > m else np.inf for v, x, m in zip(high, flat, few, strict=True)])
    parts = [_inside(*x) for x in zip(layers, flat, low, high, strict=True)]

    above, count = (jnp.stack(x) for x in zip(*[part.counts for part in parts], strict=True))
    total_above, total = exact.total(above), exact.total(above + count)
    is_between = ~exact.at_least(total_above, _scalar(k)) & exact.at_least(total, _scalar(k))
    need = exact.minus(_scalar(k), total_above)
    slots = [(x.positions < len(w)).astype(jnp.uint8) for x, w in zip(parts, flat, strict=True)]
    ranked = _ranked([x.scores for x in parts], slots)
    chosen = topk_masks(ranked, (need[0][None], need[1][None]), together=True)
    last = jnp.min(jnp.stack([
        jnp.min(jnp.where(mask > 0, part.scores, np.inf))
        for mask, part in zip(chosen, parts, strict=True)
    ]))  # fmt: skip
    least, most = (jnp.stack(x) for x in zip(*[part.bounds for part in parts], strict=True))
    is_proved = jnp.all(least * (1 - _MARGIN) > last) & jnp.all(most * (1 + _MARGIN) < last)
    is_sorted = jnp.all(count <= np.array(few))

    def by_search() -> list[jax.Array]:
        return [
            (layer.squares(x) > v).astype(jnp.uint8).at[part.positions].max(mask, mode="drop")
            .reshape(array.shape)
            for layer, x, v, part, mask, array
            in zip(layers, flat, high, parts, chosen, arrays, strict=True)
        ]  # fmt: skip

    def by_sorting() -> list[jax.Array]:
        return topk_masks(_ranked([*map(lamp_scores, arrays)]), k, together=True)

    is_searched = is_between & is_proved & is_sorted
    masks: list[jax.Array] = lax.cond(is_searched, by_search, by_sorting)
    return masks, is_searched


def _scalar(k: Words) -> Words:
    return k[0][0], k[1][0]


def _few(size: int) -> int:
    """Returns how many weights of a layer to sample, and to sort."""
    return min(max(size // _SHARE, _FEW[0]), _FEW[1], size)


class _Layer(NamedTuple):
    """Powers of two whose product takes the largest finite weight of a layer to [1/2, 1]."""

    scales: tuple[jax.Array, jax.Array]

    @classmethod
    def read(cls, weights: jax.Array) -> _Layer:
        """Reads the scale of a layer."""
        sizes = _sizes(weights)
        _, exponent = jnp.frexp(exact.max_abs(sizes, tuple(range(sizes.ndim))))
        one = jnp.ones((), sizes.dtype)
        # In two steps: a single factor may be out of range.
        first, second = compute_once([jnp.ldexp(one, (i - exponent) // 2) for i in (0, 1)])
        return cls((first, second))

    def squares(self, weights: jax.Array) -> jax.Array:
        """Returns squares in [0, 1], NaN for weights that are not finite."""
        sizes = _sizes(weights)
        sizes = jnp.where(jnp.isfinite(sizes), sizes, np.nan)
        return jnp.square(sizes * self.scales[0] * self.scales[1])


def _sizes(weights: jax.Array) -> jax.Array:
    sizes = jnp.abs(weights)
    return sizes.astype(jnp.promote_types(sizes.dtype, jnp.float32))


# ------------------------------------------------------------------ exact sums and scores
def _digits(squares: jax.Array, size: int) -> tuple[list[jax.Array], int]:
    """Returns digits of squares, int32, the highest first, and their bits.

    A sum of `size` digits fits an int32, and a sum of so many squares fits 62 bits.
    """
    log_size = max(size - 1, 1).bit_length()
    bits = min(31 - log_size, 24)
    digits, remainder = [], squares
    for _ in range((62 - log_size) // bits):
        remainder = remainder * 2.0**bits
        digit = jnp.trunc(remainder)
        remainder = remainder - digit
        digits.append(digit.astype(jnp.int32))
    return digits, bits


def _joined(digits: Sequence[Words], bits: int) -> Words:
    """Returns the integer of some digits, the highest first."""
    total = digits[0]
    for digit in digits[1:]:
        total = exact.plus(exact.shift_left(total, bits), digit)
    return total


def _scores(squares: jax.Array, size: int, above: Words) -> tuple[jax.Array, Words]:
    """Returns scores of squares[n] of a layer of a size, and the sum of all squares.

    Args:
      squares: NaN for entries to leave out.
      size: number of weights of the layer.
      above: sum of the squares that are larger than these.
    """
    place = lax.iota(jnp.int32, len(squares))
    falling, order = lax.sort((-squares, place), num_keys=1, is_stable=True)
    digits, bits = _digits(jnp.where(jnp.isnan(falling), 0, -falling), size)
    each = _joined([exact.as_words(digit) for digit in digits], bits)
    sums = exact.plus(lax.associative_scan(exact.plus, each), above)
    real = squares.dtype
    totals = sums[0].astype(real) * 2.0**32 + sums[1].astype(real)
    totals = totals * 2.0 ** -(bits * len(digits))
    ranked = jnp.where(falling == 0, 0, -falling / jnp.where(totals == 0, 1, totals))
    return jnp.zeros_like(squares).at[order].set(ranked), (sums[0][-1], sums[1][-1])


class _Inside(NamedTuple):
    """Weights inside a bracket.

    Attributes:
      counts: numbers of weights above and inside the bracket.
      positions: int32[m], increasing; the size of the layer fills empty slots.
      scores: [m], NaN in empty slots.
      bounds: a score that no weight above falls below, and one that no weight below exceeds.
    """

    counts: tuple[jax.Array, jax.Array]
    positions: jax.Array
    scores: jax.Array
    bounds: tuple[jax.Array, jax.Array]


def _inside(layer: _Layer, weights: jax.Array, low: jax.Array, high: jax.Array) -> _Inside:
    """Scores the weights with squares in (low, high]."""
    size = len(weights)
    squares = _in_rows(layer.squares(weights))
    is_above, is_inside = squares > high, (squares > low) & ~(squares > high)
    digits, bits = _digits(jnp.where(is_above, squares, 0), size)
    above, inside, *sums = (exact.total(x) for x in exact.sums([is_above, is_inside, *digits], [1]))
    total_above = _joined(sums, bits)
    positions = kept_positions(is_inside.reshape(-1).astype(jnp.uint8), _few(size))
    picked = layer.squares(weights.at[positions].get(mode="clip"))
    scores, total = _scores(jnp.where(positions < size, picked, np.nan), size, total_above)
    scale = 2.0 ** -(bits * len(digits))
    least, most = (
        square / (exact.to_float(x) * scale).astype(square.dtype)
        for square, x in ((high, total_above), (low, total))
    )
    least = jnp.where(above[1] > 0, least, np.inf)
    counts = above[1].astype(jnp.int32), inside[1].astype(jnp.int32)
    return _Inside(counts, positions, scores, (least, jnp.where(low < 0, -1, most)))


def _in_rows(x: jax.Array) -> jax.Array:
    """Returns x[n] as rows, for threads to share."""
    most = min(_ROWS, len(x))
    return x.reshape(next(rows for rows in range(most, 0, -1) if len(x) % rows == 0), -1)


# ------------------------------------------------------------------ brackets
def _brackets(
    layers: Sequence[_Layer], flat: Sequence[jax.Array], k: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the ends of the brackets, each [layers]; no result depends on their being right."""
    most = np.array([_few(len(x)) for x in flat], np.float32) * _FULL
    is_large = np.array([_few(len(x)) < len(x) for x in flat])
    pivots = _sampled_pivots(layers, flat, k)
    state = jnp.int32(0), *_narrowed(layers, flat, pivots, k)

    def is_wide(state: _State) -> jax.Array:
        return (state[0] < _PASSES) & jnp.any((state[3] > most) & is_large)

    def step(state: _State) -> _State:
        passes, low, high, _ = state
        ends = jnp.stack([low, high], axis=1)
        # In the order of the floats, which is about that of logarithms.
        first, last = (lax.bitcast_convert_type(x, jnp.int32) for x in jnp.clip(ends.T, 0, 1))
        width = (last - first).astype(jnp.float32)
        places = first[:, None] + (width[:, None] * _PARTS).astype(jnp.int32)
        pivots = lax.bitcast_convert_type(places, jnp.float32)
        return passes + 1, *_narrowed(layers, flat, jnp.concatenate([ends, pivots], axis=1), k)

    _, low, high, _ = lax.while_loop(is_wide, step, state)
    return low, high


def _sampled_pivots(layers: Sequence[_Layer], flat: Sequence[jax.Array], k: jax.Array) -> jax.Array:
    """Returns pivots[layers, n] about the squares of the last kept weights, by samples."""
    ranked = []
    for layer, x in zip(layers, flat, strict=True):
        stride = max(len(x) // _few(len(x)), 1) | 1  # odd: not in step with rows
        sample = layer.squares(lax.optimization_barrier(x[::stride]))
        squares = -jnp.sort(-jnp.where(jnp.isnan(sample), 0, sample)).astype(jnp.float32)
        share = len(x) / len(squares)
        totals = jnp.cumsum(squares) * share
        ranked.append((squares, squares / jnp.where(totals == 0, 1, totals), share))
    scores = jnp.concatenate([score for _, score, _ in ranked])
    shares = np.concatenate([np.full(len(x), share, np.float32) for x, _, share in ranked])
    falling, counts = lax.sort((-scores, jnp.asarray(shares)), num_keys=1)
    at = jnp.sum(jnp.cumsum(counts) < k, dtype=jnp.int32)
    last = -falling[jnp.minimum(at, len(falling) - 1)]
    pivots = []
    for squares, score, _ in ranked:
        rank = jnp.sum(score >= last, dtype=jnp.int32).astype(jnp.float32)
        deviation = jnp.sqrt(rank * (1 - rank / len(score)) + 1)
        places = jnp.round(rank + deviation * _TEETH).astype(jnp.int32)
        values = squares[jnp.clip(places, 0, len(score) - 1)]
        values = jnp.where(places < 0, np.inf, jnp.where(places >= len(score), -1, values))
        pivots.append(values)
    return jnp.stack(pivots)


def _narrowed(
    layers: Sequence[_Layer], flat: Sequence[jax.Array], pivots: jax.Array, k: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the pivots next to the square of the last kept weight, and the count between."""
    tables = []
    for layer, x, row in zip(layers, flat, pivots, strict=True):
        counts, sums = _counted(_in_rows(layer.squares(x).astype(jnp.float32)), row)
        tables.append((counts, sums))
    counts, sums = (jnp.stack(x).astype(jnp.float32) for x in zip(*tables, strict=True))
    # The score of the last weight above a pivot, and of the first below: about the same.
    scores = jnp.where(counts > 0, pivots / jnp.maximum(sums, 1e-37), np.inf)
    scores = jnp.where(pivots < 0, -1, scores)
    sizes = np.array([len(x) for x in flat], np.float32)[:, None]
    t = scores.reshape(-1)[:, None, None]
    is_above = scores[None] > t
    fewest = jnp.sum(jnp.max(jnp.where(is_above, counts, 0), axis=2), axis=1)
    most = jnp.sum(jnp.min(jnp.where(is_above, sizes, counts), axis=2), axis=1)
    t = t[:, 0, 0]
    floor = jnp.max(jnp.where(fewest >= k, t, -1)) * (1 - _SLACK)
    ceiling = jnp.min(jnp.where(most < k, t, np.inf)) * (1 + _SLACK)
    is_below, is_above = scores <= floor, scores > ceiling
    low = jnp.max(jnp.where(is_below, pivots, -1), axis=1)
    high = jnp.min(jnp.where(is_above, pivots, np.inf), axis=1)
    reached = jnp.min(jnp.where(is_below, counts, sizes), axis=1)
    return low, high, reached - jnp.max(jnp.where(is_above, counts, 0), axis=1)


def _counted(squares: jax.Array, pivots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns numbers and sums of squares[rows, width] above pivots[n], int32[n] and float32[n]."""
    held, pivots = lax.optimization_barrier((squares, pivots))
    masks = [held > pivot for pivot in pivots]
    n = len(masks)
    rows = lax.reduce(
        [x.astype(jnp.int32) for x in masks] + [jnp.where(x, held, 0) for x in masks],
        [np.int32(0)] * n + [np.float32(0)] * n,
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        (1,),
    )
    counts = [jnp.sum(x, dtype=jnp.int32) for x in rows[:n]]
    return jnp.stack(counts), jnp.stack([jnp.sum(x) for x in rows[n:]])
