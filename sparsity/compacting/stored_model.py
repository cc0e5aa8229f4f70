"""A model with stored kept values: its program on them, and what reads them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsity.compacting.deferred import Operand, kept_in
from sparsity.compacting.densifier import Densifier, Record
from sparsity.compacting.formats.storage import Kept, Storage, is_kept
from sparsity.compacting.observer import Observer
from sparsity.compacting.table import Row
from sparsity.core import sharding, trees
from sparsity.core.trees import Params, Path, PyTree
from sparsity.graph import Graph
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation

_NO_OBSERVERS: Mapping[Path, Observer] = MappingProxyType({})


class Read(NamedTuple):
    """An equation that reads masked parameters.

    Attributes:
      equation: the equation.
      inputs: its inputs, as shapes.
      is_dense: whether the parameters are made dense.
    """

    equation: Equation
    inputs: list[Operand]
    is_dense: bool


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StoredModel:
    """A model whose masked parameters are stored as kept values; attributes as in `Compact`."""

    indices: PyTree
    frozen: PyTree
    graph: Graph
    storages: tuple[tuple[Path, Storage], ...]
    in_turn: bool
    params: Params


def run_stored(
    model: StoredModel,
    params: Params,
    *args: PyTree,
    observers: Mapping[Path, Observer] = _NO_OBSERVERS,
    record: Record = lambda *_: None,
) -> PyTree:
    """Runs the model as `Compact.apply` does; observers see gradients of dense parameters.

    Args:
      model: the model.
      params: parameters like `model.params`.
      *args: inputs of the model.
      observers: observers of gradients by path.
      record: called with the equations that read masked parameters, see `Densifier`.
    """
    graph, inputs = _retrace(model, params, args, observers)
    return graph.model.run(Densifier(graph.is_data, model.in_turn, record), inputs)


def wrap_values(
    model: StoredModel, params: Params, observers: Mapping[Path, Observer] = _NO_OBSERVERS
) -> PyTree:
    """Returns the parameters with `Kept` for masked ones.

    Raises:
      ValueError: a parameter is missing, or has another shape than its kept values; or a dense
        parameter has another shape than in the graph.
    """
    storages = dict(model.storages)
    shapes = {parameter.path: parameter.shape for parameter in model.graph.parameters}

    def wrap(
        path: trees.KeyPath, leaf: PyTree, positions: jax.Array | None, frozen: jax.Array | None
    ) -> PyTree:
        names, name = trees.path_names(path), trees.path_string(path)
        storage = storages.get(names)
        shape = shapes.get(names) if storage is None else storage.kept_shape
        if shape is not None and jnp.shape(leaf) != shape:
            what = f"parameter {name!r} has" if storage is None else f"kept values of {name!r} have"
            raise ValueError(
                f"The {what} the shape {shape}, got {jnp.shape(leaf)}. Give parameters like "
                "model.params."
            )
        if positions is None or storage is None:
            return leaf
        return storage.wrap(leaf, positions, frozen, name, observers.get(names))

    return trees.map_matched(
        wrap, params, model.indices, model.frozen, others_role="positions of kept values"
    )


def find_readers(model: StoredModel) -> dict[str, set[str]]:
    """Returns {name: operations that need a dense array, other than products of values}."""
    readers: dict[str, set[str]] = {}
    for equation, inputs, is_dense in list_reads(model, *model.graph.model.example):
        for kept in kept_in(inputs) if is_dense else ():
            if equation.name not in PRODUCTS or kept.storage.multiplies:
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

    def record(equation: Equation, inputs: Sequence[Operand], is_dense: bool) -> None:
        shapes = jax.tree.map(sharding.abstract, list(inputs))
        reads.append(Read(equation, shapes, is_dense))

    storages = dict(model.storages)

    def shrink(path: trees.KeyPath, leaf: PyTree) -> PyTree:
        storage = storages.get(trees.path_names(path))
        return leaf if storage is None else storage.shrink(leaf)

    model = StoredModel(model.indices, model.frozen, model.graph, model.storages, False, None)
    arrays, rebuild = trees.split_arrays((trees.map_matched(shrink, params), args))

    def run(arrays: list[jax.Array]) -> PyTree:
        params, args = rebuild(arrays)
        return run_stored(model, params, *args, record=record)

    jax.eval_shape(run, arrays)
    return reads


def count_bytes(model: StoredModel) -> dict[Path, tuple[int, int, int]]:
    """Returns the bytes of each parameter's values, of their positions, and of frozen entries."""
    storages, nbytes = dict(model.storages), {}
    positions, frozen = (trees.leaves_by_names(tree) for tree in (model.indices, model.frozen))
    for parameter in model.graph.parameters:
        path, itemsize = parameter.path, parameter.dtype.itemsize
        if (storage := storages.get(path)) is None:
            nbytes[path] = parameter.size * itemsize, 0, 0
            continue
        values = math.prod(storage.kept_shape) * (4 if storage.is_quantized else itemsize)
        outside = frozen[path].nbytes if path in frozen else 0
        nbytes[path] = values, positions[path].nbytes, outside
    return nbytes


def make_rows(model: StoredModel) -> list[Row]:
    """Returns the rows of tables and pictures, in tree order."""
    storages, readers, stored = dict(model.storages), find_readers(model), count_bytes(model)
    return [
        Row(x, storages.get(x.path), stored[x.path], sorted(readers.get(x.name, ())))
        for x in model.graph.parameters
    ]


def _retrace(
    model: StoredModel, params: Params, args: tuple[PyTree, ...], observers: Mapping[Path, Observer]
) -> tuple[Graph, list[Operand]]:
    """Returns the graph of the model for these arguments, and the inputs of its program."""
    arrays, rebuild = trees.split_arrays(params)
    wrapped = wrap_values(model, params, observers)
    leaves = jax.tree.leaves(wrapped, is_leaf=is_kept)
    leaves = [leaf for leaf in leaves if is_kept(leaf) or trees.is_array(leaf)]

    def describe(struct: jax.ShapeDtypeStruct, leaf: jax.Array | Kept) -> jax.ShapeDtypeStruct:
        dense = sharding.resize_struct(struct, leaf.shape)
        if is_kept(leaf) and leaf.storage.is_quantized:  # the model casts the parameter
            return sharding.with_dtype(dense, leaf.storage.frozen_dtype)
        return dense

    example = rebuild([*map(describe, sharding.abstract(arrays), leaves)])
    return model.graph.retrace(example, *args), [*leaves, *trees.split_arrays(args)[0]]
