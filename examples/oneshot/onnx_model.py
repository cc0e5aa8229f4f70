"""An ONNX file as a function of its weights: a reader of the operators that small networks use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax
from onnx import helper, numpy_helper

Params = dict[str, jax.Array]


def load(path: Path) -> tuple[Callable[[Params, jax.Array], jax.Array], Params]:
    """Reads a network of one input and one output.

    What depends on shapes alone stays numpy, so that shapes are known when the function is traced.

    Returns:
      (fn, params): `fn(params, inputs)`. A parameter is named after the node that reads it:
      `Conv_57` is read by the Conv at index 57 of the graph.

    Raises:
      ValueError: the network has an operator that is not in `OPERATORS`.
    """
    graph = onnx.load(path).graph
    if unknown := {node.op_type for node in graph.node} - {*OPERATORS}:
        supported = ", ".join(sorted(OPERATORS))
        raise ValueError(f"{path} has the operators {sorted(unknown)}; known are {supported}.")
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    names = _parameter_names(graph)
    (source,), (target,) = graph.input, graph.output

    def fn(params: Params, inputs: jax.Array) -> jax.Array:
        values: dict[str, Any] = {**arrays, source.name: inputs}
        values |= {tensor: params[name] for tensor, name in names.items()}
        for node in graph.node:
            read = [values[name] for name in node.input]
            is_static = all(isinstance(value, np.ndarray) for value in read)
            options = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            result = OPERATORS[node.op_type](np if is_static else jnp, *read, **options)
            values[node.output[0]] = np.asarray(result) if is_static else result
        return values[target.name]

    return fn, {name: jnp.asarray(arrays[tensor]) for tensor, name in names.items()}


def save(path: Path, params: Params, target: Path) -> None:
    """Writes a copy of an ONNX file that has other parameters."""
    model = onnx.load(path)
    names = _parameter_names(model.graph)
    for tensor in model.graph.initializer:
        if tensor.name in names:
            array = np.asarray(params[names[tensor.name]])
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, target)


def _parameter_names(graph: onnx.GraphProto) -> dict[str, str]:
    """The names of parameters by those of their tensors: floating-point arrays, no numbers."""
    float32 = onnx.TensorProto.FLOAT
    tensors = {t.name for t in graph.initializer if t.data_type == float32 and np.prod(t.dims) > 1}
    names: dict[str, str] = {}
    for index, node in enumerate(graph.node):
        for tensor in node.input:
            if tensor in tensors:
                names.setdefault(tensor, f"{node.op_type}_{index}")
    return names


def _slice(xp: ModuleType, x: Any, starts: Any, ends: Any, axes: Any, steps: Any = None) -> Any:
    steps = np.ones_like(starts) if steps is None else steps
    at = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        at[axis] = slice(int(start), int(end), int(step))
    return x[tuple(at)]


def _convolve(xp: ModuleType, x: Any, kernel: Any, **options: Any) -> Any:
    """Without padding: ONNX's [batch, channels, *space] and [outputs, channels, *space]."""
    if padding := {"pads", "auto_pad"} & {*options}:
        raise ValueError(f"Conv has {sorted(padding)}: a Conv with padding is not known.")
    # Axes of length 1 are left out, with which XLA takes five times as long on a CPU.
    space = [axis for axis in range(2, x.ndim) if x.shape[axis] > 1 or kernel.shape[axis] > 1]
    dropped = tuple({*range(2, x.ndim)} - {*space})
    result = lax.conv_general_dilated(
        jnp.squeeze(x, dropped),
        jnp.squeeze(kernel, dropped),
        [options["strides"][axis - 2] for axis in space],
        "VALID",
        rhs_dilation=[options["dilations"][axis - 2] for axis in space],
        feature_group_count=options["group"],
    )
    return jnp.expand_dims(result, dropped)


def _max(xp: ModuleType, x: Any, axes: Any, keepdims: int) -> Any:
    return xp.max(x, axis=tuple(axes), keepdims=bool(keepdims))


def _sum(xp: ModuleType, x: Any, axes: Any, keepdims: int, noop_with_empty_axes: int = 0) -> Any:
    return xp.sum(x, axis=tuple(axes), keepdims=bool(keepdims))


# Each gets numpy or jax.numpy, what the node reads, and its attributes.
OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda xp, x, y: xp.add(x, y),
    "Cast": lambda xp, x, to: x.astype(helper.tensor_dtype_to_np_dtype(to)),
    "Concat": lambda xp, *parts, axis: xp.concatenate(parts, axis),
    "Conv": _convolve,
    "Div": lambda xp, x, y: xp.divide(x, y),
    "Equal": lambda xp, x, y: xp.equal(x, y),
    "Exp": lambda xp, x: xp.exp(x),
    "Expand": lambda xp, x, shape: xp.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape))),
    "GlobalMaxPool": lambda xp, x: xp.max(x, axis=tuple(range(2, x.ndim)), keepdims=True),
    "MatMul": lambda xp, x, y: xp.matmul(x, y),
    "Max": lambda xp, x, y: xp.maximum(x, y),
    "Mul": lambda xp, x, y: xp.multiply(x, y),
    "Reciprocal": lambda xp, x: xp.reciprocal(x),
    "ReduceMax": _max,
    "ReduceSum": _sum,
    "Reshape": lambda xp, x, shape: x.reshape(tuple(shape)),
    "Shape": lambda xp, x: np.array(x.shape),
    "Slice": _slice,
    "Sqrt": lambda xp, x: xp.sqrt(x),
    "Squeeze": lambda xp, x, axes: xp.squeeze(x, tuple(axes)),
    "Sub": lambda xp, x, y: xp.subtract(x, y),
    "Tanh": lambda xp, x: xp.tanh(x),
    "Transpose": lambda xp, x, perm: xp.transpose(x, perm),
    "Unsqueeze": lambda xp, x, axes: xp.expand_dims(x, tuple(axes)),
}
