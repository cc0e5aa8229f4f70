"""Refit of a block that a walk has run: what its program reads, and its batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from sparsity.calibration.refits.block import Batch, BlockRefit
from sparsity.calibration.run.frames import Lane
from sparsity.calibration.run.walk import RunBlock
from sparsity.calibration.run.weights import ModelWeights, Part, Place, put_parts
from sparsity.calibration.statistics.validation import is_finite
from sparsity.core import sharding
from sparsity.core.trees import Path, PyTree


def refit_block(
    refit: BlockRefit,
    block: RunBlock,
    lanes: Sequence[Lane],
    weights: ModelWeights,
    may_train: Callable[[Place], bool],
) -> tuple[float, float]:
    """Trains the weights of a block, and returns its held-out errors before and after.

    Args:
      refit: the refit.
      block: the block, which has run.
      lanes: the lanes of the run.
      weights: holds the parts of the block, which are replaced if they become better.
      may_train: whether a parameter without a mask may change, as no block before reads it.

    Raises:
      ValueError: outputs are not finite, or row weights do not tell their rows apart.
    """
    parts, counted = weights.parts, [i for i, lane in enumerate(lanes) if lane.is_counted]
    places = _list_places(block, counted[0], weights)
    trained = {place: part.weights for place, part in parts.items() if part.mask is not None}
    masks = {place: part.mask for place, part in parts.items() if part.mask is not None}
    others = {
        place: weights.read(place[0], *(layer for _, layer in place[1]))
        for place in places
        if place not in trained
    }
    for place in [x for x in others if may_train(x) and refit.trains(x[0], others[x])]:
        trained[place] = others.pop(place)
    batches = [x for i in counted for x in _iterate_batches(refit, block, i, lanes[i])]
    result = refit.train(trained, masks, others, batches)
    if result.after < result.before:
        for place, array in result.weights.items():
            parts[place] = Part(sharding.place_like(trained[place], array), masks.get(place))
    return result.before, result.after


def _list_places(block: RunBlock, lane: int, weights: ModelWeights) -> list[Place]:
    """Returns the parameters, or their layers, that a block reads."""
    places = dict[Place, None]()

    def read(path: Path, *layers: int) -> jax.Array:
        places[path, tuple(enumerate(layers))] = None
        with sharding.evaluate_now():  # arrays are read, and no constant of a trace
            return weights.read(path, *layers)

    inputs = block.list_inputs(lane, False)[0]
    jax.eval_shape(functools.partial(block.call, lane, read), inputs)
    return [*places]


def _iterate_batches(refit: BlockRefit, block: RunBlock, index: int, lane: Lane) -> Iterator[Batch]:
    """Yields the batches of a lane, whose inputs are 0 where rows count nothing."""
    input_values, output_values = block.list_values(index)
    call = functools.partial(_call_block, block, index)
    arrays = zip(
        lane.batches,
        block.list_inputs(index, refit.inputs == "dense"),
        block.list_outputs(index, True),
        block.list_outputs(index, False),
        lane.row_weights,
        strict=True,
    )
    for batch, inputs, targets, outputs, row_weights in arrays:
        spread = [lane.spread(value, row_weights) for value in output_values]
        if row_weights is not None and any(x is None for x in spread):
            raise ValueError(
                f"row_weights: the rows of the outputs of the block {block.name!r} cannot be told "
                "apart. Give weights of the axes that all its outputs have, or no BlockRefit."
            )
        pairs = zip((*targets, *outputs), spread * 2, strict=True)
        if not all(is_finite(_leave_out_rows(*pair)) for pair in pairs):
            raise ValueError(
                f"The outputs of the block {block.name!r} are not finite in batch {batch}: an "
                "activation is NaN or infinite. Compute in a wider dtype, or leave the batch out."
            )
        rows = [lane.spread(value, row_weights) for value in input_values]
        counted = [_leave_out_rows(*pair) for pair in zip(inputs, rows, strict=True)]
        yield Batch(call, counted, targets, spread)


def _leave_out_rows(array: PyTree, row_weights: jax.Array | None) -> jax.Array:
    """Returns an array with 0 in rows of weight 0, which may be NaN."""
    if row_weights is None or not jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.asarray(array)
    return jnp.where(row_weights > 0, array, jnp.zeros((), array.dtype))


def _call_block(
    block: RunBlock, lane: int, trained: Mapping[Place, jax.Array], others: PyTree, inputs: PyTree
) -> list[jax.Array]:
    """Returns the outputs of a block with trained weights in their places."""
    parts = {place: Part(array) for place, array in trained.items()}

    def read(path: Path, *layers: int) -> jax.Array:
        def look_up(path: Path, *layers: int) -> jax.Array:
            return others[path, tuple(enumerate(layers))]

        return put_parts(look_up, parts, path, layers)

    return block.call(lane, read, inputs)
