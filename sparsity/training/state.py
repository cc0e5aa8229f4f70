"""The state of a wrapped optimizer: finding it in a nested state, and its sharding."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from sparsity.core import owners, sharding, trees
from sparsity.core.trees import PyTree
from sparsity.masks import packed_shape


class SparseState(NamedTuple):
    """State of a wrapped optimizer.

    Attributes:
      masks: tree like the params; uint8 masks (1 = keep), `None` for dense leaves. With
        `use_packed_masks` they are bits, eight in a byte along the last axis: shapes tell.
      inner_state: state of the inner optimizer.
      target_sparsities: tree like the params of float32 scalars, `None` for dense leaves.
      count: int32 scalar, number of updates so far.
      algorithm_state: tree of arrays that the algorithm remembers; `None` for most.

    Example:
      >>> import jax.numpy as jnp
      >>> state = SparseState(masks={"w": jnp.array([1, 0], jnp.uint8)}, count=jnp.int32(3))
      >>> state.masks["w"].tolist(), int(state.count)
      ([1, 0], 3)
    """

    masks: PyTree = None
    inner_state: PyTree = None
    target_sparsities: PyTree = None
    count: PyTree = None
    algorithm_state: PyTree = None


def get_sparse_state(opt_state: PyTree) -> SparseState:
    """Returns the only `SparseState` in an optimizer state, however nested.

    Raises:
      ValueError: there is none, or more than one; their paths are named.

    Example:
      >>> opt_state = ("of clipping", SparseState(masks=None, count=3))
      >>> get_sparse_state(opt_state).count
      3
    """
    found = trees.find_nodes(opt_state, SparseState)
    if len(found) == 1:
        state: SparseState = found[0][1]
        return state
    places = ", ".join(repr(jax.tree_util.keystr(path) or "the root") for path, _ in found)
    raise ValueError(
        "Exactly one SparseState is needed, but the optimizer state holds "
        + (f"{len(found)}, at {places}" if found else "none")
        + ". Pass the state of an optimizer that was wrapped once with wrap_optax, or the part of "
        "it that you mean."
    )


def set_sparse_state(opt_state: optax.OptState, sparse_state: SparseState) -> optax.OptState:
    """Returns `opt_state` with its only `SparseState` replaced; raises as `get_sparse_state`."""
    get_sparse_state(opt_state)

    def is_state(node: object) -> bool:
        return isinstance(node, SparseState)

    def replace(node: PyTree) -> PyTree:
        return sparse_state if is_state(node) else node

    replaced: optax.OptState = jax.tree.map(replace, opt_state, is_leaf=is_state)
    return replaced


def sharding_like(params: PyTree, opt_state: optax.OptState) -> optax.OptState:
    """Returns the shardings of an optimizer state: each leaf has that of its parameter.

    For `out_shardings` of a jitted `init`, which otherwise leaves moments and counts where the
    compiler likes, and for restoring a checkpoint on a mesh. Packed masks are sharded as their
    parameters, along the last axis only if its bytes divide. Scalars, and leaves whose shape is not
    their parameter's (factored moments, histories), are replicated.

    Args:
      params: tree of arrays, or of `jax.ShapeDtypeStruct` with shardings.
      opt_state: the state of any optimizer, or its shapes: `jax.eval_shape(tx.init, params)`.

    Returns:
      A tree like `opt_state` of shardings.

    Raises:
      ValueError: a parameter has no sharding; it is named.

    Example:
      >>> import optax
      >>> from jax.sharding import AxisType
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
      >>> rows = NamedSharding(mesh, PartitionSpec("data"))
      >>> params = {"kernel": jax.device_put(jnp.ones((8, 4)), rows)}
      >>> tx = optax.adam(0.1)  # or what wrap_optax returns
      >>> shardings = sharding_like(params, jax.eval_shape(tx.init, params))
      >>> opt_state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> opt_state[0].mu["kernel"].sharding.spec, opt_state[0].count.sharding.spec
      (P('data',), P())
    """
    leaves = trees.leaves_by_path(params)
    for path, leaf in leaves.items():
        if not isinstance(getattr(leaf, "sharding", None), Sharding):
            raise ValueError(
                f"{trees.path_string(path)!r} of params has no sharding. Pass arrays, or "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
            )
    given = [leaf.sharding for leaf in leaves.values()]
    meshes = [own.mesh for own in given if isinstance(own, NamedSharding)]
    elsewhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else given[0]

    def sharding_of(param: Any, leaf: Any) -> Sharding:
        shape = jnp.shape(leaf)
        if param is None or shape not in (param.shape, packed_shape(param.shape)):
            return elsewhere
        return sharding.fit(param.sharding, shape)

    shardings: optax.OptState = owners.map_owned(sharding_of, params, opt_state)
    return shardings
