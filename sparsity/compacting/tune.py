"""Measures the formats of kept values on the inputs and the device of the user."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.compacting.deferred import MaybePending, densify_pending, kept_in
from sparsity.compacting.densifier import Densifier
from sparsity.compacting.formats.base import is_kept
from sparsity.compacting.stored_model import Read, StoredModel, list_reads
from sparsity.core import trees
from sparsity.core.trees import Path, PyTree
from sparsity.reports import rounds_in_turn

Seconds: TypeAlias = dict[Path, dict[str, float]]
TimedCall: TypeAlias = Callable[[], object]

_NOISE = 1.02  # seconds that count as equally fast
_MOST_ROUNDS = 5  # times `rounds`, for formats that are nearly as fast as the fastest one
_MOST_SECONDS = 10.0  # of these further rounds
_measured: dict[str, dict[str, float]] = {}  # by shapes of the products, device and rounds


def measure(models: Mapping[str, StoredModel], args: tuple[PyTree, ...], rounds: int) -> Seconds:
    """Returns the seconds of the products of each parameter, forward and backward, by format.

    Args:
      models: the model in each format, for parameters that can have the format.
      args: inputs of the model.
      rounds: number of measurements of each product; see `time_until_clear`.
    """
    calls: dict[Path, dict[str, list[tuple[str, TimedCall]]]] = {}
    for name, model in models.items():
        paths = {trees.join_names(x): x for x, each in model.layouts if each.format == name}
        for read in list_reads(model, model.graph.model.example[0], args):
            for kept in kept_in(read.inputs):
                if kept.name in paths:
                    by_format = calls.setdefault(paths[kept.name], {})
                    by_format.setdefault(name, []).append(_make_call(read, model))
    return {path: _time(by_format, rounds) for path, by_format in calls.items()}


def choose(seconds: Seconds, nbytes: Mapping[tuple[Path, str], int]) -> dict[Path, str]:
    """Returns for each parameter the smallest of the fastest formats."""
    chosen = {}
    for path, by_format in seconds.items():
        fastest = min(by_format.values())
        fast = [name for name, median in by_format.items() if median <= _NOISE * fastest]
        chosen[path] = min(fast, key=lambda name: nbytes[path, name])
    return chosen


def _time(
    by_format: Mapping[str, Sequence[tuple[str, TimedCall]]], rounds: int
) -> dict[str, float]:
    """Returns the seconds of each format, measured in turn; equal shapes are measured once."""
    described = [f"{name}: {text}" for name in by_format for text, _ in by_format[name]]
    key = " | ".join([f"{rounds} rounds", *described])
    if key not in _measured:

        def run(name: str) -> list[object]:
            return [call() for _, call in by_format[name]]

        runs = {name: functools.partial(run, name) for name in by_format}
        _measured[key] = time_until_clear(runs, rounds)
    return _measured[key]


def time_until_clear(runs: Mapping[str, TimedCall], rounds: int) -> dict[str, float]:
    """Returns the seconds of each format, from the ratios of each round.

    Other work of the machine slows all formats of a round, so that ratios are steadier than
    seconds. Formats whose ratios straddle the noise limit get more rounds.

    Args:
      runs: the products of each format.
      rounds: number of measurements of each format, and of further ones at a time.

    Returns:
      {format: median seconds of the fastest format x median ratio to the fastest format}.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    unclear, end = list(runs), 0.0
    for _ in range(_MOST_ROUNDS):
        times = rounds_in_turn(*(runs[name] for name in unclear), rounds=rounds)
        end = end or time.perf_counter() + _MOST_SECONDS
        for name, measured in zip(unclear, times, strict=True):
            seconds[name] += measured
        fastest = min(unclear, key=lambda name: float(np.median(seconds[name])))
        # Pairs the rounds that both formats have: the first ones.
        pairs = {name: zip(seconds[name], seconds[fastest], strict=False) for name in runs}
        ratios = {name: [some / least for some, least in pairs[name]] for name in runs}
        bounds = {name: np.percentile(ratios[name], (25, 75)) for name in unclear}
        unclear = [x for x in unclear if x == fastest or bounds[x][0] <= _NOISE < bounds[x][1]]
        if len(unclear) == 1 or time.perf_counter() > end:
            break
    return {x: float(np.median(seconds[fastest]) * np.median(ratios[x])) for x in runs}


def _make_call(read: Read, model: StoredModel) -> tuple[str, TimedCall]:
    """Returns a description of the shapes of a product, and a call that runs both its passes."""
    arrays, structure = jax.tree.flatten(_make_inputs(read.inputs, model))
    places = [i for i, array in enumerate(arrays) if trees.is_prunable(array)]

    def loss(floating: list[jax.Array], arrays: list[jax.Array]) -> jax.Array:
        """Sums the squares of the product's outputs; `floating` replaces the arrays at `places`."""
        replaced = dict(zip(places, floating, strict=True))
        operands = [replaced.get(i, x) for i, x in enumerate(arrays)]
        # As in the model: otherwise XLA shares the dense parameter of both passes in this small
        # program, which it cannot do in a model of many layers.
        interpreter = Densifier(lambda _: True, model.densifies_one_at_a_time)
        outputs = interpreter.bind(read.equation, jax.tree.unflatten(structure, operands))
        dense = [densify_pending(y) for y in outputs if trees.is_prunable(y)]
        return sum((jnp.sum(jnp.abs(y) ** 2) for y in dense), jnp.zeros(()))

    run = jax.jit(jax.grad(loss))
    name, params = read.equation.name, read.equation.params
    shapes = [f"{array.dtype}{list(array.shape)}" for array in arrays]
    text = f"{name} {params} {shapes} {model.densifies_one_at_a_time}"
    return text, functools.partial(run, [arrays[i] for i in places], arrays)


def _make_inputs(inputs: list[MaybePending], model: StoredModel) -> list[MaybePending]:
    """Returns inputs of a product, given as shapes, with the kept values of a model or random data.

    Frozen entries count as zeros. A product within a scan gets the first layer.
    """
    values, positions = (
        {trees.path_string(path): leaf for path, leaf in trees.leaves_by_path(tree).items()}
        for tree in (model.read_start("params"), model.indices)
    )

    def fill(leaf: PyTree) -> PyTree:
        if is_kept(leaf):
            return dataclasses.replace(
                leaf,
                values=_first_slice(values[leaf.name], leaf.values),
                positions=_first_slice(positions[leaf.name], leaf.positions),
                frozen=None,
            )
        rng = np.random.default_rng(0)
        drawn = rng.standard_normal(leaf.shape) if trees.is_prunable(leaf) else np.zeros(leaf.shape)
        return jnp.asarray(drawn, leaf.dtype)

    return jax.tree.map(fill, inputs, is_leaf=is_kept)


def _first_slice(array: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the first slice of a stack, of the shape and dtype that a product reads."""
    while array.ndim > len(like.shape):
        array = array[0]
    return array[tuple(slice(size) for size in like.shape)].astype(like.dtype)
