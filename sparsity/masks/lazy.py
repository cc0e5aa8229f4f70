"""Scores of updaters' hooks, computed within the search where a hook works entry by entry."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.hashing import (
    generate_random_scores,
    hash_entries,
    hash_words,
    leaf_word,
    seed_words,
)
from sparsity.core.trees import PyTree
from sparsity.masks.bits import apply_mask
from sparsity.masks.sites import Sites
from sparsity.selection import Scores
from sparsity.selection.cpu.kernels import unstack, use_flat

Hook = TypeVar("Hook", bound=Callable[..., object])


def elementwise(hook: Hook) -> Hook:
    """Marks a hook whose score of a weight depends on that weight and its gradient alone.

    Such scores are not stored: the search calls the hook on parts of leaves, with `sparse_state`
    None, as often as it reads them. The mark goes with the method: a subclass that overrides it
    sets it again, or gets whole trees.

    Example:
      >>> import dataclasses, sparsity
      >>> @dataclasses.dataclass
      ... class Squares(sparsity.BaseUpdater):
      ...     @sparsity.elementwise
      ...     def calculate_scores(self, params, sparse_state=None, grads=None):
      ...         return jax.tree.map(jnp.square, params)
    """
    vars(hook)["is_elementwise"] = True
    return hook


class Draw(Protocol):
    """What random scores are drawn with: `generate_random_scores`, or what does it lazily."""

    def __call__(
        self, params: PyTree, rng_seed: int | jax.Array, step: chex.Numeric = 0
    ) -> PyTree: ...


def drawing(table: Sites) -> Draw:
    """Returns what draws the scores of `generate_random_scores`, not computed yet if traced.

    Args:
      table: says which stored arrays the parameters were computed from.
    """

    def draw(params: PyTree, rng_seed: int | jax.Array, step: chex.Numeric = 0) -> PyTree:
        if not any(map(is_traced, jax.tree.leaves(params))):  # nobody else would place the masks
            return generate_random_scores(params, rng_seed, step)
        leaves = trees.leaves_by_path(params)
        words = np.array([leaf_word(path) for path in leaves], np.uint32)
        # Where XLA may cut arrays, what it reads at places that it does not know moves its cuts.
        each: Callable[[jax.Array], list[jax.Array]] = (
            unstack if all(map(use_flat, leaves.values())) else list
        )
        hashed = map(each, hash_words(*seed_words(rng_seed, step), words))
        words_of = dict(zip(leaves, zip(*hashed, strict=True), strict=True))

        def lazy(path: trees.KeyPath, param: Any) -> Scores:
            like = table.stored(path, param)[:1]
            return Scores(_drawn, like, words_of[path], uses_index=True, uses_arrays=False)

        return trees.map_matched(lazy, params)

    return draw


def _drawn(_: jax.Array, state: jax.Array, offset: jax.Array, index: jax.Array) -> jax.Array:
    return hash_entries(index, state, offset)


def lazy_scores(
    hook: Callable[..., PyTree],
    table: Sites,
    sparse_state: object,
    params: PyTree,
    grads: PyTree | None,
) -> PyTree | None:
    """The scores of a hook, not computed yet: a tree like `params` of `Scores`.

    Those of an `elementwise` hook, or of one that takes what it draws with as an argument `draw`.
    None if the hook is no such one, if it reads arrays of its own, or if a gradient is missing,
    which the hook can say better.

    Args:
      hook: takes params, sparse_state and grads by these names.
      table: says which stored arrays the parameters were computed from.
      sparse_state: the present state.
      params: tree of parameters.
      grads: tree of gradients.
    """
    if "draw" in inspect.signature(hook).parameters:
        return hook(params=params, sparse_state=sparse_state, grads=grads, draw=drawing(table))
    if not getattr(hook, "is_elementwise", False):
        return None
    if grads is not None and trees.leaves_by_path(params).keys() - trees.leaves_by_path(grads):
        return None
    fns: dict[tuple[Any, ...], _OfEntries] = {}

    def lazy(path: trees.KeyPath, param: Any, grad: Any) -> Any:
        stored = table.stored(path, param)
        values = (*stored, *([] if grad is None else [grad]))
        kind = len(stored) > 1, tuple(x.dtype for x in values)
        if kind not in fns:
            fns[kind] = _OfEntries.of(hook, *kind)
        return Scores(fns[kind], tuple(values[i] for i in fns[kind].read))

    scores: PyTree = trees.map_matched(lazy, params, grads)
    return None if any(fn.program.consts for fn in fns.values()) else scores


@dataclasses.dataclass(frozen=True)
class _OfEntries:
    """The hook as a function of an entry's weight, its mask if there is one, and its gradient.

    Two are equal if they compute the same: hooks of other objects then share what is compiled.

    Attributes:
      hook: as in `lazy_scores`.
      masked: whether there is a mask.
      dtypes: of these values.
      read: which of the values are given; the hook does not read the others.
      program: what the hook computes from all of them; kept, as `formula` names what it holds.
      formula: its text.
    """

    hook: Callable[..., Any] = dataclasses.field(compare=False)
    masked: bool
    dtypes: tuple[Any, ...]
    read: tuple[int, ...]
    program: Any = dataclasses.field(default=None, compare=False)
    formula: str = ""

    @classmethod
    def of(cls, hook: Callable[..., Any], masked: bool, dtypes: tuple[Any, ...]) -> _OfEntries:
        """Traces the hook; `read` is the weight if it reads none."""
        whole = cls(hook, masked, dtypes, tuple(range(len(dtypes))))
        program = jax.make_jaxpr(whole)(*(jax.ShapeDtypeStruct((), x) for x in dtypes))
        used = {id(x) for eqn in program.jaxpr.eqns for x in eqn.invars}
        used |= {*map(id, program.jaxpr.outvars)}
        read = tuple(i for i, x in enumerate(program.jaxpr.invars) if id(x) in used) or (0,)
        return cls(hook, masked, dtypes, read, program, str(program))

    def __call__(self, *given: jax.Array) -> jax.Array:
        values = [jnp.zeros_like(given[0], dtype) for dtype in self.dtypes]
        for i, value in zip(self.read, given, strict=True):
            values[i] = value
        weight, *rest = values
        if self.masked:
            weight = apply_mask(weight, rest.pop(0))
        scores: jax.Array = self.hook(
            params=weight, sparse_state=None, grads=rest[0] if rest else None
        )
        return scores
