"""Oracles of masks: whole slices, one after the other, each entry labelled with its unit."""

import numpy as np

from sparsity.sparsity_types import Block, Channel, NByM
from tests import helpers
from tests.selection_oracle import best_first


def unit_of_entry(shape, kind):
    """For each entry of a slice, the index of its unit, in the order of the units' first entry."""
    index = np.indices(shape).reshape(len(shape), -1)
    if isinstance(kind, Channel):
        index = index[[kind.axis]]
    elif isinstance(kind, Block):
        sizes = (*[1] * (len(shape) - 2), *kind.block_shape)[-len(shape) :]
        index = index // np.array(sizes)[:, None]
    return np.unique(index, axis=1, return_inverse=True)[1].reshape(shape)


def pooled(scores, units, kind):
    scores = np.asarray(scores).astype(np.float64)
    if isinstance(kind, Channel):
        pool = np.sum
    else:
        pool = np.mean if getattr(kind, "use_avg_pooling", False) else np.max
    return np.array([pool(scores[units == unit]) for unit in range(units.max() + 1)])


def expected_slice(scores, sparsity, kind):
    if isinstance(kind, NByM):
        return expected_groups(scores, kind, keep=np.zeros(scores.shape))
    units = unit_of_entry(scores.shape, kind)
    values = pooled(scores, units, kind)
    kept = best_first(values)[: helpers.num_kept(values.size, sparsity)]
    return np.isin(units, kept).astype(np.uint8)


def expected_groups(scores, kind, keep):
    """n of every m along the axis: those to keep first, then the best."""
    scores = np.moveaxis(np.asarray(scores, np.float64), kind.axis, -1)
    keep = np.moveaxis(keep, kind.axis, -1)
    mask = np.zeros(scores.shape, np.uint8)
    for row in np.ndindex(scores.shape[:-1]):
        for start in range(0, scores.shape[-1], kind.m):
            group = slice(start, start + kind.m)
            order = best_first(scores[row][group])
            order = sorted(order, key=lambda i, kept=keep[row][group]: kept[i] == 0)
            mask[row][group][order[: kind.n]] = 1
    return np.moveaxis(mask, -1, kind.axis)


def expected_drop_and_grow(mask, drop, grow, fraction, kind):
    if isinstance(kind, NByM):
        active = np.flatnonzero(mask)
        kept = active[best_first(drop.ravel()[active])][: helpers.num_kept(active.size, fraction)]
        keep = np.isin(np.arange(mask.size), kept).reshape(mask.shape)
        return expected_groups(grow, kind, keep)
    units = unit_of_entry(mask.shape, kind)
    on = pooled(mask, units, kind) > 0
    active = np.flatnonzero(on)
    kept = active[best_first(pooled(drop, units, kind)[active])][
        : helpers.num_kept(active.size, fraction)
    ]
    others = np.setdiff1d(np.arange(on.size), kept)
    grown = others[best_first(pooled(grow, units, kind)[others])][: active.size - kept.size]
    return np.isin(units, [*kept, *grown]).astype(np.uint8)


def by_slice(oracle, batch_axes, arrays, *more):
    shape = arrays[0].shape
    result = np.empty(shape, np.uint8)
    for place in np.ndindex(shape[:batch_axes]):
        result[place] = oracle(*(array[place] for array in arrays), *more)
    return result


def draw(shape, seed=0):
    """Scores with exact sums and a few ties."""
    return np.random.default_rng(seed).integers(-4000, 4000, shape).astype(np.float32) / 8
