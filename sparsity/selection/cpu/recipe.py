"""Recipes of keys: parameters with one recipe are ranked by one search."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from sparsity.selection.keys import eligible_keys
from sparsity.selection.scores import Ranked, is_eligible


class Recipe(NamedTuple):
    """Recipe that computes keys from parts of the arrays of a `Ranked`.

    Attributes:
      fn: as in `Scores`.
      dtype: dtype of the scores.
      dtypes: dtypes of `Ranked.arrays`, then of the scalars.
      arrays: the number of arrays that `fn` takes.
      where: position of the array that says which entries are eligible; None: all are.
      uses_index: as in `Scores`.
      eligible_is_zero: as in `Ranked`.
    """

    fn: Callable[..., jax.Array]
    dtype: np.dtype
    dtypes: tuple[np.dtype, ...]
    arrays: int
    where: int | None
    uses_index: bool
    eligible_is_zero: bool

    @classmethod
    def read(cls, leaf: Ranked) -> Recipe:
        """Returns the recipe of a parameter."""
        scores, arrays = leaf.scores, leaf.arrays
        return cls(
            fn=scores.fn,
            dtype=scores.dtype,
            dtypes=tuple(x.dtype for x in (*arrays, *scores.scalars)),
            arrays=min(len(scores.arrays), len(arrays)),
            where=leaf.where_position,
            uses_index=scores.uses_index,
            eligible_is_zero=leaf.eligible_is_zero,
        )

    def eligible(self, arrays: tuple[jax.Array, ...]) -> jax.Array | None:
        """Returns the mask of the eligible entries; None: all are eligible."""
        if self.where is None:
            return None
        return is_eligible(arrays[self.where], self.eligible_is_zero)

    def keys(
        self,
        arrays: tuple[jax.Array, ...],
        scalars: tuple[jax.Array, ...],
        index: jax.Array,
        is_entry: jax.Array | None,
    ) -> jax.Array:
        """Computes the keys of some entries, of any shape: the lowest key unless eligible.

        Args:
          arrays: entries of `Ranked.arrays`.
          scalars: scalars of the scores, to be broadcast against the entries.
          index: flat index of the entries in their parameter.
          is_entry: False at padding; None: there is no padding.
        """
        values = (*arrays[: self.arrays], *scalars, *[index][: self.uses_index])
        return eligible_keys(self.fn(*values), self.eligible(arrays), is_entry)
