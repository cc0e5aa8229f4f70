"""The registry of algorithms, and updaters from configurations."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from sparsity import algorithms, sparsity_distributions
from sparsity.base_updater import BaseUpdater, NoPruning
from sparsity.sparsity_schedules import NoUpdateSchedule, OneShotSchedule, PolynomialSchedule
from sparsity.sparsity_types import check_fraction, check_int, parse_sparsity_type

_log = logging.getLogger(__name__)

ALGORITHM_REGISTRY: dict[str, type[BaseUpdater]] = {
    "no_prune": NoPruning,
    "magnitude": algorithms.MagnitudePruning,
    "random": algorithms.RandomPruning,
    "saliency": algorithms.SaliencyPruning,
    "magnitude_ste": algorithms.SteMagnitudePruning,
    "random_ste": algorithms.SteRandomPruning,
    "global_magnitude": algorithms.GlobalMagnitudePruning,
    "global_saliency": algorithms.GlobalSaliencyPruning,
    "static_sparse": algorithms.StaticRandomSparse,
    "set": algorithms.SET,
    "rigl": algorithms.RigL,
}

_DISTRIBUTIONS: dict[str, Callable[..., Any]] = {
    "uniform": sparsity_distributions.uniform,
    "erk": sparsity_distributions.erk,
}
_SCHEDULE_KEYS = ("update_freq", "update_start_step", "update_end_step")
_DISTRIBUTION_KEYS = ("sparsity", "filter_fn", "custom_sparsity_map")


def all_algorithm_names() -> tuple[str, ...]:
    """Names that a configuration's `algorithm` may have.

    Example:
      >>> "rigl" in all_algorithm_names()
      True
    """
    return tuple(ALGORITHM_REGISTRY)


def register_algorithm(name: str, algorithm: type[BaseUpdater]) -> None:
    """Makes a class known to `create_updater_from_config` under `name`.

    Raises:
      ValueError: the name is taken by another class, or the class is no BaseUpdater.
    """
    if not (isinstance(algorithm, type) and issubclass(algorithm, BaseUpdater)):
        raise ValueError(f"algorithm must be a subclass of BaseUpdater, got {algorithm!r}.")
    if ALGORITHM_REGISTRY.get(name, algorithm) is not algorithm:
        raise ValueError(f"The name {name!r} is taken by {ALGORITHM_REGISTRY[name].__name__}.")
    ALGORITHM_REGISTRY[name] = algorithm


def create_updater_from_config(config: Any) -> BaseUpdater:
    """Makes an updater from a configuration, which is not changed.

    Args:
      config: an `ml_collections.ConfigDict` or `FrozenConfigDict`, or a dict, with the keys

        - `algorithm`: one of `all_algorithm_names()`.
        - `sparsity`: fraction of the weights to remove, in [0, 1].
        - `dist_type`: 'uniform' (default) or 'erk'; global pruners have no use for it.
        - `update_freq`, `update_start_step`, `update_end_step`: without a start, masks are never
          updated (`NoUpdateSchedule`); with start and end equal, once (`OneShotSchedule`); else by
          a `PolynomialSchedule`.
        - `sparsity_type`: a type, or 'nm_2,4', 'nm_2,4,-2', '2:4', 'block_4,4', 'channel_-1'.
        - `filter_fn`, `custom_sparsity_map`: as in `sparsity_distributions.uniform`. A ConfigDict
          takes regular expressions with dots as keys only with `allow_dotted_keys=True`.
        - `drop_fraction`: for SET and RigL, 0.3 by default; follows a cosine from there to zero at
          `update_end_step`, and is constant without one. Others have no use for it.
        - any other field of the algorithm's class. A key whose value is `None` counts as missing.

    Raises:
      ValueError: a key, a name or a value is not known; what is known is listed.

    Example:
      >>> create_updater_from_config({"algorithm": "magnitude", "sparsity": 0.8}).scheduler
      NoUpdateSchedule()
    """
    options = {key: value for key, value in _as_dict(config).items() if value is not None}
    name = options.pop("algorithm", None)
    if not isinstance(name, str) or name not in ALGORITHM_REGISTRY:
        raise ValueError(
            f"algorithm: {name!r} is not known. {_known(name, all_algorithm_names())} "
            "sparsity.all_algorithm_names() lists them, sparsity.register_algorithm() adds one."
        )
    algorithm = ALGORITHM_REGISTRY[name]
    fields = {field.name for field in dataclasses.fields(algorithm)}
    drops = "drop_fraction_fn" in fields
    known = fields | {"dist_type", *_SCHEDULE_KEYS, *_DISTRIBUTION_KEYS}
    known |= {"drop_fraction"}
    for key in options:
        if key not in known:
            raise ValueError(
                f"{key!r} is no key of a configuration for {name!r}. {_known(key, sorted(known))}"
            )
    dist_type = options.pop("dist_type", None)
    if dist_type not in (None, *_DISTRIBUTIONS):
        raise ValueError(
            f"dist_type: {dist_type!r} is not known. {_known(dist_type, _DISTRIBUTIONS)}"
        )
    if "sparsity" in options:
        check_fraction("sparsity", options["sparsity"])
    if isinstance(options.get("sparsity_type"), str):
        options["sparsity_type"] = parse_sparsity_type(options["sparsity_type"])
    schedule = {key: options.pop(key) for key in _SCHEDULE_KEYS if key in options}
    if schedule and "scheduler" in options:
        raise ValueError(f"{sorted(schedule)} cannot be given beside scheduler.")
    options.setdefault("scheduler", _scheduler(**schedule))
    if "drop_fraction" in options and "drop_fraction_fn" in options:
        raise ValueError("drop_fraction cannot be given beside drop_fraction_fn.")
    fraction = options.pop("drop_fraction", 0.3)
    check_fraction("drop_fraction", fraction)
    if drops and "drop_fraction_fn" not in options:
        end_step = schedule.get("update_end_step")
        options["drop_fraction_fn"] = (
            optax.cosine_decay_schedule(fraction, end_step)
            if end_step
            else optax.constant_schedule(fraction)
        )
    distribution = {key: options.pop(key) for key in _DISTRIBUTION_KEYS if key in options}
    if algorithm is NoPruning:
        return algorithm(**options)
    if "sparsity_distribution_fn" in options:
        if distribution or dist_type:
            given = sorted([*distribution, *(["dist_type"] if dist_type else [])])
            raise ValueError(f"{given} cannot be given beside sparsity_distribution_fn.")
        return algorithm(**options)
    if "sparsity" not in distribution:
        raise ValueError(f"sparsity is missing in the configuration of {name!r}.")
    if "sparsity" in fields:
        if dist_type == "erk":
            _log.warning("%s ranks all leaves together and has no use for dist_type 'erk'.", name)
        return algorithm(**options, **distribution)
    options["sparsity_distribution_fn"] = functools.partial(
        _DISTRIBUTIONS[dist_type or "uniform"],
        batch_axes=options.get("batch_axes", 0),
        **distribution,
    )
    return algorithm(**options)


def _as_dict(config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping) and not hasattr(config, "items"):
        raise ValueError(f"config must be a ConfigDict or a dict, got {config!r}.")
    return {
        key: dict(value.items()) if hasattr(value, "items") else value
        for key, value in config.items()
    }


def _scheduler(
    update_freq: int | None = None,
    update_start_step: int | None = None,
    update_end_step: int | None = None,
) -> NoUpdateSchedule:
    if update_freq is not None:
        check_int("update_freq", update_freq, 1)
    if update_start_step is None:
        return NoUpdateSchedule()
    if update_end_step is None:
        raise ValueError(
            f"update_end_step is missing beside update_start_step = {update_start_step}."
        )
    if update_start_step == update_end_step:
        return OneShotSchedule(update_end_step)
    if update_freq is None:
        raise ValueError("update_freq is missing beside update_start_step and update_end_step.")
    return PolynomialSchedule(update_freq, update_start_step, update_end_step)


def _known(name: Any, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1)
    return (f"Did you mean {near[0]!r}? " if near else "") + f"Known: {', '.join(known)}."
