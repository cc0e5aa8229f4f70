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
from sparsity.training.checks import check_optimizer
from sparsity.training.inner import (
    KeptParameter,
    KeptState,
    KeptTree,
    Positions,
    count_parts,
    find_sharding,
    gather,
)
from sparsity.training.state import check_no_state


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
            if path not in self.positions:
                return None
            stored = jnp.asarray(self.positions[path])
            if not is_traced(leaf):
                return sharding.place_like(leaf, stored)
            return sharding.shard_like(leaf, lambda x: x, stored, shape=stored.shape)

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
            frozen: PyTree = like_by_path.get(path)
            if not trees.is_array(frozen) or not jnp.issubdtype(frozen.dtype, jnp.number):
                return grad
            return jnp.full_like(frozen, _negative_zero(frozen.dtype))

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
                    f"{role} have {jnp.shape(leaves[path])}. Unpack packed masks: "
                    "sparsity.unpack_masks(masks, params)."
                )
        return trees.map_matched(
            lambda path, _: leaves[path] if path in self.layouts else optax.MaskedNode(), structure
        )

    def _read_kept(self, trained: PyTree, positions: Positions) -> KeptTree:
        """Returns a `KeptParameter` for each trained leaf, `None` if all entries are trained."""

        def read(path: trees.KeyPath, leaf: jax.Array, at: PyTree) -> KeptParameter | None:
            layout = self.layouts[path]
            expected = layout.kept_shape if path in self.positions else None
            if getattr(at, "shape", None) != expected:
                raise ValueError(
                    f"The state of {trees.path_string(path)!r} was made with other masks: it has "
                    f"positions of shape {getattr(at, 'shape', None)}, the mask needs {expected}."
                )
            return None if at is None else KeptParameter(leaf, layout, at)

        return trees.map_matched(read, trained, positions)


def _locate_kept(
    masks: Masks,
) -> tuple[dict[trees.KeyPath, KeptLayout], dict[trees.KeyPath, np.ndarray]]:
    """Returns layouts and positions as in `_Trainer`, without parameters that keep no entry."""
    check_values("masks", masks, "Call train_only outside of jit, scan and vmap.")
    layouts, positions = {}, {}
    for path, mask in trees.leaves_by_path(masks).items():
        array = np.asarray(jax.device_get(mask))
        check_entries(array, trees.path_string(path))
        if not array.any():
            continue
        parts = count_parts(mask)
        stack: tuple[int, ...] = ()
        split_shape: tuple[int, ...] | None = None
        if math.prod(parts) > 1:
            pairs = zip(parts, array.shape, strict=True)
            split_shape = tuple(size for count, axis in pairs for size in (count, axis // count))
            stack = tuple(range(0, len(split_shape), 2))
        layout = SliceLayout(array.shape, stack, split_shape)
        k = int(layout.count_kept(array != 0).max())
        if not array.all() and layout.slice_size + k >= 2**31:
            raise ValueError(
                f"train_only: {trees.path_string(path)!r} of shape {array.shape} has parts of more "
                "entries than 32-bit positions reach. Shard the parameter and its mask."
            )
        layouts[path] = KeptLayout(array.shape, stack, split_shape, slice_kept_shape=(k,))
        if not array.all():
            positions[path] = layouts[path].list_positions(array)
    if not layouts:
        raise ValueError("masks keep no entry, so that train_only has nothing to train.")
    return layouts, positions


def _check_parameter(
    path: trees.KeyPath, param: jax.Array, layout: KeptLayout, is_full: bool
) -> None:
    """Raises a ValueError if a parameter cannot be trained, or lies on other devices."""
    if not trees.is_prunable(param):
        raise ValueError(
            f"The masks have a leaf at {trees.path_string(path)!r}, which is no floating array but "
            f"of {getattr(param, 'dtype', type(param))}. Give it no mask: None."
        )
    parts, mask_parts = count_parts(param), layout.batch_shape or (1,) * param.ndim
    # The type of a traced array does not show how Auto axes of a mesh divide the array.
    is_unknown = is_traced(param) and math.prod(parts) == 1
    if not (is_full or is_unknown or find_sharding(param) is None) and parts != mask_parts:
        raise ValueError(
            f"train_only: {trees.path_string(path)!r} of shape {param.shape} is sharded in {parts} "
            f"parts, its mask in {mask_parts}: jax.device_put(mask, param.sharding)."
        )


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


def _negative_zero(dtype: np.dtype) -> jax.Array:
    """Returns -0.0, which is the sum of -0.0 and any number; 0 for integers."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.array(complex(-0.0, -0.0) if is_complex else -0.0, dtype)
