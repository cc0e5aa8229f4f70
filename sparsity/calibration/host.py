"""Arrays on the host: numpy computes on concrete arrays of one CPU, for which XLA compiles nothing.

Outside of `jit` each operation of jax is a program of its own for each new shape. A function of
arrays that numpy computes as fast, and with the same bits, has a second body here: `instead`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from sparsity.core.checks import is_traced
from sparsity.core.trees import PyTree

P = ParamSpec("P")
T = TypeVar("T")
CHUNK = 1 << 15  # entries that stay in the caches of a core through several operations


class HostDevice(NamedTuple):
    """Device of arrays on a host.

    Attributes:
      sharding: the device to which arrays are committed; `None` for the default device.
    """

    sharding: SingleDeviceSharding | None

    def put(self, tree: PyTree) -> PyTree:
        """Returns a tree with jax arrays for the arrays of numpy, which must not change later."""
        arrays, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, jax.device_put(arrays, self.sharding))


def find_host_device(*args: object) -> HostDevice | None:
    """Returns the device of all arrays among arguments; `None` unless one CPU holds all of them.

    Example:
      >>> find_host_device(np.ones(3), 1)
      HostDevice(sharding=None)
      >>> jax.eval_shape(lambda x: print(find_host_device(x)), 1.0)
      None
    """
    sharding: SingleDeviceSharding | None = None
    for x in jax.tree.leaves(args):
        if is_traced(x):
            return None
        if isinstance(x, jax.Array):
            if not isinstance(x.sharding, SingleDeviceSharding) or not _is_plain(x):
                return None
            if x.committed:
                if sharding is not None and x.sharding != sharding:
                    return None
                sharding = x.sharding
    if not jax.sharding.get_abstract_mesh().empty:
        return None
    return HostDevice(sharding)


def _is_plain(x: jax.Array) -> bool:
    """Returns whether numpy reads an array without a transfer."""
    (device,) = x.devices()
    return device.platform == "cpu" and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def to_numpy(tree: PyTree) -> PyTree:
    """Returns a tree with arrays of numpy for those of jax, which share the memory."""
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, tree)


def read(tree: PyTree) -> PyTree:
    """Returns a tree with arrays of numpy if one CPU holds all of its arrays, else the tree.

    Example:
      >>> type(read(jnp.ones(2))).__name__
      'ndarray'
    """
    return tree if find_host_device(tree) is None else to_numpy(tree)


def namespace(arrays: Iterable[object]) -> PyTree:
    """Returns `jax.numpy` if there is an array of jax, else `numpy`."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def find_body(fn: object) -> Callable[..., PyTree] | None:
    """Returns the second body of a function, for arrays of numpy, with the bits of the first.

    The body is the attribute `on_host`, as `instead` makes it. `None` if there is none, or if numpy
    may round otherwise.
    """
    return getattr(fn, "on_host", None)


def instead(host_fn: Callable[..., PyTree]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function of arrays: `host_fn` computes the result where one CPU holds them all.

    Args:
      host_fn: takes the arguments with arrays of numpy, and returns such arrays with the bits of
        the decorated function; or `NotImplemented`, and the decorated function is called. Keyword
        arguments hold no arrays. `find_body` of the result returns this body.

    Example:
      >>> @instead(lambda x: np.where(x > 0, x, np.float32(0)))
      ... def positive(x):
      ...     return jnp.where(x > 0, x, 0)
      >>> positive(jnp.array([1.0, -1.0]))
      Array([1., 0.], dtype=float32)
    """

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            device = find_host_device(args)
            if device is None:
                return fn(*args, **kwargs)
            with np.errstate(all="ignore"):  # XLA computes with infinities and NaN in silence
                result = host_fn(*to_numpy(args), **kwargs)
            if result is NotImplemented:
                return fn(*args, **kwargs)
            return device.put(result)

        call.__dict__["on_host"] = host_fn
        return call

    return decorate


def jit_or_numpy(fn: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that is its own second body: numpy on one CPU, `jax.jit` elsewhere.

    Example:
      >>> @jit_or_numpy
      ... def positive(x):
      ...     return namespace([x]).where(x > 0, x, 0)
      >>> positive(jnp.array([1.0, -1.0]))
      Array([1., 0.], dtype=float32)
    """
    return instead(fn)(jax.jit(fn))


def call(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Calls a function with a second body on arrays of numpy, for a result of such arrays."""
    host_fn = find_body(fn)
    assert host_fn is not None
    with np.errstate(all="ignore"):
        result = host_fn(*args)
    return jax.tree.map(np.asarray, fn(*args)) if result is NotImplemented else result


def empty(shape: tuple[int, ...], dtype: PyTree) -> np.ndarray:
    """Returns an uninitialized array at an address from which jax takes an array without a copy."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def chunks(size: int) -> Iterator[slice]:
    """Yields slices that cover an array of one axis."""
    return (slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))


def multiply_flushed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a * b with the bits of XLA:CPU, which takes subnormal numbers for 0."""
    return flush_subnormals(flush_subnormals(a) * flush_subnormals(b))


def copy(x: np.ndarray) -> np.ndarray:
    """Returns a copy at an address from which jax takes an array without a copy."""
    array = empty(x.shape, x.dtype)
    array[...] = x
    return array


def flush_subnormals(x: np.ndarray) -> np.ndarray:
    """Returns an array with 0 for subnormal numbers, as XLA:CPU reads them."""
    is_small = np.abs(x) < np.finfo(x.dtype).tiny
    return np.where(is_small, x.dtype.type(0), x) if is_small.any() else x
