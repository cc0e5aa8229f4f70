"""Candidates: the scores of a parameter whose entries compete for places in a mask."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scores", "where"],
    meta_fields=["batch_axes"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """Scores of one parameter, a pytree of its arrays; entries compete within a slice.

    Attributes:
      scores: real scores or booleans, of a dtype that `keys.readable_dtype` returns.
      where: array of the shape of the scores; an entry is eligible where it is not zero. `None`:
        all entries are.
      batch_axes: number of leading axes that index separate slices.
    """

    scores: jax.Array
    where: jax.Array | None = None
    batch_axes: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scores."""
        return self.scores.shape

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the axes that index slices."""
        return self.shape[: self.batch_axes]

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return math.prod(self.batch)

    @property
    def slice_size(self) -> int:
        """Number of entries of a slice."""
        return math.prod(self.shape[self.batch_axes :])
