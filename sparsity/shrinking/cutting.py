"""Cuts arrays and an optimizer's state by a plan."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, Sharding

from sparsity.core import owners, sharding, trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import KeyPath, Masks, Params, Path, PyTree, Tree
from sparsity.graph import Coupled, Graph
from sparsity.masks import Layerwise, are_kept, are_packed, pack_masks, place_masks, unpack_masks
from sparsity.programs.axes import AxisIndex
from sparsity.programs.optimizers import Removed, States, check_entrywise
from sparsity.shrinking.dead import mark_kept
from sparsity.shrinking.interpreter import take
from sparsity.shrinking.plan import cut_shape
from sparsity.sparsity_schedules import NoUpdateSchedule, find_last_update, has_updates
from sparsity.training.base_updater import BaseUpdater, WrappedOptimizer
from sparsity.training.checks import read_state
from sparsity.training.hooks import keeps_dense_weights
from sparsity.training.inner import KeptState
from sparsity.training.state import SparseState

_REMEDY = "start a new state: shrink without opt_state, then tx.init(small.params)"


@dataclasses.dataclass(frozen=True, eq=False)
class CutParameter:
    """A parameter that is cut, the owner of leaves of an optimizer's state.

    Attributes:
      name: its path in a tree of params.
      shape: its shape before the cut.
      axes: {axis: the indices that stay}, of axes that lose some.
      mask: its mask, `None` for a dense parameter.
    """

    name: str
    shape: tuple[int, ...]
    axes: Mapping[AxisIndex, np.ndarray]
    mask: jax.Array | None = None

    def cut(self, array: jax.Array) -> jax.Array:
        """Cuts an array of the parameter's shape."""
        return _cut_array(array, self.axes)

    def read_removed(self, array: jax.Array, is_masked: bool) -> np.ndarray | None:
        """Returns the entries that the cut removes from an array, `None` if they have no value.

        Args:
          array: an array of the parameter's shape.
          is_masked: whether to return entries that are masked, or those that are not.
        """
        if is_traced(array):
            return None
        is_removed = np.zeros(array.shape, bool)
        for axis, index in self.axes.items():
            is_kept = mark_kept(index, array.shape[axis])
            shape = [1] * array.ndim
            shape[0], shape[axis] = len(is_kept), array.shape[axis]
            is_removed |= ~is_kept.reshape(shape)
        mask = 1 if self.mask is None else np.asarray(self.mask)
        return np.asarray(array)[is_removed & ((mask == 0) == is_masked)]


CutParameters: TypeAlias = Mapping[KeyPath, CutParameter]  # by key path in a tree of params


def list_cut_parameters(
    graph: Graph,
    params: Params,
    kept: Mapping[Path, Mapping[AxisIndex, np.ndarray]],
    masks: Mapping[Path, jax.Array],
) -> CutParameters:
    """Returns the cut of each parameter, by its key path in a tree of params.

    Args:
      graph: the graph of the model.
      params: the parameters, or a part of their tree.
      kept: {path in the graph: {axis: the indices that stay}}.
      masks: {path in the graph: mask}.
    """
    parameters = graph.parameters.match(params, may_be_smaller=False)
    return {
        key_path: CutParameter(
            trees.path_string(key_path), x.shape, kept.get(x.path, {}), masks.get(x.path)
        )
        for key_path, x in parameters.items()
    }


def cut_params(cuts: CutParameters, params: Tree) -> Tree:
    """Cuts parameters, or a tree like them; leaves that are not arrays stay."""
    return trees.map_matched(
        lambda key_path, leaf: cuts[key_path].cut(leaf) if key_path in cuts else leaf, params
    )


def cut_masks(cuts: CutParameters, small_params: Params) -> Masks:
    """Cuts the masks: uint8, placed like the smaller parameters.

    The mask of a parameter without masked entries is `None`.
    """

    def cut(key_path: KeyPath, leaf: jax.Array) -> jax.Array | None:
        mask = cuts[key_path].mask
        if mask is None:
            return None
        kept = are_kept(cuts[key_path].cut(mask))
        if np.asarray(kept).all():
            return None
        return kept if is_traced(leaf) else sharding.place_like(leaf, kept)

    with sharding.evaluate_now():  # parameters may be traced, masks are not
        return trees.map_matched(cut, trees.only_arrays(small_params))


def cut_state(cuts: CutParameters, params: Params, small_params: Params, state: PyTree) -> PyTree:
    """Cuts the leaves of an optimizer's state that belong to cut parameters.

    Raises:
      ValueError: a leaf cannot be cut, or the state belongs to other parameters; the error names
        the leaf.
    """
    if trees.find_nodes(state, KeptState):
        raise ValueError(
            "opt_state is that of use_compact_state=True, whose arrays of kept weights do not tell "
            f"channels: {_REMEDY}."
        )

    def repack(small: Masks, masks: Masks) -> Masks:
        if not are_packed(masks, params):
            return small
        return place_masks(pack_masks(small, small_params), small_params)

    owner_tree = trees.map_matched(lambda key_path, _: cuts.get(key_path), params)
    changed = {key_path: cut.shape for key_path, cut in cuts.items() if cut.axes}
    # A packed mask has another shape than its parameter.
    unpacked = _map_masks(_unpack(params), state)
    owners.check_state(owner_tree, unpacked, _REMEDY, changed)
    return _map_masks(repack, owners.map_owned(_cut_moment, owner_tree, unpacked), state)


def check_optimizer(
    tx: optax.GradientTransformation, params: Params, opt_state: PyTree, cuts: CutParameters
) -> None:
    """Raises a ValueError unless an optimizer trains the smaller parameters as the masked ones.

    Entries that are removed without a mask have no gradient: the model is proved to be the same for
    all of their values. Those of masked entries are masked, unless `tx` has masks itself.
    """
    params = trees.only_arrays(params)
    state = read_state(tx, params, opt_state)
    remedy = "Leave out tx to cut the state without a proof"
    has_masks = bool(trees.find_nodes(state, SparseState))
    if isinstance(tx, WrappedOptimizer) and tx.updater is not None and tx.inner is not None:
        tx, state = _fix_masks(tx.updater, tx.inner, state), _map_masks(_unpack(params), state)
    elif has_masks:
        remedy = (
            "Wrap last, as in pruner.wrap_optax(optax.chain(...)), or leave out tx and make the "
            "optimizer again with small.updater(pruner)"
        )

    def remove(is_masked: bool) -> Removed:
        return Removed(
            are_zero=is_masked and not has_masks,
            have_gradients=is_masked and has_masks,
            read=lambda path, array: cuts[path].read_removed(array, is_masked),
        )

    small_params = cut_params(cuts, params)
    check_entrywise(
        tx,
        params,
        small_params,
        [remove(is_masked=True), remove(is_masked=False)],
        remedy=remedy,
        claim="tx might train the smaller model otherwise than the masked one.",
        states=States(state, cut_state(cuts, params, small_params, state)),
    )


def _fix_masks(
    updater: BaseUpdater, inner: optax.GradientTransformation, state: SparseState
) -> optax.GradientTransformation:
    """Returns a wrapped optimizer whose masks stay, and are not packed.

    Raises:
      ValueError: later updates of the masks may choose among removed channels, too.
    """
    name, last = type(updater).__name__, find_last_update(updater.scheduler)
    are_final = not has_updates(updater.scheduler)
    are_final |= last is not None and not is_traced(state.count) and int(state.count) > last
    # A pruned weight that is 0 and never returns leaves the choice to what remains.
    removes_only = not updater.regrows
    removes_only &= not keeps_dense_weights(updater)
    if not are_final and not (removes_only and isinstance(updater.scope, Coupled)):
        raise ValueError(
            "Give the inner optimizer as tx, and wrap it again for the smaller model: later "
            f"updates of the masks by {name} under scope = {updater.scope!r} may choose otherwise "
            "without the removed channels. Under Coupled a pruner whose pruned weights stay 0 "
            "passes, and any updater does after the last update of its masks."
        )
    still = dataclasses.replace(
        updater, scheduler=NoUpdateSchedule(), scope=Layerwise(), use_packed_masks=False
    )
    return still.wrap_optax(inner)


def _unpack(params: Params) -> Callable[[Masks], Masks]:
    return lambda masks: unpack_masks(masks, params) if are_packed(masks, params) else masks


def _map_masks(fn: Callable[..., Masks], *states: PyTree) -> PyTree:
    """Maps `fn` over the masks of the sparse states in trees of one structure, nested ones too.

    The result is like the first tree.
    """

    def is_state(node: object) -> bool:
        return isinstance(node, SparseState)

    def replace(*nodes: PyTree) -> PyTree:
        if not is_state(nodes[0]):
            return nodes[0]
        masks, inner_states = zip(*((node.masks, node.inner_state) for node in nodes), strict=True)
        return nodes[0]._replace(masks=fn(*masks), inner_state=_map_masks(fn, *inner_states))

    return jax.tree.map(replace, *states, is_leaf=is_state)


def _cut_moment(owner: CutParameter | None, leaf: jax.Array) -> jax.Array:
    """Cuts a leaf of an optimizer's state; a leaf without an owner stays."""
    if owner is None or not owner.axes or not hasattr(leaf, "shape"):
        return leaf
    needed = {*owner.axes} | ({0} if any(x.ndim > 1 for x in owner.axes.values()) else set())
    candidates = owners.list_axes(owner.shape, leaf.shape)
    cuts = {tuple(axes.index(x) for x in owner.axes) for axes in candidates if needed <= {*axes}}
    if len(cuts) == 1 and all(needed <= {*axes} for axes in candidates):
        return _cut_array(leaf, dict(zip(cuts.pop(), owner.axes.values(), strict=True)))
    if math.prod(leaf.shape) == 1:  # optimizers write one entry where they keep no moment
        return leaf
    raise ValueError(
        f"opt_state has a leaf of shape {leaf.shape} for {owner.name!r} of shape {owner.shape}, "
        "whose entries join several channels, as factored moments do: the smaller model would "
        f"train otherwise than the masked one. Use a moment for each weight, or {_REMEDY}."
    )


def _cut_array(array: jax.Array, axes: Mapping[AxisIndex, np.ndarray]) -> jax.Array:
    """Cuts an array, and keeps its sharding along axes that the mesh still divides."""
    if not axes:
        return array
    axes = dict(axes)  # a pytree, as other mappings are not
    old_sharding = None if is_traced(array) else getattr(array, "sharding", None)
    shape = cut_shape(jnp.shape(array), axes)
    if isinstance(old_sharding, NamedSharding) and not sharding.explicit_sharding(array):
        return _take_all(array, axes, sharding.fit(old_sharding, shape))
    return sharding.shard_like(array, _take_all, array, axes, shape=shape)


@functools.partial(jax.jit, static_argnames="target")
def _take_all(
    array: jax.Array, axes: Mapping[AxisIndex, jax.Array], target: Sharding | None = None
) -> jax.Array:
    for axis, index in axes.items():
        array = take(array, index, axis)
    return array if target is None else jax.lax.with_sharding_constraint(array, target)
