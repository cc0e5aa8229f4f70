"""How sparse each parameter becomes: functions from a parameter tree to a tree of sparsities.

A distribution is any function of the parameters (arrays, or anything with `shape`, `ndim` and
`dtype`) that returns a tree of sparsities in [0, 1] with `None` for the leaves that stay dense.
`functools.partial(uniform, sparsity=0.8)` is the usual one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax

from sparsity.core import trees
from sparsity.sparsity_types import check_fraction, check_number

FilterFn = Callable[[tuple[str, ...], chex.Array], bool]
Overrides = Mapping[trees.Key, float | None]
BatchAxes = int | Callable[[tuple[str, ...], chex.Array], int]


def uniform(
    params: chex.ArrayTree,
    sparsity: float | None = None,
    filter_fn: FilterFn | None = None,
    custom_sparsity_map: Overrides | None = None,
    batch_axes: BatchAxes = 0,
) -> chex.ArrayTree:
    """Gives every selected parameter the same sparsity.

    Args:
      params: a parameter tree, or a single array.
      sparsity: fraction of the weights to remove, in [0, 1]; `None` keeps all of them dense.
      filter_fn: `filter_fn(path, param) -> bool` selects parameters; `path` is a tuple of strings.
        By default those with more than one axis beyond `batch_axes`. Leaves that are not floating
        or complex are never selected.
      custom_sparsity_map: sparsities (or `None`) for single parameters, selected by the filter or
        not. A key is a path as a tuple, the path joined by '/', a regular expression that matches
        the whole joined path, or a compiled pattern, which is searched in it.
      batch_axes: number of leading axes that index separate matrices (scanned layers, experts), or
        a function of (path, param).

    Returns:
      A tree like `params` of floats, `None` where a parameter stays dense.

    Raises:
      ValueError: a sparsity lies outside [0, 1], or an override matches no parameter.

    Example:
      >>> import numpy as np
      >>> params = {"kernel": np.ones((4, 8)), "bias": np.ones(8)}
      >>> uniform(params, 0.5)
      {'bias': None, 'kernel': 0.5}
    """
    selected, custom = _select(params, sparsity, filter_fn, custom_sparsity_map, batch_axes)
    sparsities = dict.fromkeys(selected, sparsity) | custom
    return trees.map_matched(lambda path, _: sparsities.get(path), params)


def erk(
    params: chex.ArrayTree,
    sparsity: float | None = None,
    filter_fn: FilterFn | None = None,
    custom_sparsity_map: Overrides | None = None,
    erk_power_scale: float = 1.0,
    batch_axes: BatchAxes = 0,
) -> chex.ArrayTree:
    """Gives small layers more density than large ones: the Erdos-Renyi-Kernel distribution.

    The density of a parameter of shape `s` is `eps * (sum(s) / prod(s)) ** erk_power_scale`, with
    one `eps` for all, such that as many weights are kept as `uniform` would keep. Parameters whose
    density would exceed 1 are dense, and the others share what remains. Parameters with an override
    take no part in this.

    Args:
      params: a parameter tree, or a single array.
      sparsity: fraction of all selected weights to remove, in [0, 1]; `None` keeps them dense.
      filter_fn: as in `uniform`.
      custom_sparsity_map: as in `uniform`.
      erk_power_scale: below 1 the distribution is closer to the uniform one; 0 is uniform.
      batch_axes: as in `uniform`; a stack of layers counts by the shape of one of them.

    Returns:
      A tree like `params` of floats, `None` where a parameter stays dense.

    Raises:
      ValueError: as in `uniform`, or `erk_power_scale` is not a finite number >= 0.

    Source: Evci et al. 2020, "Rigging the Lottery", section 3.

    Example:
      >>> import numpy as np
      >>> erk({"a": np.ones((10, 10)), "b": np.ones((50, 50))}, 0.5)
      {'a': 0.0, 'b': 0.52}
    """
    check_number("erk_power_scale", erk_power_scale, 0)
    if isinstance(sparsity, jax.core.Tracer):
        raise ValueError("erk decides which layers stay dense: sparsity must not be traced.")
    selected, sparsities = _select(params, sparsity, filter_fn, custom_sparsity_map, batch_axes)
    if sparsity is not None:
        sizes = {path: param.size for path, (param, _) in selected.items()}
        raw = {
            path: (sum(shape) / math.prod(shape)) ** erk_power_scale
            for path, (param, axes) in selected.items()
            if math.prod(shape := param.shape[axes:] or (1,)) and param.size
        }
        densities = _scale_to_total(raw, sizes, (1.0 - sparsity) * sum(sizes.values()))
        sparsities |= {path: 1.0 - densities.get(path, 1.0) for path in selected}
    return trees.map_matched(lambda path, _: sparsities.get(path), params)


def _scale_to_total(
    raw: dict[trees.KeyPath, float], sizes: dict[trees.KeyPath, int], budget: float
) -> dict[trees.KeyPath, float]:
    """Densities `min(1, eps * raw)` that keep `budget` weights in total."""
    densities: dict[trees.KeyPath, float] = {}
    open_paths = sorted(raw, key=lambda path: raw[path])
    weighted = math.fsum(raw[path] * sizes[path] for path in open_paths)
    while open_paths:
        eps = budget / weighted
        densest = open_paths[-1]
        if eps * raw[densest] < 1.0 - 1e-12:  # dense up to rounding is dense
            break
        densities[open_paths.pop()] = 1.0
        budget -= sizes[densest]
        weighted = math.fsum(raw[path] * sizes[path] for path in open_paths)
    return densities | {path: eps * raw[path] for path in open_paths}


def _select(
    params: chex.ArrayTree,
    sparsity: float | None,
    filter_fn: FilterFn | None,
    custom_sparsity_map: Overrides | None,
    batch_axes: BatchAxes,
) -> tuple[dict[trees.KeyPath, tuple[Any, int]], dict[trees.KeyPath, float | None]]:
    """Returns the filtered parameters with their batch axes, and the overrides, both by path."""
    if sparsity is not None:
        check_fraction("sparsity", sparsity)
    if filter_fn is not None and not callable(filter_fn):
        raise ValueError(f"filter_fn must be a function of (path, param), got {filter_fn!r}.")
    overrides = {} if custom_sparsity_map is None else custom_sparsity_map
    if not isinstance(overrides, Mapping):
        raise ValueError(f"custom_sparsity_map must be a dict {{path: sparsity}}, got {overrides}.")
    prunable = {
        path: leaf for path, leaf in trees.leaves_by_path(params).items() if trees.is_prunable(leaf)
    }
    selected: dict[trees.KeyPath, tuple[Any, int]] = {}
    custom: dict[trees.KeyPath, float | None] = {}
    names = {path: trees.path_string(path) for path in prunable}
    for key, value in overrides.items():
        if prunable and not any(trees.matches(key, text) for text in names.values()):
            raise ValueError(
                f"custom_sparsity_map[{key!r}] matches no parameter. "
                f"{trees.nearest(key, names.values(), 'parameters')}"
            )
        if value is not None:
            check_fraction(f"custom_sparsity_map[{key!r}]", value)
    for path, param in prunable.items():
        name = trees.path_names(path)
        axes = slice_axes(batch_axes, name, param)
        own = trees.best_key(overrides, names[path])
        if own is not None:
            custom[path] = overrides[own]
            continue
        if filter_fn(name, param) if filter_fn else param.ndim - axes > 1:
            selected[path] = (param, axes)
    removes = sparsity is not None and (isinstance(sparsity, jax.core.Tracer) or sparsity > 0)
    if filter_fn and prunable and removes and not selected and not custom:
        raise ValueError(
            f"filter_fn selects no parameter, so sparsity = {sparsity} has nothing to remove. It is"
            " called as filter_fn(path, param), path a tuple of strings; there are "
            f"{[trees.path_string(path) for path in prunable]}."
        )
    return selected, custom


def slice_axes(batch_axes: BatchAxes, name: tuple[str, ...], param: chex.Array) -> int:
    """How many leading axes of a parameter index separate matrices."""
    axes = batch_axes(name, param) if callable(batch_axes) else batch_axes
    if axes < 0 or (callable(batch_axes) and axes > param.ndim):
        raise ValueError(
            f"batch_axes must lie between 0 and the number of axes, got {axes} for "
            f"{'/'.join(name)!r} of shape {param.shape}."
        )
    return min(axes, param.ndim)  # one number for all: a bias has fewer axes
