"""Sums over the rows of products, of inputs and of outputs, while a program runs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration.statistics.alignment import Alignment
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.core import trees
from sparsity.core.arrays import promote
from sparsity.core.trees import PyTree
from sparsity.graph import Use
from sparsity.programs.products import Operand, read_product
from sparsity.programs.program import Equation, Program
from sparsity.programs.walk import Interpreter, scan_like, switch

StatisticsKind: TypeAlias = Literal["squares", "moments", "gram"]
# Fields of a `Statistic` that each kind gives, the least first.
FIELDS_BY_KIND: dict[StatisticsKind, frozenset[str]] = {
    "squares": frozenset({"squares"}),
    "moments": frozenset({"squares", "sums"}),
    "gram": frozenset({"squares", "sums", "gram"}),  # squares are the diagonals of Gram matrices
}

_HIGHEST = lax.Precision.HIGHEST


def check_statistics_kind(kind: object, label: str) -> None:
    """Raises a ValueError that names a pruner or a refit unless its statistics are of a kind."""
    kinds = (*FIELDS_BY_KIND,)
    if kind not in kinds:
        raise ValueError(f"statistics_kind of {label} must be one of {kinds}, got {kind!r}.")


def sum_inputs(
    alignment: Alignment,
    kind: StatisticsKind,
    x: jax.Array,
    row_weights: jax.Array | None = None,
) -> Statistic:
    """Sums up the inputs of a product over its rows, and counts the rows.

    Args:
      alignment: of the product with its parameter.
      kind: the kind of sums.
      x: the other operand of the product.
      row_weights: weights of the rows, which broadcast to `x`.

    Returns:
      The statistic in the order of the parameter, of one layer where scans run over several.
    """
    use, x = alignment.use, _scale_inputs(alignment.use, x)
    is_dot, roots = use.kind == "dot", jnp.ones((), x.real.dtype)
    num_rows = _count_rows(use, x) * alignment.repeats
    if num_rows * (use.trips or 1) >= 2**31:
        raise ValueError(
            f"A batch has {num_rows:,} rows, {use.trips} times, at the {use.primitive} at "
            f"{use.source}, which reads {trees.join_names(use.path)!r}: 2**31 or more. Give "
            "smaller batches."
        )
    count: PyTree = np.int32(num_rows)
    if row_weights is not None:
        # Sums of integers are exact below 2**24.
        count = jnp.sum(row_weights.astype(jnp.float32)) * (num_rows // max(row_weights.size, 1))
        roots = jnp.sqrt(row_weights).astype(x.real.dtype)
        x = jnp.where(row_weights > 0, x, 0)  # NaN of rows that count nothing
    statistic = dataclasses.replace(alignment.axes, count=count)
    order = alignment.to_parameter_order
    list_rows = functools.partial(_list_dot_rows if is_dot else _extract_patches, use)
    sum_rows = functools.partial(_sum_dot_rows if is_dot else _sum_patches, use)
    if kind == "gram":
        rows = list_rows(x * roots)
        grams = jnp.einsum("...mk,...ml->...kl", jnp.conj(rows), rows, precision=_HIGHEST)
        if row_weights is not None:
            rows = list_rows(x * row_weights.astype(x.dtype))
        totals = jnp.sum(rows, axis=-2)
        return dataclasses.replace(statistic, gram=order(grams, 2), sums=order(totals, 1))
    squares = order(sum_rows(_square_magnitudes(x * roots)), 1)
    weighted = x if row_weights is None else x * row_weights.astype(x.dtype)
    sums = order(sum_rows(weighted), 1) if "sums" in FIELDS_BY_KIND[kind] else None
    return dataclasses.replace(statistic, squares=squares, sums=sums)


def sum_outputs(
    alignment: Alignment,
    x: jax.Array,
    *matrices: jax.Array,
    row_weights: jax.Array | None = None,
) -> jax.Array:
    """Sums up |y|^2 over the outputs y of each matrix: [number of matrices].

    Args:
      alignment: of the product with its parameter.
      x: the other operand of the product.
      *matrices: [*batch, outputs, inputs] in the order of the parameter.
      row_weights: weights of the rows, which broadcast to `x`.
    """
    use, x = alignment.use, _scale_inputs(alignment.use, x)
    if row_weights is not None:
        x = jnp.where(row_weights > 0, x, 0) * jnp.sqrt(row_weights).astype(x.real.dtype)

    def sum_squares(matrices: jax.Array) -> jax.Array:
        weights = alignment.to_operand_order(matrices.astype(promote(matrices.dtype, x.dtype)))
        if use.kind == "dot":
            rows = _list_dot_rows(use, x)
            rows = rows.reshape(len(weights), *rows.shape[-2:])
            outputs = jnp.einsum("bmi,boi->bmo", rows, weights, precision=_HIGHEST)
        else:
            outputs = _convolve_matrices(use, x, weights)
        return jnp.sum(_square_magnitudes(outputs))

    return jnp.stack([sum_squares(weights) for weights in matrices])


def _square_magnitudes(x: jax.Array) -> jax.Array:
    """Returns |x|^2."""
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


def _scale_inputs(use: Use, x: jax.Array) -> jax.Array:
    """Returns the operand in the dtype of the sums, at least float32, times the weight's scale."""
    x, scale = jnp.asarray(x), use.view.scale  # a batch may be of numpy
    wide = x.astype(promote(x.dtype, jnp.float32))
    return wide if scale in (1, None) else wide * scale  # else the statistic has a multiplier


def _count_rows(use: Use, x: jax.Array) -> int:
    """Returns the number of rows in each slice of a product."""
    if use.kind == "dot":
        return math.prod(x.shape[i] for i in _read_input_roles(use).free)
    sources = zip(use.equation.outputs[0].shape, read_product(use.equation).output, strict=True)
    return math.prod(size for size, source in sources if source is None or source[0] == 0)


def _read_input_roles(use: Use) -> Operand:
    """Returns the roles of the axes of the inputs."""
    return read_product(use.equation).operands[1 - use.operand]


def _list_dot_rows(use: Use, x: jax.Array) -> jax.Array:
    """Returns the rows of a dot product, [*slices, rows, inputs]."""
    inputs, free, batch, *_ = _read_input_roles(use)
    lead = [x.shape[i] for i in batch]
    count, size = (math.prod(x.shape[i] for i in axes) for axes in (free, inputs))
    return x.transpose(*batch, *free, *inputs).reshape(*lead, count, size)


def _sum_dot_rows(use: Use, x: jax.Array) -> jax.Array:
    """Sums up the rows, [*slices, inputs]."""
    inputs, free, batch, *_ = _read_input_roles(use)
    kept_axes = [i for i in range(x.ndim) if i not in free]
    total = jnp.sum(x, axis=tuple(free)).transpose([kept_axes.index(i) for i in (*batch, *inputs)])
    return total.reshape(*[x.shape[i] for i in batch], math.prod(x.shape[i] for i in inputs))


def _sum_patches(use: Use, x: jax.Array) -> jax.Array:
    """Sums up the patches, [groups, inputs], by the transposed convolution of ones."""
    spec = use.equation.params["dimension_numbers"].rhs_spec
    # One output for each group.
    shape = list(use.equation.inputs[1].shape)
    shape[spec[0]] = use.groups
    convolve = functools.partial(_convolve, use, x)
    weights = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
    outputs = jax.eval_shape(convolve, weights)
    # Each entry of the kernel gets the sum of the inputs that it meets.
    (sums,) = jax.linear_transpose(convolve, weights)(jnp.ones(outputs.shape, outputs.dtype))
    return sums.transpose(spec).reshape(use.groups, math.prod(shape) // shape[spec[0]])


def _extract_patches(use: Use, x: jax.Array) -> jax.Array:
    """Returns the patches of a convolution, [groups, patches, inputs]."""
    params, kernel = use.equation.params, use.equation.inputs[1]
    spec = params["dimension_numbers"]
    patches = lax.conv_general_dilated_patches(
        x,
        [kernel.shape[i] for i in spec.rhs_spec[2:]],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        dimension_numbers=spec,
        precision=_HIGHEST,
    )
    rows = jnp.moveaxis(patches, spec.out_spec[1], -1)
    inputs = math.prod(kernel.shape[i] for i in spec.rhs_spec[1:])
    rows = rows.reshape(_count_rows(use, x), use.groups, inputs)
    return jnp.moveaxis(rows, 1, 0)


def _convolve_matrices(use: Use, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Convolves with weights [groups, outputs, inputs]."""
    spec = use.equation.params["dimension_numbers"].rhs_spec
    kernel = [use.equation.inputs[1].shape[i] for i in spec[1:]]
    ordered = weights.reshape(weights.shape[0] * weights.shape[1], *kernel)
    return _convolve(use, x, jnp.moveaxis(ordered, range(ordered.ndim), spec))


def _convolve(use: Use, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves as a use does with another kernel, in the dtype of both."""
    changed = {"preferred_element_type": None, "precision": (_HIGHEST, _HIGHEST)}
    return jnp.asarray(use.equation.bind([x, kernel], **changed)[0])


Steps: TypeAlias = Mapping[Equation, jax.Array]  # the step of each scan around a product
Sums: TypeAlias = dict[int, PyTree]  # by index of the use: arrays that add up
SumFn: TypeAlias = Callable[[int, jax.Array, Steps], PyTree]


def add(one: PyTree, other: PyTree) -> PyTree:
    """Adds trees of arrays."""
    return jax.tree.map(operator.add, one, other)


_add_in_place: Callable[[PyTree, PyTree], PyTree] = jax.jit(add, donate_argnums=0)


def add_batch(total: PyTree | None, sums: PyTree) -> PyTree:
    """Adds the sums of a batch, a `Statistic` or an array, to those before, in place.

    Counts add up on the host, where integers have 64 bits, and so never become negative.
    """
    if not isinstance(sums, Statistic):
        return sums if total is None else _add_in_place(total, sums)
    rows = np.asarray(sums.count)
    rows = rows.astype(np.float64 if rows.dtype.kind == "f" else np.int64)
    if total is not None:
        rows = total.count + rows
        sums = _add_in_place(*(dataclasses.replace(x, count=0) for x in (total, sums)))
    return dataclasses.replace(sums, count=rows)


class Uses(dict[int, Use]):
    """Uses by index, and by the equations that they are or lie in."""

    def __init__(self, uses: Mapping[int, Use]) -> None:
        super().__init__(uses)
        self._at: dict[Equation, list[int]] = {}
        for use_index, use in uses.items():
            self._at.setdefault(use.equation, []).append(use_index)

    def find(self, equation: Equation) -> Sequence[int]:
        """Returns the indices of the uses that are this product."""
        return self._at.get(equation, ())

    def list_inner(self, equation: Equation) -> list[int]:
        """Returns the uses in the body of a loop or in a branch, in program order."""
        return [
            use_index
            for body in equation.inner_programs
            for inner in body.flat_equations()
            for use_index in (*self.find(inner), *self.list_inner(inner))
        ]

    def reads_layers(self, equation: Equation) -> bool:
        """Returns whether an equation is a scan whose steps read layers of a weight."""
        return any(equation in self[n].view.scans for n in self.list_inner(equation))


class SummingInterpreter(Interpreter[jax.Array]):
    """Runs a program and sums the inputs of chosen uses on the way.

    Args:
      uses: the uses by index.
      sum_up: `sum_up(use_index, x, steps)` returns the sums of a use, a tree of arrays.
      stacks: keep the sums of each layer of a stacked weight apart, in leading axes.

    Attributes:
      sums: the sums of what has run so far.
    """

    def __init__(self, uses: Uses, sum_up: SumFn, stacks: bool = False) -> None:
        self.sums: Sums = {}
        self._uses, self._sum_up, self._stacks = uses, sum_up, stacks
        self._steps: Steps = {}

    def bind(self, equation: Equation, inputs: list[jax.Array]) -> list[jax.Array]:
        for use_index in self._uses.find(equation):
            x = inputs[1 - self._uses[use_index].operand]
            self.sums[use_index] = self._sum_up(use_index, x, self._steps)
        return equation.bind(inputs)

    def enters(self, equation: Equation) -> bool:
        return equation.name in ("scan", "cond") and bool(self._uses.list_inner(equation))

    def _copy_without_sums(self) -> SummingInterpreter:
        """Returns the interpreter of the body of a loop or of a branch."""
        inner = copy.copy(self)
        inner.sums = {}
        return inner

    def scan(self, equation: Equation, inputs: list[jax.Array]) -> Sequence[jax.Array]:
        """Runs a scan.

        Sums of a weight that all steps read add up. A weight that the scan takes apart, so that
        each step reads a layer, has sums of each step: outputs of the scan, stacked like others.
        """
        (body,) = equation.list_bodies()
        constants, carry, stacks = body.split(inputs)
        layers = stacks, jnp.arange(equation.length, dtype=jnp.int32)

        def run(carry: PyTree, layer: PyTree) -> tuple[PyTree, PyTree, Sums, Sums]:
            """Returns the carry, the outputs, and the sums of one step: to add up, to stack."""
            arrays, step_index = layer
            inner = self._copy_without_sums()
            inner._steps = {**self._steps, equation: step_index}
            outputs = inner.run(body.program, [*constants, *carry, *arrays])
            taken_apart = [n for n in inner.sums if equation in self._uses[n].view.scans]
            stacked = {n: inner.sums.pop(n) for n in taken_apart if self._stacks}
            return outputs[: len(carry)], outputs[len(carry) :], inner.sums, stacked

        def step(state: PyTree, layer: PyTree) -> tuple[PyTree, PyTree]:
            carry, total = state
            carry, outputs, sums, stacked = run(carry, layer)
            return (carry, add(total, sums)), (outputs, stacked)

        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layers)
        total = _make_zeros(jax.eval_shape(run, carry, layer)[2])
        (carry, total), (outputs, stacked) = scan_like(equation, step, (carry, total), layers)
        self.sums |= total | stacked
        return [*carry, *outputs]

    def cond(self, equation: Equation, inputs: list[jax.Array]) -> Sequence[jax.Array]:
        """Runs a branch; the sums of the other branches are 0."""
        index, *operands = inputs
        zeros: Sums = {}

        def run_branch(program: Program, *operands: jax.Array) -> tuple[list[jax.Array], Sums]:
            inner = self._copy_without_sums()
            outputs = inner.run(program, operands)
            return outputs, _make_zeros(zeros) | inner.sums

        branches = [functools.partial(run_branch, body) for body in equation.inner_programs]
        for branch in branches:
            # All branches must return the same sums: zeros stand for those of the other branches.
            zeros |= jax.eval_shape(branch, *operands)[1]
        outputs: list[jax.Array]
        outputs, sums = switch(index, branches, operands)
        self.sums |= sums
        return outputs


def _make_zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
