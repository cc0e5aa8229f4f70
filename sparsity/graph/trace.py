"""`sparsity.trace`: from a model's function to its graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from sparsity.core import sharding, trees
from sparsity.core.checks import check_function, check_kind, is_traced
from sparsity.core.trees import Params, Path, PyTree
from sparsity.graph.graph import Graph
from sparsity.graph.traced_model import Model, Parameter
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import (
    ClosedJaxpr,
    Equation,
    Program,
    Value,
    find_read_values,
    read_jaxpr,
)
from sparsity.programs.walk import Flow

_CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def trace(
    fn: Callable[..., PyTree],
    params: Params,
    *args: PyTree,
    state: Mapping[Path | str, Path | str] | None = None,
) -> Graph:
    """Traces `fn(params, *args)` and returns the graph of all uses of its weights.

    Nothing is computed: leaves may be arrays or `jax.ShapeDtypeStruct`s. The model may be written
    with linen, nnx, haiku, equinox or plain functions.

    Args:
      fn: the model: a function of its parameters and inputs. Keyword arguments and flags are given
        by `functools.partial`.
      params: any tree of parameters; leaves that are not arrays are static.
      *args: inputs of the model, any trees.
      state: outputs that the next call reads, as `{path in the output: path in params}`, each a
        tuple of strings or joined by '/', of a leaf or of all leaves below the path. `None` finds
        them: an output becomes a parameter of the same shape and dtype if its path ends in the
        path of the parameter, that path has a name, not only numbers, and the output is computed
        from the parameter without a product.

    Returns:
      The graph: uses, costs, and the channels that can be removed.

    Raises:
      ValueError: the function cannot be traced with these arguments, depends on their values, reads
        its parameters from elsewhere, or `state` names missing paths.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"up": jnp.ones((3, 8)), "down": jnp.ones((8, 2))}
      >>> model = lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"]
      >>> graph = trace(model, params, jnp.ones((5, 3)))
      >>> graph.macs()
      200
      >>> [(group.name, group.size) for group in graph.groups]
      [('up:1', 8)]
    """
    arrays = trees.leaves_by_path(trees.only_arrays(params))
    paths, leaves = [trees.path_names(path) for path in arrays], [*arrays.values()]
    closed, shapes = _make_jaxpr(fn, params, args, paths)
    program = read_jaxpr(closed)
    pairs = zip(paths, leaves, strict=True)
    parameters = [Parameter(path, tuple(x.shape), x.dtype) for path, x in pairs]
    _check_constants(program, parameters, leaves)
    outputs = [trees.path_names(path) for path in trees.leaves_by_path(shapes)]
    find_carried = _find_carried if state is None else functools.partial(_read_state, state)
    carried = find_carried(program, outputs, parameters)
    example = sharding.abstract((params, args))
    structure = jax.tree.structure(shapes)
    model = Model(program, parameters, carried, outputs, structure, fn, example)
    return Graph(model, functools.partial(trace, state=state))


def _make_jaxpr(
    fn: Callable[..., PyTree], params: Params, args: tuple[PyTree, ...], paths: Sequence[Path]
) -> tuple[ClosedJaxpr, PyTree]:
    """Returns the jaxpr of `fn`, and the shapes of its outputs.

    Raises:
      ValueError: the function depends on values, or cannot be traced with these arguments.
    """
    check_function("fn", fn, "the parameters and the inputs")
    leaves, rebuild = trees.split_arrays(params)
    inputs, rebuild_args = trees.split_arrays(args)

    def run(leaves: list[jax.Array], inputs: list[jax.Array]) -> PyTree:
        return fn(rebuild(leaves), *rebuild_args(inputs))

    try:
        return jax.make_jaxpr(run, return_shape=True)(leaves, inputs)
    except _CONCRETIZATION_ERRORS as error:
        raise ValueError(
            "fn depends on the values of its arguments, so that no program serves them all: use "
            f"jax.lax.cond, or give a flag by functools.partial. jax says: {error}"
        ) from error
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        names = trees.listed([trees.join_names(path) for path in paths])
        raise ValueError(
            f"fn(params, *args) fails with {len(args)} arguments after params, which have "
            f"{names}: {type(error).__name__}: {error}. It must take the parameters first, then "
            "the inputs of the model; bind others by functools.partial."
        ) from error


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
