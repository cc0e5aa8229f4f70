"""The inner optimizer of a step: of complete parameters, or of kept entries.

With `use_compact_state` the optimizer sees the kept entries of a parameter as an array [*batch, k],
where k is the number of slots of a slice (`sparsity.masks.slice_layout`). Parameters, gradients and
updates stay dense: each step gathers the first two and scatters the last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from sparsity.core import owners, sharding, trees
from sparsity.core.checks import is_traced
from sparsity.core.sharding import evaluate_now
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks import Sites, has_statement, read_masks
from sparsity.masks.slice_layout import (
    KeptLayout,
    SliceLayout,
    carry_values,
    kept_positions,
    scatter,
    slots_of_positions,
)
from sparsity.patterns.base import read_count
from sparsity.programs.optimizers import Removed, check_entrywise
from sparsity.programs.program import Equation, Value, read_jaxpr
from sparsity.programs.walk import Interpreter
from sparsity.sparsity_schedules import has_updates
from sparsity.training.hooks import UpdaterHooks, keeps_dense_weights

# Trees like the parameters, with `None` where a parameter has no mask; see `PyTree` for their type.
Positions: TypeAlias = PyTree  # int32[*batch, k]
Layouts: TypeAlias = PyTree  # `KeptLayout`
KeptTree: TypeAlias = PyTree  # `KeptParameter`


class KeptState(NamedTuple):
    """State of an inner optimizer that sees kept entries only.

    Attributes:
      positions: tree like the params of int32[*batch, k], the positions of the kept entries in each
        slice, ascending; `None` for dense leaves. Unused slots come last and hold n, n + 1, ...,
        for slices of n entries.
      state: state of the inner optimizer; a masked leaf has an array [*batch, k].
    """

    positions: Positions
    state: optax.OptState


@dataclasses.dataclass(frozen=True, eq=False)
class KeptParameter:
    """Kept entries of a masked parameter. Not a pytree, so that trees hold it as a leaf.

    Attributes:
      param: the parameter, which gives its sharding to results.
      layout: layout of the kept entries.
      positions: int32[*batch, k], the positions of the kept entries in each slice.
    """

    param: jax.Array
    layout: KeptLayout
    positions: jax.Array

    def gather(self, values: jax.Array) -> jax.Array:
        """Returns the kept entries, [*batch, k], of an array like the parameter."""

        def take(values: jax.Array, positions: jax.Array) -> jax.Array:
            at = jnp.asarray(values).at[positions]
            return at.get(mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=True)

        return self.layout.map_slices(take, self.param, values, self.positions)

    def scatter(self, values: jax.Array) -> jax.Array:
        """Returns an array like the parameter with the kept entries, and 0 elsewhere."""
        fn = functools.partial(scatter, self.layout.slice_size)
        return self.layout.map_slices(fn, self.param, self.positions, values, dense=True)


def read_kept(params: Params, positions: Positions) -> KeptTree:
    """Returns a tree of `KeptParameter` from the parameters and the positions of a `KeptState`."""

    def read(_: trees.KeyPath, param: jax.Array, at: jax.Array | None) -> KeptParameter | None:
        if at is None:
            return None
        stack = tuple(range(at.ndim - 1))
        return KeptParameter(
            param, KeptLayout(param.shape, stack, slice_kept_shape=at.shape[-1:]), at
        )

    return trees.map_matched(read, params, positions)


def find_kept(params: Params, masks: Masks, layouts: Layouts) -> KeptTree:
    """Returns a tree of `KeptParameter` from the parameters and their plain masks."""
    arrays = trees.leaves_by_path(params)

    def find(path: trees.KeyPath, layout: KeptLayout, mask: PyTree) -> KeptParameter:
        fn = functools.partial(kept_positions, k=layout.slice_kept_shape[0])
        return KeptParameter(arrays[path], layout, layout.map_slices(fn, arrays[path], mask))

    return trees.map_matched(find, layouts, masks)


def gather(tree: PyTree, kept: KeptTree) -> PyTree:
    """Returns parameters or gradients with kept entries, [*batch, k], in place of masked leaves."""

    def take(_: trees.KeyPath, leaf: jax.Array, parameter: KeptParameter | None) -> jax.Array:
        return leaf if parameter is None else parameter.gather(leaf)

    return trees.map_matched(take, tree, kept, role="gradients")


@dataclasses.dataclass(frozen=True)
class InnerOptimizer:
    """The optimizer of a step, which sees complete parameters.

    Attributes:
      tx: the optimizer.
      updater: the updater that wraps it.
      user_masks: initial masks of the user, if any.
    """

    tx: optax.GradientTransformationExtraArgs
    updater: UpdaterHooks
    user_masks: Masks | None

    def init_placeholder(self, params: Params) -> optax.OptState:
        """Returns the first state for the placeholder of `optax.tree.map_params`."""
        return self.tx.init(params)

    def init(self, params: Params, masks: Masks, sites: Sites, restarts: bool) -> optax.OptState:
        """Returns the first state; a ValueError if weights that return could not restart."""
        state = self.tx.init(params)
        if restarts and self.updater.regrows:
            self.check_resettable(params, state)
        return state

    def check_resettable(self, params: Params, state: optax.OptState) -> None:
        """Raises a ValueError if a state hides which entry belongs to which parameter."""
        hidden, name = name_opaque_state(params, state), type(self.updater).__name__
        if hidden is not None:
            raise ValueError(
                f"{name} may regrow weights, and cannot wrap {hidden}, whose state hides which "
                f"entry belongs to which parameter. Leave {hidden} out, or state regrows = False "
                f"in the class {name} if its masks only shrink."
            )

    def is_state(self, state: optax.OptState, params: Params) -> bool:
        """Returns whether an optimizer of this class made the state."""
        # `train_only` keeps a `KeptState`, too.
        return not isinstance(state, KeptState) or isinstance(
            jax.eval_shape(self.tx.init, params), KeptState
        )

    def can_restart(self, state: optax.OptState, params: Params) -> bool:
        """Returns whether weights that return to a mask can get a fresh state."""
        return name_opaque_state(params, state) is None

    def start(self, state: PyTree, params: Params, masks: Masks, sites: Sites) -> optax.OptState:
        """Returns a fresh state for parameters under new masks, in the slots of `state`."""
        # The first `init` may have seen the weights alone, without the functions of a model.
        return self.tx.init(trees.prunable(params))

    def carry(
        self, state: PyTree, fresh: PyTree, params: Params, grown: PyTree, old_masks: Masks
    ) -> PyTree:
        """Returns a state with the entries of `fresh` for the weights that have grown."""
        return owners.replace_where(state, fresh, grown)

    def run(
        self,
        skips: chex.Numeric,
        extra: Mapping[str, Any],
        grads: PyTree,
        state: PyTree,
        params: Params,
    ) -> tuple[PyTree, optax.OptState]:
        """Returns dense updates and the next state, unless `skips` says to leave all as it is."""
        return update_unless(
            skips, functools.partial(self.tx.update, **extra), grads, state, params
        )


class KeptOptimizer(InnerOptimizer):
    """The optimizer of a step, which sees kept entries only; attributes as above."""

    def init_placeholder(self, params: Params) -> KeptState:
        return KeptState(0, self.tx.init(params))

    def init(self, params: Params, masks: Masks, sites: Sites, restarts: bool) -> KeptState:
        layouts = self._find_layouts(params, masks, sites)
        for path, layout in trees.leaves_by_path(layouts).items():
            _check_sharding(path, trees.leaves_by_path(params)[path], len(layout.stack))
        kept = find_kept(params, masks, layouts)
        values = gather(params, kept)
        check_entrywise(
            self.tx,
            params,
            values,
            [Removed(are_zero=False, have_gradients=False)],  # params are not masked yet
            remedy="Leave use_compact_state off",
            claim="The optimizer might train kept entries alone otherwise than with others.",
            masks_move=has_updates(self.updater.scheduler),
        )
        state = self.tx.init(values)
        self.check_resettable(values, state)
        return KeptState(_read_positions(kept), state)

    def is_state(self, state: optax.OptState, params: Params) -> bool:
        return isinstance(state, KeptState)

    def can_restart(self, state: optax.OptState, params: Params) -> bool:
        return True

    def start(self, state: PyTree, params: Params, masks: Masks, sites: Sites) -> KeptState:
        layouts = jax.tree.map(lambda kept: kept.layout, read_kept(params, state.positions))
        in_units = trees.map_matched(
            lambda path, mask: None if sites[path].pattern.is_elementwise else mask, masks
        )
        expected = trees.leaves_by_path(self._find_layouts(params, in_units, sites))
        for path, layout in trees.leaves_by_path(layouts).items():
            site = sites[path]
            if expected.get(path, layout) != layout or len(layout.stack) != site.batch_axes:
                raise ValueError(
                    f"use_compact_state=True: the state has kept entries of shape "
                    f"{layout.kept_shape} for {site.name!r}, which {site.pattern!r} with "
                    f"batch_axes = {site.batch_axes} may change. Restore the state with the "
                    "pattern, the sparsity and the batch_axes that it was made with."
                )
        kept = find_kept(params, masks, layouts)
        return KeptState(_read_positions(kept), self.tx.init(trees.prunable(gather(params, kept))))

    def carry(
        self, state: PyTree, fresh: PyTree, params: Params, grown: PyTree, old_masks: Masks
    ) -> PyTree:
        def map_slots(_: trees.KeyPath, kept: KeptParameter, mask: PyTree) -> PyTree:
            slots = kept.layout.map_slices(slots_of_positions, kept.param, mask, kept.positions)
            return _SlotMap(kept, *slots)

        def move(slot_map: _SlotMap | None, old: PyTree, new: PyTree) -> PyTree:
            if slot_map is None or jnp.shape(old) != slot_map.kept.layout.kept_shape:
                return old
            kept, *slots = slot_map.kept, slot_map.slots, slot_map.stays
            return kept.layout.map_slices(carry_values, kept.param, *slots, old, new)

        kept = read_kept(params, fresh.positions)
        slot_maps = trees.map_matched(map_slots, kept, old_masks)
        inner = owners.map_with_fresh(move, slot_maps, state.state, fresh.state)
        return fresh._replace(state=inner)

    def run(
        self,
        skips: chex.Numeric,
        extra: Mapping[str, Any],
        grads: PyTree,
        state: PyTree,
        params: Params,
    ) -> tuple[PyTree, KeptState]:
        kept = read_kept(params, state.positions)
        values, kept_grads = gather(params, kept), gather(grads, kept)
        updates, inner = super().run(skips, extra, kept_grads, state.state, values)

        def scatter_update(
            _: trees.KeyPath, update: jax.Array, parameter: KeptParameter | None
        ) -> jax.Array:
            return update if parameter is None else parameter.scatter(update)

        dense = trees.map_matched(scatter_update, updates, kept, role="updates")
        return dense, KeptState(state.positions, inner)

    def _find_layouts(self, params: Params, masks: Masks, sites: Sites) -> Layouts:
        """Returns the layout of the kept entries of each masked parameter.

        Raises:
          ValueError: the number of kept entries is not static. The message names the parameter.
        """
        updater, user_masks = self.updater, self.user_masks
        numbers = updater.compute_targets(params, sites) if user_masks is None else user_masks
        sources = trees.leaves_by_path(numbers)

        def layout(
            path: trees.KeyPath, param: jax.Array, mask: jax.Array | None
        ) -> KeptLayout | None:
            if mask is None:
                return None
            site, stack = sites[path], tuple(range(sites[path].batch_axes))
            if user_masks is None:
                target = float(sources[path])
                k = read_count(site.pattern, param.shape, target, site.batch_axes, site.name)
            else:
                k = _count_mask(sources[path], param.shape, stack)
                if has_updates(updater.scheduler) and (
                    updater.keeps_count == "at most" or not site.pattern.is_elementwise
                ):
                    k = None
            if k is None or math.prod(param.shape[site.batch_axes :]) + k >= 2**31 - 32:
                raise ValueError(
                    f"use_compact_state=True: how many entries {type(updater).__name__} keeps of "
                    f"{site.name!r} of shape {param.shape} with {site.pattern!r} is no fixed "
                    "number below 2**31. Give a pattern whose units have one size, final masks, "
                    "or batch_axes, or leave use_compact_state off."
                )
            return KeptLayout(param.shape, stack, slice_kept_shape=(k,))

        return trees.map_matched(layout, params, masks)


@dataclasses.dataclass(frozen=True, eq=False)
class _SlotMap:
    """Slots under an old mask, int32[*batch, k], and whether that mask kept the entries."""

    kept: KeptParameter
    slots: jax.Array
    stays: jax.Array


def check_static_counts(updater: UpdaterHooks, has_masks: bool) -> None:
    """Raises a ValueError for fields that exclude `use_compact_state`.

    Args:
      updater: the updater.
      has_masks: whether the user gives the first masks.
    """
    chooses = has_updates(updater.scheduler) or not has_masks
    reason = None
    if updater.is_sparse_updates is False:
        reason = "is_sparse_updates = False"
    elif keeps_dense_weights(updater):
        reason = f"keeps_dense_weights holds for {type(updater).__name__}"
    elif not updater.is_sparse_gradients:
        reason = "is_sparse_gradients = False"
    elif chooses and updater.keeps_count == "any":
        name = type(updater).__name__
        reason = f"scheduler = {updater.scheduler!r} and {name} states keeps_count = 'any'"
    elif chooses and not has_statement(updater.scope, "keeps_targets"):
        reason = f"scope = {updater.scope!r} states no keeps_targets = True"
    elif not has_masks and updater.topk_fn is not None:
        reason = f"topk_fn = {updater.topk_fn!r}"
    if reason is not None:
        raise ValueError(
            "use_compact_state=True keeps the optimizer's state of kept weights only, whose number "
            f"must not change, but {reason}. Use static_sparse, set, rigl or srigl, or give final "
            "masks: NoUpdateSchedule(), is_sparse_gradients=True, wrap_optax(tx, masks=masks)."
        )


def name_opaque_state(params: Params, inner_state: optax.OptState) -> str | None:
    """Names the part of a state that hides the entries of parameters; `None` without one."""
    if any(jax.tree.leaves(node.positions) for _, node in trees.find_nodes(inner_state, KeptState)):
        return "sparsity.train_only"
    return owners.name_hiding_state(params, inner_state)


def find_sharding(array: PyTree) -> NamedSharding | None:
    """Returns how a mesh divides an array, by its type if traced; `None` for no mesh."""
    placed = jax.typeof(array).sharding if is_traced(array) else getattr(array, "sharding", None)
    return placed if isinstance(placed, NamedSharding) and not placed.mesh.empty else None


def count_parts(array: PyTree) -> tuple[int, ...]:
    """Returns the number of parts that a mesh makes of an array along each axis."""
    placed, ndim = find_sharding(array), jnp.ndim(array)
    return (1,) * ndim if placed is None else tuple(sharding.count_devices(placed, ndim))


def _check_sharding(path: trees.KeyPath, param: jax.Array, batch_axes: int) -> None:
    """Raises a ValueError if a masked parameter is sharded along another axis than batch axes."""
    parts = count_parts(param)
    if axes := [axis for axis in range(batch_axes, param.ndim) if parts[axis] > 1]:
        raise ValueError(
            f"use_compact_state=True: {trees.path_string(path)!r} of shape {param.shape} is "
            f"sharded along axes {axes}, where devices keep unequal numbers. Shard it along "
            "batch_axes only, replicate it, or leave use_compact_state off."
        )


def _count_mask(mask: jax.Array, shape: tuple[int, ...], stack: tuple[int, ...]) -> int:
    """Returns the largest number of entries that a mask, perhaps packed, keeps of a slice."""
    like = jax.ShapeDtypeStruct(shape, jnp.uint8)
    with evaluate_now():
        entries = jax.device_get(read_masks(jax.device_get(mask), like, may_be_packed=True))
    return int(SliceLayout(shape, stack).count_kept(entries).max(initial=0))


def _read_positions(kept: KeptTree) -> Positions:
    return jax.tree.map(lambda parameter: parameter.positions, kept)


def update_unless(
    skip: chex.Numeric,
    update: Callable[..., tuple[PyTree, optax.OptState]],
    grads: PyTree,
    state: optax.OptState,
    params: Params,
) -> tuple[PyTree, optax.OptState]:
    """Returns `update(grads, state, params)`, but zero updates and `state` where `skip` holds.

    The update is traced, and each new moment is selected where it is defined; later equations read
    the selected moment, so that XLA writes it in place. Selected at the end, old moments are read
    twice, for the new moments and for the update: a CPU copies them, which makes an ordinary step
    of Adam 1.3 times as long. Scalars are selected at the end: an old count of 0 would divide by
    zero in between, which gradients would show, although no value would.

    Args:
      skip: bool, or a traced bool scalar.
      update: the `update` function of an optax transformation.
      grads: tree of gradients.
      state: state of the transformation; `update` must keep its structure.
      params: tree of parameters.
    """
    if skip is True:
        return jax.tree.map(jnp.zeros_like, grads), state
    if skip is False:
        return update(grads, state, params)
    traced, out_shape = jax.make_jaxpr(update, return_shape=True)(grads, state, params)
    program, old_leaves = read_jaxpr(traced), jax.tree.leaves(state)
    count = len(program.outputs) - len(old_leaves)
    new_values, inputs = program.outputs[count:], {*program.inputs}
    # A leaf that shares its value, or is an input or a constant, is selected at the end.
    early = {
        value: old
        for value, old in zip(new_values, old_leaves, strict=True)
        if jnp.ndim(old)
        and value.constant is None
        and value not in inputs
        and new_values.count(value) == 1
    }
    outputs = _Skipping(skip, early).run(program, jax.tree.leaves((grads, state, params)))
    updates = [jnp.where(skip, jnp.zeros_like(x), x) for x in outputs[:count]]
    leaves = [
        new if value in early else jnp.where(skip, old, new)
        for value, old, new in zip(new_values, old_leaves, outputs[count:], strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(out_shape), updates + leaves)


class _Skipping(Interpreter[jax.Array]):
    """Runs an update whose new state is selected where it is defined; calls run as they are."""

    def __init__(self, skip: chex.Numeric, early: Mapping[Value, jax.Array]) -> None:
        self._skip, self._early = skip, early

    def call(self, equation: Equation, inputs: list[jax.Array]) -> Sequence[jax.Array]:
        return self.bind(equation, inputs)

    def enters(self, equation: Equation) -> bool:
        return False

    def define(self, value: Value, array: jax.Array) -> jax.Array:
        return jnp.where(self._skip, self._early[value], array) if value in self._early else array
