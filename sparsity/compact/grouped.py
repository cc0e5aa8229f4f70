"""Products with a sparse matrix whose neighbouring outputs read the same inputs.

The kept values of a matrix [inputs, outputs] are an array [groups, k, group]. All outputs of a
group read the k inputs that `indices` [groups, k] names, so that a product gathers rows of the
transposed inputs and multiplies them densely. An index that equals the number of inputs is padding:
the entry contributes 0, and its gradient is 0. The last group may be ragged: outputs
g * group + o beyond the number of outputs are dropped, and the gradient of their values is 0.

No function makes a matrix [inputs, outputs], except `densify`. Gathered inputs live for one chunk
of groups at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from sparsity.core.checks import check_int

Carry = TypeVar("Carry")
Result = TypeVar("Result")
Precision: TypeAlias = lax.PrecisionLike
Groups: TypeAlias = "tuple[int, np.ndarray]"
Arguments: TypeAlias = "tuple[jax.Array, jax.Array, jax.Array]"

# Bytes of inputs that a step of the loop over groups gathers on a CPU.
_CHUNK_BYTES = 2**19
_LEAST_GROUP = 4  # smaller groups multiply more slowly than a dense matrix below 95 %


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
      values: floats [groups, k, group].
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
    _check(values, indices, outputs)
    if x.ndim != 2:
        raise ValueError(f"x must have shape [rows, inputs], got x.shape = {x.shape}.")
    dtype = jnp.promote_types(values.dtype, x.dtype)
    result = jnp.dtype(dtype if preferred_element_type is None else preferred_element_type)
    return _product(values.astype(dtype), indices, x.astype(dtype), outputs, precision, result)


def densify(values: jax.Array, indices: jax.Array, inputs: int, outputs: int) -> jax.Array:
    """Returns the matrix [inputs, outputs] whose kept entries are `values`; other entries are 0.

    Args:
      values: an array [groups, k, group].
      indices: integers [groups, k]; `inputs` where padding stands.
      inputs: number of rows.
      outputs: number of columns, at most groups * group.

    Raises:
      ValueError: shapes or dtypes do not fit; the error names the argument.

    Example:
      >>> densify(jnp.array([[[1, 2], [3, 4]]]), jnp.array([[0, 2]]), inputs=3, outputs=2)
      Array([[1, 2], [0, 0], [3, 4]], dtype=int32)
    """
    _check(values, indices, outputs)
    groups, _, group = values.shape
    empty = jnp.zeros((inputs, groups, group), values.dtype)
    places = _widen(indices), jnp.arange(groups)[:, None]
    matrix = empty.at[places].set(values, mode="drop", wrap_negative_indices=False)
    return matrix.reshape(inputs, groups * group)[:, :outputs]


def gather(matrix: jax.Array, indices: jax.Array, group: int) -> jax.Array:
    """Returns the entries of a matrix [inputs, outputs] at `indices`: [groups, k, group].

    Inverse of `densify` on the kept entries; padding and columns beyond the outputs become 0.

    Args:
      matrix: an array [inputs, outputs].
      indices: integers [groups, k]; `inputs` where padding stands.
      group: number of neighbouring outputs that share their inputs.

    Raises:
      ValueError: shapes or dtypes do not fit; the error names the argument.

    Example:
      >>> gather(jnp.array([[1, 2], [0, 0], [3, 4]]), jnp.array([[0, 2]]), group=2)
      Array([[[1, 2], [3, 4]]], dtype=int32)
    """
    if matrix.ndim != 2:
        raise ValueError(
            f"matrix must have shape [inputs, outputs], got matrix.shape = {matrix.shape}."
        )
    inputs, outputs = matrix.shape
    groups, k = indices.shape
    _check(jax.ShapeDtypeStruct((groups, k, group), matrix.dtype), indices, outputs)
    columns = jnp.pad(matrix, ((0, 0), (0, groups * group - outputs)))
    places = _widen(indices), jnp.arange(groups)[:, None]
    return (
        columns.reshape(inputs, groups, group)
        .at[places]
        .get(mode="fill", fill_value=0, wrap_negative_indices=False)
    )


def find_groups(
    mask: np.ndarray, group: int | None = None, most_padding: float = 1.25
) -> Groups | None:
    """Finds the largest groups of neighbouring outputs that keep the same inputs.

    Outputs g * group to g * group + group - 1 are group g; the last one may be ragged. The size is
    read from the entries of the mask, not from the name of a pattern.

    Args:
      mask: bool or uint8 [*stack, outputs, inputs], 1 = kept. All matrices of a stack get the same
        group and k.
      group: the size, if only this one will do; by default the largest one of at least 4.
      most_padding: largest ratio of stored entries that are not kept to kept entries.

    Returns:
      The size, and indices [*stack, groups, k]: sorted, uint16 where `inputs` fits, and `inputs`
      where a group keeps fewer than k. `None` if there is no such size, or too much padding.

    Raises:
      ValueError: the mask has fewer than two axes, or the group is no integer of at least 1.

    Example:
      >>> find_groups(np.repeat([[1, 0, 1], [0, 1, 0]], 4, axis=0))
      (4, array([[0, 2], [1, 3]], dtype=uint16))
    """
    mask = np.asarray(mask).astype(bool, copy=False)
    if mask.ndim < 2:
        raise ValueError(
            f"mask must have shape [*stack, outputs, inputs], got mask.shape = {mask.shape}."
        )
    outputs = mask.shape[-2]
    if group is not None:
        check_int("group", group, least=1)
    differs = (mask[..., 1:, :] != mask[..., :-1, :]).any(-1).reshape(-1, max(outputs - 1, 0))
    # A group ends wherever neighbours differ, so that the size divides all these positions.
    common = int(np.gcd.reduce(1 + np.flatnonzero(differs.any(0))))
    if group is None:
        group = common or max(outputs, 1)
        if group < _LEAST_GROUP:
            return None
    elif common % group:
        return None
    indices = _list_inputs(mask[..., ::group, :])
    num_kept = np.count_nonzero(mask)
    return None if indices.size * group - num_kept > most_padding * num_kept else (group, indices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(
    values: jax.Array,
    indices: jax.Array,
    x: jax.Array,
    outputs: int,
    precision: Precision,
    dtype: np.dtype,
) -> jax.Array:
    """Multiplies, with the derivatives of `_backward`."""
    return _multiply(values, indices, x, outputs, precision, dtype)


def _keep_arguments(
    values: jax.Array,
    indices: jax.Array,
    x: jax.Array,
    outputs: int,
    precision: Precision,
    dtype: np.dtype,
) -> tuple[jax.Array, Arguments]:
    """Multiplies by the program itself, so that derivatives of gradients can be taken."""
    y = _multiply(values, indices, x, outputs, precision, dtype)
    return y, (values, indices, x)


def _backward(
    outputs: int, precision: Precision, dtype: np.dtype, arguments: Arguments, dy: jax.Array
) -> tuple[jax.Array, None, jax.Array]:
    """Returns the gradients of values and x, by two loops: the one not needed is dropped."""
    values, indices, x = arguments
    groups, _, group = values.shape
    rows, inputs = x.shape
    superfluous = groups * group - outputs
    dy = jnp.pad(dy.T, ((0, superfluous), (0, 0))).reshape(groups, group, rows)
    xt = x.T
    wide = _widen_float(jnp.promote_types(values.dtype, dy.dtype))
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=wide)

    def differentiate_values(_: None, chunk: Sequence[jax.Array]) -> tuple[None, jax.Array]:
        indices, dy = chunk  # [chunk, k] and [chunk, group, rows]
        dvalues = dot(_gather_rows(xt, indices), dy, (((2,), (2,)), ((0,), (0,))))
        return None, dvalues.astype(values.dtype)

    def differentiate_inputs(dxt: jax.Array, chunk: Sequence[jax.Array]) -> tuple[jax.Array, None]:
        values, indices, dy = chunk
        rows_added = dot(values, dy, (((2,), (1,)), ((0,), (0,))))
        places = dxt.at[_widen(indices)]
        return places.add(rows_added, mode="drop", wrap_negative_indices=False), None

    chunk = _choose_chunk(values, x, outputs)
    _, dvalues = _scan_groups(differentiate_values, None, (indices, dy), chunk)
    empty = jnp.zeros((inputs, rows), wide)
    dxt, _ = _scan_groups(differentiate_inputs, empty, (values, indices, dy), chunk)
    return dvalues, None, dxt.T.astype(x.dtype)


_product.defvjp(_keep_arguments, _backward)


def _multiply(
    values: jax.Array,
    indices: jax.Array,
    x: jax.Array,
    outputs: int,
    precision: Precision,
    dtype: np.dtype,
) -> jax.Array:
    """Multiplies a chunk of groups at a time."""
    xt = x.T

    def multiply(_: None, chunk: Sequence[jax.Array]) -> tuple[None, jax.Array]:
        values, indices = chunk  # [chunk, k, group] and [chunk, k]
        y = lax.dot_general(
            values,
            _gather_rows(xt, indices),
            (((1,), (1,)), ((0,), (0,))),
            precision=precision,
            preferred_element_type=_widen_float(dtype),
        )
        return None, y.astype(dtype)

    chunk = _choose_chunk(values, x, outputs)
    _, y = _scan_groups(multiply, None, (values, indices), chunk)
    return y.reshape(-1, len(x))[:outputs].T


def _scan_groups(
    body: Callable[[Carry, Sequence[jax.Array]], tuple[Carry, Result]],
    carry: Carry,
    arrays: Sequence[jax.Array],
    chunk: int,
) -> tuple[Carry, Result]:
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
    count = groups // chunk
    if count * chunk == groups and count <= 1:
        return body(carry, arrays)
    even = count * chunk
    chunks = [a[:even].reshape(count, chunk, *a.shape[1:]) for a in arrays]
    carry, results = lax.scan(body, carry, chunks)
    results = jax.tree.map(lambda a: a.reshape(even, *a.shape[2:]), results)
    if even < groups:
        carry, last = body(carry, [a[even:] for a in arrays])
        results = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), results, last)
    return carry, results


def _choose_chunk(values: jax.Array, x: jax.Array, outputs: int) -> int:
    """Returns the number of groups whose gathered inputs fit the budget, at least one.

    The budget is at most the bytes of a dense matrix, and smaller on a CPU.
    """
    groups, k, _ = values.shape
    rows, inputs = x.shape
    budget = inputs * outputs * x.dtype.itemsize
    if jax.default_backend() == "cpu":
        budget = min(budget, _CHUNK_BYTES)
    most = min(max(budget // max(k * rows * x.dtype.itemsize, 1), 1), max(groups, 1))
    # Equal chunks spare a copy of the values, if they are not much smaller.
    equal = (n for n in range(most, most // 2, -1) if groups % n == 0)
    return next(equal, most)


def _gather_rows(xt: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the rows of `xt` [inputs, rows] at `indices` [..., k]; padding reads zeros."""
    return xt.at[_widen(indices)].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _widen(indices: jax.Array) -> jax.Array:
    """Converts narrow indices, in which `inputs` plus an offset might overflow, to int32."""
    return indices.astype(jnp.promote_types(indices.dtype, jnp.int32))


def _widen_float(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of sums: float32 for narrower floats, else the dtype itself."""
    dtype = jnp.dtype(dtype)
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _list_inputs(rows: np.ndarray) -> np.ndarray:
    """Returns the kept inputs of bool[*stack, groups, inputs]: [*stack, groups, k], padded."""
    *shape, inputs = rows.shape
    rows = rows.reshape(-1, inputs)
    counts = np.count_nonzero(rows, axis=1)
    numbers, kept = np.nonzero(rows)
    positions = np.arange(len(kept)) - np.repeat(np.cumsum(counts) - counts, counts)
    dtype = np.uint16 if inputs <= np.iinfo(np.uint16).max else np.int32
    k = counts.max(initial=0)
    indices = np.full((len(rows), k), inputs, dtype)
    indices[numbers, positions] = kept
    return indices.reshape(*shape, k)


def _check(values: jax.Array | jax.ShapeDtypeStruct, indices: jax.Array, outputs: int) -> None:
    """Raises a ValueError unless shapes and dtypes fit each other."""
    if len(values.shape) != 3:
        raise ValueError(
            f"values must have shape [groups, k, group], got values.shape = {values.shape}."
        )
    if indices.shape != values.shape[:2] or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"indices must be integers [groups, k] = {list(values.shape[:2])}, "
            f"got {indices.dtype}{list(indices.shape)}."
        )
    groups, _, group = values.shape
    if not (groups - 1) * group < outputs <= groups * group and (outputs or groups):
        raise ValueError(
            f"outputs must fill {groups} groups of {group}, of which only the last may be ragged, "
            f"got outputs = {outputs}."
        )
