"""Search for the k-th highest of integer keys in few passes, by good pivots.

A search narrows a bracket of keys around the k-th one: a pass over the data counts how many keys
lie above each of a few pivots. The first pivots come from a sample, the next ones from a guess.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact
from sparsity.core.exact import Words, zero_like
from sparsity.selection.keys import KeyRange, to_keys
from sparsity.selection.search import Above, SliceBrackets

# The numbers of passes below are means over 13 kinds of 65,600 float32 scores, the hostile ones of
# tests/selection/test_threshold.py, at five to seven k each: 3.5 as it is, at most 16.
# Log2 of parts between seven pivots: 15 take twice as long a pass, 3 need half more passes.
_LOG2_PARTS = 3

_GUESS_ERROR = np.float32(1 / 12)  # five on either side span 5/6 of a bracket; 1/24: 3.7 passes
_SHARPER = 16  # divides the error after a hit, as a smaller bracket is more linear; 1: 3.6 passes
# In errors around a guess: near ones leave little if it is good, far ones catch the k-th key if it
# is not; 2 instead of 5 took as many passes, 20 took 3.7.
_GUESS_TEETH = np.array([-5, -1, 0, 1, 5], np.float32)
_MIN_VARIANCE = 0.25  # of a count, half a key squared: that of a binomial vanishes at both ends
_END_SHIFT = 8  # log2 of what outer pivots cut off a bracket after a miss; 1/8 took as many passes
_BELOW_ONE = 1 - 2.0**-20  # float32(2**32 - 1) is 2**32, which as uint32 would be 0

# In deviations of a sampled rank: the k-th key is outside of three once in 370 searches.
_SAMPLE_TEETH = np.array([-3, -0.9, -0.3, 0, 0.3, 0.9, 3], np.float32)
_MIN_NOISE = 0.5  # ranks are rounded by as much
# The middle pivot is one lower: the ties of its key lie between two pivots; else 4.1 passes.
_LOWERED = np.array([0, 0, 0, 1, 0, 0, 0])

_MAX_MISSES_ON_MESH = 2  # bounds the passes: by 2 + 11 for 32 bits, 2 + 22 for 64


# ------------------------------------------------------------------ pivots
class Bracket(NamedTuple):
    """Keys from low to high, the k-th highest one among them: above < k <= at_least.

    A search ends at the k-th highest key, or at any key with exactly k keys above: low = high, and
    above <= k <= at_least. A search of many brackets holds arrays of each field, [brackets].

    Attributes:
      low: lowest key of the bracket.
      high: highest key of the bracket.
      at_least: number of keys >= low.
      above: number of keys > high.
      guess_error: largest error of a guess, as a fraction of the bracket, float32.
      poor_passes: number of passes that left more than an eighth of the counted keys, int32.
      misses: number of passes that left more than an eighth of the bracket, int32.
      passes: number of passes, int32.
    """

    low: jax.Array
    high: jax.Array
    at_least: Words
    above: Words
    guess_error: jax.Array
    poor_passes: jax.Array
    misses: jax.Array
    passes: jax.Array

    @property
    def is_open(self) -> jax.Array:
        """True where a bracket still holds several keys."""
        return self.low < self.high

    @classmethod
    def begin(cls, low: jax.Array, high: jax.Array, at_least: Words) -> "Bracket":
        """Returns brackets before the first pass, with nothing above them."""
        above = zero_like(at_least[0]), zero_like(at_least[1])
        zero = above[1].astype(np.int32)
        error = zero.astype(np.float32) + _GUESS_ERROR / _SHARPER
        return cls(low, high, at_least, above, error, poor_passes=zero, misses=zero, passes=zero)


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits of integers as unsigned ones."""
    return lax.bitcast_convert_type(x, np.dtype(f"uint{x.dtype.itemsize * 8}"))


def _width(low: jax.Array, high: jax.Array) -> jax.Array:
    # The difference may wrap around; its bits are the unsigned width.
    return _bits(high - low)


def even_pivots(bracket: Bracket) -> jax.Array:
    """Returns seven pivots that cut the bracket into equal parts of at most ceil(keys / 8)."""
    width = _width(bracket.low, bracket.high)
    parts = 1 << _LOG2_PARTS
    j = jnp.arange(1, parts, dtype=width.dtype)
    # j (width + 1) / 8, rounded down, without overflow
    offset = (width >> _LOG2_PARTS) * j + (((width & (parts - 1)) + 1) * j >> _LOG2_PARTS)
    return bracket.low + lax.bitcast_convert_type(offset, bracket.low.dtype) - 1


def guessed_pivots(bracket: Bracket, k: Words, is_float: bool) -> jax.Array:
    """Returns seven pivots around the place where linear interpolation sees the k-th key."""
    real = np.dtype(f"float{bracket.low.dtype.itemsize * 8}")
    inside = exact.to_float(exact.minus(bracket.at_least, bracket.above))
    # The place of the k-th key from the low end, if keys lie evenly
    centre = (exact.to_float(exact.minus(bracket.at_least, k)) + 0.5) / inside
    noise = jnp.sqrt(jnp.maximum(centre * (1 - centre), _MIN_VARIANCE / inside) / inside)
    error = jnp.maximum(noise, bracket.guess_error)
    places = jnp.clip(centre + error * _GUESS_TEETH, 0, 1).astype(real)
    width = _width(bracket.low, bracket.high)
    bits = width.dtype.itemsize * 8
    span = jnp.minimum(width.astype(real), real.type(2.0**bits * _BELOW_ONE))
    offsets = (places * span).astype(width.dtype)
    # After a poor guess the k-th key may well be close to an end, beyond a gap.
    ends = jnp.stack([width >> _END_SHIFT, *offsets[1:-1], width - (width >> _END_SHIFT)])
    offsets = jnp.where(bracket.poor_passes % 2 == 1, ends, offsets)
    pivots = bracket.low + lax.bitcast_convert_type(offsets, bracket.low.dtype)
    if is_float:  # first linear in the value, then in the key: about its logarithm
        first, last = _floats(bracket.low), _floats(bracket.high)
        by_value = jnp.isfinite(first) & jnp.isfinite(last) & (bracket.poor_passes % 2 == 0)
        pivots = jnp.where(by_value, to_keys(first + places * (last - first)), pivots)
    # Scores on a grid end in zero bits: the key with most of them may hold many ties.
    roundest = _roundest(bracket.low, bracket.high)
    pivots = jnp.concatenate([pivots, jnp.stack([roundest - 1, roundest])])
    return jnp.where(error > _GUESS_ERROR, even_pivots(bracket), pivots)


def _floats(keys: jax.Array) -> jax.Array:
    """Returns the floats that have these keys."""
    sign = jnp.array(np.iinfo(keys.dtype).min, keys.dtype)
    # The inverse of `to_keys`: keys below 0 stand for negative floats, in reverse.
    raw = jnp.where(keys < 0, sign - keys, keys)
    return lax.bitcast_convert_type(raw, np.dtype(f"float{keys.dtype.itemsize * 8}"))


def _roundest(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns the key from low to high that ends in most zero bits."""
    differing = _bits(high ^ (low - 1))
    first = differing.dtype.itemsize * 8 - 1 - lax.clz(differing)
    tail = (differing.dtype.type(1) << first) - 1
    return high & ~lax.bitcast_convert_type(tail, high.dtype)


def sampled_pivots(keys: jax.Array, n: jax.Array | np.ndarray, k: Words) -> jax.Array:
    """Returns seven pivots of each bracket, from the order statistics of sampled keys.

    Args:
      keys: [brackets, count], or [1, count] of all brackets; sorted here.
      n: how many keys each bracket has, as floats.
      k: the rank of the key in each bracket.
    """
    keys = jnp.sort(keys, axis=1)
    count = keys.shape[1]
    density = jnp.minimum(exact.to_float(k) / n, 1)[:, None]
    noise = jnp.sqrt(count * density * (1 - density))
    if len(keys) < len(n):  # a bracket is itself a sample of all keys
        noise = noise * np.sqrt(1 + count / n)[:, None]
    ranks = count * (1 - density) + (noise + _MIN_NOISE) * _SAMPLE_TEETH[None]
    places = jnp.clip(ranks, 0, count - 1).astype(jnp.int32)
    is_shared = len(keys) < len(n)
    pivots = keys[0][places] if is_shared else jnp.take_along_axis(keys, places, axis=1)
    return pivots - _LOWERED.astype(keys.dtype)[None]


# ------------------------------------------------------------------ the search
class SearchState(NamedTuple):
    """State of a search: its brackets, the counts of each row at their ends, and the next pivots.

    Attributes:
      bracket: [brackets].
      at_least: number of keys >= low, int32[segments, rows] of each part.
      above: number of keys > high, int32[segments, rows] of each part.
      pivots: pivots of the next pass, [brackets, pivots].
    """

    bracket: Bracket
    at_least: list[jax.Array]
    above: list[jax.Array]
    pivots: jax.Array


Count: TypeAlias = Callable[[SearchState], tuple[Words, list[jax.Array]]]


def search(
    count: Count,
    brackets: SliceBrackets,
    k: Words,
    start: SearchState,
    *,
    max_misses: int,
    is_float: bool,
) -> SearchState:
    """Narrows brackets to one key each, all of them in the same passes.

    A pass that leaves more than an eighth of a bracket is a miss. After max_misses misses the
    pivots are even, no longer guessed, so that a search takes at most max_misses + ceil(bits / 3)
    passes.

    Args:
      count: maps the state to the numbers of keys above each pivot, in one pass: of each bracket,
        and int32[segments, rows, pivots] of each part.
      brackets: the bracket of each segment.
      k: the rank of the key in each bracket, from 1.
      start: the state before the first pass; its pivots need not lie within the brackets.
      max_misses: how many guesses may fail.
      is_float: whether the scores are floats.

    Returns:
      The brackets of the k-th keys alone, or of keys with exactly k keys above them.
    """

    def step(state: SearchState) -> SearchState:
        totals_above, counts = count(state)
        old, is_open = state.bracket, state.bracket.is_open
        bracket, *ends = jax.vmap(narrow)(old, state.pivots, totals_above, k)
        # Brackets of one key stay, and get no end.
        bracket = jax.tree.map(lambda x, y: jnp.where(is_open, x, y), bracket, old)
        at_low, at_high = (brackets.by_slice(end & is_open[:, None]) for end in ends)
        guesses = jax.vmap(functools.partial(guessed_pivots, is_float=is_float))(bracket, k)
        is_guessed = (bracket.misses < max_misses)[:, None]
        pivots = jnp.where(is_guessed, guesses, jax.vmap(even_pivots)(bracket))
        return SearchState(
            bracket,
            at_least=_counts_at(counts, at_low, state.at_least),
            above=_counts_at(counts, at_high, state.above),
            pivots=_move_inside(bracket, pivots),
        )

    start = start._replace(pivots=_move_inside(start.bracket, start.pivots))
    return lax.while_loop(lambda state: jnp.any(state.bracket.is_open), step, start)


def find_by_guesses(above: Above, k: Words, lowest: jax.Array, keys: KeyRange) -> jax.Array:
    """Finds the keys of `search.find_by_digits` by guesses, for parameters on a mesh of hosts.

    The first pass also counts all keys, since its first pivot is the lowest key.
    """
    is_some = (k[0] | k[1]) > 0
    highest = lowest + np.array(keys.top - keys.low).astype(lowest.dtype)
    bracket = Bracket.begin(jnp.where(is_some, lowest, highest), highest, k)
    first = jnp.concatenate([lowest[:, None], jax.vmap(even_pivots)(bracket)[:, 1:]], axis=1)
    start, no_parts = SearchState(bracket, [], [], first), SliceBrackets((), together=True)

    def count(state: SearchState) -> tuple[Words, list[jax.Array]]:
        return above(state.pivots), []

    misses = _MAX_MISSES_ON_MESH
    bracket = search(count, no_parts, k, start, max_misses=misses, is_float=keys.is_float).bracket
    # A pivot with exactly k keys above is no such key; the next one is.
    return bracket.high + (is_some & exact.equal(bracket.above, k)).astype(bracket.high.dtype)


def _move_inside(bracket: Bracket, pivots: jax.Array) -> jax.Array:
    """Moves pivots between low and the key below high: no key lies below the lowest one."""
    last = jnp.where(bracket.is_open, bracket.high - 1, bracket.high)
    return jnp.clip(pivots, bracket.low[:, None], last[:, None])


def narrow(
    bracket: Bracket, pivots: jax.Array, total: Words, k: Words
) -> tuple[Bracket, jax.Array, jax.Array]:
    """Narrows a bracket to the part that holds the k-th key.

    Args:
      bracket: one bracket.
      pivots: its pivots, [pivots].
      total: the number of keys above each pivot.
      k: the rank of the key.

    Returns:
      The narrow bracket, and two masks of pivots: those just below its low end, and those at its
      high end. Their counts are `at_least` and `above`; an end without a pivot keeps its count.
    """
    low, high, at_low, at_high = _narrow_ends(bracket, pivots, total, k)
    at_least, above = _count_at_ends(bracket, total, at_low, at_high)
    inside, before = exact.minus(at_least, above), exact.minus(bracket.at_least, bracket.above)
    poor = exact.to_float(inside) * 2**_LOG2_PARTS > exact.to_float(before)
    missed = _width(low, high) > _width(bracket.low, bracket.high) >> _LOG2_PARTS
    narrowed = Bracket(
        low=low,
        high=high,
        at_least=at_least,
        above=above,
        guess_error=jnp.where(poor, _GUESS_ERROR, bracket.guess_error / _SHARPER),
        poor_passes=bracket.poor_passes + poor.astype(jnp.int32),
        misses=bracket.misses + missed.astype(jnp.int32),
        passes=bracket.passes + 1,
    )
    return narrowed, at_low, at_high


def _narrow_ends(
    bracket: Bracket, pivots: jax.Array, total: Words, k: Words
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the ends of the narrow bracket, and the pivots that set each end, as masks.

    With k keys or more above a pivot, the k-th key lies above; with fewer, at the pivot or below.
    A pivot with exactly k keys above ends the search: it becomes both ends.
    """
    enough, met = exact.at_least(total, k), exact.equal(total, k)
    low, not_high, hit_at, hit = _largest(
        jnp.where(enough, pivots + 1, bracket.low),
        # ~x falls as x rises: the largest ~x is that of the smallest x.
        ~jnp.where(enough, bracket.high, pivots),
        jnp.where(met, pivots, bracket.low),
        met.astype(jnp.int32),
    )
    low = jnp.where(hit > 0, hit_at, low)
    high = jnp.where(hit > 0, low, ~not_high)
    return low, high, enough & (pivots + 1 == low), (met | ~enough) & (pivots == high)


def _count_at_ends(
    bracket: Bracket, total: Words, at_low: jax.Array, at_high: jax.Array
) -> tuple[Words, Words]:
    """Returns `at_least` and `above` of the narrow bracket, of the pivots that set its ends."""
    # Pivots at the same end are alike, and so are their counts.
    ends = [at_low, at_high]
    words = [jnp.where(chosen, word, 0) for chosen in ends for word in total]
    is_low, is_high, *counts = _largest(*(x.astype(jnp.int32) for x in ends), *words)
    at_least = exact.choose(is_low > 0, (counts[0], counts[1]), bracket.at_least)
    above = exact.choose(is_high > 0, (counts[2], counts[3]), bracket.above)
    return at_least, above


def _largest(*values: jax.Array) -> Sequence[jax.Array]:
    """Returns the largest entries along the last axis of each array, all in one kernel."""
    lowest = tuple(np.array(np.iinfo(x.dtype).min, x.dtype) for x in values)
    axis = values[0].ndim - 1
    return lax.reduce(values, lowest, lambda a, b: tuple(map(lax.max, a, b)), (axis,))


def sum_rows(counts: Sequence[jax.Array]) -> list[jax.Array]:
    """Sums up int32[segments, rows, ...] of each part to int32[segments, ...]."""
    return [jnp.sum(x, axis=1, dtype=jnp.int32) for x in counts]


def _counts_at(
    counts: list[jax.Array], chosen: list[jax.Array], otherwise: list[jax.Array]
) -> list[jax.Array]:
    """Returns the count of each row at the chosen pivot of its segment, `otherwise` without one."""
    most = [
        jnp.max(jnp.where(pivots[:, None], count, -1), axis=2)
        for count, pivots in zip(counts, chosen, strict=True)
    ]
    return [jnp.where(x < 0, old, x) for x, old in zip(most, otherwise, strict=True)]
