"""A traced model: its program, its parameters, and their places in the trees of users."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding, trees
from sparsity.core.checks import check_function, check_kind, is_traced
from sparsity.core.trees import KeyPath, Masks, Params, Path, PyTree
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation, Program, Value, find_read_values, read_jaxpr
from sparsity.programs.walk import Flow, Interpreter


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
            size == full_size or (axis in cut and size < full_size)
            for axis, (size, full_size) in enumerate(zip(shape, parameter.shape, strict=True))
        )


def trace_model(
    fn: Callable[..., PyTree],
    params: Params,
    args: tuple[PyTree, ...],
    state: Mapping[Path | str, Path | str] | None,
) -> Model:
    """Returns the model of `fn(params, *args)`; see `sparsity.trace` for the arguments."""
    arrays = trees.leaves_by_path(trees.only_arrays(params))
    paths, leaves = [trees.path_names(path) for path in arrays], [*arrays.values()]
    check_function("fn", fn, "the parameters and the inputs")
    _, rebuild = trees.split_arrays(params)
    inputs, rebuild_args = trees.split_arrays(args)

    def run(leaves: list[jax.Array], inputs: list[jax.Array]) -> PyTree:
        return fn(rebuild(leaves), *rebuild_args(inputs))

    closed, shapes = jax.make_jaxpr(run, return_shape=True)(leaves, inputs)
    program = read_jaxpr(closed)
    pairs = zip(paths, leaves, strict=True)
    parameters = [Parameter(path, tuple(x.shape), x.dtype) for path, x in pairs]
    _check_constants(program, parameters, leaves)
    outputs = [trees.path_names(path) for path in trees.leaves_by_path(shapes)]
    find_carried = _find_carried if state is None else functools.partial(_read_state, state)
    carried = find_carried(program, outputs, parameters)
    example = sharding.abstract((params, args))
    structure = jax.tree.structure(shapes)
    return Model(program, parameters, carried, outputs, structure, fn, example)


def _check_constants(
    program: Program, parameters: Sequence[Parameter], arrays: Sequence[jax.Array]
) -> None:
    """Raises a ValueError if a constant stands in for a parameter that is not read."""
    read_values = find_read_values(program)
    constants = [value.constant for value in read_values if value.constant is not None]

    def may_equal(constant: PyTree, array: PyTree) -> bool:
        if getattr(constant, "shape", None) != array.shape or constant.dtype != array.dtype:
            return False
        if constant is array or isinstance(array, jax.ShapeDtypeStruct):
            return True
        return not is_traced(constant) and not is_traced(array) and np.array_equal(constant, array)

    for value, parameter, array in zip(program.inputs, parameters, arrays, strict=False):
        is_unread = value not in read_values and len(parameter.shape) > 1
        if is_unread and any(may_equal(constant, array) for constant in constants):
            raise ValueError(
                f"fn does not read params at {parameter.name!r}, but holds a constant of its shape "
                f"{parameter.shape}: it closes over its parameters. Let it take them as its first "
                "argument."
            )


def _find_carried(
    program: Program, outputs: Sequence[Path], parameters: Sequence[Parameter]
) -> dict[int, int]:
    """Returns {index of an output: index of the parameter that it becomes in the next call}.

    Position and shape are not enough: a hidden layer may be returned in a tuple and have the shape
    of a weight. An output is state only if the end of its path that equals the path of the
    parameter contains a name, and if the output is computed from the parameter without a product
    in between: a metric may have the name and the shape of a parameter.
    """
    index_by_path = {parameter.path: i for i, parameter in enumerate(parameters)}
    flow = _ParameterFlow(program.inputs[: len(parameters)])
    flow.run(program)
    carried: dict[int, int] = {}
    for i, path in enumerate(outputs):
        ends = [path[start:] for start in range(len(path)) if path[start:] in index_by_path]
        # A path of numbers alone is a place in a tuple.
        named = (index_by_path[end] for end in ends if not all(name.isdecimal() for name in end))
        index, value = next(named, None), program.outputs[i]
        if index is not None and index in flow.fact(value):
            fits = _fits_parameter(value, parameters[index])
            carried |= {i: index} if fits else {}
    return carried


def _read_state(
    state: Mapping[Path | str, Path | str],
    program: Program,
    outputs: Sequence[Path],
    parameters: Sequence[Parameter],
) -> dict[int, int]:
    """Reads the argument `state`: returns the same dictionary as `_find_carried`.

    Raises:
      ValueError: the state names an output or a parameter that does not exist or does not fit.
    """
    index_by_path = {parameter.path: i for i, parameter in enumerate(parameters)}
    carried: dict[int, int] = {}
    check_kind("state", state, Mapping, "a dict {path of an output: path of a parameter}")
    for key, target in state.items():
        for path in (key, target):
            check_kind("a path of state", path, str | tuple, "text or a tuple of strings")
        source_path, target_path = (
            tuple(name.split("/")) if isinstance(name, str) else name for name in (key, target)
        )
        matched = {
            i: index_by_path.get(target_path + path[len(source_path) :])
            for i, path in enumerate(outputs)
            if path[: len(source_path)] == source_path
        }
        carried |= (pairs := {i: index for i, index in matched.items() if index is not None})
        if not pairs:
            raise ValueError(
                f"state[{key!r}] = {target!r} matches nothing. The output has "
                f"{trees.listed(['/'.join(path) for path in outputs])}, params have "
                f"{trees.listed([parameter.name for parameter in parameters])}."
            )
        for i, index in pairs.items():
            value, parameter = program.outputs[i], parameters[index]
            if not _fits_parameter(value, parameter):
                raise ValueError(
                    f"state[{key!r}] = {target!r}: the output {'/'.join(outputs[i])!r} of shape "
                    f"{value.shape}, {value.dtype}, cannot become {parameter.name!r} of shape "
                    f"{parameter.shape}, {parameter.dtype}."
                )
    return carried


def _fits_parameter(value: Value, parameter: Parameter) -> bool:
    return (value.shape, value.dtype) == (parameter.shape, parameter.dtype)


class _ParameterFlow(Flow[frozenset[int]]):
    """Follows the parameters through a program, up to the products.

    A fact is the indices of the parameters from which a value is computed without a product.
    """

    def __init__(self, parameters: Sequence[Value]) -> None:
        super().__init__()
        self.facts = {value: frozenset([index]) for index, value in enumerate(parameters)}

    def initial_fact(self, value: Value) -> frozenset[int]:
        return frozenset()

    def visit(self, equation: Equation) -> None:
        if equation.name not in PRODUCTS:
            indices = frozenset[int]().union(*(self.fact(value) for value in equation.inputs))
            self.facts.update(dict.fromkeys(equation.outputs, indices))

    def join(
        self, one: frozenset[int], other: frozenset[int], equation: Equation, target: Value
    ) -> frozenset[int]:
        return one | other
