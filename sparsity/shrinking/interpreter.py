"""Smaller programs: every equation evaluated at the sizes of arrays that have lost channels."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, reshard

from sparsity.core.checks import is_traced
from sparsity.core.sharding import evaluate_now, fit
from sparsity.core.trees import PyTree
from sparsity.graph.removal import Removal, SharedEntry
from sparsity.programs.axes import KeptIndices, Variable, count_entries, find_kept_indices
from sparsity.programs.entrywise import SOURCES
from sparsity.programs.layout import LAYOUTS
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Program, Value, is_differentiable
from sparsity.programs.walk import Interpreter

ArraySequence: TypeAlias = Sequence[jax.Array]
ArrayFunction: TypeAlias = Callable[..., ArraySequence]


class CutInterpreter(Interpreter[jax.Array]):
    """Interpreter of programs whose arrays have lost channels.

    Args:
      removal: the axes of the values, and entries that removed channels share.
      kept_indices: the indices that stay of each variable.
    """

    def __init__(self, removal: Removal, kept_indices: KeptIndices) -> None:
        self._coupling, self._kept_indices = removal.coupling, dict(kept_indices)
        # Shared entries take a proof, which a program without removed channels does not need.
        self._shared_entries = removal.shared_entries if kept_indices else {}
        self._keeps_rules = True  # of calls, for derivatives
        # The row of `kept_indices` for the layer of a step.
        self._layer_indices: dict[Variable, jax.Array] = {}
        self._needed_values = {
            x for entry in self._shared_entries.values() for x in entry.list_values()
        }
        # Arrays of these values, in the body or call that runs.
        self._needed_arrays: dict[Value, jax.Array] = {}
        self._sizes = {variable: index.shape[-1] for variable, index in kept_indices.items()}

    def shape(self, value: Value) -> tuple[int, ...]:
        """Returns the smaller shape of a value."""
        return tuple(count_entries(axis, self._sizes) for axis in self._coupling.axes(value))

    def count_below(self, value: Value, axis: int, end: int) -> int:
        """Counts the remaining entries among the first `end` along an axis."""
        index = find_kept_indices(self._coupling.axes(value)[axis], self._kept_indices)
        if index is None:
            return end
        index = index[0] if index.ndim == 2 else index  # layers keep equal numbers
        return int(np.count_nonzero(index < end))

    def cut(self, value: Value, array: jax.Array) -> jax.Array:
        """Returns the entries of an array that stay."""
        for axis_index, axis in enumerate(self._coupling.axes(value)):
            # In a step of a scan, the row of its layer takes the place of the rows of all layers.
            index = find_kept_indices(axis, {**self._kept_indices, **self._layer_indices})  # type: ignore[dict-item]
            if index is not None:
                # Constants stay constants, so that the smaller model can be cut like this one.
                is_fixed = not is_traced(array) and not is_traced(index)
                with evaluate_now() if is_fixed else contextlib.nullcontext():
                    array = take(array, index, axis_index)
        return array

    def read(self, value: Value) -> jax.Array:
        constant: jax.Array = value.constant
        return self.cut(value, constant) if value.shape else constant

    def define(self, value: Value, array: jax.Array) -> jax.Array:
        array = _reshard_like(value, array)
        if value in self._needed_values:
            self._needed_arrays[value] = array
        return array

    def run(self, program: Program, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the outputs of a program; no other program reads its needed arrays."""
        pairs = zip(program.inputs, inputs, strict=True)
        outer = self._needed_arrays
        self._needed_arrays = {
            value: array for value, array in pairs if value in self._needed_values
        }
        outputs = super().run(program, inputs)
        self._needed_arrays = outer
        return outputs

    def bind(self, equation: Equation, inputs: list[jax.Array]) -> ArraySequence:
        name = equation.name
        values = (*equation.inputs, *equation.outputs)
        if all(self.shape(value) == value.shape for value in values):
            return equation.bind(inputs)
        if name in SOURCES:  # at full size, so that kept entries do not change
            with contextlib.nullcontext() if any(map(is_traced, inputs)) else evaluate_now():
                arrays = equation.bind(inputs)
            pairs = zip(equation.outputs, arrays, strict=True)
            return [self.cut(value, array) for value, array in pairs]
        results = equation.bind(inputs, **self._resize(equation))
        if (entry := self._shared_entries.get(equation)) is not None:
            axis = self._coupling.axes(entry.value)[entry.axis]
            # The entries that the sum has lost are all alike.
            if num_removed := axis.size - count_entries(axis, self._sizes):
                results[0] += num_removed * equation.bind([self._compute_entry(entry)])[0]
        return results

    def _resize(self, equation: Equation) -> dict[str, object]:
        """Returns the parameters of an equation that differ at the smaller sizes."""
        name = equation.name
        if name in LAYOUTS and (resize := LAYOUTS[name].resize) is not None:
            return resize(equation, self)
        if name in PRODUCTS and read_product(equation).groups > 1:
            groups = count_entries(self._coupling.feature_groups[equation], self._sizes)
            return {"feature_group_count": groups}
        return _fit_shardings(equation, self.shape(equation.outputs[0]))

    def _compute_entry(self, entry: SharedEntry) -> jax.Array:
        """Returns the entry that all removed channels share, at size 1 along its axis."""
        value, maker = entry.value, entry.maker
        shape = [1 if i == entry.axis else n for i, n in enumerate(self.shape(value))]
        if entry.constant is not None:
            return _reshard_like(value, jnp.full(shape, entry.constant, value.dtype))
        if maker is None:
            return self._needed_arrays[value] if value.constant is None else self.read(value)
        inputs = [self._compute_entry(x) for x in entry.inputs]
        if maker.name == "broadcast_in_dim":
            axes = maker.params["broadcast_dimensions"]
            return _reshard_like(value, lax.broadcast_in_dim(inputs[0], shape, axes))
        inputs = [jnp.broadcast_to(x, shape) if x.shape else x for x in inputs]
        return maker.bind(inputs, **_fit_shardings(maker, tuple(shape)))[0]

    def call(self, equation: Equation, inputs: list[jax.Array]) -> ArraySequence:
        """Returns the outputs of a call; keeps rematerialisation and rules for derivatives."""
        if equation.is_inline:
            return super().run(equation.inner_programs[0], inputs)

        def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(self.run(equation.inner_programs[0], inputs))

        function: ArrayFunction = run
        if equation.is_remat:
            function = equation.checkpoint(run)
        elif equation.rule is not None and self._keeps_rules:
            function = self._add_rule(equation, equation.rule, run)
        return list(function(*inputs))

    def list_step_inputs(self, scan: Equation) -> list[jax.Array]:
        return [jnp.asarray(self._kept_indices[v]) for v in self._list_layered_variables(scan)]

    def enter_step(self, scan: Equation, step_inputs: Sequence[jax.Array]) -> CutInterpreter:
        step = copy.copy(self)
        step._layer_indices = self._layer_indices | dict(
            zip(self._list_layered_variables(scan), step_inputs, strict=True)
        )
        return step

    def _list_layered_variables(self, scan: Equation) -> list[Variable]:
        """Returns the variables whose kept entries differ between layers of a scan."""
        length = count_entries(self._coupling.find_step_axis(scan), self._sizes)
        rows = {v: len(index) for v, index in self._kept_indices.items() if index.ndim == 2}
        return [v for v, number in rows.items() if number == length]

    def _add_rule(
        self, equation: Equation, rule: Program | Exception, function: ArrayFunction
    ) -> ArrayFunction:
        """Returns a call with its custom rule for derivatives, at the smaller sizes."""
        without_rules = copy.copy(self)
        without_rules._keeps_rules = False

        def run_rule(
            inputs: ArraySequence, derivatives: ArraySequence, values: Sequence[Value]
        ) -> list[jax.Array]:
            if isinstance(rule, Exception):
                raise rule
            pairs = zip(derivatives, values, strict=True)
            differentiable = [x for x, value in pairs if is_differentiable(value)]
            return without_rules.run(rule, [*inputs, *differentiable])

        if equation.maps_tangents:

            def forward(primals: ArraySequence, tangents: ArraySequence) -> tuple[PyTree, PyTree]:
                computed = run_rule(primals, tangents, equation.inputs)
                num_outputs, values = len(computed) // 2, equation.outputs
                outputs = _insert_others(computed[:num_outputs], values, function(*primals))
                return outputs, _insert_others(
                    computed[num_outputs:], values, _make_zero_tangents(outputs)
                )

            with_jvp = jax.custom_jvp(function)
            with_jvp.defjvp(forward)
            return with_jvp

        def backward(inputs: ArraySequence, cotangents: ArraySequence) -> PyTree:
            computed = run_rule(inputs, cotangents, equation.outputs)
            return _insert_others(computed, equation.inputs, _make_zero_tangents(inputs))

        with_vjp = jax.custom_vjp(function)
        with_vjp.defvjp(lambda *inputs: (function(*inputs), inputs), backward)
        return with_vjp


def _make_zero_tangents(arrays: ArraySequence) -> list[np.ndarray]:
    """Returns the zeros that jax takes for tangents of integers."""
    return [np.zeros(np.shape(x), jax.dtypes.float0) for x in arrays]


def _insert_others(
    computed: ArraySequence, values: Sequence[Value], others: Sequence[PyTree]
) -> PyTree:
    """Returns the arrays that a rule computes, and others for values without derivatives."""
    arrays, pairs = iter(computed), zip(values, others, strict=True)
    return tuple(next(arrays) if is_differentiable(value) else other for value, other in pairs)


def take(array: PyTree, index: np.ndarray | jax.Array, axis: int) -> PyTree:
    """Takes entries of an array of numpy or jax; [layers, entries] index each layer by itself."""
    xp = jnp if isinstance(array, jax.Array) or isinstance(index, jax.Array) else np
    if index.ndim == 2:
        shape = [1] * array.ndim
        shape[0], shape[axis] = index.shape
        rows = xp.asarray(index).reshape(shape)
        return xp.take_along_axis(xp.asarray(array), rows, axis=axis)
    return xp.take(array, index, axis=axis)


def _fit_shardings(equation: Equation, shape: tuple[int, ...]) -> dict[str, object]:
    """Returns the shardings of an equation, without axes that do not divide the new sizes."""
    params = {key: equation.params.get(key) for key in ("sharding", "out_sharding")}
    return {key: fit(x, shape) for key, x in params.items() if isinstance(x, NamedSharding)}


def _reshard_like(value: Value, array: jax.Array) -> jax.Array:
    """Shards an array on Explicit axes like the value, where axes divide the new sizes."""
    if value.sharding is None:
        return array
    return reshard(array, value.struct(jnp.shape(array)).sharding)
