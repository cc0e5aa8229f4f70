"""Proves from shapes: does an optimizer train kept entries as it would inside the full parameter?

`use_compact_state` and `train_only` ask here when the state starts, before there is a gradient: the
programs of the optimizer are compared. `shrink` and `compact`, which have arrays and a state, ask
`comparisons.updates`, which runs updates and accepts optimizers that no program proves.

The optimizer is traced twice without running: for the parameters, and for their kept entries. Both
programs must apply the same operations with the same constants in the same order, and operations
on arrays that became shorter must work entry by entry, or reduce all entries to one number that
removed ones, which are 0, do not change. A mean, a minimum, a decision by the number of axes, a
factored moment, a matrix product, noise or a sum of two parameters fails the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import owners, sharding, trees
from sparsity.core.trees import Params, PyTree
from sparsity.programs.entrywise import ENTRYWISE, REDUCTIONS
from sparsity.programs.program import CALLS, Equation, Program, Value, read_jaxpr
from sparsity.training.removed_entries import Fact, RemovedEntries

Shape: TypeAlias = tuple[int, ...]
# Parameters of operations that follow from shapes.
_SHAPES = {"shape", "broadcast_dimensions", "axes", "sharding", "out_sharding"}


def check_entrywise(
    inner: optax.GradientTransformationExtraArgs,
    params: Params,
    kept: PyTree,
    caller: str = "use_compact_state=True",
    *,
    masks_move: bool = False,
    may_start_dense: bool = False,
) -> None:
    """Raises a ValueError for an optimizer that reads more than entries and norms.

    Args:
      inner: the optimizer.
      params: tree of parameters.
      kept: the same tree with kept entries in place of masked parameters.
      caller: what shows kept entries to the optimizer, for the error.
      masks_move: whether entries are removed later, whose state in the full parameter stays.
      may_start_dense: whether removed entries of the parameters may not be 0 in the first step.
    """
    shapes = [
        (leaf.shape, short.shape)
        for leaf, short in zip(jax.tree.leaves(params), jax.tree.leaves(kept), strict=True)
        if trees.is_array(leaf)
    ]
    changed = {pair for pair in shapes if pair[0] != pair[1]}
    if not changed:
        return
    try:
        dense = _trace(inner, params)
    except TypeError as error:  # an argument of `update` is missing
        raise ValueError(
            f"{caller} checks that the optimizer works entry by entry from gradients, params and "
            f"value alone; its update fails: {error}"
        ) from error
    try:
        comparison = _Comparison(changed, masks_move, None if may_start_dense else 0.0)
        reason = comparison.compare_all(dense, _trace(inner, kept))
    except (TypeError, ValueError) as error:  # arrays of the optimizer do not fit kept entries
        reason = str(error)
    if reason:
        raise ValueError(
            f"{caller} shows the optimizer an array of kept entries in place of each masked "
            f"parameter, and this optimizer would then train otherwise: {reason}. Use an optimizer "
            "that works entry by entry (global norms of gradients may be used), give its masks and "
            f"labels as trees and not as functions of shapes, or do without {caller}."
        )


class _Trace(NamedTuple):
    """Programs of an optimizer.

    Attributes:
      init: maps the arrays of the parameters to those of the state.
      update: maps the arrays of parameters, gradients and state, and a value, to updates, state,
        and arrays in place of Python numbers of the state.
      floats: indices of the parameters that have gradients.
      owners: for each array of the state the index of its parameter, `None` for others.
    """

    init: Program
    update: Program
    floats: list[int]
    owners: list[int | None]


def _trace(inner: optax.GradientTransformationExtraArgs, params: Params) -> _Trace:
    """Returns the programs of `init` and `update`, for abstract parameters."""
    structs = jax.tree.map(_without_sharding, sharding.abstract(params))
    arrays, rebuild = trees.split_arrays(structs)
    floats = [index for index, array in enumerate(arrays) if trees.is_prunable(array)]
    states: list[PyTree] = []

    def init(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        state = inner.init(rebuild(arrays))
        # A traced function returns arrays alone; the structure of the state leaves this way.
        states.append(sharding.abstract(state))
        return trees.split_arrays(state)[0]

    def update(
        arrays: Sequence[jax.Array],
        grads: Sequence[jax.Array],
        state: Sequence[jax.Array],
        value: jax.Array,
    ) -> tuple[PyTree, list[jax.Array], list[jax.Array]]:
        # Gradients of integers are float0 in jax.
        all_grads: list[PyTree] = [np.zeros(array.shape, jax.dtypes.float0) for array in arrays]
        for index, grad in zip(floats, grads, strict=True):
            all_grads[index] = grad
        old = trees.split_arrays(states[0])[1](state)
        updates, new = inner.update(rebuild(all_grads), old, rebuild(arrays), value=value)
        leaves = [*zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)]
        same = [leaf for before, leaf in leaves if trees.is_array(before)]
        from_numbers = [
            leaf for before, leaf in leaves if trees.is_array(leaf) and not trees.is_array(before)
        ]
        return trees.prunable(updates), same, from_numbers

    first, state = jax.make_jaxpr(init, return_shape=True)(arrays)
    owned: list[int | None] = []

    def note(owner: int | None, leaf: PyTree) -> None:
        if trees.is_array(leaf):
            owned.append(owner)

    owners.map_owned(note, rebuild(range(len(arrays))), states[0])
    grads = [arrays[index] for index in floats]
    value = jax.ShapeDtypeStruct((), jnp.float32)
    later = jax.make_jaxpr(update)(arrays, grads, state, value)
    return _Trace(read_jaxpr(first), read_jaxpr(later), floats, owned)


def _without_sharding(leaf: PyTree) -> PyTree:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if trees.is_array(leaf) else leaf


class _Comparison:
    """Comparison of two programs; the second has shorter arrays.

    Args:
      changed: pairs of shapes of a masked parameter and of its kept entries.
      masks_move: as in `check_entrywise`.
      removed: value of removed entries of the parameters, `None` if uncertain.
    """

    def __init__(
        self, changed: set[tuple[Shape, Shape]], masks_move: bool, removed: float | None
    ) -> None:
        self._changed, self._masks_move, self._removed = changed, masks_move, removed
        self._partners: dict[Value, Value] = {}

    def compare_all(self, dense: _Trace, kept: _Trace) -> str:
        """Returns the first difference of two traces, or why removed entries matter, or ""."""
        return (
            self.compare(dense.init, kept.init)
            or self.compare(dense.update, kept.update)
            or self._follow_removed(dense)
        )

    def _follow_removed(self, trace: _Trace) -> str:
        """Returns why removed entries or those of other parameters matter, or ""."""
        flow = RemovedEntries(self._is_short)
        params = [
            Fact(index, self._removed) if self._is_short(value) else Fact()
            for index, value in enumerate(trace.init.inputs)
        ]
        floats = [params[index] for index in trace.floats]
        grads = [Fact() if fact.owner is None else Fact(fact.owner, 0.0) for fact in floats]
        inputs = [*params, *grads]
        state, before = flow.follow(trace.init, params), None
        if self._masks_move:  # moments of dropped entries are not 0
            state = [fact._replace(removed=None) for fact in state]
        # A fixpoint: facts of the state that hold before and after every step
        while state != before:
            before = state
            outputs = flow.follow(trace.update, [*inputs, *state, Fact()])
            updates, after = outputs[: len(trace.floats)], outputs[len(trace.floats) :]
            pairs = zip(state, after, strict=False)  # other arrays come last
            state = [flow.join_facts(*pair, "update") for pair in pairs]
        for owner, fact in zip([*trace.floats, *trace.owners], [*updates, *state], strict=True):
            # A state without the paths of the parameters cannot follow masks that move.
            if fact.owner not in (None, owner) and (owner is not None or self._masks_move):
                flow.refuse("entries of one parameter train another")
        return flow.reason

    def _is_short(self, value: Value) -> bool:
        partner = self._partners.get(value, value)
        return partner.shape != value.shape

    def compare(self, dense: Program, kept: Program) -> str:
        """Returns the first difference, or an empty string."""
        for field in ("inputs", "equations", "outputs"):
            if len(getattr(dense, field)) != len(getattr(kept, field)):
                return "its operations depend on the number of axes or their sizes"
        self._partners.update(zip(dense.inputs, kept.inputs, strict=True))
        for one, other in zip(dense.equations, kept.equations, strict=True):
            if reason := self._compare_equations(one, other):
                return reason
        if not all(map(self._are_partners, dense.outputs, kept.outputs)):
            return "its results depend on the number of axes or their sizes"
        return ""

    def _compare_equations(self, dense: Equation, kept: Equation) -> str:
        name = dense.name
        if name != kept.name or len(dense.inputs) != len(kept.inputs):
            return f"{name} takes the place of {kept.name}"
        if not all(map(self._are_partners, dense.inputs, kept.inputs)):
            return f"{name} reads a number that depends on the size of the array"
        if name not in CALLS:  # outputs of a call are those of its body
            self._partners.update(zip(dense.outputs, kept.outputs, strict=True))
        shapes = [
            (one.shape, other.shape)
            for one, other in zip(
                [*dense.inputs, *dense.outputs], [*kept.inputs, *kept.outputs], strict=True
            )
        ]
        differing = [pair for pair in shapes if pair[0] != pair[1]]
        if any(pair not in self._changed for pair in differing):
            return f"{name} makes an array whose shape is not that of the parameter"
        if len(dense.inner_programs) != len(kept.inner_programs):
            return f"{name} depends on the number of axes or their sizes"
        for one, other in zip(dense.inner_programs, kept.inner_programs, strict=True):
            if reason := self.compare(one, other):
                return reason
        if dense.inner_programs:
            return ""
        if not _have_equal_params(dense.params, kept.params, bool(differing)):
            return f"{name} has other settings"
        if differing and not self._is_entrywise(name, dense, kept):
            return f"{name} joins entries"
        return ""

    def _is_entrywise(self, name: str, dense: Equation, kept: Equation) -> bool:
        """Returns whether the entries of shortened arrays stay apart, or become one number."""
        (result,), operands = dense.outputs, zip(dense.inputs, kept.inputs, strict=True)
        if name in REDUCTIONS:  # `RemovedEntries` refuses those that removed entries change
            return not result.shape
        if name in ENTRYWISE or name == "broadcast_in_dim":
            full = (result.shape, kept.outputs[0].shape)
            return all((one.shape, other.shape) in (full, ((), ())) for one, other in operands)
        return False

    def _are_partners(self, dense: Value, kept: Value) -> bool:
        if dense.constant is not None and kept.constant is not None:
            return dense.shape == kept.shape and _is_same(dense.constant, kept.constant)
        return self._partners.get(dense) is kept


def _have_equal_params(dense: dict[str, object], kept: dict[str, object], is_short: bool) -> bool:
    skipped = _SHAPES if is_short else set()
    return dense.keys() == kept.keys() and all(
        # As text, because `==` of arrays and programs gives no bool or compares identity.
        key in skipped or repr(dense[key]) == repr(kept[key])
        for key in dense
    )


def _is_same(one: PyTree, other: PyTree) -> bool:
    """Returns whether two constants have one dtype and value; NaN equals NaN."""
    if one is other:  # numbers that a surrounding program computes have no value yet
        return True
    if jnp.result_type(one) != jnp.result_type(other):
        return False
    if jnp.issubdtype(jnp.result_type(one), jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    one = np.asarray(one)
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
