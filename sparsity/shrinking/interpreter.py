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
from sparsity.programs.axes import (
    KeptIndices,
    Variable,
    count_entries,
    find_kept_indices,
    label_entries,
    list_variables,
)
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
            x for _, entry in self._shared_entries.values() for x in entry.list_values()
        }
        # Arrays of these values, and of shared entries, in the body or call that runs.
        self._needed_arrays: dict[Value, jax.Array] = {}
        self._entry_arrays: dict[tuple[int, tuple[int, ...]], jax.Array] = {}
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
        outer = self._needed_arrays, self._entry_arrays
        needed = {value: array for value, array in pairs if value in self._needed_values}
        self._needed_arrays, self._entry_arrays = needed, {}
        outputs = super().run(program, inputs)
        self._needed_arrays, self._entry_arrays = outer
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
        if equation in self._shared_entries:
            results[0] += self._sum_removed(equation, *self._shared_entries[equation])
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

    def _sum_removed(self, reduction: Equation, axis_index: int, entry: SharedEntry) -> PyTree:
        """Returns what a sum has lost along an axis with its removed entries."""
        axis = self._coupling.axes(entry.value)[axis_index]
        num_removed = axis.size - count_entries(axis, self._sizes)
        if not num_removed:
            return 0
        kept = {v: self._kept_indices[v] for v in list_variables(axis) if v in self._kept_indices}
        one_each = dict.fromkeys(kept, np.arange(1))
        removed = copy.copy(self)  # the interpreter of the removed channels, or of one of them
        indices = {v: _invert(x, v.size) for v, x in kept.items()} if entry.differs else one_each
        removed._kept_indices = self._kept_indices | indices
        removed._sizes = self._sizes | {v: index.shape[-1] for v, index in indices.items()}
        removed._layer_indices = {v: x for v, x in self._layer_indices.items() if v not in kept}
        for v in self._layer_indices.keys() & kept.keys() if entry.differs else ():
            num_others = v.size - len(self._layer_indices[v])
            removed._layer_indices[v] = jnp.setdiff1d(
                jnp.arange(v.size), self._layer_indices[v], assume_unique=True, size=num_others
            )
        array = removed._compute_entry(entry)
        if entry.differs:
            return reduction.bind([array])[0]
        # The axis may have entries of other variables, and several of this one, which are alike.
        labels = label_entries(axis, next(iter(kept)), removed._sizes)
        place = int(np.argmax(np.asarray(labels) >= 0))
        array = lax.slice_in_dim(array, place, place + 1, axis=axis_index)
        return num_removed * reduction.bind([array])[0]

    def _compute_entry(self, entry: SharedEntry) -> jax.Array:
        """Returns the entries of removed channels, where this is their interpreter."""
        value, maker = entry.value, entry.maker
        key = id(entry), self.shape(value)  # which tells one removed channel from all
        if key not in self._entry_arrays:
            if entry.constant is not None:
                array = jnp.full(self.shape(value), entry.constant, value.dtype)
            elif maker is None:
                array = (
                    self.read(value) if value.constant is not None else self._needed_arrays[value]
                )
            else:
                array = self.bind(maker, [self._compute_entry(x) for x in entry.inputs])[0]
            self._entry_arrays[key] = _reshard_like(value, array)
        return self._entry_arrays[key]

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


def _invert(kept: np.ndarray, size: int) -> np.ndarray:
    """Returns the indices below a size that are not kept, for each layer where layers differ."""
    rows = [np.setdiff1d(np.arange(size), row) for row in np.atleast_2d(kept)]
    return rows[0] if kept.ndim == 1 else np.stack(rows)


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
