"""Products: dots, ragged dots and convolutions, by the roles of their axes.

The only place that reads the dimension numbers of a product.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from sparsity.programs.program import Equation, Value

PRODUCTS = frozenset(("conv_general_dilated", "dot_general", "ragged_dot_general"))


class Operand(NamedTuple):
    """The axes of one operand.

    Attributes:
      contracted: those that are summed over, in step with those of the other operand; of a
        convolution the input channels first, then the axes of space.
      free: those that become axes of the result, in its order.
      batch: those that index separate products, in step with those of the other operand.
      experts: those that index the matrices of a ragged dot, of which each row meets one.
    """

    contracted: tuple[int, ...]
    free: tuple[int, ...]
    batch: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Product:
    """How an equation multiplies its first two inputs.

    Attributes:
      left: the axes of the first.
      right: the axes of the second: of a convolution, the kernel.
      output: for each axis of the result (operand, axis) that it comes from; `None` for axes of
        space and for the experts of a ragged dot that contracts rows.
      groups: feature groups of a convolution.
      cost: (value, axis) whose sizes multiply to the multiply-adds.
      inserted: by how much zeros between the entries of an image make these too many.
    """

    left: Operand
    right: Operand
    output: tuple[tuple[int, int] | None, ...]
    cost: tuple[tuple[Value, int], ...]
    groups: int = 1
    inserted: int = 1

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """The left one and the right one."""
        return self.left, self.right

    @property
    def macs(self) -> int:
        """Multiply-adds; zeros that a convolution inserts between entries cost nothing."""
        return math.prod([value.shape[axis] for value, axis in self.cost]) // self.inserted


def read_product(equation: Equation) -> Product:
    """Returns the roles of the axes of a dot, a ragged dot or a convolution."""
    match equation.name:
        case "conv_general_dilated":
            return _convolution(equation)
        case "dot_general":
            return _dot(equation, equation.params["dimension_numbers"], (), ())
    numbers = equation.params["ragged_dot_dimension_numbers"]
    return _dot(
        equation,
        numbers.dot_dimension_numbers,
        _ints(numbers.lhs_ragged_dimensions),
        _ints(numbers.rhs_group_dimensions),
    )


def _dot(
    equation: Equation,
    numbers: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]],
    ragged: tuple[int, ...],
    experts: tuple[int, ...],
) -> Product:
    operands = []
    for value, contracted, batch, own in zip(
        equation.inputs, *numbers, ((), experts), strict=False
    ):
        roles = _ints(contracted), _ints(batch)
        taken = {*roles[0], *roles[1], *own}
        free = tuple(axis for axis in range(len(value.shape)) if axis not in taken)
        operands.append(Operand(roles[0], free, roles[1], own))
    left, right = operands
    # The experts of a ragged dot that contracts rows are the first axis of its result.
    made = [None] if {*ragged} & {*left.contracted} else []
    pairs = [(0, axis) for axis in (*left.batch, *left.free)]
    pairs += [(1, axis) for axis in right.free]
    summed = [(equation.inputs[0], axis) for axis in left.contracted]
    kept = [(equation.outputs[0], axis) for axis in range(len(made), len(made) + len(pairs))]
    return Product(left, right, (*made, *pairs), (*kept, *summed))


def _convolution(equation: Equation) -> Product:
    params, (_, kernel), (result,) = equation.params, equation.inputs, equation.outputs
    spec = params["dimension_numbers"]
    (batch, *image), (out, *inputs) = spec.lhs_spec, spec.rhs_spec
    output: list[tuple[int, int] | None] = [None] * len(result.shape)
    output[spec.out_spec[0]], output[spec.out_spec[1]] = (0, batch), (1, out)
    return Product(
        Operand(tuple(image), (batch,)),
        Operand(tuple(inputs), (out,)),
        tuple(output),
        (*((result, axis) for axis in range(len(output))), *((kernel, axis) for axis in inputs)),
        params["feature_group_count"],
        math.prod(params["lhs_dilation"]),
    )


def _ints(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(axis) for axis in axes)  # jax.vmap leaves numpy's
