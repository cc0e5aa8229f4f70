"""Search for the k-th highest of integer keys by counting: no sorting, nothing stored.

A search narrows a bracket of keys around the k-th one: a pass over the data counts how many keys
lie above each of a few pivots. On a GPU a loop that looks at its data waits on the host, so that
the number of passes is fixed there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact
from sparsity.core.exact import Words, zero_like
from sparsity.selection.counting import Leaf
from sparsity.selection.keys import to_keys

_EIGHTHS = 3  # log2 of parts, between seven pivots
_SIXTEENTHS = 4  # the same where the number of passes is fixed: fewer of them, of more comparisons

_SPREAD = np.float32(1 / 12)  # of guessed pivots, in brackets; if wider, eighths are better
_SHARPER = 16  # divides the spread after a hit: a guess in a smaller bracket is a better one
# In spreads around a guess: the near ones leave little if it is good, the far ones if it is not.
_GUESS_TEETH = np.array([-5, -1, 0, 1, 5], np.float32)
_MIN_VARIANCE = 0.25  # of a count: half a key, squared; that of a binomial vanishes at the ends
_END_SHIFT = 8  # log2 of the share of a bracket that outer pivots cut off either end after a miss
_BELOW_ONE = 1 - 2.0**-20  # keeps a width that was rounded to a float below the next power of two

_SAMPLE_SHIFT = 8  # every 256th key is sampled, so that sorting costs less than a pass,
_SAMPLE_SIZES = (256, 4096)  # but at least and at most so many
# In deviations of a sampled rank: the k-th key is seldom outside of three.
_SAMPLE_TEETH = np.array([-3, -0.9, -0.3, 0, 0.3, 0.9, 3], np.float32)
_MIN_NOISE = 0.5  # ranks, as these are rounded
# The middle pivot lies one lower, so that the ties of its key are between two pivots.
_LOWERED = np.array([0, 0, 0, 1, 0, 0, 0])


def loops_wait_on_host() -> bool:
    """Whether a loop that looks at its data makes the device wait on the host."""
    return jax.default_backend() not in ("cpu", "tpu")


# ------------------------------------------------------------------ pivots
class Bracket(NamedTuple):
    """Keys from low to high, the wanted one among them. Counts are int32[leaves].

    The search is for the k-th highest key, or for any with exactly k keys above it.
    """

    low: jax.Array
    high: jax.Array
    at_least: jax.Array  # keys >= low
    above: jax.Array  # keys > high
    spread: jax.Array  # float32: how far off a guess may be, as a fraction of the bracket
    misses: jax.Array  # int32: passes that left more than an eighth of the bracket
    passes: jax.Array  # int32

    @classmethod
    def of(
        cls, low: jax.Array, high: jax.Array, at_least: jax.Array, *, sharp: bool = True
    ) -> "Bracket":
        """A bracket before the first pass, with nothing above it; sharp if guesses are good."""
        zero = zero_like(at_least[0])
        spread = zero.astype(np.float32) + (_SPREAD / _SHARPER if sharp else _SPREAD)
        return cls(low, high, at_least, zero_like(at_least), spread, misses=zero, passes=zero)


def _bits(x: jax.Array) -> jax.Array:
    """Integers read as unsigned ones."""
    return lax.bitcast_convert_type(x, np.dtype(f"uint{x.dtype.itemsize * 8}"))


def _width(low: jax.Array, high: jax.Array) -> jax.Array:
    return _bits(high - low)


def even_pivots(b: Bracket, log2_parts: int) -> jax.Array:
    """Pivots that cut the bracket into equal parts of at most ceil(keys / 2**log2_parts)."""
    width = _width(b.low, b.high)
    parts = 1 << log2_parts
    j = jnp.arange(1, parts, dtype=width.dtype)
    offset = (width >> log2_parts) * j + (((width & (parts - 1)) + 1) * j >> log2_parts)
    return b.low + lax.bitcast_convert_type(offset, b.low.dtype) - 1


def guessed_pivots(b: Bracket, k: Words, is_float: bool) -> jax.Array:
    """Seven pivots around the place where linear interpolation sees the k-th key."""
    real = np.dtype(f"float{b.low.dtype.itemsize * 8}")
    at_least = exact.total(b.at_least)
    inside = exact.to_float(exact.minus(at_least, exact.total(b.above)))
    centre = (exact.to_float(exact.minus(at_least, k)) + 0.5) / inside
    noise = jnp.sqrt(jnp.maximum(centre * (1 - centre), _MIN_VARIANCE / inside) / inside)
    spread = jnp.maximum(noise, b.spread)
    places = jnp.clip(centre + spread * _GUESS_TEETH, 0, 1).astype(real)
    width = _width(b.low, b.high)
    bits = width.dtype.itemsize * 8
    span = jnp.minimum(width.astype(real), real.type(2.0**bits * _BELOW_ONE))
    offsets = (places * span).astype(width.dtype)
    # After a miss the k-th key may well be close to an end, beyond a gap.
    ends = jnp.stack([width >> _END_SHIFT, *offsets[1:-1], width - (width >> _END_SHIFT)])
    offsets = jnp.where(b.misses % 2 == 1, ends, offsets)
    pivots = b.low + lax.bitcast_convert_type(offsets, b.low.dtype)
    if is_float:  # first linear in the value, after a miss in the key: about its logarithm
        ends = _floats(jnp.stack([b.low, b.high]))
        by_value = jnp.all(jnp.isfinite(ends)) & (b.misses % 2 == 0)
        pivots = jnp.where(by_value, to_keys(ends[0] + places * (ends[1] - ends[0])), pivots)
    # Scores on a grid end in zero bits: the key with most of them may hold many ties.
    roundest = _roundest(b.low, b.high)
    pivots = jnp.concatenate([pivots, jnp.stack([roundest - 1, roundest])])
    return jnp.where(spread > _SPREAD, even_pivots(b, _EIGHTHS), pivots)


def _floats(keys: jax.Array) -> jax.Array:
    """The floats of which these are the keys."""
    sign = jnp.array(np.iinfo(keys.dtype).min, keys.dtype)
    raw = jnp.where(keys < 0, sign - keys, keys)
    return lax.bitcast_convert_type(raw, np.dtype(f"float{keys.dtype.itemsize * 8}"))


def _roundest(low: jax.Array, high: jax.Array) -> jax.Array:
    """The key from low to high that ends in most zero bits."""
    differing = _bits(high ^ (low - 1))
    first = differing.dtype.itemsize * 8 - 1 - lax.clz(differing)
    tail = (differing.dtype.type(1) << first) - 1
    return high & ~lax.bitcast_convert_type(tail, high.dtype)


def sampled_pivots(leaves: Sequence[Leaf], k: Words) -> jax.Array:
    """Seven pivots from the order statistics of every so many-th key."""
    n = sum(leaf.scores.size for leaf in leaves)
    least, most = _SAMPLE_SIZES
    wanted = min(max(n >> _SAMPLE_SHIFT, least), most)
    parts = []
    for leaf in leaves:
        stride = min(n // wanted | 1, leaf.scores.size)  # odd: not in step with rows
        parts.append(leaf.map(functools.partial(_every, stride)).keys())
    keys = jnp.sort(jnp.concatenate(parts))
    density = jnp.minimum(exact.to_float(k) / np.float32(n), 1)
    noise = jnp.sqrt(keys.size * density * (1 - density)) + _MIN_NOISE
    ranks = keys.size * (1 - density) + noise * _SAMPLE_TEETH
    pivots = keys[jnp.clip(ranks, 0, keys.size - 1).astype(jnp.int32)]
    return pivots - _LOWERED.astype(keys.dtype)


def _every(stride: int, x: jax.Array) -> jax.Array:
    return x.reshape(-1)[::stride]


# ------------------------------------------------------------------ the search
def search(
    count: Callable[[jax.Array], jax.Array],
    k: Words,
    b: Bracket,
    *,
    bits: int,
    max_misses: int = 0,
    first: jax.Array | None = None,
    is_float: bool = False,
) -> Bracket:
    """Narrows a bracket of at most 2**bits keys to one.

    Where loops may look at their data, a pass that does not leave an eighth of the bracket is a
    miss, and after max_misses of them there are no more guesses: the number of passes is at most
    max_misses + ceil(bits / 3). Elsewhere it is ceil(bits / 4).

    Args:
        count: Maps pivots to int32[leaves, pivots], the numbers of keys above each, in one pass.
        k: The rank of the wanted key, from 1.
        b: The bracket.
        bits: Base-2 logarithm of the number of its keys, rounded up.
        max_misses: How many guesses may fail.
        first: Pivots of the first pass.
        is_float: Whether keys are those of floats.

    Returns:
        The bracket of the k-th key alone, or of one with exactly k keys above it.
    """

    def step(b: Bracket, pivots: jax.Array) -> Bracket:
        last = jnp.where(b.low < b.high, b.high - 1, b.high)  # the lowest key has none below
        pivots = jnp.clip(pivots, b.low, last)
        return narrow(b, pivots, count(pivots), k)

    if loops_wait_on_host():
        fixed: Bracket = lax.fori_loop(
            0,
            -(-bits // _SIXTEENTHS),
            lambda _, b: step(b, even_pivots(b, _SIXTEENTHS)),
            b,
            unroll=b.at_least.size == 1,
        )
        return fixed

    def body(state: tuple[Bracket, jax.Array]) -> tuple[Bracket, jax.Array]:
        b = step(*state)
        guesses = guessed_pivots(b, k, is_float)
        return b, jnp.where(b.misses < max_misses, guesses, even_pivots(b, _EIGHTHS))

    first = even_pivots(b, _EIGHTHS) if first is None else first
    return lax.while_loop(lambda state: state[0].low < state[0].high, body, (b, first))[0]


def narrow(b: Bracket, pivots: jax.Array, counts: jax.Array, k: Words) -> Bracket:
    """The part of the bracket that holds the k-th key, by the counts above the pivots."""
    total = exact.total(counts)
    enough, met = exact.at_least(total, k), exact.equal(total, k)
    hit = jnp.any(met)
    low = jnp.max(jnp.where(enough, pivots + 1, b.low))
    high = jnp.min(jnp.where(enough, b.high, pivots))
    low = jnp.where(hit, jnp.max(jnp.where(met, pivots, b.low)), low)
    high = jnp.where(hit, low, high)

    def counts_at(chosen: jax.Array, otherwise: jax.Array) -> jax.Array:
        return jnp.where(jnp.any(chosen), jnp.max(jnp.where(chosen, counts, 0), axis=1), otherwise)

    missed = _width(low, high) > _width(b.low, b.high) >> _EIGHTHS
    return Bracket(
        low=low,
        high=high,
        at_least=counts_at(enough & (pivots + 1 == low), b.at_least),
        above=counts_at((met | ~enough) & (pivots == high), b.above),
        spread=jnp.where(missed, _SPREAD, b.spread / _SHARPER),
        misses=b.misses + missed.astype(jnp.int32),
        passes=b.passes + 1,
    )
