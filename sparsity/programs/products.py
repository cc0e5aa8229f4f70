"""Products: dots, ragged dots and convolutions, by the roles of their axes.

The only place that reads the dimension numbers of a product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from sparsity.core.checks import check_sizes
from sparsity.programs.program import Equation, Value

# Primitives that are not analysed, and multiply no matrices.
NO_PRODUCTS = frozenset((
    "after_all", "all_gather", "all_to_all", "approx_top_k", "axis_index", "create_token",
    "debug_callback", "debug_print", "empty2", "eq_to", "get", "igamma_grad_a", "le_to", "lt_to",
    "platform_index", "pmax", "pmin", "polygamma", "polynomial", "ppermute", "psum",
    "ragged_all_to_all", "random_gamma", "reduce", "rng_bit_generator", "select_and_gather_add",
    "select_and_scatter", "select_and_scatter_add", "swap",
))  # fmt: skip


ProductKind: TypeAlias = Literal["dot", "convolution", "ragged"]
DotNumbers: TypeAlias = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


class Operand(NamedTuple):
    """The axes of one operand.

    Attributes:
      contracted: axes that the product sums over, in step with the other operand; for a
        convolution, the input channels first, then the axes of space.
      free: axes that become axes of the result, in the order of the result.
      batch: axes that index separate products, in step with the other operand.
      experts: axes that index the matrices of a ragged dot; each row meets one matrix.
      window: the contracted axes of space.
    """

    contracted: tuple[int, ...]
    free: tuple[int, ...]
    batch: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    window: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """The contracted axes without windows: for a convolution, the input channels."""
        return tuple(axis for axis in self.contracted if axis not in self.window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A multiplication of the first two inputs of an equation.

    Attributes:
      kind: 'dot': rows times matrices. 'convolution': patches times matrices, one for each group.
        'ragged': groups of rows, each times a matrix.
      lhs: the axes of the first input.
      rhs: the axes of the second input; for a convolution, the kernel.
      output: for each axis of the result its source (operand, axis); `None` for axes of space and
        for the experts of a ragged dot that contracts rows.
      pairs: (axis of lhs, axis of rhs) that are summed over, or index products, in step.
      ordered: (input, axis) that need all entries in order, such as space, rows and experts; input
        2 is the result.
      ordered_text: name of the ordered axes, for errors.
      groups: feature groups of a convolution.
      cost: (value, axis): the product of these sizes is the number of multiply-adds.
      text: name of the operation, for errors.
      inserted: factor of `cost` that is due to zeros between the entries of an image.
      refusal: why no axis can lose entries, `None` if some can.
    """

    kind: ProductKind
    lhs: Operand
    rhs: Operand
    output: tuple[tuple[int, int] | None, ...]
    cost: tuple[tuple[Value, int], ...]
    pairs: tuple[tuple[int, int], ...]
    ordered: tuple[tuple[int, int], ...] = ()
    ordered_text: str = ""
    text: str = "a product"
    groups: int = 1
    inserted: int = 1
    refusal: str | None = None

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """The axes of both inputs."""
        return self.lhs, self.rhs

    def map_paired_axes(self, operand: int) -> dict[int, int]:
        """Returns {axis of an operand: axis of the other operand that is paired with it}.

        In a convolution in groups, output channels meet the input channels of their group.
        """
        paired = {pair[operand]: pair[1 - operand] for pair in self.pairs}
        if operand == 1 and self.groups > 1:
            paired |= dict.fromkeys(self.rhs.free, self.lhs.inputs[0])
        return paired

    def map_result_axes(self, operand: int) -> dict[int, int]:
        """Returns {axis of the result: axis of an operand}, of free axes and batch axes."""
        roles = self.operands[operand]
        axes = {(operand, axis): axis for axis in roles.free}
        axes |= {
            (0, axis): operand_axis
            for axis, operand_axis in zip(self.lhs.batch, roles.batch, strict=True)
        }
        return {place: axes[x] for place, x in enumerate(self.output) if x in axes}

    @property
    def macs(self) -> Fraction:
        """Multiply-adds; zeros that a convolution inserts between entries cost nothing."""
        check_sizes(
            "The count of multiply-adds",
            [value for value, _ in self.cost],
            "Trace with the sizes of one call; export a compact model for any number of rows by "
            "jax.vmap of lambda row: model.apply(params, row[None]).",
        )
        return Fraction(math.prod(value.shape[axis] for value, axis in self.cost), self.inserted)


def read_product(equation: Equation) -> Product:
    """Returns the roles of the axes of a dot, a ragged dot or a convolution."""
    return PRODUCTS[equation.name](equation)


def _dot(
    equation: Equation,
    numbers: DotNumbers | None = None,
    ragged: tuple[int, ...] = (),
    experts: tuple[int, ...] = (),
) -> Product:
    (result,), numbers = equation.outputs, numbers or equation.params["dimension_numbers"]
    operands = []
    # Not strict: a ragged dot has a third input, the sizes of its groups.
    for value, contracted, batch, indices in zip(
        equation.inputs, *numbers, ((), experts), strict=False
    ):
        contracted, batch = _to_ints(contracted), _to_ints(batch)
        placed = {*contracted, *batch, *indices}
        free = tuple(axis for axis in range(len(value.shape)) if axis not in placed)
        operands.append(Operand(contracted, free, batch, indices))
    lhs, rhs = operands
    # The experts of a ragged dot that contracts rows are the first axis of its result.
    num_new = int(not {*ragged}.isdisjoint(lhs.contracted))
    kept = [(0, axis) for axis in (*lhs.batch, *lhs.free)] + [(1, axis) for axis in rhs.free]
    cost = [(result, axis) for axis in range(num_new, len(result.shape))]
    cost += [(equation.inputs[0], axis) for axis in lhs.contracted]
    axes = zip((*lhs.contracted, *lhs.batch), (*rhs.contracted, *rhs.batch), strict=True)
    ordered = [*((0, axis) for axis in ragged), *((1, axis) for axis in experts)]
    return Product(
        kind="ragged" if ragged else "dot",
        lhs=lhs,
        rhs=rhs,
        output=(*[None] * num_new, *kept),
        cost=tuple(cost),
        pairs=tuple(axes),
        ordered=(*ordered, *((2, axis) for axis in range(num_new))),
        ordered_text="rows in the order of their experts",
    )


def _convolution(equation: Equation) -> Product:
    params, (_, kernel), (result,) = equation.params, equation.inputs, equation.outputs
    spec = params["dimension_numbers"]
    (batch, *image), (output_channel, *inputs) = spec.lhs_spec, spec.rhs_spec
    output: list[tuple[int, int] | None] = [None] * len(result.shape)
    output[spec.out_spec[0]], output[spec.out_spec[1]] = (0, batch), (1, output_channel)
    spatial = (image[1:], inputs[1:], spec.out_spec[2:])
    in_batch = "a convolution in groups of the batch"
    return Product(
        kind="convolution",
        lhs=Operand(tuple(image), (batch,), window=tuple(spatial[0])),
        rhs=Operand(tuple(inputs), (output_channel,), window=tuple(spatial[1])),
        output=tuple(output),
        cost=tuple([(result, i) for i in range(len(output))] + [(kernel, i) for i in inputs]),
        pairs=((image[0], inputs[0]),),
        ordered=tuple((index, axis) for index, axes in enumerate(spatial) for axis in axes),
        ordered_text="an axis of space",
        text="a convolution",
        groups=params["feature_group_count"],
        inserted=math.prod(params["lhs_dilation"]),
        refusal=None if params["batch_group_count"] == 1 else in_batch,
    )


def _ragged_dot(equation: Equation) -> Product:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    return _dot(
        equation,
        numbers.dot_dimension_numbers,
        _to_ints(numbers.lhs_ragged_dimensions),
        _to_ints(numbers.rhs_group_dimensions),
    )


def _to_ints(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(axis) for axis in axes)  # jax.vmap leaves numpy's


PRODUCTS: dict[str, Callable[[Equation], Product]] = {
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
}
