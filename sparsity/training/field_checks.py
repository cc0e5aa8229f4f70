"""Checks of the fields of an updater."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import check_bool, check_function, check_int
from sparsity.core.names import suggest
from sparsity.core.trees import PyTree
from sparsity.masks import find_missing_scope_method
from sparsity.patterns import SparsityType
from sparsity.sparsity_schedules import check_schedule
from sparsity.training.inner import check_static_counts
from sparsity.training.overrides import KeepsCount
from sparsity.training.updater_hooks import UpdaterHooks


def check_names(cls: type, names: Iterable[str]) -> None:
    """Raises a TypeError for a name that is no field of the class, and suggests the nearest."""
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # a custom __init__, which checks its arguments
    for name in names:
        if name not in parameters:
            hint = suggest("use_packed_masks" if name == "is_packed" else name, list(parameters))
            raise TypeError(f"{cls.__name__} has no argument {name!r}. {hint}")


def check_common_fields(updater: UpdaterHooks) -> None:
    """Raises a ValueError that names an invalid field of `UpdaterHooks` and its value."""
    pattern, scope, seed = updater.sparsity_type, updater.scope, updater.rng_seed
    seed_dtype: PyTree = getattr(seed, "dtype", None)
    distribution, name = updater.sparsity_distribution_fn, type(updater).__name__
    is_array = isinstance(seed, jax.Array | np.ndarray)
    kinds = jax.dtypes.prng_key, np.integer
    for field, is_valid, expected in [
        (
            "sparsity_type",
            isinstance(pattern, SparsityType) or _is_function(pattern),
            "a pattern such as NByM(2, 4), or a function of (path, param)",
        ),
        (
            "sparsity_distribution_fn",
            distribution is None or _is_function(distribution),
            "a function of params or None, for example Uniform(0.8)",
        ),
        (
            "scope",
            not isinstance(scope, type) and find_missing_scope_method(scope) is None,
            "a scope such as Layerwise(), Global() or Coupled(graph)",
        ),
        (
            "rng_seed",
            not is_array or any(jnp.issubdtype(seed_dtype, kind) for kind in kinds),
            "an integer or a random key",
        ),
        (
            "keeps_count",
            updater.keeps_count in get_args(KeepsCount),
            f"one of {get_args(KeepsCount)}",
        ),
    ]:
        if not is_valid:
            value = getattr(updater, field)
            raise ValueError(f"{name}.{field} must be {expected}, got {field} = {value!r}.")
    if not is_array:
        check_int("rng_seed", seed)
    check_schedule(updater.scheduler)
    check_function("topk_fn", updater.topk_fn, "(scores, sparsity)", optional=True)
    for field in ("skip_gradients", "is_sparse_gradients", "use_packed_masks", "use_compact_state"):
        check_bool(field, getattr(updater, field))
    if updater.is_sparse_updates is not None:
        check_bool("is_sparse_updates", updater.is_sparse_updates)
    if not callable(updater.batch_axes):
        check_int("batch_axes", updater.batch_axes, 0)
    scope.check(pattern, updater.batch_axes, updater.topk_fn)
    if updater.use_compact_state:
        check_static_counts(updater, has_masks=True)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)
