"""`sparsity.trace`: from a model's function to its graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sparsity.core import sharding, trees
from sparsity.core.trees import PyTree
from sparsity.graph.channels import Leaf
from sparsity.graph.graph import Graph
from sparsity.graph.uses import Path
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import (
    Equation,
    Program,
    Value,
    captured_arrays,
    read_jaxpr,
    values_read,
)
from sparsity.programs.walk import Flow

_ON_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


def trace(
    fn: Callable[..., PyTree],
    params: PyTree,
    *args: PyTree,
    state: Mapping[Path | str, Path | str] | None = None,
) -> Graph:
    """Traces `fn(params, *args)` and returns what it does with every weight.

    Nothing is computed: leaves may be arrays or `jax.ShapeDtypeStruct`s. The model may be written
    with linen, nnx, haiku, equinox or plain functions.

    Args:
      fn: the model: a function of its parameters and inputs. Keyword arguments and flags are given
        by `functools.partial`.
      params: any tree of parameters; leaves that are no arrays are static.
      *args: inputs of the model, any trees.
      state: what `fn` returns for its next call, as `{path in the output: path in params}`, each a
        tuple of strings or joined by '/', of a leaf or of all leaves below it. `None` finds them:
        leaves of the output whose path ends in that of a parameter of the same shape and dtype,
        if it has a name, not only a number; of weights, those computed from them without a product.

    Returns:
      The graph: uses, costs, and the channels that can be removed.

    Raises:
      ValueError: the function cannot be traced with these arguments, depends on their values, reads
        its parameters from elsewhere, or `state` names what is not there.

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
    leaves, rebuild = trees.split_arrays(params)
    by_path = trees.leaves_by_path(params).items()
    paths = [trees.path_names(path) for path, leaf in by_path if trees.is_array(leaf)]
    inputs, rebuild_args = trees.split_arrays(args)

    def flat(leaves: list[Any], inputs: list[Any]) -> Any:
        return fn(rebuild(leaves), *rebuild_args(inputs))

    try:
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(leaves, inputs)
    except _ON_VALUES as error:
        raise ValueError(
            "fn depends on the values of its arguments, so that no program serves them all: use "
            "jax.lax.cond, or give the argument by functools.partial if it is a flag. jax says: "
            f"{error}"
        ) from error
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(
            f"fn(params, *args) fails with {len(args)} arguments after params, which have "
            f"{trees.listed(['/'.join(path) for path in paths])}: {type(error).__name__}: {error}. "
            "It must take the parameters first, then the inputs of the model; bind others by "
            "functools.partial."
        ) from error
    program = read_jaxpr(closed)
    found = [Leaf(path, tuple(x.shape), x.dtype) for path, x in zip(paths, leaves, strict=True)]
    _check_constants(program, found, leaves)
    outputs = [trees.path_names(path) for path in trees.leaves_by_path(shapes)]
    carried = _carried(program, outputs, found, state)

    retrace = functools.partial(_trace_like, state)
    example = sharding.abstract((params, args))
    return Graph(program, found, carried, outputs, jax.tree.structure(shapes), fn, example, retrace)


def _trace_like(
    state: Mapping[Path | str, Path | str] | None,
    fn: Callable[..., PyTree],
    params: PyTree,
    args: tuple[PyTree, ...],
) -> Graph:
    return trace(fn, params, *args, state=state)


def _check_constants(program: Program, leaves: list[Leaf], given: list[Any]) -> None:
    """Raises a ValueError if a leaf is not read, but a constant like it."""
    read_values = values_read(program)
    for value, leaf, array in zip(program.inputs, leaves, given, strict=False):
        if value in read_values or len(leaf.shape) < 2:
            continue
        for constant in captured_arrays(program):
            if getattr(constant, "shape", None) != leaf.shape or constant.dtype != leaf.dtype:
                continue
            is_abstract = isinstance(array, jax.ShapeDtypeStruct)
            if is_abstract or constant is array or np.array_equal(constant, array):
                raise ValueError(
                    f"fn does not read params at {leaf.name!r}, but holds a constant of its shape "
                    f"{leaf.shape}: it closes over its parameters. Let it take them as its first "
                    "argument."
                )


def _carried(
    program: Program,
    outputs: list[Path],
    leaves: list[Leaf],
    state: Mapping[Path | str, Path | str] | None,
) -> dict[int, int]:
    """Which outputs, by number, become which leaves in the next call.

    Places and shapes do not tell: a hidden layer may be returned in a tuple like that of the
    parameters, and have the shape of a weight. So a state has a name; and what is multiplied is a
    state only if its next value is computed from it without a product between, as a cache is.
    """
    numbers = {leaf.path: i for i, leaf in enumerate(leaves)}

    def fits(output: int, leaf: int) -> bool:
        value = program.outputs[output]
        return (value.shape, value.dtype) == (leaves[leaf].shape, leaves[leaf].dtype)

    if state is None:
        sources = _Sources(program, program.inputs[: len(leaves)])

        def is_state(output: int, leaf: int) -> bool:
            value = program.outputs[output]
            is_weight = leaf in sources.multiplied and leaf not in sources.fact(value)
            return fits(output, leaf) and not is_weight

        suffixes = {
            i: next((numbers[x] for x in _ends(path) if x in numbers and _is_named(x)), None)
            for i, path in enumerate(outputs)
        }
        return {i: leaf for i, leaf in suffixes.items() if leaf is not None and is_state(i, leaf)}
    carried: dict[int, int] = {}
    for key, target in state.items():
        source, into = (tuple(x.split("/")) if isinstance(x, str) else x for x in (key, target))
        matched = {
            i: numbers[into + path[len(source) :]]
            for i, path in enumerate(outputs)
            if path[: len(source)] == source and into + path[len(source) :] in numbers
        }
        if not matched:
            raise ValueError(
                f"state[{key!r}] = {target!r} matches nothing. The output has "
                f"{trees.listed(['/'.join(path) for path in outputs])}, params have "
                f"{trees.listed([leaf.name for leaf in leaves])}."
            )
        for i, leaf in matched.items():
            if not fits(i, leaf):
                raise ValueError(
                    f"state[{key!r}] = {target!r}: the output {'/'.join(outputs[i])!r} of shape "
                    f"{program.outputs[i].shape}, {program.outputs[i].dtype}, cannot become "
                    f"{leaves[leaf].name!r} of shape {leaves[leaf].shape}, {leaves[leaf].dtype}."
                )
        carried |= matched
    return carried


class _Sources(Flow[frozenset[int]]):
    """Follows the leaves through a program, up to its products.

    The facts are numbers of leaves, of which a value is computed without a product between.

    Attributes:
      multiplied: numbers of the leaves that reach a product in this way.
    """

    def __init__(self, program: Program, leaves: Sequence[Value]) -> None:
        super().__init__()
        self.facts = {value: frozenset([number]) for number, value in enumerate(leaves)}
        self.multiplied: frozenset[int] = frozenset()
        self.run(program)

    def start(self, value: Value) -> frozenset[int]:
        return frozenset()

    def visit(self, equation: Equation) -> None:
        numbers = frozenset[int]().union(*(self.fact(value) for value in equation.inputs))
        if equation.name in PRODUCTS:
            self.multiplied |= numbers
        else:
            self.facts.update(dict.fromkeys(equation.outputs, numbers))

    def join(
        self, one: frozenset[int], other: frozenset[int], equation: Equation, target: Value
    ) -> frozenset[int]:
        return one | other

    def layer(self, fact: frozenset[int], scan: Equation) -> frozenset[int]:
        return fact

    def stack(self, fact: frozenset[int], scan: Equation) -> frozenset[int]:
        return fact


def _is_named(path: Path) -> bool:
    """Whether a path has more than the numbers of places in lists and tuples."""
    return any(not name.isdecimal() for name in path)


def _ends(path: Path) -> list[Path]:
    """The path and what is left of it without its first names, down to its last one."""
    return [path[start:] for start in range(len(path))]
