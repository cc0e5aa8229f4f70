"""Selection by numpy, for concrete arrays on one CPU: nothing compiles for a new shape."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from sparsity.core.checks import is_traced
from sparsity.selection.candidates import Candidates
from sparsity.selection.keys import to_keys

_MAX_SLICES = 4096  # of all parameters; more are searched by a compiled program


def is_on_host(all_candidates: Sequence[Candidates]) -> bool:
    """Returns whether concrete arrays of one CPU hold the scores, in few slices."""
    arrays = jax.tree.leaves(all_candidates)
    if any(map(is_traced, arrays)) or not jax.sharding.get_abstract_mesh().empty:
        return False
    devices = {device for x in arrays for device in x.devices()}
    is_here = all(x.is_fully_addressable for x in arrays)
    is_few = sum(x.num_slices for x in all_candidates) <= _MAX_SLICES
    return is_few and is_here and len(devices) == 1 and next(iter(devices)).platform == "cpu"


def select_on_host(
    all_candidates: Sequence[Candidates], k: Sequence[int], *, together: bool
) -> list[np.ndarray]:
    """Returns the masks of `search.select` as arrays of numpy; `k` are plain numbers."""
    keys, where = list[np.ndarray](), list[np.ndarray]()
    for x in all_candidates:
        shape = x.num_slices, x.slice_size
        with np.errstate(invalid="ignore"):  # comparisons of NaN
            keys.append(to_keys(np.asarray(x.scores)).reshape(shape))
        where.append(np.ones(shape, bool) if x.where is None else np.asarray(x.where) != 0)
    masks: Sequence[object]
    if together:
        joined = (np.concatenate([x.reshape(-1) for x in arrays]) for arrays in (keys, where))
        masks = np.split(_mask_best(k[0], *joined), np.cumsum([x.size for x in keys])[:-1])
    else:
        counts = iter(k)
        slices = [zip(x, w.reshape(x.shape), strict=True) for x, w in zip(keys, where, strict=True)]
        masks = [[_mask_best(next(counts), *row) for row in rows] for rows in slices]
    pairs = zip(all_candidates, masks, strict=True)
    return [np.asarray(mask, np.uint8).reshape(x.shape) for x, mask in pairs]


def _mask_best(k: int, keys: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Returns uint8[n] with ones at the k highest keys[n] where[n] is True, the first of ties."""
    places = np.flatnonzero(where)
    keys, k = keys[places], min(k, len(places))
    kept = np.zeros(len(keys), bool)
    if k:
        threshold = np.partition(keys, len(keys) - k)[len(keys) - k]
        kept = keys > threshold
        kept[np.flatnonzero(keys == threshold)[: k - np.count_nonzero(kept)]] = True
    mask = np.zeros(len(where), np.uint8)
    mask[places[kept]] = 1
    return mask
