"""A traced model: its program, its parameters, and their places in the trees of users."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import trees
from sparsity.core.trees import KeyPath, Masks, Params, Path, PyTree
from sparsity.programs.program import Program, Value
from sparsity.programs.walk import Interpreter


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter: its path, shape and dtype."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def name(self) -> str:
        return trees.join_names(self.path)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A traced model.

    Attributes:
      program: the program; its first inputs are the parameters.
      parameters: the parameters, in tree order.
      carried: {index of an output: index of the parameter that it becomes in the next call}.
      outputs: paths of the outputs.
      output_tree: structure of the outputs.
      fn: the function that was traced.
      example: shapes and dtypes of the parameters, and of the inputs that were traced.
    """

    program: Program
    parameters: Sequence[Parameter]
    carried: Mapping[int, int]
    outputs: Sequence[Path]
    output_tree: jax.tree_util.PyTreeDef
    fn: Callable[..., PyTree]
    example: tuple[PyTree, tuple[PyTree, ...]]

    @functools.cached_property
    def parameter_inputs(self) -> dict[Value, Parameter]:
        """{input of the program: the parameter that it is}."""
        return dict(zip(self.program.inputs, self.parameters, strict=False))

    @property
    def state(self) -> dict[Path, Path]:
        """Outputs that the next call reads: {path in the output: path in params}."""
        return {self.outputs[i]: self.parameters[n].path for i, n in self.carried.items()}

    def run(self, interpreter: Interpreter[PyTree], inputs: Sequence[PyTree]) -> PyTree:
        """Returns the outputs of the program by an interpreter, in the tree of the function.

        Args:
          interpreter: computes the equations.
          inputs: the leaves of the parameters and of the inputs, in order.
        """
        return jax.tree.unflatten(self.output_tree, interpreter.run(self.program, inputs))

    def make_reader(self, arrays: Mapping[Path, jax.Array]) -> Callable[[Value], jax.Array]:
        """Returns a function that computes values of the program from parameters alone.

        Args:
          arrays: the parameters by path.

        Raises:
          ValueError: the function needs a parameter that is missing or of another shape.
        """
        makers = self.program.makers

        def read(value: Value) -> jax.Array:
            if (parameter := self.parameter_inputs.get(value)) is not None:
                shape = jnp.shape(arrays[parameter.path]) if parameter.path in arrays else None
                if shape != parameter.shape:
                    raise ValueError(
                        f"A value of the model depends on {parameter.name!r}, which has shape "
                        f"{parameter.shape} in the graph and {shape} in the params. Trace the "
                        "model with the params, and give all of them."
                    )
                return arrays[parameter.path]
            if value not in makers:
                return jnp.asarray(value.constant)
            equation = makers[value]
            outputs = equation.bind([read(x) for x in equation.inputs])
            return outputs[equation.outputs.index(value)]

        return read


class Parameters:
    """The parameters of a model, in tree order, and the search for them by path.

    Args:
      parameters: the parameters, in tree order.
      list_removable: returns (path, axis) of all axes that can lose channels.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        list_removable: Callable[[], Collection[tuple[Path, int]]],
    ) -> None:
        self._parameters, self._list_removable = parameters, list_removable
        # {end of paths: parameters, shortest path first}
        self._by_end: dict[Path, list[Parameter]] = {}
        for parameter in sorted(parameters, key=lambda parameter: len(parameter.path)):
            for start in range(len(parameter.path) + 1):
                self._by_end.setdefault(parameter.path[start:], []).append(parameter)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def find_shape(self, path: Path) -> tuple[int, ...]:
        """Returns the shape of a parameter."""
        return self._by_end[path][0].shape

    def find(
        self, path: Path, array: object, role: str = "params", may_be_smaller: bool = False
    ) -> Parameter:
        """Returns the parameter of a path, in the traced tree or in a part of that tree.

        The path may lack the first names of the traced path. The shortest traced path wins: in
        `variables["params"]`, `a/w` is `params/a/w` rather than `params/layer/a/w`.

        Args:
          path: path of the array.
          array: the array.
          role: the name of the tree in errors.
          may_be_smaller: allow the smaller shapes of a model that has lost channels.

        Raises:
          ValueError: no parameter or several have this path, or the shape differs.
        """
        shape = tuple(getattr(array, "shape", ()))
        ends = self._by_end.get(path, [])
        matches = [parameter for parameter in ends if len(parameter.path) == len(ends[0].path)]
        if len(matches) != 1:
            raise ValueError(
                f"The {role} have {trees.join_names(path)!r} of shape {shape}, of which the "
                f"graph has {len(matches)}. Its parameters are "
                f"{trees.listed([parameter.name for parameter in self])}."
            )
        parameter = matches[0]
        if parameter.shape != shape and not (may_be_smaller and self._fits(parameter, shape)):
            remedy = "Trace the model with these parameters."
            if role == "masks":
                remedy = "Unpack packed masks: sparsity.unpack_masks(masks, params)."
            raise ValueError(
                f"The {role} have shape {shape} at {trees.join_names(path)!r}, the graph was "
                f"traced with {parameter.shape}. {remedy}"
            )
        return parameter

    def match_masks(self, masks: Masks) -> list[tuple[Parameter, PyTree]]:
        """Returns the masks with their parameters, without those that are `None`.

        Raises:
          ValueError: a mask belongs to no parameter, or has another shape; the error names both.
        """
        return [
            (self.find(path, mask, "masks"), mask)
            for path, mask in trees.leaves_by_names(masks).items()
        ]

    def match(self, tree: PyTree, may_be_smaller: bool = True) -> dict[KeyPath, Parameter]:
        """Returns {key path in the tree: parameter} for a tree of params.

        The params may be those of a smaller model, unless `may_be_smaller` is false.
        """
        matched = {
            key_path: self.find(trees.path_names(key_path), array, may_be_smaller=may_be_smaller)
            for key_path, array in trees.leaves_by_path(tree).items()
            if hasattr(array, "shape")
        }
        if len(self) and not matched:
            raise ValueError(
                "The params have no array of the graph, which has "
                f"{trees.listed([parameter.name for parameter in self])}."
            )
        return matched

    def check_complete(self, params: Params) -> None:
        """Raises a ValueError unless each collection, such as 'params', is complete."""
        matched = self.match(params)
        paths = {parameter.path for parameter in matched.values()}
        # A tree of nested collections may hold some of them.
        parts = {x.path[: len(x.path) - max(len(path) - 1, 1)] for path, x in matched.items()}
        for parameter in self:
            if parameter.path not in paths and any(
                parameter.path[: len(part)] == part for part in parts
            ):
                raise ValueError(
                    f"The params have no {parameter.name!r}, with which the graph was traced. "
                    "Give all parameters, or trace the model without this one."
                )

    def _fits(self, parameter: Parameter, shape: tuple[int, ...]) -> bool:
        """Returns whether a parameter may have this shape in a smaller model."""
        cut = {axis for path, axis in self._list_removable() if path == parameter.path}
        return len(shape) == len(parameter.shape) and all(
            size == full_size or (axis in cut and 0 < size < full_size)
            for axis, (size, full_size) in enumerate(zip(shape, parameter.shape, strict=True))
        )
