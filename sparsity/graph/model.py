"""A model as it was traced: the program, the parameters, and the function itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from sparsity.core.trees import Path, PyTree
from sparsity.graph.channels.groups import Parameter
from sparsity.programs.program import Program, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A traced model.

    Attributes:
      program: the program; its first inputs are the parameters.
      leaves: the parameters, in tree order.
      carried: {number of an output: number of the parameter that it becomes in the next call}.
      outputs: paths of the outputs.
      output_tree: structure of the outputs.
      fn: the function that was traced.
      example: shapes and dtypes of the parameters, and of the inputs that were traced.
    """

    program: Program
    leaves: Sequence[Parameter]
    carried: Mapping[int, int]
    outputs: Sequence[Path]
    output_tree: jax.tree_util.PyTreeDef
    fn: Callable[..., PyTree]
    example: tuple[PyTree, tuple[PyTree, ...]]

    @functools.cached_property
    def values(self) -> dict[Value, int]:
        """Numbers of the parameters, by the inputs of the program that they are."""
        return {value: i for i, value in enumerate(self.program.inputs[: len(self.leaves)])}

    @property
    def state(self) -> dict[Path, Path]:
        """Outputs that the next call reads: {path in the output: path in params}."""
        return {self.outputs[i]: self.leaves[n].path for i, n in self.carried.items()}

    def reader(self, arrays: Mapping[Path, jax.Array]) -> Callable[[Value], jax.Array]:
        """Returns a function that computes values of the program from parameters alone.

        Args:
          arrays: the parameters by path.

        Raises:
          ValueError: the function needs a parameter that is missing or of another shape.
        """
        makers = self.program.makers

        def read(value: Value) -> jax.Array:
            if value in self.values:
                parameter = self.leaves[self.values[value]]
                shape = jnp.shape(arrays[parameter.path]) if parameter.path in arrays else None
                if shape != parameter.shape:
                    raise ValueError(
                        f"The scale of a bias depends on {parameter.name!r}, which has shape "
                        f"{parameter.shape} in the graph and {shape} in the params. Trace the "
                        "model with the params, and give all of them."
                    )
                return arrays[parameter.path]
            if value not in makers:
                return jnp.asarray(value.constant)
            equation = makers[value]
            outputs = equation.bind([read(x) for x in equation.inputs])
            result: jax.Array = outputs[equation.outputs.index(value)]
            return result

        return read
