"""Lazy scores: hooks that work entry by entry run within the search."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeAlias, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import host, trees
from sparsity.core.checks import is_traced
from sparsity.core.hashing import (
    Seed,
    generate_random_scores,
    hash_entries,
    hash_words,
    leaf_word,
    seed_words,
)
from sparsity.core.kernels import unstack, use_flat
from sparsity.core.trees import Grads, Masks, Params, PyTree, ScoreTree
from sparsity.masks.bits import apply_mask
from sparsity.programs.entrywise import ENTRYWISE, REDUCTIONS
from sparsity.programs.program import CONTROL, ClosedJaxpr, Equation, Program, read_jaxpr
from sparsity.selection import Scores

_MARK = "is_marked_elementwise"  # attribute of a marked hook
Hook = TypeVar("Hook", bound=Callable[..., object])
Dtypes: TypeAlias = tuple[np.dtype, ...]  # of weight, mask and gradient, without absent ones


def elementwise(hook: Hook) -> Hook:
    """Marks a hook whose score of a weight depends on that weight and its gradient alone.

    The mask search then calls the hook on parts of parameters, and `sparse_state` is `None`. The
    mark belongs to the method: an override without the mark gets complete trees. A hook that
    joins entries, as a mean does, is a ValueError when masks are made. A hook that adds axes, as
    `jnp.stack` does, gets complete trees.

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
    vars(hook)[_MARK] = True
    return hook


def is_marked_elementwise(hook: Callable[..., object]) -> bool:
    """Returns whether a method has the mark of `elementwise`."""
    return getattr(hook, _MARK, False)


def may_score_slices(hook: Callable[..., PyTree]) -> bool:
    """Returns whether a hook has the mark of `elementwise`, and its program allows for slices.

    Args:
      hook: function of `params`, `sparse_state` and `grads`, which are passed by name.

    Raises:
      ValueError: the hook has the mark but joins entries.
    """
    if not is_marked_elementwise(hook):
        return False
    dtype = np.dtype(np.float32)
    traced = _EntryScore.trace(hook, False, (dtype, dtype))
    return traced.is_entrywise or bool(traced.program.consts)


class Draw(Protocol):
    """Function that draws random scores: `generate_random_scores`, or a result of `make_draw`."""

    def __call__(self, params: Params, rng_seed: Seed, step: chex.Numeric = 0) -> PyTree: ...


def make_draw(stored: PyTree) -> Draw:
    """Returns a `generate_random_scores` whose scores are lazy if they are traced.

    Args:
      stored: tree of the parameters as they are stored. Scores depend only on the shape of a
        parameter, so that masked parameters need not be computed.
    """
    likes = trees.leaves_by_path(stored)

    def draw(params: Params, rng_seed: Seed, step: chex.Numeric = 0) -> PyTree:
        if not any(map(is_traced, jax.tree.leaves(params))):  # nobody else would place the masks
            return generate_random_scores(params, rng_seed, step)
        words = _hash_leaves(trees.leaves_by_path(params), rng_seed, step)

        def lazy(path: trees.KeyPath, _: jax.Array) -> Scores:
            shape_only = (likes[path],)
            return Scores(
                _draw_entries, shape_only, words[path], uses_index=True, uses_arrays=False
            )

        return trees.map_matched(lazy, params)

    return draw


def _hash_leaves(
    leaves: Mapping[trees.KeyPath, jax.Array], rng_seed: Seed, step: chex.Numeric
) -> dict[trees.KeyPath, tuple[jax.Array, jax.Array]]:
    """Returns the two words of each parameter for `hash_entries`; one program hashes them all.

    Args:
      leaves: the parameters that get random scores, by path.
      rng_seed: as in `generate_random_scores`.
      step: as in `generate_random_scores`.
    """
    leaf_words = np.array([leaf_word(path) for path in leaves], np.uint32)
    states, offsets = hash_words(*seed_words(rng_seed, step), leaf_words)
    # One kernel reads the words of every leaf, at a place that it gets when it runs. Such reads
    # would change how XLA partitions arrays over devices: there each leaf has its kernel.
    is_local = all(map(use_flat, leaves.values()))
    split: Callable[[jax.Array], list[jax.Array]] = unstack if is_local else list
    pairs = zip(split(states), split(offsets), strict=True)
    return dict(zip(leaves, pairs, strict=True))


def _draw_entries(_: jax.Array, state: jax.Array, offset: jax.Array, index: jax.Array) -> jax.Array:
    return hash_entries(index, state, offset)


def defer_scores(
    hook: Callable[..., PyTree], params: Params, masks: Masks | None, grads: Grads | None
) -> ScoreTree | None:
    """Returns the lazy scores of an `elementwise` hook, a tree of `Scores`.

    The result is `None` if the hook is not marked, holds arrays as constants, or adds axes. The
    result is also `None` if a gradient is missing, as the error of the hook itself says more.

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
        path: trees.KeyPath, param: jax.Array, mask: jax.Array | None, grad: jax.Array | None
    ) -> Scores:
        values = [x for x in (param, mask, grad) if x is not None]
        kind = mask is not None, tuple(x.dtype for x in values)
        if kind not in fns:
            fns[kind] = _EntryScore.trace(hook, *kind)
        return Scores(fns[kind], tuple(values[i] for i in fns[kind].read))

    scores: ScoreTree = trees.map_matched(lazy, params, masks, grads)
    return scores if all(fn.is_entrywise for fn in fns.values()) else None


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
      is_entrywise: whether every operation of the program is entrywise, and the program holds no
        arrays; hooks of other programs get complete trees.
    """

    hook: Callable[..., PyTree] = dataclasses.field(compare=False)
    masked: bool
    dtypes: Dtypes
    read: tuple[int, ...]
    program: ClosedJaxpr = dataclasses.field(compare=False)
    formula: str
    is_entrywise: bool

    @classmethod
    def trace(cls, hook: Callable[..., PyTree], masked: bool, dtypes: Dtypes) -> _EntryScore:
        """Traces the hook for a few entries; `read` holds the position of the weight if the
        hook reads no value.

        Raises:
          ValueError: the hook joins entries.
        """
        call = functools.partial(_call_hook, hook, masked)
        program = jax.make_jaxpr(call)(*(jax.ShapeDtypeStruct((_LENGTH,), x) for x in dtypes))
        steps = [] if program.consts else [*_list_live(read_jaxpr(program))]
        _check_joins(hook, steps)
        is_entrywise = not program.consts and all(map(_is_entrywise, steps))
        used = {*map(id, program.jaxpr.outvars)}
        for eqn in reversed(program.jaxpr.eqns):
            if not used.isdisjoint(map(id, eqn.outvars)):
                used.update(map(id, eqn.invars))
        read = tuple(i for i, x in enumerate(program.jaxpr.invars) if id(x) in used) or (0,)
        return cls(hook, masked, dtypes, read, program, str(program), is_entrywise)

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


# Number of the entries for which hooks are traced, which tells their axis from others; a prime, so
# that no other axes make it.
_LENGTH = 97


def _list_live(program: Program) -> list[Equation]:
    """Returns the equations on which results depend, those of loops and branches included."""
    live = list[Equation]()
    used = {*program.outputs}
    for equation in reversed([*program.flat()]):
        if not used.isdisjoint(equation.outputs):
            used.update(equation.inputs)
            live += [step for body in equation.bodies for step in _list_live(body)]
            live.append(equation)
    return live


def _check_joins(hook: Callable[..., PyTree], steps: Iterable[Equation]) -> None:
    """Raises a ValueError that names an operation of a hook that joins entries."""
    for equation in steps:
        if any(shape[axis] == _LENGTH for shape, axis in _joined_axes(equation)):
            name = getattr(hook, "__qualname__", repr(hook))
            raise ValueError(
                f"{name} is marked @elementwise but uses {equation.name}, which does more than "
                "compute entry by entry. The mask search calls the hook on parts of "
                "parameters: remove the mark, so that the hook gets complete trees."
            )


def _joined_axes(equation: Equation) -> list[tuple[tuple[int, ...], int]]:
    """Returns (shape, axis) of the axes along which an equation joins or moves entries."""
    params, shapes = equation.params, [value.shape for value in equation.inputs]
    match equation.name:
        case name if name in REDUCTIONS:
            return [(shapes[0], axis) for axis in params["axes"]]
        case "cumsum" | "cumprod" | "cummax" | "cummin" | "cumlogsumexp":
            return [(shapes[0], params["axis"])]
        case "rev":
            return [(shapes[0], axis) for axis in params["dimensions"]]
        case "sort" | "concatenate":
            return [(shape, params["dimension"]) for shape in shapes]
        case "iota":
            return [(equation.outputs[0].shape, params["dimension"])]
        case "dot_general":
            contracted, _ = params["dimension_numbers"]
            pairs = zip(shapes, contracted, strict=True)
            return [(shape, axis) for shape, axes in pairs for axis in axes]
        case "slice":
            axes, after = range(len(shapes[0])), equation.outputs[0].shape
            return [(shapes[0], axis) for axis in axes if after[axis] != shapes[0][axis]]
    return []


def _is_entrywise(equation: Equation) -> bool:
    """Returns whether an equation keeps the entries of arrays apart; scalars are one for all."""
    if not any(value.shape for value in [*equation.inputs, *equation.outputs]):
        return True
    if equation.name in CONTROL:  # the bodies are checked, too
        return not any(body.layers for body in equation.within())
    is_repeated = equation.name == "broadcast_in_dim" and not equation.inputs[0].shape
    return is_repeated or equation.name in ENTRYWISE


def _call_hook(
    hook: Callable[..., PyTree], masked: bool, weight: jax.Array, *operands: jax.Array
) -> jax.Array:
    """Returns the scores of weights; operands are the mask and the gradient, each if any."""
    if masked:
        weight, operands = apply_mask(weight, operands[0]), operands[1:]
    grads = operands[0] if operands else None
    scores: jax.Array = hook(params=weight, sparse_state=None, grads=grads)
    return scores


# XLA rounds no result of these, and does not take subnormal numbers for 0, as it does in products.
_ON_HOST: dict[str, Callable[..., np.ndarray]] = {
    "abs": np.abs,
    "copy": np.asarray,
    "neg": np.negative,
}


def host_scores(
    hook: Callable[..., PyTree], params: Params, grads: Grads | None
) -> ScoreTree | None:
    """Returns lazy scores if numpy computes them from concrete arrays; `None` if not.

    Raises:
      ValueError: the hook is marked but joins entries, wherever the arrays are.
    """
    scores = defer_scores(hook, params, None, grads)
    if host.find_place(params, grads) is None:
        return None
    return scores if all(score.is_on_host for score in jax.tree.leaves(scores)) else None
