"""Cuts arrays and an optimizer's state by a plan."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from sparsity.core import owners, sharding, trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import PyTree
from sparsity.graph import Graph
from sparsity.masks import are_packed, pack_masks, place_masks, unpack_masks
from sparsity.shrinking.evaluate import take
from sparsity.shrinking.plan import Plan, shrink_shape, stays_at
from sparsity.training.kept import KeptState
from sparsity.training.state import SparseState

_MOST_UPDATES = 64  # in a comparison


def cut_params(graph: Graph, plan: Plan, params: PyTree) -> PyTree:
    """Cuts parameters, or a part of their tree."""
    return trees.map_matched(lambda path, leaf: _cut(leaf, _axes(graph, plan, path, leaf)), params)


def cut_state(
    graph: Graph, plan: Plan, params: PyTree, small_params: PyTree, state: PyTree
) -> PyTree:
    """Cuts the leaves of an optimizer's state that belong to cut parameters.

    Raises:
      ValueError: a leaf cannot be cut, or the state belongs to other parameters; the error names
        the leaf.
    """

    def describe(path: trees.KeyPath, leaf: jax.Array) -> _Owner:
        axes = _axes(graph, plan, path, leaf)
        return _Owner(trees.path_string(path), jnp.shape(leaf), axes)

    owners_tree = trees.map_matched(describe, params)
    owned = set()  # names of the parameters that have state
    unowned_ids = set()  # ids of leaves that belong to no parameter

    def cut(owner: _Owner | None, leaf: jax.Array) -> jax.Array:
        if owner is None:
            unowned_ids.add(id(leaf))
            return leaf
        owned.add(owner.name)
        return _cut_moment(owner, leaf)

    if trees.find_nodes(state, KeptState):
        raise ValueError(
            "opt_state is that of use_compact_state=True, whose arrays of kept weights do not tell "
            "channels. Start a new state: shrink without opt_state, then tx.init(small.params)."
        )
    # A packed mask has another shape than its parameter: it is cut unpacked.
    nodes = [node for _, node in trees.find_nodes(state, SparseState)]
    packed = [node for node in nodes if are_packed(node.masks, params)]
    for node in packed:
        masks = unpack_masks(node.masks, params)
        state = _replace_node(state, node, node._replace(masks=masks))
    before = trees.leaves_by_path(state)
    state = owners.map_owned(cut, owners_tree, state)
    unowned = {path: leaf for path, leaf in before.items() if id(leaf) in unowned_ids}
    _check_unowned(unowned, owners_tree)
    arrays = [x.shape for x in jax.tree.leaves(state) if trees.is_prunable(x) and x.ndim]
    if arrays and not owned and any(owner.axes for owner in jax.tree.leaves(owners_tree)):
        raise ValueError(
            f"No leaf of opt_state belongs to one of params, and it has one of shape {arrays[0]}: "
            "it is the state of other params. Give that of these, or start a new state: shrink "
            "without opt_state, then tx.init(small.params)."
        )
    for _, node in trees.find_nodes(state, SparseState) if packed else ():
        masks = place_masks(pack_masks(node.masks, small_params), small_params)
        state = _replace_node(state, node, node._replace(masks=masks))
    return state


def _cut_moment(owner: _Owner, leaf: jax.Array) -> jax.Array:
    """Cuts a leaf of an optimizer's state that belongs to a parameter."""
    if not owner.axes or not hasattr(leaf, "shape"):
        return leaf
    axes = owner.axes if leaf.shape == owner.shape else _find_average_axes(owner, leaf.shape)
    if axes is not None:
        return _cut(leaf, axes)
    if math.prod(leaf.shape) == 1:  # optimizers write one entry where they keep no moment
        return leaf
    raise ValueError(
        f"The optimizer's state has a leaf of shape {leaf.shape} for {owner.name!r} of shape "
        f"{owner.shape}: its entries join several channels, as factored moments do, and the "
        "smaller model would train otherwise than the masked one. Shrink with an optimizer "
        "that keeps a moment for each weight, or start a new state: shrink without "
        "opt_state, then tx.init(small.params)."
    )


def _check_unowned(leaves: Mapping[trees.KeyPath, jax.Array], owners_tree: PyTree) -> None:
    """Raises a ValueError if a leaf of no parameter looks like a moment of a cut parameter."""
    shapes = {owner.shape: owner.name for owner in jax.tree.leaves(owners_tree) if owner.axes}
    for path, leaf in leaves.items():
        if not (trees.is_prunable(leaf) and leaf.ndim):
            continue
        if leaf.shape in shapes:
            raise ValueError(
                f"The optimizer's state has a leaf of the shape {leaf.shape} of "
                f"{shapes[leaf.shape]!r} in a tree whose leaves are not those of params. Give "
                "the state of these params, or start a new state: shrink without opt_state, then "
                "tx.init(small.params)."
            )
        _check_place(path, leaf, owners_tree)


def check_updates(
    tx: optax.GradientTransformation, graph: Graph, plan: Plan, params: PyTree, state: PyTree
) -> float:
    """Compares updates of the smaller parameters with updates of the masked parameters.

    Compares four updates, or more until one is not 0, as where `MultiSteps` accumulates gradients.

    Returns:
      The largest difference, as a part of the largest entry of its array.

    Raises:
      ValueError: updates differ by more than rounding; the error names the leaf and the entry.
    """
    rng = np.random.default_rng(0)
    if isinstance(state, SparseState) and _fits_optimizer(tx, params, state.inner_state):
        state = state.inner_state

    def mask(path: trees.KeyPath, leaf: jax.Array) -> jax.Array:
        return _mask(leaf, _axes(graph, plan, path, leaf))

    def gradient(path: trees.KeyPath, leaf: jax.Array) -> jax.Array:
        if not trees.is_prunable(leaf):
            return leaf
        drawn = jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
        return mask(path, sharding.place_like(leaf, drawn))

    # Some transforms ask for the value of the loss.
    update = jax.jit(
        functools.partial(optax.with_extra_args_support(tx).update, value=jnp.float32(1))
    )
    largest, is_still = 0.0, True
    params = jax.tree.map(lambda leaf: leaf if trees.is_array(leaf) else None, params)
    params = trees.map_matched(mask, params)
    small_params = cut_params(graph, plan, params)
    small_state = cut_state(graph, plan, params, small_params, state)
    for step in range(_MOST_UPDATES):
        if step >= 4 and not is_still:
            break
        grads = trees.map_matched(gradient, params)
        updates, state = update(grads, state, params)
        small_grads = cut_params(graph, plan, grads)
        small_updates, small_state = update(small_grads, small_state, small_params)
        is_still = is_still and not any(map(jnp.any, jax.tree.leaves(trees.prunable(updates))))
        expected = {
            "state": cut_state(graph, plan, params, small_params, state),
            "update": cut_params(graph, plan, updates),
        }
        computed = {"state": small_state, "update": small_updates}
        largest = max(largest, _compare(expected, computed))
    return largest


def _fits_optimizer(tx: optax.GradientTransformation, params: PyTree, state: PyTree) -> bool:
    """Returns whether a state has the structure that the `init` of an optimizer returns."""
    arrays = jax.tree.map(lambda leaf: leaf if trees.is_array(leaf) else None, params)
    shapes = jax.eval_shape(tx.init, arrays)
    structures: list[object] = [jax.tree.structure(tree) for tree in (shapes, state)]
    return structures[0] == structures[1]


@dataclasses.dataclass(frozen=True)
class _Owner:
    """A parameter to which leaves of an optimizer's state belong."""

    name: str
    shape: tuple[int, ...]
    axes: Mapping[int, np.ndarray]


def _check_place(path: trees.KeyPath, leaf: jax.Array, owners_tree: PyTree) -> None:
    """Raises a ValueError if a leaf of no owner lies below the path of a parameter that is cut."""
    names = trees.path_names(path)
    for place, owner in trees.leaves_by_path(owners_tree).items():
        part = trees.path_names(place)
        starts = range(len(names) - len(part) + 1)
        if owner.axes and any(names[i : i + len(part)] == part for i in starts):
            raise ValueError(
                f"The optimizer's state has a leaf {trees.path_string(path)!r} of shape "
                f"{leaf.shape} for {owner.name!r} of shape {owner.shape}, and nothing tells which "
                "entries belong to a channel. Shrink with an optimizer that keeps a moment for "
                "each weight, or start a new state: shrink without opt_state, then "
                "tx.init(small.params)."
            )


def _find_average_axes(owner: _Owner, shape: tuple[int, ...]) -> Mapping[int, np.ndarray] | None:
    """Returns the cut axes of a factored moment, which averages its parameter over one axis.

    Returns `None` if that axis loses entries, or if shapes do not tell the axis.
    """
    candidates = set()
    for axis in range(len(owner.shape)):
        if owner.shape[:axis] + owner.shape[axis + 1 :] == shape:
            by_layer = axis == 0 and any(index.ndim > 1 for index in owner.axes.values())
            if axis in owner.axes or by_layer:
                return None
            candidates.add(tuple(a - (a > axis) for a in owner.axes))
    if len(candidates) != 1:
        return None
    return dict(zip(candidates.pop(), owner.axes.values(), strict=True))


def _compare(expected: PyTree, computed: PyTree) -> float:
    """Returns the largest difference; raises a ValueError if it is more than rounding."""
    largest = 0.0
    leaves = zip(trees.leaves_by_path(expected).items(), jax.tree.leaves(computed), strict=True)
    for (path, exact), got in leaves:
        if jnp.issubdtype(exact.dtype, jax.dtypes.prng_key) or not exact.size:
            continue
        # Sums over other numbers of terms round otherwise, and a transform may amplify that.
        rounding = jnp.finfo(exact.dtype).eps ** 0.6 if trees.is_prunable(exact) else 0.0
        exact, got = (np.asarray(x).astype(complex) for x in (exact, got))
        is_same = (exact == got) | (np.isnan(exact) & np.isnan(got))
        scale = np.abs(exact[np.isfinite(exact)]).max(initial=0) or 1.0
        apart = np.abs(np.where(is_same, 0, exact) - np.where(is_same, 0, got)) / scale
        largest = max(largest, float(apart.max()))
        if not apart.max() <= rounding:
            at = np.unravel_index(apart.argmax(), apart.shape)
            raise ValueError(
                "The optimizer would not train the smaller model as the masked one: "
                f"{trees.path_string(path)!r} has {got[at].real:.6g} in place of "
                f"{exact[at].real:.6g} at {[int(i) for i in at]}. It reads the shapes of arrays, "
                "averages over them, joins moments of removed entries with others, or updates "
                "masks across groups. Cut when masks are final, use an optimizer that works entry "
                "by entry, or start a new state: shrink without opt_state, then "
                "tx.init(small.params)."
            )
    return largest


def _axes(
    graph: Graph, plan: Plan, path: trees.KeyPath, leaf: jax.Array
) -> Mapping[int, np.ndarray]:
    """Returns the indices that stay along each axis of a leaf that loses some."""
    if not hasattr(leaf, "shape"):
        return {}
    return plan.kept.get(graph.find_parameter(trees.path_names(path), leaf).path, {})


def _cut(array: jax.Array, axes: Mapping[int, np.ndarray]) -> jax.Array:
    """Cuts an array, and keeps its sharding along axes that the mesh still divides."""
    if not axes:
        return array
    placed = None if is_traced(array) else getattr(array, "sharding", None)
    shape = shrink_shape(jnp.shape(array), axes)
    index = {axis: jnp.asarray(index) for axis, index in axes.items()}
    small: jax.Array
    if isinstance(placed, NamedSharding) and not sharding.explicit_sharding(array):
        small = _take(array, index, sharding.fit(placed, shape))
    else:
        small = sharding.shard_like(array, _take, array, index, shape=shape)
    return small


@functools.partial(jax.jit, static_argnames="target")
def _take(
    array: jax.Array, axes: Mapping[int, jax.Array], target: NamedSharding | None = None
) -> jax.Array:
    for axis, index in axes.items():
        array = take(array, index, axis)
    return array if target is None else jax.lax.with_sharding_constraint(array, target)


def _mask(array: jax.Array, axes: Mapping[int, np.ndarray]) -> jax.Array:
    """Returns the array with zeros at the removed entries."""
    for axis, index in axes.items():
        stays = stays_at(index, array.shape[axis])
        shape = [1] * array.ndim
        shape[axis] = array.shape[axis]
        if index.ndim == 2:
            shape[0] = len(stays)
        array = jnp.where(stays.reshape(shape), array, 0)
    return array


def _replace_node(tree: PyTree, node: PyTree, by: PyTree) -> PyTree:
    """Replaces a node of a tree."""
    return jax.tree.map(lambda x: by if x is node else x, tree, is_leaf=lambda x: x is node)
