"""Target sparsities: a distribution is called, and its sparsities are checked against patterns."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import chex
import jax
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import check_fraction, is_traced
from sparsity.core.trees import Params, PyTree, Sparsities
from sparsity.masks.distributions import erk, uniform
from sparsity.masks.scopes import Scope, TreeScope
from sparsity.masks.sites import BatchAxes, Overrides, Site, Sites
from sparsity.patterns import SparsityType
from sparsity.patterns.counts import ROUNDING, read_final_sparsity

DistributionFn: TypeAlias = Callable[..., PyTree]  # `masks.distributions.Distribution`

_log = logging.getLogger(__name__)


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

    def check(
        key_path: trees.KeyPath, param: PyTree, target: chex.Numeric | None
    ) -> chex.Numeric | None:
        if target is None or not trees.is_prunable(param):
            return None
        name = trees.path_string(key_path)
        check_fraction(f"the sparsity of {name!r}", target)
        if sites.stays_dense(key_path):
            return None
        site = sites[key_path]
        if not site.has_override:
            try:
                scope.check(site.pattern, site.batch_axes, None)
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
        if not is_traced(target):
            _check_final(site.pattern, float(target), name)
        return target

    sparsities = call_distribution(distribution_fn, params, batch_axes, sites, scope)
    role = "sparsities that sparsity_distribution_fn returns"
    targets = trees.map_matched(check, params, sparsities, others_role=role)
    if not jax.tree.leaves(targets) and (paths := _list_positive(sparsities)):
        raise ValueError(
            f"sparsity_distribution_fn gives a sparsity to {trees.listed(paths)} alone, and all "
            "stay dense: sparsity_type is None there, or they are no floating or complex arrays. "
            "Give a pattern, or a sparsity to other parameters."
        )
    return targets


def _list_positive(sparsities: Sparsities) -> list[str]:
    """Returns the names of the parameters whose sparsity is above 0, or may be."""
    leaves = trees.leaves_by_path(sparsities).items()
    return [trees.path_string(path) for path, x in leaves if is_traced(x) or np.any(x > 0)]


def _check_final(pattern: SparsityType, target: float, name: str) -> None:
    """Logs a target that a pattern cannot reach.

    Raises:
      ValueError: the sparsity of the pattern is no number in [0, 1], beyond rounding.
    """
    final = read_final_sparsity(pattern, target, name)
    if final is None or math.isclose(target, final, abs_tol=ROUNDING):
        return
    message = "%s ends at sparsity %g, not at the target %g of %r."
    _log.warning(message, pattern, final, target, name)


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
