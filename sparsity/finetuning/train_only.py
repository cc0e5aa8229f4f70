"""`sparsity.train_only`: trains the entries that masks keep, in any training loop.

The inner optimizer gets arrays of chosen entries, so its state has one number for each of them.
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
from sparsity.masks.positions import check_entries
from sparsity.training.entrywise_proof import check_entrywise
from sparsity.training.kept_state import (
    KeptLayout,
    KeptParameter,
    KeptState,
    KeptTree,
    Positions,
    find_sharding,
    gather,
)
from sparsity.training.state import check_no_state
from sparsity.training.step_checks import check_optimizer


@dataclasses.dataclass(frozen=True, eq=False)
class Support:
    """Chosen entries of a parameter.

    Attributes:
      layout: layout of the entries; `None` if all entries are chosen.
      positions: int32[*parts, k], the positions of the entries within each part, ascending. Slots
        that are not in use hold positions beyond the part.
      shape: shape of the parameter.
      parts: number of equal parts along each axis of the parameter, which devices share.
    """

    layout: KeptLayout | None
    positions: np.ndarray
    shape: tuple[int, ...]
    parts: tuple[int, ...]


def train_only(
    tx: optax.GradientTransformation, masks: Masks
) -> optax.GradientTransformationExtraArgs:
    """Trains the entries that masks keep; `optax.apply_updates` leaves all others as they are.

    The state of `tx` holds k numbers for the k chosen entries of a parameter, in a `KeptState` with
    their positions, int32[k]. A parameter without a mask is frozen and has no state; one whose mask
    keeps all entries has the state that `tx` gives it. Weight decay, moments and global norms count
    chosen entries only: an update is the dense one, restricted to the chosen entries.

    Frozen entries get the update -0.0, because x + (-0.0) has the bits of x for every x but those
    below. Wrapping `train_only` in a transformation that scales or clips may break this: put such
    transformations inside `tx`.

    Limits: in the sum of a parameter and its update, XLA on CPUs reads subnormal numbers as 0 and
    quiets signalling NaN, and a GPU writes one NaN for all.

    Args:
      tx: an optimizer that works entry by entry; global norms may be used.
      masks: tree like the parameters of masks, 1 = train, not packed; `None` for frozen parameters,
        which may also be missing. A mask is sharded as its parameter: chosen entries are stored on
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
    trainer = _Trainer(optax.with_extra_args_support(tx), read_supports(masks))
    return optax.GradientTransformationExtraArgs(trainer.init, trainer.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _Trainer:
    """Optimizer of chosen entries.

    Attributes:
      inner: the optimizer.
      supports: {path: chosen entries}.
    """

    inner: optax.GradientTransformationExtraArgs
    supports: dict[trees.KeyPath, Support]

    def init(self, params: Params) -> KeptState:
        """Returns the positions of the chosen entries, and the optimizer's state for them."""
        chosen = self._choose(params, "params", params)
        for path, leaf in trees.leaves_by_path(chosen).items():
            _check_parameter(path, leaf, self.supports[path])

        def place(path: trees.KeyPath, leaf: jax.Array) -> jax.Array | None:
            support = self.supports[path]
            return None if support.layout is None else _place_positions(support.positions, leaf)

        positions = trees.map_matched(place, chosen)
        kept = gather(chosen, self._read_kept(chosen, positions))
        check_entrywise(self.inner, chosen, kept, "train_only", "")
        return KeptState(positions, self.inner.init(kept))

    def update(
        self, updates: PyTree, state: PyTree, params: Params = None, **extra: object
    ) -> tuple[PyTree, KeptState]:
        """Returns updates of chosen entries, -0.0 for others, and the next state."""
        check_kind("state", state, KeptState, "the state that init of train_only returns")
        positions, inner_state = state
        grads = self._choose(updates, "gradients", updates if params is None else params)
        values = None
        if params is not None:
            chosen = self._choose(params, "params", params)
            values = gather(chosen, self._read_kept(chosen, positions))
        kept = self._read_kept(grads, positions)
        steps, inner_state = self.inner.update(gather(grads, kept), inner_state, values, **extra)
        dense = trees.map_matched(_spread_update, steps, kept, role="updates")
        trained = trees.leaves_by_path(dense)
        like = trees.leaves_by_path(updates if params is None else params)

        def complete(path: trees.KeyPath, grad: PyTree) -> PyTree:
            return trained[path] if path in trained else _make_frozen_update(grad, like.get(path))

        return trees.map_matched(complete, updates), KeptState(positions, inner_state)

    def _choose(self, tree: PyTree, role: str, structure: PyTree) -> PyTree:
        """Returns the trained leaves of a tree, in another structure with `MaskedNode` elsewhere.

        Args:
          tree: parameters or gradients.
          role: what `tree` is, for the error.
          structure: tree of parameters; gradients may have `None` at frozen ones.
        """
        leaves = trees.leaves_by_path(tree)
        trees.check_paths(leaves, self.supports, role, "masks")
        for path, support in self.supports.items():
            if jnp.shape(leaves[path]) != support.shape:
                raise ValueError(
                    f"The mask of {trees.path_string(path)!r} has the shape {support.shape}, the "
                    f"{role} have {jnp.shape(leaves[path])}. Masks are made for these parameters; "
                    "unpack packed masks: sparsity.unpack_masks(masks, params)."
                )

        def choose(path: trees.KeyPath, _: PyTree) -> PyTree:
            return leaves[path] if path in self.supports else optax.MaskedNode()

        return trees.map_matched(choose, structure)

    def _read_kept(self, chosen: PyTree, positions: Positions) -> KeptTree:
        """Returns a `KeptParameter` for each trained leaf, `None` if all entries are trained."""

        def read(
            path: trees.KeyPath, leaf: jax.Array, leaf_positions: jax.Array | None
        ) -> KeptParameter | None:
            layout = self.supports[path].layout
            expected = None if layout is None else layout.kept_shape
            if (None if leaf_positions is None else leaf_positions.shape) != expected:
                raise ValueError(
                    f"The state of {trees.path_string(path)!r} has positions of shape "
                    f"{getattr(leaf_positions, 'shape', None)}, its mask needs {expected}: the "
                    "state was made with other masks. Give the masks of the run, or start a new "
                    "state."
                )
            return (
                None
                if layout is None or leaf_positions is None
                else KeptParameter(leaf, layout, leaf_positions)
            )

        return trees.map_matched(read, chosen, positions)


def read_supports(masks: Masks) -> dict[trees.KeyPath, Support]:
    """Returns the chosen entries of each parameter, without those that have none.

    Args:
      masks: tree of masks, not packed.

    Raises:
      ValueError: masks are traced, have other entries than 0 and 1, or keep nothing.
    """
    check_values("masks", masks, "Call train_only outside of jit, scan and vmap.")
    supports = {}
    for path, mask in trees.leaves_by_path(masks).items():
        name, array = trees.path_string(path), np.asarray(jax.device_get(mask))
        check_entries(array, name)
        if array.any():
            supports[path] = _read_support(name, array != 0, _count_parts(mask))
    if not supports:
        raise ValueError("masks keep no entry, so that train_only has nothing to train.")
    return supports


def _read_support(name: str, mask: np.ndarray, parts: tuple[int, ...]) -> Support:
    """Returns the chosen entries of a mask, bool, by the parts that devices share."""
    if mask.all():
        return Support(None, np.zeros(0, np.int32), mask.shape, parts)
    layout = _layout_parts(mask.shape, parts)
    n, k = layout.slice_size, int(np.count_nonzero(layout.slices(mask), axis=-1).max())
    if n + k >= 2**31:
        raise ValueError(
            f"train_only: {name!r} of shape {mask.shape} has parts of {n} entries, more than "
            "32-bit positions reach. Shard the parameter and its mask."
        )
    layout = dataclasses.replace(layout, num_slots=k)
    return Support(layout, layout.list_positions(mask), mask.shape, parts)


def _layout_parts(shape: tuple[int, ...], parts: tuple[int, ...]) -> KeptLayout:
    """Returns the layout whose slices are equal parts of the parameter, so many along each axis."""
    if math.prod(parts) == 1:
        return KeptLayout(shape)
    pairs = zip(parts, shape, strict=True)
    split = tuple(n for count, size in pairs for n in (count, size // count))
    return KeptLayout(shape, tuple(range(0, len(split), 2)), split)


def _count_parts(array: PyTree) -> tuple[int, ...]:
    """Returns the number of parts that a mesh makes of an array along each axis."""
    mesh_sharding, ndim = find_sharding(array), np.ndim(array)
    return (
        (1,) * ndim if mesh_sharding is None else tuple(sharding.num_devices(mesh_sharding, ndim))
    )


def _check_parameter(path: trees.KeyPath, param: jax.Array, support: Support) -> None:
    """Raises a ValueError if a parameter cannot be trained, or lies on other devices."""
    name = trees.path_string(path)
    if not trees.is_prunable(param):
        raise ValueError(
            f"The masks have a leaf at {name!r}, which is no floating array but of "
            f"{getattr(param, 'dtype', type(param))}. Give it no mask: None."
        )
    parts, is_placed = _count_parts(param), find_sharding(param) is not None
    # Axes of the kind Auto are in no type of a traced array.
    if support.layout is None or not is_placed or (is_traced(param) and math.prod(parts) == 1):
        return
    if parts != support.parts:
        raise ValueError(
            f"train_only: {name!r} of shape {param.shape} is sharded in {parts} parts, its mask in "
            f"{support.parts}. Shard the mask as the parameter: "
            "jax.device_put(mask, param.sharding)."
        )


def _place_positions(positions: np.ndarray, param: jax.Array) -> jax.Array:
    """Returns positions [*parts, k] on the devices of the parts of a parameter."""
    array = jnp.asarray(positions)
    if not is_traced(param):
        return sharding.place_like(param, array)
    placed: jax.Array = sharding.shard_like(param, lambda x: x, array, shape=array.shape)
    return placed


def _spread_update(_: trees.KeyPath, step: jax.Array, kept: KeptParameter | None) -> jax.Array:
    """Returns a dense update of the shape and sharding of the gradient, -0.0 at other entries."""
    if kept is None:
        return step
    grad, map_slices = kept.param, kept.layout.map_slices
    update: jax.Array = map_slices(_spread_slice, grad, step, kept.positions, grad, dense=True)
    return update


def _spread_slice(step: jax.Array, positions: jax.Array, grad: jax.Array) -> jax.Array:
    # The update takes the memory of the gradient: XLA cannot tell that the condition never holds.
    always_false = step[0].real.astype(jnp.float32) > jnp.inf
    frozen = jnp.where(always_false, grad.astype(step.dtype), _negative_zero(step.dtype))
    return frozen.at[positions].set(step, mode="drop", indices_are_sorted=True, unique_indices=True)


def _make_frozen_update(grad: PyTree, like: PyTree) -> PyTree:
    """Returns an update that changes no bit of a frozen leaf, or the gradient of no number."""
    if not trees.is_array(like) or not jnp.issubdtype(like.dtype, jnp.number):
        return grad
    return jnp.full_like(like, _negative_zero(like.dtype))


def _negative_zero(dtype: np.dtype) -> jax.Array:
    """Returns -0.0, which is the sum of -0.0 and any number; 0 for integers."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.array(complex(-0.0, -0.0) if is_complex else -0.0, dtype)
