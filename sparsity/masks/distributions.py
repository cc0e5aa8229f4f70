"""Distributions: functions from a parameter tree to a tree of sparsities.

A distribution is any function of the parameters (arrays, or objects with `shape`, `ndim` and
`dtype`) that returns a tree of sparsities in [0, 1] with `None` for the parameters that stay dense.
`Uniform(0.8)` and `ERK(0.8)` are such functions as frozen objects; `uniform` and `erk` are plain
functions, for `functools.partial(uniform, sparsity=0.8)`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, TypeAlias

import chex
import jax
import numpy as np

from sparsity.core import checks, names, trees
from sparsity.core.names import Registry
from sparsity.core.trees import Params, PyTree, Sparsities
from sparsity.masks.scopes import Scope, TreeScope, has_statement
from sparsity.masks.sites import BatchAxes, Overrides, Site, Sites, leading_axes
from sparsity.patterns import Unstructured
from sparsity.patterns.base import ROUNDING, entry_counter, read_final_sparsity
from sparsity.selection import lowest_sparsity, num_kept

DistributionFn: TypeAlias = Callable[..., PyTree]  # `masks.distributions.Distribution`
_log = logging.getLogger(__name__)

FilterFn: TypeAlias = Callable[[tuple[str, ...], jax.Array], bool]
# Selected parameters: {key path: (parameter, batch axes)}
Candidates: TypeAlias = dict[trees.KeyPath, tuple[PyTree, int]]


class Distribution(Protocol):
    """Interface of `sparsity_distribution_fn`.

    A distribution may name three more parameters, which the updater passes: `batch_axes`, `sites`
    (the table of patterns) and `scope`. A global scope ranks the parameters that an attribute
    `custom_sparsity_map` names apart from the others. `Coupled` leaves channels of parameters
    without a sparsity whole, unless an attribute `filter_fn` is `None`: then the distribution
    leaves parameters out by default. A subclass of `sparsity.masks.MaskBudget` gives the cost of a
    weight: a global scope then ranks by score per cost, within the budget.

    Example:
      >>> def half(params):
      ...     return jax.tree.map(lambda param: 0.5, params)
      >>> distribution: Distribution = half
      >>> distribution({"kernel": 1.0})
      {'kernel': 0.5}
    """

    def __call__(self, params: Params, /) -> Sparsities:
        """Returns a tree of sparsities in [0, 1], `None` for parameters that stay dense."""


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Gives every selected parameter the same sparsity.

    Attributes:
      sparsity: fraction of the weights to remove, in [0, 1]; `None` keeps all of them dense.
      filter_fn: `filter_fn(path, param) -> bool` selects parameters; `path` is a tuple of strings.
        By default parameters with more than one axis beyond the batch axes. Only floating and
        complex parameters are ever selected.
      custom_sparsity_map: sparsities (or `None`) for single parameters, selected by the filter or
        not. A key is a path as a tuple, which matches no other parameter; the path joined by '/'
        or a regular expression that matches the whole joined path, and any text is read as both; or
        a compiled pattern, which is searched in it. Under `Coupled`, `None` keeps all channels of
        a parameter, and 0.0 lets them go with those of others.
      batch_axes: number of leading axes that index separate matrices (scanned layers, experts), or
        a function of (path, param); `None` means the `batch_axes` of the updater, or 0 without one.
      entries: the number of entries that all masks together may keep, in place of `sparsity`: as
        many as float32 sparsities reach, never more. Masks of the overrides count, too.

    Example:
      >>> import numpy as np
      >>> params = {"kernel": np.ones((4, 8)), "bias": np.ones(8)}
      >>> Uniform(0.5)(params)
      {'bias': None, 'kernel': 0.5}
      >>> round(32 * (1 - Uniform(entries=8)(params)["kernel"]))
      8
    """

    sparsity: chex.Numeric | None = None
    filter_fn: FilterFn | None = None
    custom_sparsity_map: Overrides | None = None
    batch_axes: BatchAxes | None = None
    entries: int | None = dataclasses.field(default=None, kw_only=True)

    # Keys of a configuration, and the fields that they set.
    config_keys: ClassVar[Mapping[str, str]] = {
        "sparsity": "sparsity",
        "filter_fn": "filter_fn",
        "custom_sparsity_map": "custom_sparsity_map",
    }

    def __post_init__(self) -> None:
        if self.sparsity is not None:
            checks.check_fraction("sparsity", self.sparsity)
        if self.entries is not None:
            checks.check_int("entries", self.entries, 1)
            if self.sparsity is not None:
                raise ValueError(
                    f"Give one of sparsity and entries, got sparsity = {self.sparsity} and entries "
                    f"= {self.entries}."
                )
        checks.check_function("filter_fn", self.filter_fn, "(path, param)", optional=True)
        overrides, kind = self.custom_sparsity_map, Mapping | None
        checks.check_kind("custom_sparsity_map", overrides, kind, "a dict {path: sparsity}")
        for key, value in (overrides or {}).items():
            if value is not None:
                checks.check_fractions(f"custom_sparsity_map[{key!r}]", value)

    def __call__(
        self,
        params: Params,
        batch_axes: BatchAxes = 0,
        sites: Sites | None = None,
        scope: object = None,
    ) -> Sparsities:
        """Returns a tree like `params` of sparsities, `None` where a parameter stays dense.

        Args:
          params: a parameter tree, or a single array.
          batch_axes: `batch_axes` of the updater; the field takes precedence.
          sites: the sites of the updater, with patterns; by default entries are removed one by one.
          scope: the scope of the updater, for `entries`.

        Raises:
          ValueError: an override matches no parameter, nothing is selected for a sparsity, or the
            sparsest masks keep more than `entries`.
        """
        if self.entries is not None:
            return self._spread_entries(params, batch_axes, sites, scope)
        selected, custom = self._filter_params(params, batch_axes, sites)
        sparsities = self._share(selected) | custom
        return trees.map_matched(lambda key_path, _: sparsities.get(key_path), params)

    def _spread_entries(
        self, params: Params, batch_axes: BatchAxes, sites: Sites | None, scope: object
    ) -> PyTree:
        """Returns the lowest sparsities whose masks keep no more than `entries`."""
        keeps_total = has_statement(scope, "keeps_total")
        if not (scope is None or keeps_total or has_statement(scope, "keeps_targets")):
            raise ValueError(
                f"entries = {self.entries} counts under Layerwise() and Global(), but not under "
                f"scope = {scope!r}. Give a sparsity, or sparsity.budget(graph, nbytes=). A scope "
                "of your own states the class attribute `keeps_targets = True` or "
                "`keeps_total = True`."
            )
        self._filter_params(params, batch_axes, sites)  # raises an error for an empty selection
        sites = sites or Sites(params, Unstructured(), batch_axes)
        arrays = trees.leaves_by_path(params)
        count_kept = kept_counter(params, sites)

        def spread(sparsity: float) -> PyTree:
            distribution = dataclasses.replace(self, sparsity=sparsity, entries=None)
            return distribution(params, batch_axes, sites)

        def count(sparsity: float) -> int:
            targets = spread(sparsity)
            kept = count_kept(targets)
            leaves = trees.leaves_by_path(targets)
            ranked = [x for x in leaves if not sites[x].has_override]
            shares = {float(np.float32(leaves[x])) for x in ranked}
            if keeps_total and len(shares) == 1:  # parameters of one share count as one parameter
                total = num_kept(sum(math.prod(arrays[x].shape) for x in ranked), *shares)
                return total + sum(n for x, n in kept.items() if x not in ranked)
            return sum(kept.values())

        if (fewest := count(1.0)) > int(self.entries or 0):
            raise ValueError(
                f"entries = {self.entries} is less than the {fewest} entries that the sparsest "
                "masks keep, one unit or more in each matrix. Allow more, or select fewer "
                "parameters with filter_fn."
            )
        return spread(lowest_sparsity(lambda sparsity: count(sparsity) <= int(self.entries or 0)))

    def _share(self, selected: Candidates) -> dict[trees.KeyPath, chex.Numeric | None]:
        """Returns the sparsities of the selected parameters, by key path."""
        return dict.fromkeys(selected, self.sparsity)

    def _filter_params(
        self, params: Params, batch_axes: BatchAxes, sites: Sites | None
    ) -> tuple[Candidates, dict[trees.KeyPath, float | None]]:
        """Returns the filtered parameters with their batch axes, and the overrides, by path."""
        batch_axes = batch_axes if self.batch_axes is None else self.batch_axes
        overrides: dict[names.Key, float | None] = dict((self.custom_sparsity_map or {}).items())
        leaves = trees.leaves_by_path(params)
        prunable = {x: leaf for x, leaf in leaves.items() if trees.is_prunable(leaf)}
        labels = {key_path: trees.path_string(key_path) for key_path in prunable}
        for key in overrides:
            if prunable and not any(names.matches(key, label) for label in labels.values()):
                raise ValueError(
                    f"custom_sparsity_map[{key!r}] matches no parameter. "
                    f"{names.explain_syntax(key)}"
                    f"{names.suggest(key, labels.values(), cutoff=0)}"
                )
        excluded = [x for x in prunable if sites is not None and x in sites.excluded]
        custom: dict[trees.KeyPath, float | None] = dict.fromkeys(excluded)
        selected: Candidates = {}
        for key_path, param in prunable.items():
            override = names.best_key(overrides, labels[key_path])
            if override is not None:
                custom.setdefault(key_path, overrides[override])
            elif key_path not in custom:
                path = trees.path_names(key_path)
                axes = leading_axes(batch_axes, path, param)
                is_chosen = self.filter_fn(path, param) if self.filter_fn else param.ndim - axes > 1
                if is_chosen and not (sites is not None and sites.stays_dense(key_path)):
                    selected[key_path] = (param, axes)
        target = self.sparsity if self.entries is None else self.entries
        is_pruning = target is not None and (checks.is_traced(target) or target > 0)
        is_dense = not selected and all(target is None for target in custom.values())
        # Of excluded parameters a warning says why they stay dense.
        if is_pruning and is_dense and not excluded and any(map(trees.is_array, leaves.values())):
            amount = f"entries = {self.entries}" if self.entries else f"sparsity = {self.sparsity}"
            raise ValueError(
                f"{amount} has nothing to remove from the floating or complex parameters, which "
                f"are {trees.listed([*labels.values()])}. Select some with filter_fn(path, param), "
                "path a tuple of strings, or with custom_sparsity_map, and give them a pattern; a "
                "wrapper that flattens parameters belongs inside wrap_optax."
            )
        return selected, custom


@dataclasses.dataclass(frozen=True)
class ERK(Uniform):
    """Gives small layers more density than large ones: the Erdos-Renyi-Kernel distribution.

    The density of a parameter of shape `s` is `eps * (sum(s) / prod(s)) ** power_scale`, with one
    `eps` for all, such that as many weights are kept as by `Uniform`. Parameters whose density
    would exceed 1 are dense; the others share the remaining weights. Parameters with an override
    are excluded. A stack of layers counts by the shape of one layer.

    Attributes:
      power_scale: exponent; smaller values are closer to the uniform distribution, 0 is uniform.

    Source: Evci et al. 2020, "Rigging the Lottery", section 3.

    Example:
      >>> import numpy as np
      >>> ERK(0.5, power_scale=1.0)({"a": np.ones((10, 10)), "b": np.ones((50, 50))})
      {'a': 0.0, 'b': 0.52}
    """

    power_scale: float = 1.0

    config_keys: ClassVar[Mapping[str, str]] = {
        **Uniform.config_keys,
        "erk_power_scale": "power_scale",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_number("erk_power_scale", self.power_scale, 0)
        if checks.is_traced(self.sparsity):
            raise ValueError("erk decides which layers stay dense: sparsity must not be traced.")

    def _share(self, selected: Candidates) -> dict[trees.KeyPath, chex.Numeric | None]:
        if self.sparsity is None:
            return {}
        sizes = {key_path: param.size for key_path, (param, _) in selected.items()}
        raw: dict[trees.KeyPath, float] = {}
        try:
            for key_path, (param, axes) in selected.items():
                if param.size:
                    shape = param.shape[axes:] or (1,)
                    raw[key_path] = (sum(shape) / math.prod(shape)) ** self.power_scale
            densities = _scale_to_total(raw, sizes, (1.0 - self.sparsity) * sum(sizes.values()))
        except (OverflowError, ZeroDivisionError):
            raise ValueError(
                f"erk_power_scale = {self.power_scale} is too large: densities of these shapes "
                "leave the range of floats. 1 is the exponent of the source."
            ) from None
        return {key_path: 1.0 - densities.get(key_path, 1.0) for key_path in selected}


def kept_counter(params: Params, sites: Sites) -> Callable[[Sparsities], dict[trees.KeyPath, int]]:
    """Returns a function from sparsities to the largest numbers of entries that masks keep."""
    arrays = trees.leaves_by_path(params)

    @functools.cache
    def count(key_path: trees.KeyPath) -> Callable[[float], int]:
        site = sites[key_path]
        return entry_counter(site.pattern, arrays[key_path].shape, site.batch_axes, site.name)

    return lambda targets: {
        key_path: count(key_path)(float(x)) for key_path, x in trees.leaves_by_path(targets).items()
    }


def uniform(
    params: Params,
    sparsity: chex.Numeric | None = None,
    filter_fn: FilterFn | None = None,
    custom_sparsity_map: Overrides | None = None,
    batch_axes: BatchAxes | None = None,
    sites: Sites | None = None,
) -> Sparsities:
    """Gives every selected parameter the same sparsity: `Uniform` as a function.

    Args:
      params: a parameter tree, or a single array.
      sparsity: fraction of the weights to remove, in [0, 1]; `None` keeps all of them dense.
      filter_fn: as in `Uniform`.
      custom_sparsity_map: as in `Uniform`.
      batch_axes: as in `Uniform`.
      sites: as in `Uniform.__call__`.

    Returns:
      A tree like `params` of floats, `None` where a parameter stays dense.

    Raises:
      ValueError: a sparsity lies outside [0, 1], an override matches no parameter, or nothing is
        selected.

    Example:
      >>> import numpy as np
      >>> params = {"kernel": np.ones((4, 8)), "bias": np.ones(8)}
      >>> uniform(params, 0.5)
      {'bias': None, 'kernel': 0.5}
    """
    distribution = Uniform(sparsity, filter_fn, custom_sparsity_map, batch_axes)
    return distribution(params, sites=sites)


def erk(
    params: Params,
    sparsity: chex.Numeric | None = None,
    filter_fn: FilterFn | None = None,
    custom_sparsity_map: Overrides | None = None,
    erk_power_scale: float = 1.0,
    batch_axes: BatchAxes | None = None,
    sites: Sites | None = None,
) -> Sparsities:
    """Gives small layers more density than large ones: `ERK` as a function.

    Args:
      params: a parameter tree, or a single array.
      sparsity: fraction of all selected weights to remove, in [0, 1]; `None` keeps them dense.
      filter_fn: as in `Uniform`.
      custom_sparsity_map: as in `Uniform`.
      erk_power_scale: `power_scale` of `ERK`.
      batch_axes: as in `Uniform`.
      sites: as in `Uniform.__call__`.

    Returns:
      A tree like `params` of floats, `None` where a parameter stays dense.

    Raises:
      ValueError: as in `uniform`, or `erk_power_scale` is not a finite number >= 0.

    Example:
      >>> import numpy as np
      >>> erk({"a": np.ones((10, 10)), "b": np.ones((50, 50))}, 0.5)
      {'a': 0.0, 'b': 0.52}
    """
    distribution = ERK(
        sparsity, filter_fn, custom_sparsity_map, batch_axes, power_scale=erk_power_scale
    )
    return distribution(params, sites=sites)


DISTRIBUTIONS: Registry[Callable[..., Distribution]] = Registry(
    "dist_type", {"uniform": Uniform, "erk": ERK}
)


def _scale_to_total(
    raw: dict[trees.KeyPath, float], sizes: dict[trees.KeyPath, int], budget: float
) -> dict[trees.KeyPath, float]:
    """Returns the densities `min(1, eps * raw)` that keep `budget` weights in total."""
    densities: dict[trees.KeyPath, float] = {}
    open_paths = sorted(raw, key=lambda key_path: raw[key_path])
    weighted = math.fsum(raw[key_path] * sizes[key_path] for key_path in open_paths)
    while open_paths:
        eps = budget / weighted
        densest = open_paths[-1]
        if eps * raw[densest] < 1.0 - 1e-12:  # dense up to rounding is dense
            break
        densities[open_paths.pop()] = 1.0
        budget -= sizes[densest]
        weighted = math.fsum(raw[key_path] * sizes[key_path] for key_path in open_paths)
    return densities | {key_path: eps * raw[key_path] for key_path in open_paths}


def compute_targets(
    distribution_fn: DistributionFn | None,
    params: Params,
    sites: Sites,
    scope: Scope | TreeScope,
    batch_axes: BatchAxes = 0,
) -> Sparsities:
    """Returns the checked sparsities of a distribution, `None` for parameters that stay dense.

    Logs targets that the pattern of their parameter cannot reach.

    Raises:
      ValueError: a sparsity lies outside [0, 1], or a pattern does not fit its parameter or
        the scope.
    """
    if distribution_fn is None:
        return None

    def check(key_path: trees.KeyPath, param: PyTree, target: PyTree) -> chex.Numeric | None:
        if target is None or not trees.is_prunable(param):
            return None
        name = trees.path_string(key_path)
        checks.check_fractions(f"the sparsity of {name!r}", target)
        if sites.stays_dense(key_path):
            return None
        site = sites[key_path]
        if not site.has_override:
            try:
                scope.check(site.pattern, site.batch_axes, None)
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
        if np.ndim(target) and np.shape(target) != param.shape[: np.ndim(target)]:
            raise ValueError(
                f"The sparsities of {name!r}, of shape {np.shape(target)}, must be one number, or "
                f"one for each slice along the first axes of {param.shape}."
            )
        if checks.is_traced(target) or np.ndim(target):
            return target
        final = read_final_sparsity(site.pattern, float(target), name)
        if final is not None and not math.isclose(target, final, abs_tol=ROUNDING):
            message = "%s ends at sparsity %g, not at the target %g of %r."
            _log.warning(message, site.pattern, final, target, name)
        return target

    sparsities = call_distribution(distribution_fn, params, batch_axes, sites, scope)
    role = "sparsities that sparsity_distribution_fn returns"
    targets = trees.map_matched(check, params, sparsities, others_role=role)
    all_sparsities = jax.tree.leaves(sparsities)
    is_pruning = any(checks.is_traced(x) or np.any(x > 0) for x in all_sparsities)
    if is_pruning and not jax.tree.leaves(targets):
        raise ValueError(
            "sparsity_distribution_fn gives sparsities to parameters that stay dense alone, which "
            "have no pattern, or are no floating or complex arrays. Give others a sparsity."
        )
    return targets


def call_distribution(
    distribution_fn: DistributionFn,
    params: Params,
    batch_axes: BatchAxes,
    sites: Sites,
    scope: Scope | TreeScope,
) -> Sparsities:
    """Calls a distribution with those of `batch_axes`, `sites` and `scope` that it names."""
    bound = distribution_fn.keywords if isinstance(distribution_fn, functools.partial) else {}
    try:
        named = set(inspect.signature(distribution_fn).parameters)
    except (TypeError, ValueError):  # a builtin
        named = set()
    offered = {"batch_axes": batch_axes, "sites": sites, "scope": scope}
    return distribution_fn(
        params, **{k: v for k, v in offered.items() if k in named and k not in bound}
    )


def read_overrides(distribution_fn: DistributionFn | None) -> Overrides | None:
    """Returns the overrides of a distribution or of a `functools.partial`."""
    if isinstance(distribution_fn, functools.partial):
        return distribution_fn.keywords.get("custom_sparsity_map")
    return getattr(distribution_fn, "custom_sparsity_map", None)


def has_user_filter(distribution_fn: DistributionFn | None) -> bool:
    """Returns whether a user, and no default filter, says which parameters have no sparsity."""
    fn, keywords = distribution_fn, dict[str, object]()
    if isinstance(distribution_fn, functools.partial):
        fn, keywords = distribution_fn.func, distribution_fn.keywords
    if fn is uniform or fn is erk:
        return keywords.get("filter_fn") is not None
    return getattr(fn, "filter_fn", fn) is not None


def check_user_mask(
    scope: Scope | TreeScope, sites: Mapping[trees.KeyPath, Site], key_path: trees.KeyPath
) -> None:
    """Raises a ValueError if a parameter has a mask but no target, and could get no later mask.

    Args:
      scope: scope that would create the next mask.
      sites: the sites of the parameters.
      key_path: path of the parameter in the tree.
    """
    name = trees.path_string(key_path)
    try:
        if key_path not in sites:
            raise ValueError(f"{name!r} is no array of floating-point numbers.")
        scope.check(sites[key_path].pattern, sites[key_path].batch_axes, None)
    except ValueError as error:
        raise ValueError(
            f"The masks of wrap_optax have one for {name!r}, which has no target sparsity, but no "
            f"other could be made for it later. Give None for it there, or fix this: {error}"
        ) from error
