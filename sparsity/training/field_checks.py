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
from sparsity.masks import SCOPES, find_missing_scope_method
from sparsity.patterns import SparsityType
from sparsity.sparsity_schedules import check_schedule
from sparsity.training.inner import check_static_counts
from sparsity.training.overrides import KeepsCount
from sparsity.training.updater_hooks import UpdaterHooks

RENAMED = {"is_packed": "use_packed_masks"}  # as a document of jaxpruner calls it


def check_names(cls: type, names: Iterable[str]) -> None:
    """Raises a TypeError for a name that is no field of the class, and suggests the nearest."""
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # a custom __init__, which checks its arguments
    fields = list(parameters)
    for name in names:
        if name in RENAMED:
            raise TypeError(
                f"{cls.__name__} has no argument {name}; masks are packed to bits with "
                f"{RENAMED[name]}=True."
            )
        if name not in fields:
            raise TypeError(f"{cls.__name__} has no argument {name!r}. {suggest(name, fields)}")


def check_common_fields(updater: UpdaterHooks) -> None:
    """Raises a ValueError that names an invalid field of `UpdaterHooks` and its value."""
    pattern = updater.sparsity_type
    if not isinstance(pattern, SparsityType) and not _is_function(pattern):
        raise ValueError(
            "sparsity_type must be Unstructured(), NByM(n, m), Block(shape), Channel(axis), "
            f"FanIn(group, axis) or a function of (path, param), got sparsity_type = {pattern!r}."
        )
    check_schedule(updater.scheduler)
    distribution = updater.sparsity_distribution_fn
    if distribution is not None and not _is_function(distribution):
        raise ValueError(
            "sparsity_distribution_fn must be a function of params or None, for example "
            f"Uniform(0.8), got sparsity_distribution_fn = {distribution!r}."
        )
    check_function("topk_fn", updater.topk_fn, "(scores, sparsity)", optional=True)
    _check_seed(updater.rng_seed)
    for name in ("skip_gradients", "is_sparse_gradients", "use_packed_masks", "use_compact_state"):
        check_bool(name, getattr(updater, name))
    if updater.is_sparse_updates is not None:
        check_bool("is_sparse_updates", updater.is_sparse_updates)
    if not callable(updater.batch_axes):
        check_int("batch_axes", updater.batch_axes, 0)
    scope = updater.scope
    method = "check" if isinstance(scope, type) else find_missing_scope_method(scope)
    if method is not None:
        raise ValueError(
            f"scope must be an object with a method {method}, for example "
            f"{', '.join(f'{cls.__name__}()' for cls in SCOPES.values())}; got scope = {scope!r}."
        )
    scope.check(pattern, updater.batch_axes, updater.topk_fn)
    if updater.keeps_count not in (values := get_args(KeepsCount)):
        name = f"{type(updater).__name__}.keeps_count"
        raise ValueError(f"{name} must be one of {values}, got {updater.keeps_count!r}.")
    if updater.use_compact_state:
        check_static_counts(updater, has_masks=True)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _check_seed(seed: object) -> None:
    """Raises a ValueError unless a seed is an integer, also in an array, or a random key."""
    if not isinstance(seed, jax.Array | np.ndarray):
        check_int("rng_seed", seed)
    elif not jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and not jnp.issubdtype(
        seed.dtype, np.integer
    ):
        raise ValueError(
            f"rng_seed must be an integer or a random key, got an array of {seed.dtype}: "
            f"rng_seed = {seed!r}."
        )
