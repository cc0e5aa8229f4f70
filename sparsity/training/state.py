"""State of a wrapped optimizer: lookup in a nested state, and sharding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from sparsity.core import owners, sharding, trees
from sparsity.core.checks import check_kind
from sparsity.core.sharding import on_device
from sparsity.core.trees import Masks, Params, Path, PyTree, Sparsities, Tree
from sparsity.masks import pack_masks, packed_shape, place_masks, read_masks


class SparseState(NamedTuple):
    """State of a wrapped optimizer.

    Attributes:
      masks: tree like the params; uint8 masks (1 = keep), `None` for dense parameters. With
        `use_packed_masks` masks are bits, eight in a byte along the last axis.
      inner_state: state of the inner optimizer.
      target_sparsities: tree like the params of float32 scalars, `None` for dense parameters.
      count: int32 scalar, number of updates so far.
      algorithm_state: tree of arrays that the algorithm accumulates; `None` for most algorithms.

    Example:
      >>> import jax.numpy as jnp
      >>> state = SparseState(masks={"w": jnp.array([1, 0], jnp.uint8)}, count=jnp.int32(3))
      >>> state.masks["w"].tolist(), int(state.count)
      ([1, 0], 3)
    """

    masks: Masks = None
    inner_state: PyTree = None
    target_sparsities: Sparsities = None
    count: PyTree = None  # no array type: `tuple.count` is a method, which mypy lets only Any hide
    algorithm_state: PyTree = None


def to_stored_form(
    state: SparseState, params: Params, pack: bool, role: str = "masks"
) -> SparseState:
    """Returns the first state of a hook or a user as training stores the state.

    Args:
      state: masks of any real dtype, packed or not; targets and count may be Python numbers.
      params: tree of parameters, whose devices get the masks.
      pack: whether to store masks as bits; only then they may be packed.
      role: name of the masks in messages.

    Raises:
      ValueError: as `read_masks`.
    """
    masks = read_masks(state.masks, params, pack, role)
    if pack:
        masks = pack_masks(masks, params)
    return state._replace(
        masks=place_masks(masks, params),
        target_sparsities=jax.tree.map(on_device, state.target_sparsities),
        count=on_device(0 if state.count is None else state.count, np.int32),
    )


def get_sparse_state(opt_state: PyTree) -> SparseState:
    """Returns the only `SparseState` in an optimizer state, however nested.

    Raises:
      ValueError: the state holds no `SparseState`, or several. The message names their paths.

    Example:
      >>> opt_state = ("of clipping", SparseState(masks=None, count=3))
      >>> get_sparse_state(opt_state).count
      3
    """
    nodes = trees.find_nodes(opt_state, SparseState)
    if len(nodes) == 1:
        return nodes[0][1]
    places = ", ".join(repr(jax.tree_util.keystr(path) or "the root") for path, _ in nodes)
    raise ValueError(
        "Exactly one SparseState is needed, but the optimizer state, a "
        + f"{type(opt_state).__name__}, "
        + (f"holds {len(nodes)}, at {places}" if nodes else "holds none")
        + ". Pass the state of an optimizer that was wrapped once with wrap_optax, or the part of "
        "it that you mean."
    )


def check_no_state(masks: PyTree) -> None:
    """Raises a ValueError if masks are the state of a wrapped optimizer, which holds them."""
    if trees.find_nodes(masks, SparseState):
        raise ValueError(
            f"masks must be a tree of masks, got the state of an optimizer, a "
            f"{type(masks).__name__}. Give sparsity.get_sparse_state(opt_state).masks."
        )


def check_wrapped_once(inner_state: optax.OptState) -> None:
    """Raises a ValueError if the optimizer that is wrapped holds masks itself."""
    if trees.find_nodes(inner_state, SparseState):
        raise ValueError(
            "Wrap an optimizer once: inner was wrapped by wrap_optax before, and its state holds "
            "masks. Give wrap_optax the optimizer itself, such as optax.adam(1e-3)."
        )


def check_optax_state(opt_state: PyTree, tx: object, may_hold_masks: bool) -> None:
    """Raises a ValueError for a state around that of optax, as `nnx.state(optimizer)` returns it.

    There optax's states are dictionaries, so that `tx` takes none, and nothing tells a SparseState.

    Args:
      opt_state: the argument.
      tx: the optimizer that would take the state, if any.
      may_hold_masks: whether the masks of such a state may stay in the result.
    """
    names = {*map(trees.path_names, trees.node_paths(opt_state))}
    for path in names:
        is_around = path[-1:] == ("opt_state",) and (*path[:-1], "step") in names
        has_masks = (*path, "inner_state") in names
        if is_around and (tx is not None or (has_masks and not may_hold_masks)):
            raise ValueError(
                "opt_state is the state of a trainer that holds the optimizer's state at "
                f"{trees.join_names(path)!r}. Give that: optimizer.opt_state of nnx.Optimizer."
            )


def set_sparse_state(opt_state: Tree, sparse_state: SparseState) -> Tree:
    """Returns `opt_state` with its only `SparseState` replaced.

    Args:
      opt_state: any optimizer state that holds one `SparseState`.
      sparse_state: the state that takes its place.

    Raises:
      ValueError: as `get_sparse_state`.

    Example:
      >>> opt_state = ("of clipping", SparseState(masks=None, count=3))
      >>> sparse_state = get_sparse_state(opt_state)
      >>> set_sparse_state(opt_state, sparse_state._replace(count=0))[1].count
      0
    """
    old = get_sparse_state(opt_state)
    check_kind("sparse_state", sparse_state, SparseState, "a SparseState")
    return trees.replace_node(opt_state, old, sparse_state)


def sharding_like(params: Params, opt_state: optax.OptState) -> PyTree:
    """Returns the shardings of an optimizer state: each leaf has the sharding of its parameter.

    The result serves as `out_shardings` of a jitted `init`, because the compiler would otherwise
    place moments and counts freely, and for restoring a checkpoint on a mesh. Packed masks are
    sharded as their parameters, along the last axis only if the devices divide its bytes. State of
    kept entries (`use_compact_state`) is sharded along the batch axes, a moment that averages one
    axis (adafactor) along the others. Scalars are replicated, and so are leaves that share no
    leading axes with their parameter (histories).

    Args:
      params: tree of arrays, or of `jax.ShapeDtypeStruct` with shardings.
      opt_state: the state of any optimizer, or its shapes: `jax.eval_shape(tx.init, params)`.

    Returns:
      A tree like `opt_state` of shardings.

    Raises:
      ValueError: a parameter has no sharding. The message names the parameter.

    Example:
      >>> import optax
      >>> from jax.sharding import AxisType
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
      >>> rows = NamedSharding(mesh, PartitionSpec("data"))
      >>> params = {"kernel": jax.device_put(jnp.ones((8, 4)), rows)}
      >>> tx = optax.adam(0.1)  # or a result of wrap_optax
      >>> shardings = sharding_like(params, jax.eval_shape(tx.init, params))
      >>> opt_state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> adam = opt_state[0]
      >>> adam.mu["kernel"].sharding == rows, adam.count.sharding.spec == PartitionSpec()
      (True, True)
    """
    leaves = trees.leaves_by_path(params)
    for path, leaf in leaves.items():
        if not isinstance(getattr(leaf, "sharding", None), Sharding):
            raise ValueError(
                f"{trees.path_string(path)!r} of params has no sharding. Pass arrays, or "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
            )
    if not leaves:
        raise ValueError(f"params hold no array, got params = {params!r}.")
    param_shardings = [leaf.sharding for leaf in leaves.values()]
    meshes = [placed.mesh for placed in param_shardings if isinstance(placed, NamedSharding)]
    replicated = NamedSharding(meshes[0], PartitionSpec()) if meshes else param_shardings[0]

    def fit(param: jax.Array | None, leaf: PyTree, path: Path) -> Sharding:
        fitted = None if param is None else _shard_like(param, jnp.shape(leaf), path)
        if fitted is None and isinstance(replicated, NamedSharding):
            return sharding.with_axes(replicated, [()] * jnp.ndim(leaf))
        return fitted or replicated

    paths = jax.tree_util.tree_map_with_path(lambda path, _: trees.path_names(path), opt_state)
    return owners.map_owned(fit, params, opt_state, paths)


def _shard_like(param: jax.Array, shape: tuple[int, ...], path: Path) -> Sharding | None:
    """Returns the sharding of a leaf of the state of a parameter; `None` if no axes tell one.

    Args:
      param: the parameter.
      shape: shape of the leaf.
      path: path of the leaf in the state.
    """
    full, placed = param.shape, param.sharding
    if shape in (full, packed_shape(full)):
        return sharding.fit(placed, shape)
    axes = owners.find_axes(full, shape, path)
    if axes is not None and isinstance(placed, NamedSharding):
        mesh_axes = sharding.mesh_axes(placed, len(full))
        return sharding.with_axes(placed, [mesh_axes[axis] for axis in axes])
    leading = shape[:-1]  # of kept entries, [*batch, k]
    is_kept = leading and leading == full[: len(leading)]
    return sharding.fit(placed, (*leading, None)) if is_kept else None
