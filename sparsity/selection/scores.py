"""Scores to rank: stored, or computed where they are read.

- `LazyScores`, the base: anything that computes an array of scores on demand. `LampPruning` and
  users subclass the base; scopes call `compute` or `select_together`.
- `EntryScores`, the usual lazy scores: a function of an entry, and the arrays that the function
  reads. `masks.defer_scores` makes them for hooks marked `elementwise`, `masks.make_draw` for
  random scores, `EntryScores.wrap` for stored ones. Trees hold them as leaves.
- `Ranked`, the argument of searches: the same arrays, the mask of the entries that compete, and the
  axes that index slices. A pytree of its arrays, which goes through `jit`.
- `Recipe`, how a `Ranked` makes keys of its arrays. Parameters of one recipe share a search.

The page on the design says what each of them saves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import host
from sparsity.core.exact import Words
from sparsity.core.hashing import hash_index
from sparsity.core.host import AnyArray
from sparsity.core.sharding import shard_like
from sparsity.core.trees import PyTree
from sparsity.selection.keys import key_range, readable, to_keys

# Dtypes of scores by those of values, for every function in use: `jax.eval_shape` takes 1 ms.
_DTYPES: weakref.WeakKeyDictionary[
    Callable[..., jax.Array], dict[tuple[np.dtype, ...], np.dtype]
] = weakref.WeakKeyDictionary()


@host.instead(lambda x: x)
def _itself(x: jax.Array) -> jax.Array:
    """Returns stored scores."""
    return x


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
    def select_together(cls, scores: Sequence[Self], k: Words) -> list[jax.Array] | None:
        """Returns uint8 masks of the k highest scores of all parameters.

        A class may override this method by a search that computes fewer scores, with the masks of
        `topk_masks`. `None`: there is no such search for these parameters.
        """
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class EntryScores(LazyScores):
    """Scores that are computed entry by entry, where they are read, and never stored.

    Leaves whose `fn` is the same object are searched by the same part of the program.

    Attributes:
      fn: maps an entry's values in `arrays`, then `scalars`, to its score; called with arrays of
        any shape that broadcast.
      arrays: stored arrays, all of one shape; at least one.
      scalars: values that hold for all entries.
      reads_index: whether `fn` takes the int32 flat index of an entry, by `hash_index`, in place of
        the values in `arrays`, which only give the shape.
    """

    fn: Callable[..., jax.Array]
    arrays: tuple[jax.Array, ...]
    scalars: tuple[jax.Array, ...] = ()
    reads_index: bool = False

    @classmethod
    def wrap(cls, scores: chex.Array | LazyScores) -> EntryScores:
        """Returns stored scores, checked, or lazy scores as they are."""
        if isinstance(scores, EntryScores):
            return scores
        return cls(_itself, (readable(compute_array(scores)),))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the scores, as the search reads them."""
        return Ranked.wrap(self).dtype

    def compute(self) -> jax.Array:
        """Returns the scores as an array."""
        return Ranked.wrap(self).compute()


def compute_array(scores: PyTree) -> jax.Array:
    """Returns lazy scores as an array, and an array unchanged."""
    return scores.compute() if isinstance(scores, LazyScores) else scores


class Recipe(NamedTuple):
    """Recipe for the keys of entries, from their values in the arrays of a `Ranked`.

    Attributes:
      fn: as in `EntryScores`.
      num_arrays: number of arrays that `fn` takes, the first ones; 0 if it takes the index.
      where_position: position of the array that says which entries are eligible; None: all are.
      eligible_is_zero: an entry is eligible where this array is zero, else where it is not zero.
    """

    fn: Callable[..., jax.Array]
    num_arrays: int
    where_position: int | None = None
    eligible_is_zero: bool = False

    @property
    def reads_index(self) -> bool:
        """True if `fn` takes the index of an entry."""
        return self.num_arrays == 0

    def eligible(self, arrays: Sequence[jax.Array]) -> jax.Array | None:
        """Returns a bool mask of the eligible entries; None: all entries are eligible."""
        if self.where_position is None:
            return None
        mask = arrays[self.where_position].astype(bool)
        return ~mask if self.eligible_is_zero else mask

    def scores(
        self, arrays: Sequence[jax.Array], scalars: Sequence[jax.Array], index: jax.Array | None
    ) -> jax.Array:
        """Computes the scores of some entries, of any shape.

        Args:
          arrays: entries of `Ranked.arrays`.
          scalars: scalars of the scores, to be broadcast against the entries.
          index: flat index of the entries in their parameter; not read unless `reads_index`.
        """
        return self.fn(*([index] if self.reads_index else arrays[: self.num_arrays]), *scalars)

    def keys(
        self,
        arrays: Sequence[jax.Array],
        scalars: Sequence[jax.Array],
        index: jax.Array | None,
        is_entry: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the keys of some entries: the lowest key unless eligible.

        Args:
          arrays: as in `scores`.
          scalars: as in `scores`.
          index: as in `scores`.
          is_entry: False at padding; None: there is no padding.
        """
        scores = readable(self.scores(arrays, scalars, index))
        keys = to_keys(scores)
        lowest = jnp.array(key_range(scores.dtype).low, keys.dtype)
        for mask in (self.eligible(arrays), is_entry):
            keys = keys if mask is None else jnp.where(mask, keys, lowest)
        return keys


def _compute_on_host(ranked: Ranked) -> PyTree:
    if not ranked.is_on_host:
        return NotImplemented
    scores = host.empty(ranked.shape, ranked.dtype)
    flat, arrays = scores.reshape(-1), [x.reshape(-1) for x in ranked.arrays]
    for at in host.chunks(ranked.size):
        flat[at] = ranked.compute_on_host([x[at] for x in arrays])
    return scores


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "scalars"],
    meta_fields=["recipe", "batch_axes", "last_axes"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Ranked:
    """Scores of one parameter and the mask of its eligible entries, a pytree of its arrays.

    Attributes:
      arrays: arrays that a search reads, all of one shape: those of the scores, and the mask.
      scalars: scalars of the scores.
      recipe: computes the keys.
      batch_axes: number of leading axes that index separate slices.
      last_axes: number of last axes that index separate slices, too.
    """

    arrays: tuple[jax.Array, ...]
    scalars: tuple[jax.Array, ...]
    recipe: Recipe
    batch_axes: int = 0
    last_axes: int = 0

    @classmethod
    def wrap(
        cls,
        scores: chex.Array | LazyScores,
        where: jax.Array | None = None,
        batch_axes: int = 0,
        last_axes: int = 0,
    ) -> Ranked:
        """Returns stored or lazy scores as a search takes them.

        Args:
          scores: the scores.
          where: an entry is eligible where this array is not zero; None: all are.
          batch_axes: as in `Ranked`.
          last_axes: as in `Ranked`.
        """
        lazy = EntryScores.wrap(scores)
        recipe = Recipe(lazy.fn, 0 if lazy.reads_index else len(lazy.arrays))
        ranked = cls(lazy.arrays, lazy.scalars, recipe, batch_axes, last_axes)
        return ranked if where is None else ranked.restrict_to(where)

    def restrict_to(self, where: jax.Array, *, eligible_is_zero: bool = False) -> Ranked:
        """Returns the scores with entries that are eligible where an array is not zero, or is."""
        count = self.recipe.num_arrays
        arrays = self.arrays[:count]
        # An array that is used twice is one argument of a program.
        position = next((i for i, x in enumerate(arrays) if x is where), count)
        return dataclasses.replace(
            self,
            arrays=arrays if position < count else (*arrays, where),
            recipe=self.recipe._replace(where_position=position, eligible_is_zero=eligible_is_zero),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scores."""
        return self.arrays[0].shape

    @property
    def size(self) -> int:
        """Number of entries of all slices."""
        return math.prod(self.shape)

    @property
    def num_slices(self) -> int:
        return math.prod(self.batch)

    @property
    def slice_size(self) -> int:
        return math.prod(self.shape[axis] for axis in self.axes)

    @property
    def axes(self) -> range:
        """Axes of a slice."""
        return range(self.batch_axes, len(self.shape) - self.last_axes)

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the axes that index slices."""
        return self.shape[: self.axes.start] + self.shape[self.axes.stop :]

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the scores, those that index slices first."""
        return (*range(self.axes.start), *range(self.axes.stop, len(self.shape)), *self.axes)

    def to_slices(self, x: AnyArray) -> AnyArray:
        """Returns an array of the shape of the scores as [num_slices, slice_size]."""
        return x.transpose(self.order).reshape(self.num_slices, self.slice_size)

    def from_slices(self, x: AnyArray) -> AnyArray:
        """Undoes `to_slices`."""
        ordered = x.reshape([self.shape[axis] for axis in self.order])
        return ordered.transpose(np.argsort(self.order))

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the scores, as the search reads them."""
        recipe, dtypes = self.recipe, _DTYPES.setdefault(self.recipe.fn, {})
        index = [np.dtype(np.int32)] * recipe.reads_index
        read = *self.arrays[: recipe.num_arrays], *self.scalars
        values: tuple[np.dtype, ...] = (*index, *(x.dtype for x in read))
        if values not in dtypes:
            structs = [jax.ShapeDtypeStruct((), dtype) for dtype in values]
            dtypes[values] = jax.eval_shape(lambda *x: readable(recipe.fn(*x)), *structs).dtype
        return dtypes[values]

    @property
    def program_key(self) -> Hashable:
        """Equal for parameters whose keys come from one recipe, of arrays that may be joined."""
        return self.recipe, tuple(x.dtype for x in (*self.arrays, *self.scalars))

    def eligible(self) -> jax.Array | None:
        """Returns the mask of the eligible entries; None: all are."""
        return self.recipe.eligible(self.arrays)

    def keys(self) -> jax.Array:
        """Computes keys in the shape of the scores."""
        index = hash_index(self.shape) if self.recipe.reads_index else None
        return self.recipe.keys(self.arrays, self.scalars, index)

    @host.instead(_compute_on_host)
    def compute(self) -> jax.Array:
        """Returns the scores as an array."""
        index: jax.Array | None = None
        if self.recipe.reads_index:  # nothing else gives the sharding of the scores
            like = self.arrays[0]
            index = shard_like(like, functools.partial(hash_index, like.shape))
        return self.recipe.scores(self.arrays, self.scalars, index)

    @property
    def is_on_host(self) -> bool:
        """True if `compute_on_host` computes the scores."""
        return host.find_body(self.recipe.fn) is not None and not self.recipe.reads_index

    def compute_on_host(self, arrays: Sequence[chex.Array]) -> np.ndarray:
        """Computes scores by numpy.

        Args:
          arrays: some entries of `self.arrays`, as arrays of numpy, and so are the scalars.
        """
        values = arrays[: self.recipe.num_arrays]
        return host.call(self.recipe.fn, *values, *self.scalars)
