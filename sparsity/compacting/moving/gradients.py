"""Gradients that rank the entries of a mask update, and the update where a backward pass has them.

RigL ranks the gradient of a dense slice. A backward pass makes this gradient anyway, where it
computes the gradient of the kept values: an `Observer` finds the new positions there, and no other
dense gradient exists. The positions leave the backward pass as float32 numbers, in place of the
gradient of the kept values. Where a loss reads a slice several times, gradients have to be added
up first: the dense gradient of such a parameter leaves the backward pass, and is ranked afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.compacting.moving.mask_update import MaskUpdate, SliceArrays, find_all_positions
from sparsity.compacting.observer import Observer
from sparsity.core import sharding
from sparsity.core.trees import Path
from sparsity.programs.program import CALLS, Equation, Program, Value, read_jaxpr

_EXACT = 2**24  # integers below are exact in float32
_BASE = 2**16


def find_positions_by_gradient(
    mask_updates: Mapping[Path, MaskUpdate],
    slices: Mapping[Path, SliceArrays],
    loss: Callable[[Mapping[Path, Observer]], jax.Array],
) -> dict[Path, jax.Array]:
    """Returns the new positions of all parameters, ranked by gradients; see `read_positions`.

    Args:
      mask_updates: mask updates by path.
      slices: slices by path.
      loss: the loss of the model whose parameters have these observers.
    """
    observers = {path: _observe_gradient(mask_update) for path, mask_update in mask_updates.items()}

    def run(results: list[jax.Array]) -> jax.Array:
        pairs = zip(observers.items(), results, strict=True)
        return loss({path: dataclasses.replace(each, result=x) for (path, each), x in pairs})

    results = [each.result for each in observers.values()]
    traced = jax.make_jaxpr(run)(sharding.abstract(results))
    program = read_jaxpr(traced)
    at_once = {
        path
        for path, value in zip(observers, program.inputs, strict=True)
        if mask_updates[path].rule is not None and _count_reads(program, value) == 1
    }
    mapped = _zero_from(traced.consts)
    for path, mask_update in mask_updates.items():
        if path in at_once:
            slice_arrays = slices[path]
            observers[path] = _observe_positions(
                mask_update, slice_arrays._replace(step=slice_arrays.step + mapped)
            )
        else:
            arrays = jnp.broadcast_to(mapped, mask_update.layout.batch_shape)
            observers[path] = dataclasses.replace(observers[path], arrays=arrays)
    outputs = jax.grad(run)([x.result for x in observers.values()])
    by_path = dict(zip(observers, outputs, strict=True))
    by_dense_gradient = {path: mask_updates[path] for path in mask_updates if path not in at_once}
    return by_path | find_all_positions(by_dense_gradient, slices, by_path)


def _zero_from(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns an int32 0 that a `vmap` around a move maps if it maps one of the arrays.

    Observers add up the gradients of rows that a loss maps, and tell them by this number from the
    gradients of models that move in parallel.
    """
    zero = jnp.zeros((), jnp.int32)
    for array in filter(np.size, arrays):
        is_key = jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key)
        numbers = jax.random.key_data(array) if is_key else jnp.asarray(array)
        first: jax.Array = sharding.call_replicated(lambda x: x.reshape(-1)[0], numbers)
        zero += lax.stop_gradient(first).real.astype(jnp.int32) * 0
    return zero


def _observe_positions(mask_update: MaskUpdate, slices: SliceArrays) -> Observer:
    """Returns the observer that finds new positions, which leave as float32 numbers."""
    layout = mask_update.part_layout
    is_small = math.prod(layout.shape) + math.prod(layout.kept_shape) < _EXACT

    def find(part: SliceArrays, gradient: jax.Array) -> jax.Array:
        new = mask_update.find_positions(part, gradient)
        digits = [new] if is_small else [new % _BASE, new // _BASE]
        return jnp.stack(digits, axis=-1).astype(jnp.float32)

    shape = *slices.positions.shape, 1 if is_small else 2
    return Observer(find, slices, jnp.zeros(shape, jnp.float32))


def read_positions(digits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns positions, from positions or from float32 [..., digits]."""
    if jnp.issubdtype(digits.dtype, jnp.integer):
        return digits
    low, *high = (x.astype(jnp.int32) for x in jnp.moveaxis(digits, -1, 0))
    return sum((each * _BASE for each in high), start=low).astype(dtype)


def _observe_gradient(mask_update: MaskUpdate) -> Observer:
    """Returns the observer that returns dense gradients, axes in the order of the layout."""
    layout = mask_update.layout
    shape = *layout.batch_shape, *layout.slice_shape
    return Observer(lambda _, gradient: gradient, (), jnp.zeros(shape, jnp.float32))


def _count_reads(program: Program, value: Value) -> int:
    """Returns how often a program reads a value; 2 for more, and where the number is unknown."""
    reads = 2 * sum(output is value for output in program.outputs)
    for equation in program.equations:
        if any(each is value for each in equation.inputs):
            reads += _count_reads_in(equation, value)
    return min(reads, 2)


def _count_reads_in(equation: Equation, value: Value) -> int:
    if equation.name == "custom_vjp_call":
        return sum(each is value for each in equation.inputs)
    if equation.name in CALLS and not isinstance(equation.rule, Program):
        return _count_reads(equation.inner_programs[0], value)
    if equation.name != "scan":
        return 2
    (body,) = equation.list_bodies()
    pairs = enumerate(zip(body.inputs, body.program.inputs, strict=True))
    return sum(
        # Steps read different layers of a stack, but all read any other input.
        _count_reads(body.program, inner) * (1 if index in body.layers else 2)
        for index, (outer, inner) in pairs
        if outer is value
    )


def differentiate_directly(
    loss: Callable[[dict[Path, jax.Array]], jax.Array], values: dict[Path, jax.Array]
) -> dict[Path, jax.Array]:
    """Returns the gradients of kept values, without those that are zeros in the traced program.

    Args:
      loss: a function of kept values.
      values: kept values by path.
    """
    gradient = jax.grad(lambda values: loss(dict(zip(paths, values, strict=True))))
    paths = [*values]
    program = read_jaxpr(jax.make_jaxpr(gradient)(sharding.abstract([*values.values()])))
    made = {id(y): each for each in program.flat_equations() for y in each.outputs}

    def is_zero(value: Value) -> bool:
        equation = made.get(id(value))
        value = value if equation is None else equation.inputs[0]
        is_constant = equation is None or equation.name == "broadcast_in_dim"
        return is_constant and value.constant is not None and not np.any(value.constant)

    places = [i for i, value in enumerate(program.outputs) if not is_zero(value)]
    if not places:
        return {}
    gradients = gradient([*values.values()])
    return {paths[i]: gradients[i] for i in places}
