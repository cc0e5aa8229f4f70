"""`sparsity.train_only`: trains the entries that masks keep, in any training loop.

The inner optimizer gets arrays of kept entries, so its state has one number for each of them.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind, check_values, is_traced
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks.slice_layout import KeptLayout, SliceLayout, check_entries
from sparsity.programs.optimizers import Removed, check_entrywise
from sparsity.training.kept_state import (
    KeptParameter,
    KeptState,
    KeptTree,
    Positions,
    count_parts,
    find_sharding,
    gather,
)
from sparsity.training.state import check_no_state
from sparsity.training.step_checks import check_optimizer


def train_only(
    tx: optax.GradientTransformation, masks: Masks
) -> optax.GradientTransformationExtraArgs:
    """Trains the entries that masks keep; `optax.apply_updates` leaves all others as they are.

    The state of `tx` holds k numbers for the k kept entries of a parameter, in a `KeptState` with
    their positions, int32[k]. A parameter without a mask is frozen and has no state; one whose mask
    keeps all entries has the state that `tx` gives it. Weight decay, moments and global norms count
    kept entries only: an update is the dense one, restricted to the kept entries.

    Frozen entries get the update -0.0, because x + (-0.0) has the bits of x for every x but those
    below. Wrapping `train_only` in a transformation that scales or clips may break this: put such
    transformations inside `tx`.

    Limits: in the sum of a parameter and its update, XLA on CPUs reads subnormal numbers as 0 and
    quiets signalling NaN, and a GPU writes one NaN for all.

    Args:
      tx: an optimizer that works entry by entry; global norms may be used.
      masks: tree like the parameters of masks, 1 = train, not packed; `None` for frozen parameters,
        which may also be missing. A mask is sharded as its parameter: kept entries are stored on
        the devices of the parameter, [*parts, k] for parts along the axes of a mesh, padded to the
        part that keeps most.

    Returns:
      An optax transformation for any training loop.

    Raises:
      ValueError: masks are traced, packed or keep nothing, or `tx` is no optimizer; from `init`:
        masks belong to other parameters, are sharded otherwise, or `tx` reads more than entries and
        global norms. The message names the parameter.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> params = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.ones(3)}
      >>> tx = sparsity.train_only(optax.sgd(0.5, momentum=0.9), {"w": jnp.array([0, 1, 0])})
      >>> state = tx.init(params)
      >>> state.positions["w"], state.state[0].trace["w"]
      (Array([1], dtype=int32), Array([0.], dtype=float32))
      >>> grads = {"w": jnp.ones(3), "b": jnp.ones(3)}
      >>> updates, state = tx.update(grads, state, params)
      >>> optax.apply_updates(params, updates)["w"]
      Array([ 1. , -2.5,  3. ], dtype=float32)
    """
    check_optimizer("tx", tx)
    check_no_state(masks)
    trainer = _Trainer(optax.with_extra_args_support(tx), *_locate_kept(masks))
    return optax.GradientTransformationExtraArgs(trainer.init, trainer.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _Trainer:
    """Optimizer of kept entries.

    Attributes:
      inner: the optimizer.
      layouts: layout of the kept entries of each trained parameter; its slices are equal parts of
        the parameter, one for each device of a mesh; `batch_shape` counts them along each axis. A
        single part has no axes.
      positions: int32[*parts, k], the positions of the kept entries within each part, without
        parameters whose mask keeps all entries.
    """

    inner: optax.GradientTransformationExtraArgs
    layouts: dict[trees.KeyPath, KeptLayout]
    positions: dict[trees.KeyPath, np.ndarray]

    def init(self, params: Params) -> KeptState:
        """Returns the positions of the kept entries, and the state of their optimizer."""
        trained = self._select_trained(params, "params", params)
        for path, leaf in trees.leaves_by_path(trained).items():
            _check_parameter(path, leaf, self.layouts[path], is_full=path not in self.positions)

        def place(path: trees.KeyPath, leaf: jax.Array) -> jax.Array | None:
            stored = self.positions.get(path)
            return None if stored is None else _place_positions(stored, leaf)

        positions = trees.map_matched(place, trained)
        kept = gather(trained, self._read_kept(trained, positions))
        check_entrywise(
            self.inner,
            trained,
            kept,
            [Removed(are_zero=True, have_gradients=False)],
            remedy="Give train_only masks of complete parameters",
            claim="tx might train the kept entries alone otherwise than among zeros.",
        )
        return KeptState(positions, self.inner.init(kept))

    def update(
        self, updates: PyTree, state: PyTree, params: Params = None, **extra: object
    ) -> tuple[PyTree, KeptState]:
        """Returns updates of kept entries, -0.0 for others, and the next state."""
        check_kind("state", state, KeptState, "the state that init of train_only returns")
        positions, inner_state = state
        like = updates if params is None else params
        grads = self._select_trained(updates, "gradients", like)
        values = None
        if params is not None:
            trained = self._select_trained(params, "params", params)
            values = gather(trained, self._read_kept(trained, positions))
        kept = self._read_kept(grads, positions)
        kept_updates, inner_state = self.inner.update(
            gather(grads, kept), inner_state, values, **extra
        )
        dense = trees.map_matched(_scatter_update, kept_updates, kept, role="updates")
        dense_by_path = trees.leaves_by_path(dense)
        like_by_path = trees.leaves_by_path(like)

        def complete(path: trees.KeyPath, grad: PyTree) -> PyTree:
            if path in dense_by_path:
                return dense_by_path[path]
            return _make_frozen_update(grad, like_by_path.get(path))

        return trees.map_matched(complete, updates), KeptState(positions, inner_state)

    def _select_trained(self, tree: PyTree, role: str, structure: PyTree) -> PyTree:
        """Returns the trained leaves of a tree, in another structure with `MaskedNode` elsewhere.

        Args:
          tree: parameters or gradients.
          role: what `tree` is, for the error.
          structure: tree of parameters; gradients may have `None` at frozen ones.
        """
        leaves = trees.leaves_by_path(tree)
        trees.check_paths(leaves, self.layouts, role, "masks")
        for path, layout in self.layouts.items():
            if jnp.shape(leaves[path]) != layout.shape:
                raise ValueError(
                    f"The mask of {trees.path_string(path)!r} has the shape {layout.shape}, the "
                    f"{role} have {jnp.shape(leaves[path])}. Masks are made for these parameters; "
                    "unpack packed masks: sparsity.unpack_masks(masks, params)."
                )

        def select(path: trees.KeyPath, _: PyTree) -> PyTree:
            return leaves[path] if path in self.layouts else optax.MaskedNode()

        return trees.map_matched(select, structure)

    def _read_kept(self, trained: PyTree, positions: Positions) -> KeptTree:
        """Returns a `KeptParameter` for each trained leaf, `None` if all entries are trained."""

        def read(
            path: trees.KeyPath, leaf: jax.Array, leaf_positions: jax.Array | None
        ) -> KeptParameter | None:
            layout = self.layouts[path]
            expected = layout.kept_shape if path in self.positions else None
            if (None if leaf_positions is None else leaf_positions.shape) != expected:
                raise ValueError(
                    f"The state of {trees.path_string(path)!r} has positions of shape "
                    f"{getattr(leaf_positions, 'shape', None)}, its mask needs {expected}: the "
                    "state was made with other masks. Give the masks of the run, or start a new "
                    "state."
                )
            if leaf_positions is None:
                return None
            return KeptParameter(leaf, layout, leaf_positions)

        return trees.map_matched(read, trained, positions)


def _locate_kept(
    masks: Masks,
) -> tuple[dict[trees.KeyPath, KeptLayout], dict[trees.KeyPath, np.ndarray]]:
    """Returns layouts and positions as in `_Trainer`, without parameters that keep no entry.

    Args:
      masks: tree of masks, not packed.

    Raises:
      ValueError: masks are traced, have other entries than 0 and 1, or keep nothing.
    """
    check_values("masks", masks, "Call train_only outside of jit, scan and vmap.")
    layouts, positions = {}, {}
    for path, mask in trees.leaves_by_path(masks).items():
        name, array = trees.path_string(path), np.asarray(jax.device_get(mask))
        check_entries(array, name)
        if array.any():
            layouts[path] = layout = _make_layout(name, array != 0, count_parts(mask))
            if not array.all():
                positions[path] = layout.list_positions(array)
    if not layouts:
        raise ValueError("masks keep no entry, so that train_only has nothing to train.")
    return layouts, positions


def _make_layout(name: str, mask: np.ndarray, parts: tuple[int, ...]) -> KeptLayout:
    """Returns the layout of the entries that a mask, bool, keeps of the parts of devices."""
    stack: tuple[int, ...] = ()
    split_shape: tuple[int, ...] | None = None
    if math.prod(parts) > 1:
        pairs = zip(parts, mask.shape, strict=True)
        split_shape = tuple(size for count, axis in pairs for size in (count, axis // count))
        stack = tuple(range(0, len(split_shape), 2))
    layout = SliceLayout(mask.shape, stack, split_shape)
    n, k = layout.slice_size, int(layout.count_kept(mask).max())
    if not mask.all() and n + k >= 2**31:
        raise ValueError(
            f"train_only: {name!r} of shape {mask.shape} has parts of {n} entries, more than "
            "32-bit positions reach. Shard the parameter and its mask."
        )
    return KeptLayout(mask.shape, stack, split_shape, slice_kept_shape=(k,))


def _check_parameter(
    path: trees.KeyPath, param: jax.Array, layout: KeptLayout, is_full: bool
) -> None:
    """Raises a ValueError if a parameter cannot be trained, or lies on other devices."""
    name = trees.path_string(path)
    if not trees.is_prunable(param):
        raise ValueError(
            f"The masks have a leaf at {name!r}, which is no floating array but of "
            f"{getattr(param, 'dtype', type(param))}. Give it no mask: None."
        )
    parts, is_placed = count_parts(param), find_sharding(param) is not None
    # The type of a traced array does not show how Auto axes of a mesh divide the array.
    if is_full or not is_placed or (is_traced(param) and math.prod(parts) == 1):
        return
    mask_parts = layout.batch_shape or (1,) * param.ndim
    if parts != mask_parts:
        raise ValueError(
            f"train_only: {name!r} of shape {param.shape} is sharded in {parts} parts, its mask in "
            f"{mask_parts}. Shard the mask as the parameter: "
            "jax.device_put(mask, param.sharding)."
        )


def _place_positions(positions: np.ndarray, param: jax.Array) -> jax.Array:
    """Returns positions [*parts, k] on the devices of the parts of a parameter."""
    array = jnp.asarray(positions)
    if not is_traced(param):
        return sharding.place_like(param, array)
    return sharding.shard_like(param, lambda x: x, array, shape=array.shape)


def _scatter_update(_: trees.KeyPath, update: jax.Array, kept: KeptParameter | None) -> jax.Array:
    """Returns a dense update of the shape and sharding of the gradient, -0.0 at other entries."""
    if kept is None:
        return update
    grad, map_slices = kept.param, kept.layout.map_slices
    return map_slices(_scatter_slice, grad, update, kept.positions, grad, dense=True)


def _scatter_slice(update: jax.Array, positions: jax.Array, grad: jax.Array) -> jax.Array:
    # The update takes the memory of the gradient: XLA cannot tell that the condition never holds.
    always_false = update[0].real.astype(jnp.float32) > jnp.inf
    frozen = jnp.where(always_false, grad.astype(update.dtype), _negative_zero(update.dtype))
    return frozen.at[positions].set(
        update, mode="drop", indices_are_sorted=True, unique_indices=True
    )


def _make_frozen_update(grad: PyTree, like: PyTree) -> PyTree:
    """Returns an update that changes no bit of a frozen leaf, or the gradient of no number."""
    if not trees.is_array(like) or not jnp.issubdtype(like.dtype, jnp.number):
        return grad
    return jnp.full_like(like, _negative_zero(like.dtype))


def _negative_zero(dtype: np.dtype) -> jax.Array:
    """Returns -0.0, which is the sum of -0.0 and any number; 0 for integers."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.array(complex(-0.0, -0.0) if is_complex else -0.0, dtype)
