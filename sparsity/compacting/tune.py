"""Measures the formats of kept values on the inputs and the device of the user."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp

from sparsity.compacting.deferred import densify_pending, kept_in
from sparsity.compacting.densifier import Densifier
from sparsity.compacting.formats.base import is_kept
from sparsity.compacting.stored_model import Read, StoredModel, list_reads
from sparsity.core import trees
from sparsity.core.trees import Path, PyTree
from sparsity.reports.times import time_in_turn

Seconds: TypeAlias = dict[Path, dict[str, float]]

_NOISE = 1.02  # seconds that count as equally fast


def measure(models: Mapping[str, StoredModel], args: tuple[PyTree, ...], rounds: int) -> Seconds:
    """Returns the median seconds of the products of each parameter, forward and backward.

    Args:
      models: the model in each format, for parameters that can have the format.
      args: inputs of the model.
      rounds: number of measurements of each product.
    """
    runs: dict[Path, dict[str, Callable[[], object]]] = {}
    for name, model in models.items():
        paths = {trees.join_names(x): x for x, each in model.layouts if each.format == name}
        reads: dict[Path, list[Read]] = {}
        for read in list_reads(model, model.graph.model.example[0], args):
            for kept in kept_in(read.inputs):
                if kept.name in paths:
                    reads.setdefault(paths[kept.name], []).append(read)
        for path, each in reads.items():
            runs.setdefault(path, {})[name] = _make_run(each, model)
    seconds = {path: time_in_turn(*each.values(), rounds=rounds) for path, each in runs.items()}
    return {path: dict(zip(runs[path], each, strict=True)) for path, each in seconds.items()}


def choose(seconds: Seconds, nbytes: Mapping[tuple[Path, str], int]) -> dict[Path, str]:
    """Returns for each parameter the smallest of the fastest formats."""
    chosen = {}
    for path, by_format in seconds.items():
        fast = [x for x, time in by_format.items() if time <= _NOISE * min(by_format.values())]
        chosen[path] = min(fast, key=lambda name: nbytes[path, name])
    return chosen


def _make_run(reads: list[Read], model: StoredModel) -> Callable[[], object]:
    """Returns a function that runs products forward and backward, on ones."""
    positions = {trees.join_names(x): at for x, at in trees.leaves_by_names(model.indices).items()}
    interpreter = Densifier(lambda _: True, model.densifies_one_at_a_time)

    def fill(leaf: PyTree) -> PyTree:
        if not is_kept(leaf):
            return jnp.full(leaf.shape, trees.is_prunable(leaf), leaf.dtype)
        at, shape = positions[leaf.name], leaf.positions.shape
        while at.ndim > len(shape):  # a product within a scan gets the first layer
            at = at[0]
        at = at[tuple(map(slice, shape))].astype(leaf.positions.dtype)
        return dataclasses.replace(
            leaf, values=jnp.ones(leaf.values.shape, leaf.values.dtype), positions=at, frozen=None
        )

    inputs = [jax.tree.map(fill, read.inputs, is_leaf=is_kept) for read in reads]
    arrays, structure = jax.tree.flatten(inputs)
    floats = [array if trees.is_prunable(array) else None for array in arrays]

    def loss(floats: list[jax.Array | None], arrays: list[jax.Array]) -> jax.Array:
        pairs = zip(floats, arrays, strict=True)
        inputs = jax.tree.unflatten(structure, [y if x is None else x for x, y in pairs])
        outputs = [
            densify_pending(y)
            for read, each in zip(reads, inputs, strict=True)
            for y in interpreter.bind(read.equation, each)
        ]
        squares = [
            jnp.sum(jnp.abs(y) ** 2, dtype=jnp.float32) for y in outputs if trees.is_prunable(y)
        ]
        return sum(squares, jnp.zeros(()))

    return functools.partial(jax.jit(jax.grad(loss)), floats, arrays)
