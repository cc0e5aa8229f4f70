"""Optimizer states of kept values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.compacting.formats.base import FormatLayout
from sparsity.core import owners, sharding, trees
from sparsity.core.trees import Params, Path, PyTree
from sparsity.programs.optimizers import Removed, States, check_entrywise
from sparsity.training.base_updater import WrappedOptimizer
from sparsity.training.kept_state import KeptParameter, KeptState, read_kept
from sparsity.training.state import SparseState
from sparsity.training.step_checks import read_state

_REMEDY = "start a new state: compact without opt_state, then tx.init(model.params)"


@dataclasses.dataclass(frozen=True)
class StoredParameter:
    """A parameter as `compact` stores it, to which leaves of an optimizer's state belong.

    Attributes:
      name: the path.
      layout: the layout of the kept values, `None` for a dense parameter.
      positions: where the kept values lie.
    """

    name: str
    layout: FormatLayout | None
    positions: jax.Array | np.ndarray | None

    def place_positions(self, leaf: PyTree) -> jax.Array | None:
        """Returns the positions on the devices of a parameter."""
        if self.layout is None:
            return None
        return self.layout.place(np.asarray(self.positions), leaf, self.name)

    def freeze(self, leaf: PyTree) -> PyTree:
        """Returns the dense slices of a parameter if entries outside the mask are frozen."""
        if self.layout is None or not self.layout.is_frozen:
            return None
        order = self.layout.order
        return leaf if order == tuple(range(leaf.ndim)) else leaf.transpose(order)

    def gather(self, leaf: PyTree) -> PyTree:
        """Returns the entries that the mask keeps, of a dense array or of its shape."""
        if self.layout is None:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return sharding.resize_struct(leaf, self.layout.kept_shape)
        values = self.layout.gather(np.asarray(leaf), np.asarray(self.positions))
        return self.layout.place(values, leaf, self.name)

    def densify(self, values: jax.Array) -> jax.Array:
        """Returns kept values as a dense array, with zeros outside the mask."""
        if self.layout is None:
            return values
        return self.layout.wrap(values, jnp.asarray(self.positions)).densify()


StoredTree: TypeAlias = PyTree  # tree like the parameters, a `StoredParameter` for each


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


def gather_state(stored_tree: StoredTree, state: PyTree) -> PyTree:
    """Cuts the moments of masked parameters down to those of kept values.

    Args:
      stored_tree: the parameters as `compact` stores them.
      state: state of an optimizer, with dense moments; of a SparseState the inner state.

    Raises:
      ValueError: a leaf holds no moment for each entry, or belongs to no parameter and has the
        shape of one; the error names the leaf.
    """
    while nodes := trees.find_nodes(state, SparseState):
        state = trees.replace_node(state, nodes[0][1], nodes[0][1].inner_state)
    masked = [stored for stored in jax.tree.leaves(stored_tree) if stored.layout is not None]
    names = {stored.layout.shape: stored.name for stored in masked}

    def gather(stored: StoredParameter | None, leaf: PyTree) -> PyTree:
        shape = jnp.shape(leaf)
        if stored is None:
            owners.check_stray(leaf, names, _REMEDY)
            return leaf
        if stored.layout is None or shape == stored.layout.shape:
            return stored.gather(leaf)
        if np.size(leaf) == 1:
            return leaf
        raise ValueError(
            f"opt_state has a leaf of shape {shape} for {stored.name!r} of shape "
            f"{stored.layout.shape}: it holds no moment for each entry, as factored moments, and "
            "kept values would train otherwise than the masked model. Use an optimizer that works "
            f"entry by entry, or {_REMEDY}."
        )

    kept = owners.map_owned(gather, stored_tree, state)
    owners.check_state(stored_tree, state, _REMEDY)
    return kept


def densify_state(stored_tree: StoredTree, state: PyTree) -> PyTree:
    """Returns the state with dense moments, 0 outside the masks.

    Raises:
      ValueError: a leaf holds no moment for each kept value; the error names the parameter.
    """

    def densify_stored(stored: StoredParameter | None, leaf: jax.Array) -> jax.Array:
        return leaf if stored is None or not _has_moments(stored, leaf) else stored.densify(leaf)

    owners.check_state(stored_tree, state, _REMEDY)
    return owners.map_owned(densify_stored, stored_tree, state)


def check_kept_state(stored_tree: StoredTree, state: PyTree) -> None:
    """Raises a ValueError that names a parameter without a moment for each kept value."""
    owners.check_state(stored_tree, state, _REMEDY)
    owners.map_owned(lambda stored, leaf: stored and _has_moments(stored, leaf), stored_tree, state)


def _has_moments(stored: StoredParameter, leaf: jax.Array) -> bool:
    """Returns whether a leaf of a parameter holds a moment for each kept value.

    Raises:
      ValueError: the leaf holds others; optimizers write one entry where they keep no moment.
    """
    shape = jnp.shape(leaf)
    if stored.layout is None or (np.size(leaf) == 1 and shape != stored.layout.kept_shape):
        return False
    if shape == stored.layout.kept_shape:
        return True
    raise ValueError(
        f"opt_state has a leaf of shape {shape} for {stored.name!r}, whose kept values have shape "
        f"{stored.layout.kept_shape}: it holds no moment for each of them, as factored moments, or "
        "is that of other parameters. Give the state of an optimizer of model.params that works "
        "entry by entry."
    )


def unwrap(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the inner optimizer of a wrapped one."""
    return tx.inner if isinstance(tx, WrappedOptimizer) and tx.inner is not None else tx


def check_entries(
    tx: optax.GradientTransformation,
    params: Params,
    kept: Params,
    state: PyTree,
    kept_state: PyTree,
    masks: Mapping[Path, np.ndarray],
) -> None:
    """Raises a ValueError unless an optimizer trains kept values as the masked parameters.

    Args:
      tx: the optimizer, or one that an updater wrapped, which may give gradients of other entries.
      params: tree of parameters.
      kept: the same tree of kept values.
      state: the optimizer's state of the parameters, or a SparseState around that state.
      kept_state: the optimizer's state of the kept values.
      masks: masks by path.
    """
    updater = tx.updater if isinstance(tx, WrappedOptimizer) else None
    have_gradients = updater is not None and not updater.is_sparse_gradients
    tx = unwrap(tx)
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
