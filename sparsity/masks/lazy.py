"""Scores of updaters' hooks, computed within the search where a hook works entry by entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.trees import PyTree
from sparsity.masks.bits import apply_mask
from sparsity.masks.sites import Sites
from sparsity.selection import Scores

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


def is_elementwise(hook: Callable[..., object]) -> bool:
    """Whether a hook is marked as `elementwise`."""
    return getattr(hook, "is_elementwise", False)


def lazy_scores(
    hook: Callable[..., PyTree], table: Sites, params: PyTree, grads: PyTree | None
) -> PyTree | None:
    """The scores of an `elementwise` hook, not computed yet: a tree like `params` of `Scores`.

    None if the hook is no such one, or if a gradient is missing, which the hook can say better.

    Args:
      hook: takes params, sparse_state and grads by these names.
      table: says which stored arrays the parameters were computed from.
      params: tree of parameters.
      grads: tree of gradients.
    """
    if not is_elementwise(hook):
        return None
    if grads is not None and trees.leaves_by_path(params).keys() - trees.leaves_by_path(grads):
        return None

    def lazy(path: trees.KeyPath, param: Any, grad: Any) -> Any:
        stored = table.stored(path, param)
        values = (*stored, *([] if grad is None else [grad]))
        fn = _OfEntries(hook, len(stored) > 1, tuple(x.dtype for x in values))
        read = fn.read()
        return Scores(dataclasses.replace(fn, kept=read), tuple(values[i] for i in read))

    return trees.map_matched(lazy, params, grads)


@dataclasses.dataclass(frozen=True)
class _OfEntries:
    """The hook as a function of an entry's weight, its mask if there is one, and its gradient.

    Attributes:
      hook: as in `lazy_scores`.
      masked: whether there is a mask.
      dtypes: of these values.
      kept: which of them are given; None: all. The hook does not read the others.
    """

    hook: Callable[..., Any]
    masked: bool
    dtypes: tuple[Any, ...]
    kept: tuple[int, ...] | None = None

    def __call__(self, *given: jax.Array) -> jax.Array:
        kept = range(len(self.dtypes)) if self.kept is None else self.kept
        values = [jnp.zeros_like(given[0], dtype) for dtype in self.dtypes]
        for i, value in zip(kept, given, strict=True):
            values[i] = value
        weight, *rest = values
        if self.masked:
            weight = apply_mask(weight, rest.pop(0))
        scores: jax.Array = self.hook(
            params=weight, sparse_state=None, grads=rest[0] if rest else None
        )
        return scores

    def read(self) -> tuple[int, ...]:
        """Which of the values the hook reads; the weight if it reads none."""
        program = jax.make_jaxpr(self)(*(jax.ShapeDtypeStruct((), x) for x in self.dtypes)).jaxpr
        used = {id(x) for eqn in program.eqns for x in eqn.invars} | {*map(id, program.outvars)}
        return tuple(i for i, x in enumerate(program.invars) if id(x) in used) or (0,)
