"""Exact search, for any platform and sharding: no sorting, nothing stored, only counts move.

**The threshold.** Integers in the order of the scores, the keys (`keys`), stand for the scores. Let
c(t) be the number of eligible keys that are at least t. The k-th highest key is the largest t with
c(t) >= k, because c(t) never rises with t. The search finds this t digit by digit, to the base 16
and the highest digit first: with the higher digits fixed, a digit is the largest d with
c(t) >= k. One pass over the data counts c(t) for the digits 1 to 15 at once. Integers make all
digits exact. Once c(t) = k, the mask keeps all keys from t on, and lower digits do not matter.

**Ties.** The mask keeps `need` of the keys equal to the threshold: k less the number of keys above.
A second search ranks the ties by the key ~index, which falls as the index rises. These keys are
distinct, so that exactly `need` ties stay, those of the lowest indices. Across parameters, earlier
ones keep their ties first (`tie_shares`).

**Eligibility.** An entry that may not stay has the lowest key. Counts are of keys *above* a pivot,
and no pivot is below the lowest key, so that no ineligible entry is counted. Ties are masked.

**Overflow.** A slice has fewer than 2**31 entries, so that its counts fit int32. Counts of fewer
than 2**16 slices are added as two words of 32 bits (`exact.total`). Pivots stay within
[lowest, lowest + 2**bits), which the dtype of keys holds, or just above a range that is narrower.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact
from sparsity.core.exact import Words, varying_zero, zero_like
from sparsity.core.exact_sums import count, sums
from sparsity.core.hashing import flat_index
from sparsity.selection.kept_counts import RemovedFraction, limit_kept
from sparsity.selection.keys import KeyRange, key_range
from sparsity.selection.scores import Ranked

DigitState: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
Above: TypeAlias = Callable[[jax.Array], Words]
FindThresholds: TypeAlias = Callable[[Above, Words, jax.Array, KeyRange], jax.Array]
_BITS = 4  # of a digit: for 1e7 floats 4 take 76 ms of one CPU core, 3 take 87, and 2 take 97


class SliceBrackets(NamedTuple):
    """Assignment of slices to brackets: each slice has a bracket, or all share one.

    Attributes:
      slices: number of slices of each parameter.
      together: whether all slices share one bracket.
    """

    slices: tuple[int, ...]
    together: bool

    def totals(self, counts: Sequence[jax.Array]) -> Words:
        """Returns int32[slices, ...] of each parameter as words [brackets, ...], or their sum."""
        joined = jnp.concatenate(counts)
        if not self.together:
            return exact.as_words(joined)
        high, low = exact.total(joined)
        return high[None], low[None]

    def by_slice(self, x: jax.Array) -> list[jax.Array]:
        """Returns x[brackets, ...] for the slices of each parameter."""
        if self.together:
            return [jnp.broadcast_to(x, (num_slices, *x.shape[1:])) for num_slices in self.slices]
        return jnp.split(x, np.cumsum(self.slices)[:-1])


def find_by_digits(above: Above, k: Words, lowest: jax.Array, keys: KeyRange) -> jax.Array:
    """Returns a key t of each bracket with at most k keys above t, and at least k from t on.

    Args:
      above: maps pivots[brackets, n] to the numbers of keys above them.
      k: [brackets]; t is the lowest key if there are fewer than k, and above all keys if k = 0.
      lowest: `keys.low`, [brackets]; this key is not counted.
      keys: the range of the keys.
    """
    bits, digits = keys.bits, np.arange(1, 1 << _BITS, dtype=lowest.dtype)
    is_some = (k[0] | k[1]) > 0
    highest = lowest + np.array((1 << bits) - 1).astype(lowest.dtype)
    state = zero_like(k[1][0]), jnp.where(is_some, lowest, highest), is_some

    def step(state: DigitState) -> DigitState:
        i, key, is_open = state
        # The last pass may look at bits again: of digits that reach beyond them none is enough.
        shift = jnp.maximum(bits - _BITS * (i.astype(jnp.int32) + 1), 0).astype(key.dtype)
        # Keys above t - 1 are the keys from t on.
        counts, rank = above(key[:, None] + (digits << shift) - 1), (k[0][:, None], k[1][:, None])
        digit = jnp.sum(exact.at_least(counts, rank), axis=1, dtype=key.dtype)
        is_met = jnp.any(exact.equal(counts, rank), axis=1)  # then no lower digit changes the mask
        return i + 1, jnp.where(is_open, key + (digit << shift), key), is_open & ~is_met

    return lax.while_loop(lambda x: (x[0] * _BITS < bits) & jnp.any(x[2]), step, state)[1]


def select_by_counting(
    all_ranked: Sequence[Ranked],
    k: Words | RemovedFraction,
    *,
    together: bool,
    find_thresholds: FindThresholds = find_by_digits,
) -> tuple[list[jax.Array], Words]:
    """Returns masks of the k best eligible entries, or of all if there are fewer.

    Args:
      all_ranked: one or more parameters whose scores have one dtype, fewer than 2**31 in a slice.
      k: number of entries to keep of each slice, [slices], in the order of the parameters; with
        `together` of all, [1]. Clamped from above. Or the fraction of the eligible entries to
        remove.
      together: whether all entries compete, or the entries of each slice.
      find_thresholds: `find_by_digits`, or another function with its results.

    Returns:
      uint8 masks, each of its parameter's shape and sharding; and the number of eligible entries,
      as words like k.
    """
    counters = [SliceCounter(ranked) for ranked in all_ranked]
    brackets = SliceBrackets(tuple(ranked.num_slices for ranked in all_ranked), together)
    like = jnp.zeros((), jnp.int32) if isinstance(k, RemovedFraction) else k[1][0]
    zero = varying_zero([x for ranked in all_ranked for x in ranked.arrays], like)
    eligible = brackets.totals([x.count_eligible() + zero for x in counters])
    k = limit_kept(eligible, k)

    def count_above(
        brackets: SliceBrackets, tied: Sequence[jax.Array | None], pivots: jax.Array
    ) -> Words:
        each = zip(counters, brackets.by_slice(pivots), tied, strict=True)
        return brackets.totals([x.count_above(rows, key) for x, rows, key in each])

    above = functools.partial(count_above, brackets, [None] * len(all_ranked))
    score_keys = key_range(all_ranked[0].dtype)
    lowest = zero_like(k[1]).astype(score_keys.dtype) + score_keys.low
    keys = brackets.by_slice(find_thresholds(above, k, lowest, score_keys))
    counts = [x.count_above_and_ties(key) for x, key in zip(counters, keys, strict=True)]
    ties = jnp.concatenate([x[:, 1] for x in counts])
    need = exact.minus(k, brackets.totals([x[:, 0] for x in counts]))
    share = tie_shares(ties, need, together)
    each_alone = brackets._replace(together=False)
    above_among_ties = functools.partial(count_above, each_alone, keys)
    tie_keys = KeyRange(np.dtype(np.int32), -1 - max(x.slice_size for x in all_ranked), -1)
    all_ties = zero_like(share) + np.int32(tie_keys.low)  # below every ~index
    cut = lax.cond(  # with no slice that keeps some of its ties only, there is nothing to search
        jnp.any((share > 0) & (share < ties)),
        lambda: find_thresholds(above_among_ties, exact.as_words(share), all_ties, tie_keys),
        lambda: all_ties,
    )
    # Each ~index is below 0, so that a cut of 0 keeps no tie.
    cuts = each_alone.by_slice(jnp.where(share > 0, cut, 0))
    return [x.mask(*ends) for x, *ends in zip(counters, keys, cuts, strict=True)], eligible


class SliceCounter:
    """Counts and masks the slices of one parameter, in its shape: no entry moves."""

    def __init__(self, ranked: Ranked) -> None:
        shape = ranked.shape
        if ranked.slice_size >= 2**31:
            raise ValueError(f"A slice may hold fewer than 2**31 scores, got shape {shape}.")
        self._ranked, self._shape = ranked, shape
        self._axes = axes = ranked.axes
        strides = [math.prod(shape[axis + 1 : axes.stop]) for axis in axes]
        # Of an index within a slice.
        self._strides = [0] * ranked.batch_axes + strides + [0] * ranked.last_axes

    def count_eligible(self) -> jax.Array:
        """Counts the eligible entries, int32[slices]."""
        mask = self._ranked.eligible()
        if mask is None:
            return jnp.full(self._ranked.num_slices, self._ranked.slice_size, jnp.int32)
        return count(mask, self._axes).reshape(-1)

    def count_above(self, pivots: jax.Array, tied: jax.Array | None = None) -> jax.Array:
        """Counts the keys above pivots[slices, n], int32[slices, n].

        With tied[slices], ties of that key have ~index as their key, all others the lowest key.
        """
        # Without a barrier that pivots pass, too, XLA moves keys out of the loop and stores them.
        state = self._ranked, pivots, [jnp.int32(stride) for stride in self._strides], tied
        ranked, pivots, strides, tied = lax.optimization_barrier(state)
        if tied is None:
            keys = ranked.keys()
        else:
            ties, index = self._compare(ranked, tied)[1], flat_index(self._shape, strides)
            keys = jnp.where(ties, ~index, np.int32(-(2**31)))
        return self._sums([keys > self._align_slices(pivot) for pivot in pivots.T])

    def count_above_and_ties(self, key: jax.Array) -> jax.Array:
        """Counts keys above key[slices] and eligible keys equal to it, int32[slices, 2]."""
        return self._sums(self._compare(self._ranked, key))

    def mask(self, key: jax.Array, cut: jax.Array) -> jax.Array:
        """Returns the uint8 mask of keys above the key, and of ties with ~index >= cut[slices]."""
        above, ties = self._compare(self._ranked, key)
        is_early = ~flat_index(self._shape, self._strides) >= self._align_slices(cut)
        return (above | (ties & is_early)).astype(jnp.uint8)

    def _compare(self, ranked: Ranked, key: jax.Array) -> list[jax.Array]:
        """Returns masks of keys above key[slices], and of eligible keys equal to it."""
        keys, key, where = ranked.keys(), self._align_slices(key), ranked.eligible()
        return [keys > key, keys == key if where is None else (keys == key) & where]

    def _align_slices(self, x: jax.Array) -> jax.Array:
        """Reshapes x[slices], to be broadcast against the entries."""
        inner = (1,) * len(self._axes)
        shape = self._shape[: self._axes.start] + inner + self._shape[self._axes.stop :]
        return x.reshape(shape)

    def _sums(self, masks: Sequence[jax.Array]) -> jax.Array:
        """Sums up masks: int32[slices, masks]."""
        return jnp.stack([x.reshape(-1) for x in sums(masks, self._axes)], axis=-1)


@jax.jit  # which traces once for all parameters of a shape and a score
def mask_entries(ranked: Ranked, key: jax.Array, cut: jax.Array) -> jax.Array:
    """Returns `SliceCounter.mask` of a parameter."""
    return SliceCounter(ranked).mask(key, cut)


def tie_shares(ties: jax.Array, need: Words, together: bool) -> jax.Array:
    """Returns the number of ties that each slice keeps, so that each bracket keeps `need`."""
    if not together:
        return need[1].astype(jnp.int32)
    before = exact.totals_before(ties)
    room = exact.minus(need, before)
    # With a high word above 0 there is room for 2**32 ties or more.
    fits = jnp.minimum(room[1], ties.astype(jnp.uint32)).astype(jnp.int32)
    return jnp.where(exact.at_least(need, before), jnp.where(room[0] > 0, ties, fits), 0)
