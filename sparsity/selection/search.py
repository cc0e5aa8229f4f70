"""Exact search for the highest scores, for any platform and sharding: only counts move.

**The threshold.** Unsigned integers in the order of the scores, the keys, stand for the scores. Let
c(t) be the number of eligible keys that are at least t. The k-th highest key is the largest t with
c(t) >= k, because c(t) never rises with t. The search finds this t digit by digit, to the base 16
and the highest digit first: with the higher digits fixed, a digit is the largest d with c(t) >= k.
One pass over the data counts c(t) for the digits 1 to 15 at once. CPUs, which compare more slowly
than they read, count to the base 4.

**Ties.** The mask keeps `need` of the keys equal to the threshold: k less the number of keys above.
A second search ranks the ties by keys that fall as the index rises. These keys are distinct, so
that exactly `need` ties stay, those of the lowest indices. Across parameters, earlier ones keep
their ties first. The second search makes no pass where no slice has to choose among its ties.

**Eligibility.** An entry that may not stay has key 0, and no pivot is 0. NaN and the lowest integer
of a dtype have key 0, too: a mask tells these ties from entries that may not stay.

**Layout.** Small parameters on one device are laid out as rows of one array, which one kernel
counts. Large ones, and those on a mesh, are counted in their shape: no entry moves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.arrays import count, sums, use_flat
from sparsity.core.hashing import flat_index, flat_strides
from sparsity.selection.keys import Candidates, key_bits, to_keys

CountFn: TypeAlias = Callable[[jax.Array], jax.Array]
State: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]  # of a loop over digits
_COLUMNS = 1024  # of a row of small parameters
_MAX_JOINED = 2**22  # entries of a parameter that is laid out in rows
_MAX_PADDED = 2**14  # entries of rows that hold more padding than scores


def select(
    all_candidates: Sequence[Candidates], k: jax.Array | CountFn, *, together: bool
) -> tuple[list[jax.Array], jax.Array]:
    """Returns masks of the k best eligible entries, or of all if there are fewer.

    Args:
      all_candidates: parameters; if all entries compete, with scores of one dtype.
      k: number of entries to keep of each slice, int32[slices], in the order of the parameters;
        with `together` of all, [1]. Or a function of the number of eligible entries.
      together: whether all entries compete, or the entries of each slice.

    Returns:
      uint8 masks, each of its parameter's shape and sharding; and the number of eligible entries
      that are removed, int32 like k.

    Raises:
      ValueError: 2**31 or more entries compete.
    """
    filled = [x for x in all_candidates if x.num_slices]  # others are stacks of no layers
    masks, removed = iter(list[jax.Array]()), jnp.zeros(int(together), jnp.int32)
    if filled:
        filled = jax.tree.map(lax.stop_gradient, filled)  # a mask has no derivatives
        chosen, removed = _select(filled, k, together)
        masks = iter(chosen)
    empty = [None if x.num_slices else jnp.zeros(x.shape, jnp.uint8) for x in all_candidates]
    return [next(masks) if mask is None else mask for mask in empty], removed


def _select(
    all_candidates: Sequence[Candidates], k: jax.Array | CountFn, together: bool
) -> tuple[list[jax.Array], jax.Array]:
    """Returns the results of `select` for parameters that have slices."""
    _check_size(all_candidates, together)
    order, blocks = _lay_out(all_candidates)
    slices = _order_slices(all_candidates, order)
    zero = _varying_zero(jax.tree.leaves(all_candidates), k)

    def count_all(counter: Callable[..., jax.Array], *each: Sequence[jax.Array]) -> jax.Array:
        """Counts entries of each slice in the order of blocks, int32[slices, n]."""
        return jnp.concatenate([counter(*x) for x in zip(blocks, *each, strict=True)]) + zero

    def add_up(counts: jax.Array) -> jax.Array:
        return jnp.sum(counts, 0, jnp.int32, keepdims=True) if together else counts

    eligible = add_up(count_all(lambda block: block.count_eligible()))
    k = k(eligible) if callable(k) else jnp.minimum(k if together else k[slices], eligible)

    def count_from(pivots: jax.Array) -> jax.Array:
        return add_up(count_all(_Block.count_from, _split(blocks, pivots)))

    bits = max(key_bits(x.scores.dtype) for x in all_candidates)
    thresholds = _split(blocks, _find(count_from, k, bits, k >= 0))
    each = zip(blocks, thresholds, strict=True)
    all_ties = [block.find_ties(threshold) for block, threshold in each]
    above, ties = count_all(_Block.count_above_and_ties, thresholds, all_ties).T
    need = k - add_up(above)
    share = _share_ties(ties, need, slices) if together else need

    def count_ties_from(pivots: jax.Array) -> jax.Array:
        return count_all(_Block.count_ties_from, all_ties, _split(blocks, pivots))

    bits = (max(x.slice_size for x in all_candidates) + 1).bit_length()
    cut = _find(count_ties_from, share, bits, (share > 0) & (share < ties))
    cut = jnp.where(share < ties, jnp.where(share > 0, cut, np.uint32(2**32 - 1)), 0)
    ends = zip(blocks, thresholds, all_ties, _split(blocks, cut), strict=True)
    masks = [mask for block, *x in ends for mask in block.masks(*x)]
    removed = (eligible - k)[slice(None) if together else np.argsort(slices)]
    return [masks[i] for i in np.argsort(order)], removed


def _check_size(all_candidates: Sequence[Candidates], together: bool) -> None:
    """Raises a ValueError unless an int32 counts the entries that compete."""
    sizes = [x.num_slices * x.slice_size if together else x.slice_size for x in all_candidates]
    if (sum(sizes) if together else max(sizes)) >= 2**31:
        largest = all_candidates[int(np.argmax(sizes))].shape
        raise ValueError(
            f"Fewer than 2**31 scores may compete, got more, the most of shape {largest}. Give "
            "batch_axes if leading axes index separate matrices, use scope=Layerwise(), or leave "
            "parameters dense with filter_fn."
        )


def _varying_zero(arrays: Sequence[jax.Array], k: jax.Array | CountFn) -> jax.Array:
    """Returns an int32 zero that varies over a mesh as all arrays do: a loop needs such a state."""
    zero = jnp.int32(0) if callable(k) else k[0] & 0
    for x in arrays:
        if not jax.typeof(x).sharding.mesh.empty:
            zero += jnp.sum((x != 0).astype(jnp.int32) & 0, dtype=jnp.int32)
    return zero


def _split(blocks: Sequence[_Block], x: jax.Array) -> list[jax.Array]:
    """Returns x[slices, ...] of the slices of each block; x[1, ...] holds for all slices."""
    counts = [block.num_slices for block in blocks]
    return jnp.split(jnp.broadcast_to(x, (sum(counts), *x.shape[1:])), np.cumsum(counts)[:-1])


def _find(count_from: CountFn, k: jax.Array, bits: int, is_open: jax.Array) -> jax.Array:
    """Returns integers t[n] with at most k[n] keys above t, and at least k from t on.

    Args:
      count_from: maps pivots[n, m], all above 0, to the numbers of keys that are at least these.
      k: numbers of keys, int32[n].
      bits: number of bits of the keys.
      is_open: bool[n], whether to search; if no key is searched, the results are 0.
    """
    dtype = jnp.uint64 if bits > 32 else jnp.uint32

    def find(base_bits: int, is_open: jax.Array) -> jax.Array:
        choices = np.arange(1, 1 << base_bits, dtype=dtype)[None]  # of a digit

        def step(state: State) -> State:
            digits, key, is_open = state
            shift = (base_bits * (digits - 1)).astype(dtype)
            counts = count_from(key[:, None] + (choices << shift))
            key += jnp.sum(counts >= k[:, None], axis=1, dtype=dtype) << shift
            # Once c(t) = k, the mask keeps all keys from t on, and lower digits do not matter.
            return digits - 1, key, is_open & ~jnp.any(counts == k[:, None], axis=1)

        zero = k & 0  # varies as k does, where `jnp.zeros_like` would not
        start = zero[0] - (-bits // base_bits), zero.astype(dtype), is_open
        return lax.while_loop(lambda x: (x[0] > 0) & jnp.any(x[2]), step, start)[1]

    # Accelerators wait for memory, CPUs for comparisons.
    bodies = {"cpu": functools.partial(find, 2), "default": functools.partial(find, 4)}
    return lax.platform_dependent(is_open, **bodies)


def _order_slices(all_candidates: Sequence[Candidates], order: Sequence[int]) -> np.ndarray:
    """Returns the indices of all slices, parameter by parameter in an order."""
    ends = np.cumsum([x.num_slices for x in all_candidates])
    return np.concatenate(
        [np.arange(ends[i] - all_candidates[i].num_slices, ends[i]) for i in order]
    )


def _share_ties(ties: jax.Array, need: jax.Array, slices: np.ndarray) -> jax.Array:
    """Returns how many ties each slice keeps, so that the first ones keep `need` together."""
    in_order = ties[np.argsort(slices)]
    before = jnp.cumsum(in_order, dtype=jnp.int32) - in_order
    return jnp.clip(need - before[slices], 0, ties)


# ------------------------------------------------------------------ the layout
def _lay_out(all_candidates: Sequence[Candidates]) -> tuple[list[int], list[_Block]]:
    """Returns the parameters in the order of blocks, and the blocks, with keys of one dtype."""
    is_wide = any(key_bits(x.scores.dtype) > 32 for x in all_candidates)
    dtype = np.dtype(np.uint64 if is_wide else np.uint32)
    joined = [i for i, x in enumerate(all_candidates) if _fits_rows(x)]
    joined = joined if len(joined) > 1 else []
    alone = [i for i in range(len(all_candidates)) if i not in joined]
    blocks: list[_Block] = [_Rows([all_candidates[i] for i in joined], dtype)] if joined else []
    return [*joined, *alone], blocks + [_Parameter(all_candidates[i], dtype) for i in alone]


def _fits_rows(candidates: Candidates) -> bool:
    """Returns whether a parameter is laid out in rows: small, on one device, and hardly padded."""
    size = math.prod(candidates.shape)
    padded = candidates.num_slices * -(-candidates.slice_size // _COLUMNS) * _COLUMNS
    is_little = padded <= max(2 * size, _MAX_PADDED)
    return 0 < size <= _MAX_JOINED and is_little and use_flat(candidates.scores)


class _Block(Protocol):
    """Slices that are counted by one kernel.

    Attributes:
      num_slices: number of slices.
      keys: unsigned keys, 0 where an entry is not eligible.
    """

    num_slices: int
    keys: jax.Array

    def align(self, x: jax.Array) -> jax.Array:
        """Returns x[slices] as it broadcasts against the keys."""

    def sum(self, masks: Sequence[jax.Array]) -> jax.Array:
        """Sums masks over each slice, int32[slices, masks]."""

    def eligible(self) -> jax.Array | None:
        """Returns the mask of the eligible entries, bool; `None`: all are."""

    def places(self) -> jax.Array:
        """Returns uint32 numbers above 0, which fall along the entries of each slice."""

    def count_eligible(self) -> jax.Array:
        """Counts the eligible entries, int32[slices]."""

    def masks(self, threshold: jax.Array, is_tied: jax.Array, cut: jax.Array) -> list[jax.Array]:
        """Returns the masks of parameters: keys above, and ties whose place is at least the cut."""

    def count_from(self, pivots: jax.Array) -> jax.Array:
        """Counts keys that are at least pivots[slices, n], int32[slices, n]."""
        return self.sum([self.keys >= self.align(x) for x in pivots.T])

    def find_ties(self, threshold: jax.Array) -> jax.Array:
        """Returns the mask of eligible entries whose key is threshold[slices], bool."""
        is_equal, eligible = self.keys == self.align(threshold), self.eligible()
        # Stored: a pass then reads a byte of an entry in place of its key.
        return lax.optimization_barrier(is_equal if eligible is None else is_equal & eligible)

    def count_above_and_ties(self, threshold: jax.Array, is_tied: jax.Array) -> jax.Array:
        """Counts keys above a threshold[slices], and ties at the threshold, int32[slices, 2]."""
        return self.sum([self.keys > self.align(threshold), is_tied])

    def count_ties_from(self, is_tied: jax.Array, pivots: jax.Array) -> jax.Array:
        """Counts ties at places that are at least pivots[slices, n], int32[slices, n]."""
        places = self.places()
        return self.sum([is_tied & (places >= self.align(x)) for x in pivots.T])

    def mask(self, threshold: jax.Array, is_tied: jax.Array, cut: jax.Array) -> jax.Array:
        """Returns the mask of `masks` in the shape of the keys."""
        is_above = self.keys > self.align(threshold)
        return (is_above | (is_tied & (self.places() >= self.align(cut)))).astype(jnp.uint8)


class _Parameter(_Block):
    """A parameter in its shape."""

    def __init__(self, candidates: Candidates, dtype: np.dtype) -> None:
        self._candidates, self.num_slices = candidates, candidates.num_slices
        self.keys = lax.optimization_barrier(_make_keys(candidates, dtype))

    def align(self, x: jax.Array) -> jax.Array:
        inner = [1] * (self.keys.ndim - self._candidates.batch_axes)
        return x.reshape(*self._candidates.batch, *inner)

    def sum(self, masks: Sequence[jax.Array]) -> jax.Array:
        each = sums(masks, range(self._candidates.batch_axes, self.keys.ndim))
        return jnp.stack([x.reshape(-1) for x in each], axis=-1)

    def eligible(self) -> jax.Array | None:
        where = self._candidates.where
        return None if where is None else where.astype(bool)

    def places(self) -> jax.Array:
        shape, batch_axes = self._candidates.shape, self._candidates.batch_axes
        strides = [0] * batch_axes + flat_strides(shape)[batch_axes:]
        return (self._candidates.slice_size - flat_index(shape, strides)).astype(jnp.uint32)

    def count_eligible(self) -> jax.Array:
        eligible = self.eligible()
        if eligible is None:
            return jnp.full(self.num_slices, self._candidates.slice_size, jnp.int32)
        axes = range(self._candidates.batch_axes, eligible.ndim)
        return count(eligible, axes).reshape(-1)

    def masks(self, threshold: jax.Array, is_tied: jax.Array, cut: jax.Array) -> list[jax.Array]:
        return [self.mask(threshold, is_tied, cut)]


class _Rows(_Block):
    """Small parameters: each slice fills some rows of an array, the last one with padding."""

    def __init__(self, members: Sequence[Candidates], dtype: np.dtype) -> None:
        self._members = members
        sizes = np.repeat([x.slice_size for x in members], [x.num_slices for x in members])
        num_rows = -(-sizes // _COLUMNS)
        self.num_slices = len(sizes)
        ends = np.cumsum(num_rows)
        self._slice = np.repeat(np.arange(self.num_slices), num_rows)  # of each row
        row_in_slice = np.arange(ends[-1]) - (ends - num_rows)[self._slice]
        # Number of entries of the slice from the row on
        self._sizes_from_row = (sizes[self._slice] - row_in_slice * _COLUMNS).astype(np.int32)
        self._sizes = sizes.astype(np.int32)
        self.keys = lax.optimization_barrier(self._join([_make_keys(x, dtype) for x in members]))
        self._where: jax.Array | None = None
        if any(x.where is not None for x in members):
            ones = [jnp.ones_like(x.scores, bool) if x.where is None else x.where for x in members]
            self._where = lax.optimization_barrier(self._join([x.astype(bool) for x in ones]))

    def _join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Returns arrays of the shapes of the members as [rows, columns]."""
        rows = []
        for member, array in zip(self._members, arrays, strict=True):
            slices = array.reshape(member.num_slices, member.slice_size)
            padded = jnp.pad(slices, ((0, 0), (0, -member.slice_size % _COLUMNS)))
            rows.append(padded.reshape(-1, _COLUMNS))
        return jnp.concatenate(rows)

    def align(self, x: jax.Array) -> jax.Array:
        return x[self._slice][:, None]

    def sum(self, masks: Sequence[jax.Array]) -> jax.Array:
        by_row = jnp.stack(sums(masks, (1,)), axis=1)
        return jax.ops.segment_sum(by_row, self._slice, self.num_slices, indices_are_sorted=True)

    def eligible(self) -> jax.Array | None:
        is_entry = self.places() > 0
        return is_entry if self._where is None else is_entry & self._where

    def places(self) -> jax.Array:
        column = lax.broadcasted_iota(jnp.int32, self.keys.shape, 1)
        return jnp.maximum(self._sizes_from_row[:, None] - column, 0).astype(jnp.uint32)

    def count_eligible(self) -> jax.Array:
        if self._where is None:
            return jnp.asarray(self._sizes)
        return self.sum([self._where, ~self._where])[:, 0]

    def masks(self, threshold: jax.Array, is_tied: jax.Array, cut: jax.Array) -> list[jax.Array]:
        # Stored: each parameter reads its rows alone.
        mask = lax.optimization_barrier(self.mask(threshold, is_tied, cut))
        start, masks = 0, list[jax.Array]()
        for member in self._members:
            num_rows = member.num_slices * -(-member.slice_size // _COLUMNS)
            rows = mask[start : start + num_rows].reshape(member.num_slices, -1)
            masks.append(rows[:, : member.slice_size].reshape(member.shape))
            start += num_rows
        return masks


def _make_keys(candidates: Candidates, dtype: np.dtype) -> jax.Array:
    """Returns the keys of a parameter in its shape, 0 where an entry is not eligible."""
    keys = to_keys(candidates.scores).astype(dtype)
    return keys if candidates.where is None else jnp.where(candidates.where.astype(bool), keys, 0)
