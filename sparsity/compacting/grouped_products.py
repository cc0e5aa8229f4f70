"""Products with a sparse matrix whose neighbouring outputs read the same inputs.

The kept values of a matrix [inputs, outputs] are an array [groups, k, group]. All outputs of a
group read the k inputs that `indices` [groups, k] names, so that a product gathers rows of the
transposed inputs and multiplies them densely. An index that equals the number of inputs is padding:
the entry contributes 0, and its gradient is 0. The last group may be ragged: outputs
g * group + o beyond the number of outputs are dropped, and the gradient of their values is 0.

No function makes a matrix [inputs, outputs], except `scatter_groups`. Gathered inputs live for one
chunk of groups at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard
from jax.typing import DTypeLike

from sparsity.core.arrays import promote
from sparsity.core.checks import check_int
from sparsity.core.sharding import explicit_sharding, mesh_axes, vary_alike
from sparsity.core.trees import PyTree
from sparsity.masks.slice_layout import number_padding

Carry = TypeVar("Carry")
Output = TypeVar("Output")
Precision: TypeAlias = lax.PrecisionLike

# Bytes of inputs that a step of the loop over groups gathers on a CPU, where they fit the cache:
# 1.3 times as fast as 4 MiB at 128 and 512 rows.
_CPU_CHUNK_BYTES = 2**20


class Result(NamedTuple):
    """The static part of a product.

    Attributes:
      outputs: number of columns.
      dtype: dtype of the result.
      precision: precision of the products.
    """

    outputs: int
    dtype: np.dtype
    precision: Precision


def grouped_product(
    values: jax.Array,
    indices: jax.Array,
    x: jax.Array,
    outputs: int,
    *,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Multiplies `x` by the matrix whose kept entries are `values`.

    y[b, g * group + o] = sum over j of x[b, indices[g, j]] * values[g, j, o]

    The rule for derivatives gathers again, so that the backward pass keeps the arguments only. It
    holds for gradients and for forward derivatives of gradients; forward derivatives of the product
    itself are an error of jax. Narrow floats are summed in float32.

    Args:
      values: floats [groups, k, group], finite at padding.
      indices: integers [groups, k], sorted and unique along k; `inputs` where padding stands.
      x: floats [rows, inputs]; both dtypes are promoted to a common one.
      outputs: number of columns of the result, at most groups * group.
      precision: precision of the products, as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result; by default the common dtype of values and x.

    Returns:
      An array [rows, outputs].

    Raises:
      ValueError: shapes or dtypes do not fit; the error names the argument.

    Example:
      >>> values = jnp.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]]])
      >>> indices = jnp.array([[0, 2], [1, 3]])  # of 3 inputs: the 3 is padding
      >>> grouped_product(values, indices, jnp.array([[1.0, 10.0, 100.0]]), outputs=3)
      Array([[301., 402.,  50.]], dtype=float32)
    """
    check_int("outputs", outputs)
    shapes: list[PyTree] = [getattr(array, "shape", ()) for array in (values, indices, x)]
    fits = [*map(len, shapes)] == [3, 2, 2] and shapes[0][:2] == shapes[1]
    count, _, group = shapes[0] if fits else (0, 0, 0)
    if not fits or not ((count - 1) * group < outputs <= count * group or count == outputs == 0):
        raise ValueError(
            "values must be [groups, k, group], indices [groups, k] and x [rows, inputs], and "
            "outputs must fill the groups, of which only the last may be ragged, got shapes "
            f"{shapes} and outputs = {outputs}."
        )
    return multiply_stack(values, indices, x, outputs, precision, preferred_element_type)


def multiply_stack(
    values: jax.Array,
    indices: jax.Array,
    x: jax.Array,
    outputs: int,
    precision: Precision,
    preferred_element_type: DTypeLike | None,
) -> jax.Array:
    """Returns `grouped_product` for each matrix of a stack; checks no argument.

    Args:
      values: floats [*stack, groups, k, group].
      indices: integers [*stack, groups, k].
      x: floats [*stack, *rows, inputs].
      outputs: as in `grouped_product`, as are the other arguments.

    Returns:
      An array [*stack, *rows, outputs].
    """
    indices, dtype = jnp.asarray(indices), promote(values.dtype, x.dtype)
    values, x = jnp.asarray(values, dtype), jnp.asarray(x, dtype)
    result = Result(outputs, jnp.dtype(preferred_element_type or dtype), precision)
    placed = explicit_sharding(jax.typeof(x)) or explicit_sharding(jax.typeof(values))
    if placed is None:
        return _multiply_each(values, indices, x, result)
    return _multiply_shards(values, indices, x, result, placed.mesh)


def scatter_groups(values: jax.Array, indices: jax.Array, inputs: int, outputs: int) -> jax.Array:
    """Returns the matrix [inputs, outputs] whose kept entries are `values`; other entries are 0.

    Args:
      values: an array [groups, k, group].
      indices: integers [groups, k]; `inputs` where padding stands.
      inputs: number of rows.
      outputs: number of columns, at most groups * group.

    Example:
      >>> scatter_groups(jnp.array([[[1, 2], [3, 4]]]), jnp.array([[0, 2]]), inputs=3, outputs=2)
      Array([[1, 2], [0, 0], [3, 4]], dtype=int32)
    """
    groups, _, group = values.shape
    # A 0 that depends on the positions lets zeros and values wait: XLA on CPUs begins with all
    # buffers of zeros, and with copies of values that are written twice.
    at = number_padding(indices, inputs)
    zero = jnp.min(at, initial=0)
    empty = jnp.broadcast_to(zero.astype(values.dtype), (inputs, groups, group))
    places = empty.at[at, jnp.arange(groups)[:, None]]
    waiting = jnp.where(zero < 0, jnp.zeros((), values.dtype), values)
    matrix = places.set(waiting, mode="drop", wrap_negative_indices=False, unique_indices=True)
    return matrix.reshape(inputs, groups * group)[:, :outputs]


def _multiply_each(
    values: jax.Array, indices: jax.Array, x: jax.Array, result: Result
) -> jax.Array:
    """Multiplies by each matrix of a stack, within a `shard_map` too."""
    depth = values.ndim - 3

    def multiply(*arrays: jax.Array) -> jax.Array:
        return _multiply_once(*vary_alike(arrays), result)

    for _ in range(depth):
        multiply = jax.vmap(multiply)
    matrices = x.reshape(*x.shape[:depth], math.prod(x.shape[depth:-1]), x.shape[-1])
    return multiply(values, indices, matrices).reshape(*x.shape[:-1], result.outputs)


def _multiply_shards(
    values: jax.Array, indices: jax.Array, x: jax.Array, result: Result, mesh: Mesh | AbstractMesh
) -> jax.Array:
    """Multiplies on a mesh of Explicit axes: each device multiplies its groups by its rows.

    The devices that share axes of the stack, in `values` or in `x`, multiply by their matrices.
    """
    axis_types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = {name for name, axis_type in axis_types if axis_type == AxisType.Explicit}
    depth, x_axes, values_axes = values.ndim - 3, _split_axes(x), _split_axes(values)
    stack_axes = [a or b for a, b in zip(x_axes[:depth], values_axes[:depth], strict=True)]
    # An axis of the mesh splits one axis of the result.
    axes, taken = list[tuple[str, ...]](), set[str]()
    for axis_names in (*stack_axes, *x_axes[depth:-1], values_axes[depth]):
        axes.append(tuple(name for name in axis_names if name not in taken))
        taken |= {*axis_names}
    values_spec = PartitionSpec(*axes[:depth], axes[-1])
    specs = values_spec, values_spec, PartitionSpec(*axes[:-1])

    def multiply_shard(values: jax.Array, indices: jax.Array, x: jax.Array) -> jax.Array:
        # All columns of the groups of this device; those beyond `outputs` are cut at the end.
        outputs = values.shape[depth] * values.shape[-1]
        return _multiply_each(values, indices, x, result._replace(outputs=outputs))

    arrays = [
        reshard(array, NamedSharding(mesh, spec))
        for array, spec in zip((values, indices, x), specs, strict=True)
    ]
    y = jax.shard_map(
        multiply_shard,
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(*axes),
        # An empty set is all axes but those that a `vmap` maps.
        axis_names=names if len(names) < len(mesh.axis_names) else set(),
    )(*arrays)
    if y.shape[-1] > result.outputs:
        y = reshard(y, NamedSharding(mesh, PartitionSpec(*axes[:-1])))[..., : result.outputs]
    return y


def _split_axes(array: jax.Array) -> list[tuple[str, ...]]:
    """Returns for each axis of an array the Explicit axes of the mesh that split it."""
    sharding = explicit_sharding(jax.typeof(array))
    return [()] * array.ndim if sharding is None else mesh_axes(sharding, array.ndim)


def _backward(
    result: Result, arguments: tuple[jax.Array, jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, None, jax.Array]:
    """Returns the gradients of values and x, by two loops: the one not needed is dropped."""
    values, indices, x = arguments
    groups, _, group = values.shape
    rows, inputs = x.shape
    # Columns that only fill the last group get no gradient.
    superfluous = groups * group - result.outputs
    dy = jnp.pad(dy.T, ((0, superfluous), (0, 0))).reshape(groups, group, rows)
    xt = x.T
    wide = _widen_float(promote(values.dtype, dy.dtype))
    dot = functools.partial(
        lax.dot_general, precision=result.precision, preferred_element_type=wide
    )

    def differentiate_values(_: None, chunk: Sequence[jax.Array]) -> tuple[None, jax.Array]:
        indices, dy = chunk  # [chunk, k] and [chunk, group, rows]
        dvalues = dot(_gather_rows(xt, indices), dy, (((2,), (2,)), ((0,), (0,))))
        return None, dvalues.astype(values.dtype)

    def differentiate_inputs(dxt: jax.Array, chunk: Sequence[jax.Array]) -> tuple[jax.Array, None]:
        values, indices, dy = chunk
        rows_added = dot(values, dy, (((2,), (1,)), ((0,), (0,))))
        # Several groups may read one input, so gradients add up; padding is dropped.
        places = dxt.at[indices.astype(jnp.int32)]
        return places.add(rows_added, mode="drop", wrap_negative_indices=False), None

    empty, _ = vary_alike([jnp.zeros((inputs, rows), wide), x])

    def differentiate(chunk: int) -> tuple[jax.Array, jax.Array]:
        _, dvalues = _scan_groups(differentiate_values, None, (indices, dy), chunk)
        dxt, _ = _scan_groups(differentiate_inputs, empty, (values, indices, dy), chunk)
        return dvalues, dxt

    dvalues, dxt = _run_in_chunks(differentiate, values, x, result.outputs)
    return dvalues, None, dxt.T.astype(x.dtype)


def _multiply(values: jax.Array, indices: jax.Array, x: jax.Array, result: Result) -> jax.Array:
    """Multiplies a chunk of groups at a time."""
    groups, _, group = values.shape
    xt = x.T

    def multiply(_: None, chunk: Sequence[jax.Array]) -> tuple[None, jax.Array]:
        values, indices = chunk  # [chunk, k, group] and [chunk, k]
        y = lax.dot_general(
            values,
            _gather_rows(xt, indices),
            (((1,), (1,)), ((0,), (0,))),
            precision=result.precision,
            preferred_element_type=_widen_float(result.dtype),
        )
        return None, y.astype(result.dtype)

    def multiply_all(chunk: int) -> jax.Array:
        return _scan_groups(multiply, None, (values, indices), chunk)[1]

    y = _run_in_chunks(multiply_all, values, x, result.outputs)
    return y.reshape(groups * group, len(x))[: result.outputs].T


# The forward pass is the program itself, so that derivatives of gradients can be taken.
_product = jax.custom_vjp(_multiply, nondiff_argnums=(3,))
_product.defvjp(lambda *args: (_multiply(*args), args[:3]), _backward)
# Equal products, such as those of equal layers, are traced and lowered once.
_multiply_once: Callable[..., jax.Array] = jax.jit(_product, static_argnums=3)


def _scan_groups(
    body: Callable[[Carry, Sequence[jax.Array]], tuple[Carry, Output]],
    carry: Carry,
    arrays: Sequence[jax.Array],
    chunk: int,
) -> tuple[Carry, Output]:
    """Runs `body` on each `chunk` of groups, as `lax.scan` does, the last ones apart.

    Args:
      body: a function of a carry and arrays [chunk, ...].
      carry: the first carry.
      arrays: arrays [groups, ...].
      chunk: number of groups at a time.

    Returns:
      The last carry, and the results [groups, ...].
    """
    groups = len(arrays[0])
    even = groups // chunk * chunk
    if groups <= chunk:  # one chunk needs no loop, nor its copies
        return body(carry, arrays)
    blocks = [a[:even].reshape(-1, chunk, *a.shape[1:]) for a in arrays]
    carry, results = lax.scan(body, carry, blocks)
    results = jax.tree.map(lambda a: a.reshape(even, *a.shape[2:]), results)
    if even < groups:
        carry, last = body(carry, [a[even:] for a in arrays])
        results = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), results, last)
    return carry, results


def _run_in_chunks(
    run: Callable[[int], Output], values: jax.Array, x: jax.Array, outputs: int
) -> Output:
    """Returns `run(chunk)` for the number of groups at a time, which is smaller on CPUs.

    Their gathered inputs take no more bytes than the dense matrix.
    """
    (groups, k, _), (rows, inputs) = values.shape, x.shape

    def choose_chunk(budget: int) -> int:
        most = min(max(budget // max(k * rows * x.dtype.itemsize, 1), 1), max(groups, 1))
        # Equal chunks spare a copy of the values, if they are not much smaller.
        return next((n for n in range(most, most // 2, -1) if groups % n == 0), most)

    dense_bytes = inputs * outputs * x.dtype.itemsize
    chunk, cpu_chunk = map(choose_chunk, (dense_bytes, min(dense_bytes, _CPU_CHUNK_BYTES)))
    if chunk == cpu_chunk:
        return run(chunk)
    result: Output = lax.platform_dependent(cpu=lambda: run(cpu_chunk), default=lambda: run(chunk))
    return result


def _gather_rows(xt: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the rows of `xt` [inputs, rows] at `indices` [..., k]; padding reads zeros."""
    # Indices are not negative: wrapping them would cost a comparison and a select for each.
    places = xt.at[indices.astype(jnp.int32)]  # narrow ones do not hold the sizes
    return places.get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _widen_float(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of sums: float32 for narrower floats, else the dtype itself."""
    dtype = jnp.dtype(dtype)
    return promote(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
