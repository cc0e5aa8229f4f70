"""Shards arrays like others, on meshes of Auto and of Explicit axes, inside jit and outside."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    auto_axes,
    use_abstract_mesh,
)

from sparsity.core.checks import is_traced
from sparsity.core.trees import PyTree, is_array

T = TypeVar("T")


def shard_like(
    like: PyTree, fn: Callable[..., T], *args: PyTree, shape: tuple[int, ...] | None = None
) -> T:
    """Calls `fn(*args)`; on a mesh with Explicit axes the result is sharded as `like`.

    Explicit axes make the sharding a part of an array's type, so that each reshape and each new
    array would have to name one. Inside `fn` the axes are Auto: XLA chooses the shardings.

    Args:
      like: array with the sharding of the result, or a tree of arrays for a tree of results.
      fn: function of arrays.
      *args: all arrays and scalars that `fn` reads; a closure would not be converted.
      shape: shape of the result if it differs from that of `like`; mesh axes that do not divide the
        shape are dropped.
    """
    explicit = [explicit_sharding(jax.typeof(leaf)) for leaf in jax.tree.leaves(like)]
    if not any(explicit):
        return fn(*args)
    replicated_sharding = next(filter(None, explicit)).update(spec=PartitionSpec())
    shardings = jax.tree.unflatten(
        jax.tree.structure(like), [x or replicated_sharding for x in explicit]
    )
    if shape is not None:
        shardings = fit(shardings, shape)
    with _use_mesh(like):
        result: T = auto_axes(fn, out_sharding=shardings)(*args)
    return result


def _use_mesh(like: PyTree) -> contextlib.AbstractContextManager[object]:
    """Returns the context of the mesh with Explicit axes that arrays outside of jit lie on.

    Programs that read none of these arrays, such as random numbers, would run on one device.
    """
    mesh = find_mesh(like) if jax.sharding.get_abstract_mesh().empty else None
    try:
        return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
    except ValueError:  # of a function that is traced: the array is a constant there
        return contextlib.nullcontext()


def find_mesh(tree: PyTree) -> Mesh | None:
    """Returns the mesh of the first array outside of jit that lies on one."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not is_traced(x)]
    placed = [x.sharding for x in arrays]
    meshes = [x.mesh for x in placed if isinstance(x, NamedSharding) and isinstance(x.mesh, Mesh)]
    return meshes[0] if meshes else None


def explicit_sharding(aval: object) -> NamedSharding | None:
    """Returns the sharding in the type of an array; `None` without a mesh of Explicit axes."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding


def varying_axes(aval: object) -> frozenset[str]:
    """Returns the axes of a surrounding `shard_map` along which an array of a type varies."""
    manual_type = getattr(aval, "mat", None)  # jax before 0.10.2 has `vma`
    return getattr(aval, "vma", frozenset()) if manual_type is None else manual_type.varying


def _read_manual_axes(aval: object) -> dict[str, object]:
    """Returns the argument of `jax.ShapeDtypeStruct` for the axes along which an array varies."""
    if not varying_axes(aval):
        return {}
    manual_type = getattr(aval, "mat", None)
    return {"vma": varying_axes(aval)} if manual_type is None else {"manual_axis_type": manual_type}


def vary_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Lets arrays vary along the same axes of a surrounding `shard_map`, if inside of one."""
    varying = [varying_axes(jax.typeof(array)) for array in arrays]
    axes = frozenset[str]().union(*varying)
    return [
        _vary(array, tuple(sorted(axes - array_axes))) if axes - array_axes else array
        for array, array_axes in zip(arrays, varying, strict=True)
    ]


def _vary(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Lets an array vary along axes of a `shard_map`."""
    varied: jax.Array
    if hasattr(jax.lax, "pcast"):
        varied = jax.lax.pcast(array, axes, to="varying")
    else:
        varied = jax.lax.pvary(array, axes)  # type: ignore[attr-defined]  # jax 0.8
    return varied


def abstract(tree: PyTree) -> PyTree:
    """Returns the tree with `jax.ShapeDtypeStruct`s for arrays; other leaves stay.

    Example:
      >>> abstract({"w": jnp.ones((2, 3)), "name": "relu"})
      {'name': 'relu', 'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """

    def describe(leaf: PyTree) -> PyTree:
        if not is_array(leaf):
            return leaf
        aval = jax.typeof(leaf)
        return jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            sharding=aval.sharding if varying_axes(aval) else explicit_sharding(aval),
            weak_type=aval.weak_type,
            **_read_manual_axes(aval),
        )

    return jax.tree.map(describe, tree)


def resize_struct(struct: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Returns the struct with another shape, sharded along the axes that still divide."""
    return struct.update(shape=shape, sharding=struct.sharding and fit(struct.sharding, shape))


def call_replicated(fn: Callable[..., T], *args: PyTree) -> T:
    """Calls `fn(*args)`; on a mesh with Explicit axes the results are replicated."""
    like = next((x for x in jax.tree.leaves(args) if explicit_sharding(jax.typeof(x))), None)
    # A result without axes has no sharding but the replicated one, whatever its shape is then.
    return fn(*args) if like is None else shard_like(like, fn, *args, shape=())


def place_like(like: jax.Array, array: jax.Array) -> jax.Array:
    """Returns an array sharded as `like`.

    Args:
      like: array with the sharding of the result; its values are not read.
      array: array of the shape of `like`, or a packed mask, which has fewer bytes.
    """
    if not is_traced(array):
        sharding = getattr(like, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return array
        return jax.device_put(array, fit(sharding, array.shape))
    if placed := explicit_sharding(jax.typeof(array)):
        fitted = fit(explicit_sharding(jax.typeof(like)) or placed, array.shape)
        return array if fitted == placed else jax.sharding.reshard(array, fitted)
    if array.shape != like.shape:
        rows, count = like.reshape(like.shape or (1,)), array.shape[-1]
        # Shards of entries are shards of bytes only if the devices divide the bytes.
        divides = rows.shape[-1] == 8 * count and count % jax.device_count() == 0
        first_entries = rows.reshape(*array.shape, 8)[..., 0] if divides else rows[..., :1]
        like = jnp.broadcast_to(first_entries, array.shape)
    # XLA shards both operands of a selection alike, and drops the one that is never selected.
    return jnp.where(jnp.zeros((), bool), (like != 0).astype(array.dtype), array)


@contextlib.contextmanager
def evaluate_now() -> Iterator[None]:
    """Computes constants at once within functions that are traced, `shard_map` included.

    There jax can compute nothing on the mesh in use; the constants lie on no mesh.
    """
    with jax.ensure_compile_time_eval(), use_abstract_mesh(AbstractMesh((), ())):
        yield


def shard_along(array: jax.Array, axes: Iterable[int]) -> jax.Array:
    """Shards a replicated array along the first of the axes that the mesh divides."""
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.is_fully_replicated:
        count = sharding.mesh.size
        for axis in axes if count > 1 else ():
            if array.shape[axis] % count == 0:
                spec = PartitionSpec(*[None] * axis, sharding.mesh.axis_names)
                return jax.device_put(array, sharding.update(spec=spec))
    return array


def on_device(value: chex.Numeric, dtype: type[np.generic] = np.float32) -> jax.Array:
    """Converts a scalar to an array by an explicit transfer, as a transfer guard may demand.

    The array lies on all devices of the mesh in use, as arrays of `jax.numpy` do, so that a step
    compiled for the first state serves for the next one.
    """
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    sharding = None
    with contextlib.suppress(ValueError):  # of a compiled function, which places its values
        mesh = jax.sharding.get_mesh()
        sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return jax.device_put(np.asarray(value, dtype), sharding)


@functools.partial(jax.jit, keep_unused=True)  # which says on what devices
def ones_like(array: jax.Array) -> jax.Array:
    """Returns uint8 ones of the shape of an array; compiled, so that no constant is sent."""
    return jnp.ones_like(array, dtype=jnp.uint8)


def zeros_like(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns zeros of the shape and sharding of an array; compiled as `ones_like`."""
    return place_like(array, _zeros(array, dtype))


@functools.partial(jax.jit, static_argnums=1, keep_unused=True)
def _zeros(array: jax.Array, dtype: np.dtype) -> jax.Array:
    return jnp.zeros_like(array, dtype)


def fit(sharding: Sharding, shape: Sequence[int | None]) -> Sharding:
    """Returns the sharding without the axes of the mesh that do not divide `shape`.

    Of several mesh axes along one axis, the first ones stay that divide it, as XLA keeps them. An
    axis of size `None` lies on every device.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    old_axes, fitted_axes = mesh_axes(sharding, len(shape)), []
    for size, names in zip(shape, old_axes, strict=False):
        while names and (size is None or size % _count_devices_along(sharding, names)):
            names = names[:-1]
        fitted_axes.append(names)
    if fitted_axes == old_axes and len(sharding.spec) >= len(shape):
        return sharding
    return with_axes(sharding, fitted_axes)


def with_axes(sharding: NamedSharding, axes: Sequence[tuple[str, ...]]) -> NamedSharding:
    """Returns the sharding with other mesh axes along each axis of an array.

    The spec is the one with which jit returns arrays: another would compile a step again.
    """
    specs = [names or None for names in axes]
    while specs and not specs[-1] and AxisType.Explicit not in sharding.mesh.axis_types:
        specs.pop()
    return sharding.update(spec=PartitionSpec(*specs))


def count_devices(sharding: NamedSharding, ndim: int) -> list[int]:
    """Returns for each axis of an array the number of devices that share it."""
    return [_count_devices_along(sharding, names) for names in mesh_axes(sharding, ndim)]


def mesh_axes(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """Returns for each axis of an array the names of the mesh axes that share it."""
    spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]  # a spec may be short
    return [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec]


def _count_devices_along(sharding: NamedSharding, names: tuple[str, ...]) -> int:
    return math.prod(sharding.mesh.shape[name] for name in names)
