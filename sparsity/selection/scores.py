"""Scores to rank: stored, or computed where they are read."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.hashing import flat_index
from sparsity.core.sharding import shard_like
from sparsity.core.trees import PyTree
from sparsity.selection.keys import key_range, readable, to_keys


def _itself(scores: jax.Array) -> jax.Array:
    return scores


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Scores that are computed entry by entry, where they are read; nothing is stored.

    Leaves whose `fn` is the same object are searched by the same part of the program.

    Attributes:
      fn: from an entry's values in `arrays`, then `scalars`, then its flat index if it
        `uses_index`, to its score; called with arrays of any shape that broadcast.
      arrays: what is stored, all of one shape; at least one array.
      scalars: values that hold for all entries.
      uses_index: whether `fn` wants the int32 flat index of each entry, too.
      uses_arrays: whether `fn` reads `arrays`, which else give no more than a shape.
    """

    fn: Callable[..., jax.Array]
    arrays: tuple[jax.Array, ...]
    scalars: tuple[jax.Array, ...] = ()
    uses_index: bool = False
    uses_arrays: bool = True

    @classmethod
    def of(cls, scores: chex.Array | Scores) -> Scores:
        """Stored scores, checked, or lazy ones as they are."""
        if isinstance(scores, Scores):
            return scores
        scores = readable(scores)
        return cls(_itself, (scores,))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape

    @property
    def size(self) -> int:
        return self.arrays[0].size

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """That of the scores."""
        own = tuple(x.dtype for x in (*self.arrays, *self.scalars))
        return _score_dtype(self.fn, own, self.uses_index)

    def compute(self) -> jax.Array:
        """The scores as an array."""
        index: tuple[jax.Array, ...] = ()
        if self.uses_index:  # sharded as the scores shall be, which may depend on nothing else
            like = self.arrays[0]
            index = (shard_like(like, functools.partial(flat_index, like.shape)),)
        return self.fn(*self.arrays, *self.scalars, *index)


def computed(scores: PyTree) -> PyTree:
    """Scores as an array, if they are lazy; anything else as it is."""
    return scores.compute() if isinstance(scores, Scores) else scores


def number_of(array: jax.Array | None, arrays: Sequence[jax.Array]) -> int | None:
    """Which of the arrays is this very one, `None` if it is none of them."""
    return next((i for i, x in enumerate(arrays) if x is array), None)


class Ranked(NamedTuple):
    """Scores, and which of them may be kept."""

    scores: Scores
    where: jax.Array | None = None  # not zero: eligible; None: all are
    batch_axes: int = 0  # how many leading axes index separate slices
    excludes: bool = False  # `where` says the opposite: zero is eligible

    @property
    def slices(self) -> int:
        """How many slices there are."""
        return math.prod(self.scores.shape[: self.batch_axes])

    @property
    def size(self) -> int:
        """Entries of a slice."""
        return math.prod(self.scores.shape[self.batch_axes :])

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """All that is stored of the leaf and is read, nothing twice."""
        own = self.scores.arrays
        if self.where is None or number_of(self.where, own) is not None:
            return own
        return (*own, self.where) if self.scores.uses_arrays else (self.where,)

    def keys(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
        """Its keys, in its shape, of these arrays: its own ones, or what a barrier made of them."""
        return self.recipe.keys(arrays, self.scores.scalars, flat_index(self.scores.shape))

    def materialized(self) -> Ranked:
        """The leaf of stored scores."""
        allowed = self.recipe.eligible(self.arrays)
        where = None if allowed is None else allowed.astype(jnp.uint8)
        return Ranked(Scores.of(self.scores.compute()), where, self.batch_axes)

    @property
    def recipe(self) -> Recipe:
        """How its keys are computed; leaves of one recipe can be ranked by one search."""
        scores, arrays = self.scores, self.arrays
        return Recipe(
            fn=scores.fn,
            dtype=scores.dtype,
            dtypes=tuple(x.dtype for x in (*arrays, *scores.scalars)),
            arrays=min(len(scores.arrays), len(arrays)),
            where=number_of(self.where, arrays),
            uses_index=scores.uses_index,
            excludes=self.excludes,
        )


class Recipe(NamedTuple):
    """How keys are computed from what is stored.

    Attributes:
      fn: as in `Scores`.
      dtype: that of the scores.
      dtypes: those of the arrays of `Ranked.arrays`, then of the scalars.
      arrays: how many of the arrays `fn` takes.
      where: which of the arrays says which entries are eligible; None: all are.
      uses_index: as in `Scores`.
      excludes: as in `Ranked`.
    """

    fn: Callable[..., jax.Array]
    dtype: np.dtype
    dtypes: tuple[np.dtype, ...]
    arrays: int
    where: int | None
    uses_index: bool
    excludes: bool

    def eligible(self, arrays: tuple[jax.Array, ...]) -> jax.Array | None:
        """Which entries may be kept, None if all are."""
        if self.where is None:
            return None
        return arrays[self.where] == 0 if self.excludes else arrays[self.where] != 0

    def keys(
        self,
        arrays: tuple[jax.Array, ...],
        scalars: tuple[jax.Array, ...],
        index: jax.Array,
        own: jax.Array | None = None,
    ) -> jax.Array:
        """Keys of some entries, of any shape; the lowest one where an entry is not eligible.

        Args:
          arrays: entries of `Ranked.arrays`.
          scalars: those of the scores, to be broadcast against the entries.
          index: flat index of the entries in their leaf.
          own: which of the entries there are; None: all.
        """
        values = (*arrays[: self.arrays], *scalars, *[index][: self.uses_index])
        keys = to_keys(readable(self.fn(*values)))
        lowest = jnp.array(key_range(self.dtype).low, keys.dtype)
        for allowed in (self.eligible(arrays), own):
            keys = keys if allowed is None else jnp.where(allowed, keys, lowest)
        return keys


@functools.lru_cache
def _score_dtype(
    fn: Callable[..., jax.Array], dtypes: tuple[np.dtype, ...], uses_index: bool
) -> np.dtype:
    values = [jax.ShapeDtypeStruct((), dtype) for dtype in (*dtypes, *[np.int32] * uses_index)]
    dtype: np.dtype = jax.eval_shape(lambda *x: readable(fn(*x)), *values).dtype
    return dtype
