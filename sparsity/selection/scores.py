"""Scores to rank: stored, or computed where they are read.

    name                       made by                          read by
    -------------------------  -------------------------------  ------------------------------------
    LazyScores                 `LampPruning`, classes of users  scopes: `compute`, `select_together`
    Scores, of an entry        `masks.defer_scores` for hooks   scopes; searches, through `Ranked`
                               marked `elementwise`;
                               `make_draw` for random scores;
                               `Scores.wrap` for stored arrays
    Ranked, with the mask of   scopes, `topk_masks`             searches, by its `Recipe`
    entries that compete

The page on the design says what each of them saves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import chex
import jax
import numpy as np

from sparsity.core import host
from sparsity.core.exact import Words
from sparsity.core.hashing import hash_index
from sparsity.core.sharding import shard_like
from sparsity.core.trees import PyTree
from sparsity.selection.keys import eligible_keys, readable

# Dtypes of scores by those of values, for every function in use: `jax.eval_shape` takes 1 ms.
_DTYPES: weakref.WeakKeyDictionary[
    Callable[..., jax.Array], dict[tuple[np.dtype, ...], np.dtype]
] = weakref.WeakKeyDictionary()


class _Itself:
    """Function that returns its argument."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x

    def on_host(self, x: np.ndarray) -> np.ndarray:
        return x


_itself = _Itself()


class LazyScores:
    """Base of scores that are computed where somebody needs the array.

    A subclass keeps its arrays as attributes in `vars(scores)`, alone or in trees, and uses no
    `__slots__`: a scope finds there the mesh on which the arrays lie.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scores."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Number of scores."""
        return math.prod(self.shape)

    def compute(self) -> jax.Array:
        """Returns the scores as an array."""
        raise NotImplementedError

    @classmethod
    def select_together(cls, leaves: Sequence[Self], k: Words) -> list[jax.Array] | None:
        """Returns uint8 masks of the k highest scores of all parameters.

        A class may override this method by a search that computes fewer scores, with the masks of
        `topk_masks`. `None`: there is no such search for these parameters.
        """
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class Scores(LazyScores):
    """Scores that are computed entry by entry, where they are read, and never stored.

    Leaves whose `fn` is the same object are searched by the same part of the program.

    Attributes:
      fn: maps an entry's values in `arrays`, then `scalars`, then its flat index if `uses_index`,
        to its score; called with arrays of any shape that broadcast.
      arrays: stored arrays, all of one shape; at least one.
      scalars: values that hold for all entries.
      uses_index: whether `fn` takes the int32 flat index of each entry, too; of arrays with 2**31
        entries or more the number of `hash_index`.
      uses_arrays: whether `fn` reads `arrays`; otherwise they only give the shape.
    """

    fn: Callable[..., jax.Array]
    arrays: tuple[jax.Array, ...]
    scalars: tuple[jax.Array, ...] = ()
    uses_index: bool = False
    uses_arrays: bool = True

    @classmethod
    def wrap(cls, scores: chex.Array | LazyScores) -> Scores:
        """Returns stored scores, checked, or lazy scores as they are."""
        if isinstance(scores, Scores):
            return scores
        scores = readable(compute_array(scores))
        return cls(_itself, (scores,))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the scores, as the search reads them."""
        index = [np.dtype(np.int32)] * self.uses_index
        values: tuple[np.dtype, ...] = (*(x.dtype for x in (*self.arrays, *self.scalars)), *index)
        dtypes = _DTYPES.setdefault(self.fn, {})
        if values not in dtypes:
            structs = [jax.ShapeDtypeStruct((), dtype) for dtype in values]
            dtypes[values] = jax.eval_shape(lambda *x: readable(self.fn(*x)), *structs).dtype
        return dtypes[values]

    @property
    def is_on_host(self) -> bool:
        """Returns whether `on_host` computes the scores."""
        return host.find_body(self.fn) is not None and not self.uses_index

    def on_host(self, arrays: Sequence[chex.Array]) -> np.ndarray:
        """Computes scores by numpy.

        Args:
          arrays: some entries of `self.arrays`, as arrays of numpy, and so are the scalars.
        """
        scores: np.ndarray = host.call(self.fn, *arrays, *self.scalars)
        return scores

    def compute(self) -> jax.Array:
        """Returns the scores as an array."""
        return _compute(Ranked(self))  # a pytree, as scores are leaves of trees

    def _compute(self) -> jax.Array:
        index: tuple[jax.Array, ...] = ()
        if self.uses_index:  # sharded as the scores shall be, which may depend on nothing else
            like = self.arrays[0]
            index = (shard_like(like, functools.partial(hash_index, like.shape)),)
        return self.fn(*self.arrays, *self.scalars, *index)


def _compute_on_host(ranked: Ranked) -> PyTree:
    scores = ranked.scores
    return host.copy(scores.on_host(scores.arrays)) if scores.is_on_host else NotImplemented


@host.instead(_compute_on_host)
def _compute(ranked: Ranked) -> jax.Array:
    return ranked.scores._compute()


def compute_array(scores: PyTree) -> PyTree:
    """Returns lazy scores as an array, and anything else unchanged."""
    return scores.compute() if isinstance(scores, LazyScores) else scores


class Recipe(NamedTuple):
    """Recipe that computes keys from parts of the arrays of a `Ranked`.

    Parameters with one recipe are ranked by one search.

    Attributes:
      fn: as in `Scores`.
      dtype: dtype of the scores.
      dtypes: dtypes of `Ranked.arrays`, then of the scalars.
      num_arrays: the number of arrays that `fn` takes.
      where_position: position of the array that says which entries are eligible; None: all are.
      uses_index: as in `Scores`.
      eligible_is_zero: as in `Ranked`.
    """

    fn: Callable[..., jax.Array]
    dtype: np.dtype
    dtypes: tuple[np.dtype, ...]
    num_arrays: int
    where_position: int | None
    uses_index: bool
    eligible_is_zero: bool

    def eligible(self, arrays: Sequence[jax.Array]) -> jax.Array | None:
        """Returns a bool mask of the eligible entries; None: all entries are eligible."""
        if self.where_position is None:
            return None
        mask = arrays[self.where_position].astype(bool)
        return ~mask if self.eligible_is_zero else mask

    def keys(
        self,
        arrays: Sequence[jax.Array],
        scalars: tuple[jax.Array, ...],
        index: jax.Array | None,
        is_entry: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the keys of some entries, of any shape: the lowest key unless eligible.

        Args:
          arrays: entries of `Ranked.arrays`.
          scalars: scalars of the scores, to be broadcast against the entries.
          index: flat index of the entries in their parameter; not read unless `uses_index`.
          is_entry: False at padding; None: there is no padding.
        """
        values = (*arrays[: self.num_arrays], *scalars, *[index][: self.uses_index])
        return eligible_keys(self.fn(*values), self.eligible(arrays), is_entry)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Ranked:
    """Scores of one parameter and the mask of its eligible entries, a pytree of its arrays.

    Attributes:
      scores: the scores.
      where: an entry is eligible where this array is not zero.
      batch_axes: number of leading axes that index separate slices.
      eligible_is_zero: an entry is eligible where the array is zero.
      last_axes: number of last axes that index separate slices, too.
      where_in_scores: position of the array among those of the scores, in place of `where`, so that
        an array that is used twice is one argument of a program. Without both, all entries are
        eligible.
    """

    scores: Scores
    where: jax.Array | None = None
    batch_axes: int = 0
    eligible_is_zero: bool = False
    last_axes: int = 0
    where_in_scores: int | None = None

    @classmethod
    def wrap(
        cls, scores: chex.Array | LazyScores, where: jax.Array | None = None, batch_axes: int = 0
    ) -> Ranked:
        """Returns stored or lazy scores as a search takes them."""
        return cls(Scores.wrap(scores), where, batch_axes)

    def restrict_to(self, where: jax.Array) -> Ranked:
        """Returns the scores with entries that are eligible where an array is not zero."""
        same = next((i for i, x in enumerate(self.scores.arrays) if x is where), None)
        return dataclasses.replace(
            self, where=where if same is None else None, where_in_scores=same
        )

    @property
    def slices(self) -> int:
        return math.prod(self.batch)

    @property
    def size(self) -> int:  # of a slice
        return math.prod(self.scores.shape[axis] for axis in self.axes)

    @property
    def axes(self) -> range:
        """Axes of a slice."""
        return range(self.batch_axes, self.scores.ndim - self.last_axes)

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the axes that index slices."""
        shape = self.scores.shape
        return shape[: self.axes.start] + shape[self.axes.stop :]

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the scores, those that index slices first."""
        return (*range(self.axes.start), *range(self.axes.stop, self.scores.ndim), *self.axes)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Arrays that a search reads, each of them once: the arrays of the scores, then `where`."""
        if self.where is None:
            return self.scores.arrays
        return (*self.scores.arrays, self.where) if self.scores.uses_arrays else (self.where,)

    @property
    def where_position(self) -> int | None:
        """Position in `arrays` of the array that says what is eligible; None: all entries are."""
        return self.where_in_scores if self.where is None else len(self.arrays) - 1

    @property
    def recipe(self) -> Recipe:
        """Recipe that computes the keys."""
        scores, arrays = self.scores, self.arrays
        return Recipe(
            fn=scores.fn,
            dtype=scores.dtype,
            dtypes=tuple(x.dtype for x in (*arrays, *scores.scalars)),
            num_arrays=min(len(scores.arrays), len(arrays)),
            where_position=self.where_position,
            uses_index=scores.uses_index,
            eligible_is_zero=self.eligible_is_zero,
        )

    def eligible(self, arrays: Sequence[jax.Array]) -> jax.Array | None:
        """Returns the mask of the eligible entries, by values of `self.arrays`; None: all are."""
        return self.recipe.eligible(arrays)

    def keys(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Computes keys in the shape of the scores, by values of `self.arrays`."""
        index = hash_index(self.scores.shape) if self.scores.uses_index else None
        return self.recipe.keys(arrays, self.scores.scalars, index)

    def tree_flatten(self) -> tuple[PyTree, PyTree]:
        """Splits off the arrays."""
        x = self.scores
        fields = self.batch_axes, self.eligible_is_zero, self.last_axes, self.where_in_scores
        return (x.arrays, x.scalars, self.where), (x.fn, x.uses_index, x.uses_arrays, *fields)

    @classmethod
    def tree_unflatten(cls, static: PyTree, children: PyTree) -> Ranked:
        """Undoes `tree_flatten`."""
        fn, uses_index, uses_arrays, *fields = static
        arrays, scalars, where = children
        return cls(Scores(fn, arrays, scalars, uses_index, uses_arrays), where, *fields)
