"""A model with stored kept values: its program on them, and what reads them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsity.compacting.deferred import MaybePending, kept_in
from sparsity.compacting.densifier import Densifier, Record
from sparsity.compacting.formats.base import FormatLayout, KeptArray, is_kept
from sparsity.compacting.table import Row, StoredBytes
from sparsity.core import sharding, trees
from sparsity.core.trees import Params, Path, PyTree
from sparsity.graph import Graph
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation


class Read(NamedTuple):
    """An equation that reads masked parameters.

    Attributes:
      equation: the equation.
      inputs: its inputs, as shapes.
      is_dense: whether the parameters are made dense.
    """

    equation: Equation
    inputs: list[MaybePending]
    is_dense: bool


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StoredModel:
    """A model whose masked parameters are stored as kept values; attributes as in `Compact`.

    The tree `indices` holds the positions of each parameter, which are `positions` elsewhere: users
    and checkpoints know it by this name.

    Attributes:
      start: the parameters, the optimizer's state and the update error that the model was made
        with, by name; no part of the pytree.
    """

    indices: PyTree
    frozen: PyTree
    graph: Graph
    layouts: tuple[tuple[Path, FormatLayout], ...]
    densifies_one_at_a_time: bool
    start: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)

    def read_start(self, name: str) -> PyTree:
        """Returns an entry of `start`.

        Raises:
          AttributeError: jax made the model from its leaves.
        """
        if name in self.start:
            return self.start[name]
        raise AttributeError(
            f"This Compact has no {name}: jax made it from its leaves, in a function such as "
            "jit, grad or jax.tree.map, and they are positions and frozen entries only. Keep "
            "parameters and the optimizer's state beside the model, as arguments and results."
        )


def run_stored(
    model: StoredModel,
    params: Params,
    *args: PyTree,
    record: Record = lambda *_: None,
) -> PyTree:
    """Runs the model as `Compact.apply` does.

    Args:
      model: the model.
      params: parameters like `model.params`.
      *args: inputs of the model.
      record: called with the equations that read masked parameters, see `Densifier`.
    """
    graph, inputs = _retrace(model, params, args)
    densifier = Densifier(graph.tracker.is_data, model.densifies_one_at_a_time, record)
    return graph.model.run(densifier, inputs)


def wrap_values(model: StoredModel, params: Params) -> PyTree:
    """Returns the parameters with `KeptArray` for masked ones.

    Raises:
      ValueError: a parameter is missing, or has another shape than its kept values; or a dense
        parameter has another shape than in the graph.
    """
    layouts = dict(model.layouts)
    shapes = {parameter.path: parameter.shape for parameter in model.graph.parameters}

    def wrap(
        path: trees.KeyPath, leaf: PyTree, positions: jax.Array | None, frozen: jax.Array | None
    ) -> PyTree:
        names, name = trees.path_names(path), trees.path_string(path)
        layout = layouts.get(names)
        shape = shapes.get(names) if layout is None else layout.kept_shape
        if shape is not None and jnp.shape(leaf) != shape:
            what = f"parameter {name!r} has" if layout is None else f"kept values of {name!r} have"
            raise ValueError(
                f"The {what} the shape {shape}, got {jnp.shape(leaf)}. Give parameters like "
                "model.params."
            )
        if positions is None or layout is None:
            return leaf
        return layout.wrap(leaf, positions, frozen, name)

    return trees.map_matched(
        wrap, params, model.indices, model.frozen, others_role="positions of kept values"
    )


def find_readers(model: StoredModel) -> dict[str, set[str]]:
    """Returns {name: operations that need a dense array, other than products of values}."""
    readers: dict[str, set[str]] = {}
    for equation, inputs, is_dense in list_reads(model, *model.graph.model.example):
        for kept in kept_in(inputs) if is_dense else ():
            if equation.name not in PRODUCTS or kept.layout.multiplies:
                where = f"{equation.name} {equation.source}".strip()
                readers.setdefault(kept.name, set()).add(where)
    return readers


def list_reads(model: StoredModel, params: Params, args: tuple[PyTree, ...]) -> list[Read]:
    """Returns the equations that read masked parameters.

    Args:
      model: the stored model.
      params: the dense parameters, or their shapes.
      args: inputs of the model, or their shapes.
    """
    params, args = sharding.abstract((params, args))
    reads: list[Read] = []

    def record(equation: Equation, inputs: Sequence[MaybePending], is_dense: bool) -> None:
        shapes = jax.tree.map(sharding.abstract, list(inputs))
        reads.append(Read(equation, shapes, is_dense))

    layouts = dict(model.layouts)

    def describe(path: trees.KeyPath, leaf: PyTree) -> PyTree:
        layout = layouts.get(trees.path_names(path))
        return leaf if layout is None else sharding.resize_struct(leaf, layout.kept_shape)

    model = dataclasses.replace(model, densifies_one_at_a_time=False)
    arrays, rebuild = trees.split_arrays((trees.map_matched(describe, params), args))

    def run(arrays: list[jax.Array]) -> PyTree:
        params, args = rebuild(arrays)
        return run_stored(model, params, *args, record=record)

    jax.eval_shape(run, arrays)
    return reads


def count_bytes(model: StoredModel) -> dict[Path, StoredBytes]:
    """Returns the bytes that are stored of each parameter."""
    layouts, nbytes = dict(model.layouts), {}
    positions, frozen = (trees.leaves_by_names(tree) for tree in (model.indices, model.frozen))
    for parameter in model.graph.parameters:
        path, itemsize = parameter.path, parameter.dtype.itemsize
        if (layout := layouts.get(path)) is None:
            nbytes[path] = StoredBytes(parameter.size * itemsize)
            continue
        values = math.prod(layout.kept_shape) * itemsize
        outside = frozen[path].nbytes if path in frozen else 0
        nbytes[path] = StoredBytes(values, positions[path].nbytes, outside)
    return nbytes


def make_rows(model: StoredModel) -> list[Row]:
    """Returns the rows of tables and pictures, in tree order."""
    layouts, readers, stored = dict(model.layouts), find_readers(model), count_bytes(model)
    return [
        Row(x, layouts.get(x.path), stored[x.path], sorted(readers.get(x.name, ())))
        for x in model.graph.parameters
    ]


def _retrace(
    model: StoredModel, params: Params, args: tuple[PyTree, ...]
) -> tuple[Graph, list[MaybePending]]:
    """Returns the graph of the model for these arguments, and the inputs of its program."""
    arrays, rebuild = trees.split_arrays(params)
    wrapped = wrap_values(model, params)
    leaves = jax.tree.leaves(wrapped, is_leaf=is_kept)
    leaves = [leaf for leaf in leaves if is_kept(leaf) or trees.is_array(leaf)]

    def describe(struct: jax.ShapeDtypeStruct, leaf: jax.Array | KeptArray) -> jax.ShapeDtypeStruct:
        if not is_kept(leaf):
            return struct
        dense = sharding.resize_struct(struct, leaf.shape)
        return dense.update(sharding=leaf.explicit_sharding or dense.sharding)

    example = rebuild([*map(describe, sharding.abstract(arrays), leaves)])
    return model.graph.retrace(example, *args), [*leaves, *trees.split_arrays(args)[0]]
