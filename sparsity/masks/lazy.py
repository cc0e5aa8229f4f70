"""Hooks that work entry by entry, which the search of the masks calls where it reads scores."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import host, trees
from sparsity.core.trees import Grads, Masks, Params, PyTree, ScoreTree
from sparsity.masks.bits import apply_mask
from sparsity.programs.program import ClosedJaxpr, Equation, Program, read_jaxpr
from sparsity.selection import EntryScores, Ranked

_MARK = "is_marked_elementwise"  # attribute of a marked hook
Hook = TypeVar("Hook", bound=Callable[..., object])
Dtypes: TypeAlias = tuple[np.dtype, ...]  # of weight, mask and gradient, without absent ones


def elementwise(hook: Hook) -> Hook:
    """States that a hook's score of a weight depends on that weight and its gradient alone.

    The mark changes no argument: a hook of your class gets complete trees with and without it.

    Example:
      >>> import dataclasses, sparsity
      >>> @dataclasses.dataclass
      ... class Squares(sparsity.BaseUpdater):
      ...     @sparsity.elementwise
      ...     def calculate_scores(self, params, sparse_state=None, grads=None):
      ...         return jax.tree.map(jnp.square, params)
    """
    if not inspect.isfunction(hook):
        raise ValueError(f"elementwise marks a method of a class, got hook = {hook!r}.")
    # Hooks of the library take single arrays as trees; others may tell parameters apart by path.
    if (hook.__module__ or "").startswith("sparsity."):
        vars(hook)[_MARK] = hook
    return hook


def is_marked_elementwise(hook: Callable[..., object]) -> bool:
    """Returns whether a method of the library has the mark of `elementwise`."""
    # The mark names its function: `functools.wraps` copies it to a function of the user.
    return getattr(hook, _MARK, False) is getattr(hook, "__func__", hook)


def defer_scores(
    hook: Callable[..., PyTree], params: Params, masks: Masks | None, grads: Grads | None
) -> ScoreTree | None:
    """Returns the lazy scores of an `elementwise` hook, a tree of `EntryScores`.

    The result is `None` if the hook is not one of the library with the mark, or if a gradient is
    missing, as the error of the hook itself says more.

    Args:
      hook: function of `params`, `sparse_state` and `grads`, which are passed by name.
      params: tree of parameters as they are stored.
      masks: tree of the masks under which the hook sees the parameters; `None` for no masks.
      grads: tree of gradients.
    """
    if not is_marked_elementwise(hook):
        return None
    if grads is not None and trees.leaves_by_path(params).keys() - trees.leaves_by_path(grads):
        return None
    fns: dict[tuple[bool, Dtypes], _EntryScore] = {}

    def lazy(
        key_path: trees.KeyPath, param: jax.Array, mask: jax.Array | None, grad: jax.Array | None
    ) -> EntryScores:
        values = [x for x in (param, mask, grad) if x is not None]
        signature = mask is not None, tuple(x.dtype for x in values)
        if signature not in fns:
            fns[signature] = _EntryScore.trace(hook, *signature)
        return EntryScores(fns[signature], tuple(values[i] for i in fns[signature].read))

    return trees.map_matched(lazy, params, masks, grads)


@dataclasses.dataclass(frozen=True)
class _EntryScore:
    """Hook as a function of the weight of an entry, the mask if any, and the gradient.

    Instances are equal if they compute the same: equal hooks of different objects share compiled
    programs.

    Attributes:
      hook: as in `defer_scores`.
      masked: whether there is a mask.
      dtypes: dtypes of weight, mask and gradient.
      read: positions of the values that the hook reads; calls take only these values.
      program: the traced hook; kept alive, because `formula` names its objects.
      formula: the text of the program.
    """

    hook: Callable[..., PyTree] = dataclasses.field(compare=False)
    masked: bool
    dtypes: Dtypes
    read: tuple[int, ...]
    program: ClosedJaxpr = dataclasses.field(compare=False)
    formula: str

    @classmethod
    def trace(cls, hook: Callable[..., PyTree], masked: bool, dtypes: Dtypes) -> _EntryScore:
        """Traces the hook for a few entries; `read` holds the position of the weight if the
        hook reads no value.
        """
        call = functools.partial(_call_hook, hook, masked)
        closed = jax.make_jaxpr(call)(*(jax.ShapeDtypeStruct((_LENGTH,), x) for x in dtypes))
        program = read_jaxpr(closed)
        steps = _list_live(program)
        used = {*program.outputs, *(value for step in steps for value in step.inputs)}
        read = tuple(i for i, x in enumerate(program.inputs) if x in used) or (0,)
        return cls(hook, masked, dtypes, read, closed, str(closed))

    def __call__(self, *inputs: jax.Array) -> jax.Array:
        values = [jnp.zeros_like(inputs[0], dtype) for dtype in self.dtypes]
        for i, value in zip(self.read, inputs, strict=True):
            values[i] = value
        return _call_hook(self.hook, self.masked, *values)

    @functools.cached_property
    def on_host(self) -> Callable[..., np.ndarray] | None:
        """Function of arrays of numpy with the same bits; `None` if numpy may round otherwise."""
        program, dtype = self.program.jaxpr, self.dtypes[self.read[0]]
        if len(program.eqns) > 1 or jnp.issubdtype(dtype, jnp.complexfloating):
            return None
        name, results = "copy", program.invars
        for step in program.eqns:
            name, results = step.primitive.name, step.outvars
        return _ON_HOST.get(name) if program.outvars[0] in results else None


_LENGTH = 97  # entries for which hooks are traced; not 1, which would be broadcast


def _list_live(program: Program) -> list[Equation]:
    """Returns the equations on which results depend, those of loops and branches included."""
    live = list[Equation]()
    used = {*program.outputs}
    for equation in reversed([*program.flat_equations()]):
        if not used.isdisjoint(equation.outputs):
            used.update(equation.inputs)
            live += [step for body in equation.inner_programs for step in _list_live(body)]
            live.append(equation)
    return live


def _call_hook(
    hook: Callable[..., PyTree], masked: bool, weight: jax.Array, *operands: jax.Array
) -> jax.Array:
    """Returns the scores of weights; operands are the mask and the gradient, each if any."""
    if masked:
        weight, operands = apply_mask(weight, operands[0]), operands[1:]
    grads = operands[0] if operands else None
    return hook(params=weight, sparse_state=None, grads=grads)


# XLA rounds no result of these, and does not take subnormal numbers for 0, as it does in products.
_ON_HOST: dict[str, Callable[..., np.ndarray]] = {
    "abs": np.abs,
    "copy": np.asarray,
    "neg": np.negative,
}


def host_scores(
    hook: Callable[..., PyTree], params: Params, grads: Grads | None
) -> ScoreTree | None:
    """Returns lazy scores if numpy computes them from concrete arrays; `None` if not."""
    if host.find_host_device(params, grads) is None:
        return None
    scores = defer_scores(hook, params, None, grads)
    is_on_host = all(Ranked.wrap(score).is_on_host for score in jax.tree.leaves(scores))
    return scores if is_on_host else None
