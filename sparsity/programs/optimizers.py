"""Proofs about optimizers, from the programs of `init` and `update`, which are never run.

`check_entrywise` proves that an optimizer trains the entries that remain of parameters as it trains
them inside the complete parameters; `shrink`, `compact`, `use_compact_state` and `train_only` ask
here. The optimizer is traced for the complete parameters, and for what remains. A sum of squares
passes where gradients, parameters and moments of removed entries are 0. A mean, a factored moment,
a matrix product, noise, or a decision by the number of axes fails.

`find_frozen` returns the parameters that an optimizer never moves: their updates are always 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import owners, trees
from sparsity.core.trees import KeyPath, Params, PyTree
from sparsity.programs.kept_entries import (
    EntriesMeetError,
    EntryFlow,
    Fact,
    are_of_other_shape,
    find_constant,
    find_origin,
    make_fact,
)
from sparsity.programs.program import Program, read_jaxpr


class Removed(NamedTuple):
    """Removed entries of parameters, and what is certain of them.

    Attributes:
      are_zero: whether training keeps the entries at 0.
      have_gradients: whether the optimizer may get gradients other than 0 for the entries.
      read: `read(path, array)` returns the entries of an array of the shape of a parameter; `None`
        where only shapes are known.
    """

    are_zero: bool
    have_gradients: bool
    read: Callable[[KeyPath, PyTree], PyTree] | None = None


class States(NamedTuple):
    """States from which training continues: of complete parameters, and of what remains."""

    complete: PyTree
    kept: PyTree


def check_entrywise(
    tx: optax.GradientTransformation,
    params: Params,
    kept: PyTree,
    removed: Sequence[Removed],
    *,
    remedy: str,
    claim: str,
    states: States | None = None,
    masks_move: bool = False,
) -> None:
    """Raises a ValueError unless an optimizer trains what remains as in the complete parameters.

    Args:
      tx: the optimizer.
      params: tree of parameters.
      kept: the same tree with the remaining entries in place of each parameter that loses some.
      removed: kinds of removed entries; together all.
      remedy: says what to do, for the error.
      claim: says what might not hold, for the error.
      states: the states from which training continues; by default those of `init`.
      masks_move: whether entries are removed later, too, whose moments are not 0.
    """
    arrays, kept_arrays = (trees.split_arrays(tree)[0] for tree in (params, kept))
    pairs = zip(arrays, kept_arrays, strict=True)
    if not any(are_of_other_shape(array.shape, small.shape) for array, small in pairs):
        return
    remedy = f"{remedy}, or use an optimizer that works entry by entry"
    reason = "its update cannot be traced from gradients, state, params and a value alone"
    try:
        traced = _trace(tx, params, states and states.complete)
        reason = "it fails on arrays of other shapes"
        twin = _trace(tx, kept, states and states.kept)
    except Exception as error:  # the optimizer is the user's code
        message = str(error).split("\n")[0].rstrip(".")
        raise ValueError(f"{remedy}: {reason} ({message}). {claim}") from error
    try:
        for entries in removed:
            _check_steps(traced, twin, entries, arrays, kept_arrays, states, masks_move)
    except EntriesMeetError as error:
        raise ValueError(f"{remedy}: {error}. {claim}") from None


def find_frozen(tx: optax.GradientTransformation, params: Params) -> set[KeyPath]:
    """Returns the paths of the parameters that an optimizer never moves.

    Returns no path for an optimizer that moves no parameter at all, or that needs arguments of the
    training loop. Numbers of the state that the update leaves alone, such as injected learning
    rates, are for others to set, and count as unknown.

    Example:
      >>> tx = optax.masked(optax.set_to_zero(), {"base": True, "head": False})
      >>> find_frozen(tx, {"base": jnp.ones(2), "head": jnp.ones(2)})
      {(DictKey(key='base'),)}
    """
    try:
        traced = _trace(tx, params)
    except Exception:  # the optimizer is the user's code
        return set()
    flow, frozen = EntryFlow([], {}), traced.floats
    weights, grads = ([Fact() for _ in each] for each in (traced.paths, traced.floats))
    first = flow.follow(traced.init, weights)
    inputs = traced.update.inputs[len(weights) + len(grads) : -1]
    outputs = traced.update.outputs[len(grads) :]
    state = [
        Fact() if find_origin(traced.update.makers, after) is before else fact
        for fact, before, after in zip(first, inputs, outputs, strict=False)
    ]
    for updates, _ in _follow_steps(flow, traced, weights, grads, state):
        frozen = [x for x, fact in zip(traced.floats, updates, strict=True) if fact.constant == 0]
        if not frozen:
            break
    return {traced.paths[x] for x in frozen} if len(frozen) < len(traced.floats) else set()


class _Traced(NamedTuple):
    """Programs of an optimizer.

    Attributes:
      init: maps the arrays of the parameters to those of the state; empty if a state is given.
      update: maps arrays of parameters, gradients and state, and a value, to updates, arrays of the
        state, and arrays in place of Python numbers of the state.
      paths: paths of the arrays of the parameters.
      floats: indices of the parameters that have gradients.
      owners: for each array of the state the index of its parameter, `None` for others.
    """

    init: Program
    update: Program
    paths: list[KeyPath]
    floats: list[int]
    owners: list[int | None]


def _check_steps(
    traced: _Traced,
    twin: _Traced,
    removed: Removed,
    arrays: Sequence[PyTree],
    kept_arrays: Sequence[PyTree],
    states: States | None,
    masks_move: bool,
) -> None:
    """Raises an EntriesMeetError if removed entries matter; arguments as in `check_entrywise`."""
    pairs = zip(arrays, kept_arrays, strict=True)
    cut = [
        i for i, (array, small) in enumerate(pairs) if are_of_other_shape(array.shape, small.shape)
    ]
    read = removed.read or (lambda path, array: None)
    entries = {owner: read(traced.paths[owner], arrays[owner]) for owner in cut}
    empty = {owner for owner, array in entries.items() if array is not None and not array.size}

    def describe(owner: int | None, array: PyTree) -> Fact:
        if owner not in entries or array.size == 1:
            return make_fact(find_constant(array))
        if array.shape != arrays[owner].shape:
            return Fact(owner, is_opaque=True)
        # Anything holds of no entries; an optimizer that gets zeros mostly returns zeros.
        constant = find_constant(read(traced.paths[owner], array))
        return Fact(owner, 0.0 if owner in empty else constant)

    held = {*cut} if removed.are_zero else empty
    weights, grads = [Fact() for _ in arrays], [Fact() for _ in arrays]
    for owner, array in entries.items():
        is_zero = owner in empty or not removed.have_gradients
        weights[owner] = Fact(owner, 0.0 if owner in held else find_constant(array))
        grads[owner] = Fact(owner, 0.0 if is_zero else None)
    grads = [grads[owner] for owner in traced.floats]
    twins = {traced.update: twin.update, traced.init: twin.init}
    flow = EntryFlow([trees.path_string(path) for path in traced.paths], twins)
    if states is not None:
        state = list(map(describe, traced.owners, trees.split_arrays(states.complete)[0]))
    else:
        values = traced.update.inputs[len(arrays) + len(grads) :]
        state = [
            fact._replace(owner=owner)  # of zeros, which hold no entries yet
            if owner in entries and fact.owner is None and value.shape == arrays[owner].shape
            else fact
            for fact, owner, value in zip(
                flow.follow(traced.init, weights), traced.owners, values, strict=False
            )
        ]
    if masks_move:
        state = [fact._replace(constant=None) for fact in state]
    *_, (updates, state) = _follow_steps(flow, traced, weights, grads, state, held)
    trained: list[int | None] = [*traced.floats, *traced.owners]
    for trainee, fact in zip(trained, [*updates, *state], strict=True):
        # A state without the paths of the parameters cannot follow masks that move.
        if fact.owner not in (None, trainee) and (trainee is not None or masks_move):
            raise EntriesMeetError("entries of one parameter train another")


def _follow_steps(
    flow: EntryFlow,
    traced: _Traced,
    weights: list[Fact],
    grads: list[Fact],
    state: list[Fact],
    held: Collection[int] = (),
) -> Iterator[tuple[list[Fact], list[Fact]]]:
    """Yields facts of updates and state that hold in more and more steps, in the end in all.

    Args:
      flow: the flow.
      traced: the optimizer.
      weights: facts of the parameters before the first step.
      grads: facts of the gradients.
      state: facts of the state before the first step.
      held: indices of parameters whose facts hold in every step.
    """
    before = None
    while before != (weights, state):
        before = weights, state
        outputs = flow.follow(traced.update, [*weights, *grads, *state, Fact()])
        updates, after = outputs[: len(grads)], outputs[len(grads) :]
        state = [flow.join_steps(*pair) for pair in zip(state, after, strict=False)]
        weights = list(weights)
        for owner, update in zip(traced.floats, updates, strict=True):
            if owner not in held:
                weights[owner] = flow.join_steps(weights[owner], _add(weights[owner], update))
        yield updates, state


def _add(weight: Fact, update: Fact) -> Fact:
    """Returns the fact of a parameter after an update."""
    if weight.constant is None or update.constant is None:
        return Fact(weight.owner)
    return Fact(weight.owner, weight.constant + update.constant)


def _trace(
    tx: optax.GradientTransformation, params: Params, state: PyTree | None = None
) -> _Traced:
    """Returns the programs of an optimizer, for abstract arrays; by default for a first state."""
    by_path = trees.leaves_by_path(params)
    arrays, rebuild = trees.split_arrays(jax.tree.map(_describe, params))
    floats = [index for index, array in enumerate(arrays) if trees.is_prunable(array)]
    init, first = Program([], [], []), [state]

    def start(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        first[0] = tx.init(rebuild(arrays))
        return trees.split_arrays(first[0])[0]

    if state is None:
        init = read_jaxpr(jax.make_jaxpr(start)(arrays))
    state = jax.tree.map(_describe, first[0])
    paths = [path for path, leaf in by_path.items() if trees.is_array(leaf)]
    owned: list[int | None] = []

    def note(owner: int | None, leaf: PyTree) -> None:
        if trees.is_array(leaf):
            owned.append(owner)

    owners.map_owned(note, rebuild(range(len(arrays))), state)
    update = _trace_update(tx, params, state, [paths[index] for index in floats])
    return _Traced(init, update, paths, floats, owned)


def _trace_update(
    tx: optax.GradientTransformation, params: Params, state: PyTree, paths: Sequence[KeyPath]
) -> Program:
    """Returns the program of an update; `paths` are those of the parameters with gradients."""
    arrays, rebuild = trees.split_arrays(jax.tree.map(_describe, params))
    old_arrays, rebuild_state = trees.split_arrays(state)

    def update(
        arrays: Sequence[jax.Array],
        grads: Sequence[jax.Array],
        state: Sequence[jax.Array],
        value: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        remaining = iter(grads)
        all_grads = [  # those of integers are float0 in jax
            next(remaining) if trees.is_prunable(x) else np.zeros(x.shape, jax.dtypes.float0)
            for x in arrays
        ]
        old = rebuild_state(state)
        inputs = rebuild(all_grads), old, rebuild(arrays)
        try:
            updates, new = optax.with_extra_args_support(tx).update(*inputs, value=value)
        except TypeError:  # of a transformation that takes arguments, but no value
            updates, new = tx.update(*inputs)
        by_path = trees.leaves_by_path(updates)
        if lacking := [path for path in paths if path not in by_path]:
            raise ValueError(f"no update of {trees.path_string(lacking[0])!r}")
        pairs = list(zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
        # Arrays in place of Python numbers come last.
        first = [leaf for before, leaf in pairs if trees.is_array(before)]
        new_arrays = [x for before, x in pairs if trees.is_array(x) and not trees.is_array(before)]
        return [by_path[path] for path in paths], first, new_arrays

    grads, value = list(filter(trees.is_prunable, arrays)), jax.ShapeDtypeStruct((), jnp.float32)
    return read_jaxpr(jax.make_jaxpr(update)(arrays, grads, old_arrays, value))


def _describe(leaf: PyTree) -> PyTree:
    """Returns the abstract array of a leaf, without a sharding; other leaves stay."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if trees.is_array(leaf) else leaf
