"""Optimizer states of kept values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.compacting.formats import FormatLayout
from sparsity.core import owners, sharding, trees
from sparsity.core.trees import Params, Path, PyTree
from sparsity.programs.optimizers import Removed, States, check_entrywise
from sparsity.training.base_updater import WrappedOptimizer
from sparsity.training.checks import read_state
from sparsity.training.inner import KeptParameter, KeptState, read_kept
from sparsity.training.state import SparseState

_REMEDY = "start a new state: compact without opt_state, then tx.init(model.params)"


@dataclasses.dataclass(frozen=True, eq=False)
class StoredParameter:
    """A masked parameter as `compact` stores it. Not a pytree, so that trees hold it as a leaf.

    Attributes:
      name: the path.
      layout: the layout of the kept values.
      positions: where the kept values lie.
    """

    name: str
    layout: FormatLayout
    positions: jax.Array

    def gather(self, leaf: PyTree) -> PyTree:
        """Returns the entries that the mask keeps, of a dense array or of its shape."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return sharding.resize_struct(leaf, self.layout.kept_shape)
        values = _take(self.layout, np.asarray(leaf), np.asarray(self.positions))
        return self.layout.place(values, leaf, self.name)

    def locate(self, mask: jax.Array) -> jax.Array:
        """Returns the positions under another mask, for compiled programs."""

        def locate(mask: jax.Array) -> jax.Array:
            return self.layout.locate(mask).astype(self.positions.dtype)

        located = sharding.shard_like(self.positions, locate, mask)
        return sharding.place_like(self.positions, located)

    def densify(self, values: jax.Array) -> jax.Array:
        """Returns kept values as a dense array, with zeros outside the mask."""
        return self.layout.wrap(values, self.positions).densify()


@functools.partial(jax.jit, static_argnums=0)
def _take(layout: FormatLayout, array: jax.Array, positions: jax.Array) -> jax.Array:
    return layout.take(array, positions)


CompactModel: TypeAlias = PyTree  # a `Compact`, whose module imports those that take one
StoredTree: TypeAlias = PyTree  # like the parameters: `StoredParameter`, or `None` if dense


def densify_kept_states(state: PyTree, params: Params) -> PyTree:
    """Returns an optimizer state with arrays like the parameters in place of kept entries.

    Each `KeptState` becomes the state of its inner optimizer, with 0 for entries that are not kept.
    Runs on the host.

    Args:
      state: state of an optimizer.
      params: tree of parameters.

    Raises:
      ValueError: a mesh divides the kept entries along other axes than the first ones. The message
        names the parameter.
    """

    def densify_kept(kept: KeptParameter | None, leaf: jax.Array) -> PyTree:
        if kept is None or jnp.shape(leaf) != kept.positions.shape:
            return leaf
        array: PyTree = kept.layout.scatter(np.asarray(leaf), np.asarray(kept.positions))
        return sharding.place_like(leaf, array)  # stays on the host without a mesh

    while nodes := trees.find_nodes(state, KeptState):
        node = nodes[0][1]  # a replacement copies the other nodes
        kept_tree = read_kept(params, node.positions)
        for path, kept in trees.leaves_by_path(kept_tree).items():
            batch, shape = kept.positions.shape[:-1], kept.layout.shape
            if shape[: len(batch)] != batch:
                raise ValueError(
                    f"opt_state has positions of the shape {kept.positions.shape} for "
                    f"{trees.path_string(path)!r} of shape {shape}: a mesh divides its kept "
                    "entries. Start a new state."
                )
        dense = owners.map_owned(densify_kept, kept_tree, node.state)
        state = trees.replace_node(state, node, dense)
    return state


def map_moments(
    fn: Callable[..., jax.Array],
    stored_tree: StoredTree,
    state: PyTree,
    *others: PyTree,
    are_dense: bool = False,
) -> PyTree:
    """Maps `fn(stored, moment, *others)` over the moments of masked parameters in a state.

    Other leaves stay: moments of dense parameters, counts, and single numbers for a parameter.

    Args:
      fn: a function of a `StoredParameter` and leaves.
      stored_tree: tree of `StoredParameter`.
      state: state of an optimizer.
      *others: trees of the structure of `state`.
      are_dense: whether moments have the shape of the parameter, not that of its kept values.

    Raises:
      ValueError: a leaf holds no moment for each entry, or none belongs to a parameter.
    """
    stored_by_path = trees.leaves_by_path(stored_tree).items()
    shapes = {
        path: x.layout.shape if are_dense else x.layout.kept_shape for path, x in stored_by_path
    }
    owners.check_state(stored_tree, state, _REMEDY, shapes)

    def apply(stored: StoredParameter | None, leaf: PyTree, *other: PyTree) -> PyTree:
        if stored is None:
            return leaf
        layout = stored.layout
        expected, shape = layout.shape if are_dense else layout.kept_shape, jnp.shape(leaf)
        if shape == expected:
            return fn(stored, leaf, *other)
        if np.size(leaf) == 1:
            return leaf
        whose = "which has" if are_dense else "whose kept values have"
        raise ValueError(
            f"opt_state has a leaf of shape {shape} for {stored.name!r}, {whose} shape {expected}: "
            "it holds no moment for each entry, as factored moments, or is that of other "
            f"parameters. Use an optimizer that works entry by entry, or {_REMEDY}."
        )

    return owners.map_owned(apply, stored_tree, state, *others)


def gather_state(stored_tree: StoredTree, state: PyTree) -> PyTree:
    """Cuts the moments of masked parameters down to kept values; takes a SparseState, too."""
    while nodes := trees.find_nodes(state, SparseState):
        state = trees.replace_node(state, nodes[0][1], nodes[0][1].inner_state)
    return map_moments(StoredParameter.gather, stored_tree, state, are_dense=True)


def read_optimizer(
    tx: optax.GradientTransformation,
    params: Params,
    kept: Params,
    state: PyTree,
    kept_state: PyTree,
    masks: Mapping[Path, np.ndarray],
) -> optax.GradientTransformation:
    """Returns the optimizer without a wrapper, if it trains kept values as masked parameters.

    Args:
      tx: the optimizer, or one that an updater wrapped, which may give gradients of other entries.
      params: tree of parameters.
      kept: the same tree of kept values.
      state: the optimizer's state of the parameters, or a SparseState around that state.
      kept_state: the optimizer's state of the kept values.
      masks: masks by path.

    Raises:
      ValueError: the program of the optimizer gives no proof.
    """
    updater = tx.updater if isinstance(tx, WrappedOptimizer) else None
    have_gradients = updater is not None and not updater.is_sparse_gradients
    tx = tx.inner if isinstance(tx, WrappedOptimizer) and tx.inner else tx
    params, kept, state, kept_state = trees.strip_variables((params, kept, state, kept_state))
    params, kept = map(trees.only_arrays, (params, kept))
    if isinstance(jax.eval_shape(tx.init, params), SparseState):
        raise ValueError(
            "tx is a wrapped optimizer, whose masks are for dense parameters: kept values train "
            "without a wrapper. Give the optimizer that wrap_optax got, as tx and in training."
        )

    def read(path: trees.KeyPath, array: PyTree) -> PyTree:
        return np.asarray(array)[masks[trees.path_names(path)] == 0]

    check_entrywise(
        tx,
        params,
        kept,
        [Removed(are_zero=True, have_gradients=have_gradients, read=read)],
        remedy="Leave out tx to take over the state without a proof",
        claim="tx might train kept values otherwise than the masked parameters.",
        states=States(read_state(tx, params, state), kept_state),
    )
    return tx
