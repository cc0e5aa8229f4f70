"""Makes updaters from configurations, and registers names for configurations."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from sparsity.core.checks import check_fraction
from sparsity.core.names import suggest
from sparsity.core.trees import PyTree
from sparsity.masks import SCOPES, Scope, find_missing_scope_method
from sparsity.masks.distributions import DISTRIBUTIONS, Distribution
from sparsity.patterns import parse_sparsity_type
from sparsity.sparsity_schedules import (
    SCHEDULES,
    Schedule,
    check_schedule,
    find_missing_schedule_method,
)
from sparsity.training.base_updater import ALGORITHM_REGISTRY, BaseUpdater

T = TypeVar("T")
Options: TypeAlias = dict[str, Any]  # keys of a configuration with their values

_log = logging.getLogger(__name__)


class Config(Protocol):
    """A dict, an `ml_collections.ConfigDict` or a `FrozenConfigDict`."""

    def items(self) -> Iterable[tuple[str, object]]:
        """Returns pairs of keys and values."""


def all_algorithm_names() -> tuple[str, ...]:
    """Returns the names for the key `algorithm` of a configuration.

    Example:
      >>> "rigl" in all_algorithm_names()
      True
    """
    return tuple(ALGORITHM_REGISTRY)


def register_algorithm(name: str, algorithm: type[BaseUpdater]) -> None:
    """Registers a class for the key `algorithm` of a configuration.

    Args:
      name: value of `algorithm`.
      algorithm: a subclass of `BaseUpdater`; its fields become keys.

    Raises:
      ValueError: another class has the name, or the class is not a subclass of BaseUpdater.

    Example:
      >>> import dataclasses, sparsity
      >>> @dataclasses.dataclass(kw_only=True)
      ... class Smallest(sparsity.MagnitudePruning):
      ...     scale: float = 1.0
      >>> register_algorithm("smallest", Smallest)
      >>> create_updater_from_config({"algorithm": "smallest", "sparsity": 0.5, "scale": 2.0}).scale
      2.0
      >>> del sparsity.ALGORITHM_REGISTRY["smallest"]
    """
    if not (isinstance(algorithm, type) and issubclass(algorithm, BaseUpdater)):
        raise ValueError(f"algorithm must be a subclass of BaseUpdater, got {algorithm!r}.")
    ALGORITHM_REGISTRY.add(name, algorithm)


def register_distribution(name: str, distribution: Callable[..., Distribution]) -> None:
    """Registers a class or function for the key `dist_type` of a configuration.

    Args:
      name: value of `dist_type`.
      distribution: a class whose instances are distributions, or a function that returns one. Its
        attribute `config_keys` maps keys of a configuration to arguments, or lists keys that are
        arguments. By default the fields of a dataclass are its keys.

    Raises:
      ValueError: the name is taken by another class, or an instance takes the place of the class.

    Example:
      >>> import sparsity
      >>> register_distribution("uniform", sparsity.Uniform)  # as the library does
    """
    _check_class("distribution", distribution, None)
    DISTRIBUTIONS.add(name, distribution)


def register_schedule(name: str, schedule: Callable[..., Schedule]) -> None:
    """Registers a class or function for the key `schedule_type` of a configuration.

    Args:
      name: value of `schedule_type`.
      schedule: a class with the methods of `Schedule`, or a function that returns such an object;
        its keys are found as in `register_distribution`.

    Raises:
      ValueError: the name is taken by another class, or the class lacks a method of `Schedule`.

    Example:
      >>> import sparsity
      >>> register_schedule("periodic", sparsity.PeriodicSchedule)  # as the library does
    """
    is_class = isinstance(schedule, type)
    _check_class("schedule", schedule, find_missing_schedule_method(schedule) if is_class else None)
    SCHEDULES.add(name, schedule)


def register_scope(name: str, scope: type[Scope]) -> None:
    """Registers a class of scopes for the key `scope` of a configuration.

    Args:
      name: value of `scope`.
      scope: a dataclass with the methods of `Scope`; its fields become keys.

    Raises:
      ValueError: the name is taken by another class, or the class lacks a method of `Scope`.

    Example:
      >>> import sparsity
      >>> register_scope("global", sparsity.Global)  # as the library does
    """
    _check_class("scope", scope, find_missing_scope_method(scope))
    SCOPES.add(name, scope)


def _check_class(role: str, value: object, missing: str | None) -> None:
    """Raises a ValueError for an instance in place of a class, or a class without a method."""
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_instance or missing or not callable(value):
        raise ValueError(
            f"{role} must be a class of {role}s, or a function that makes one, got {role} = "
            f"{value!r}" + (f" without a method {missing}." if missing else ".")
        )


def create_updater_from_config(config: Config) -> BaseUpdater:
    """Returns the updater that a configuration describes; leaves the configuration unchanged.

    Args:
      config: an `ml_collections.ConfigDict` or `FrozenConfigDict`, or a dict, with the keys

        - `algorithm`: one of `all_algorithm_names()`.
        - `sparsity`: fraction of the weights to remove, in [0, 1].
        - `dist_type`: 'uniform' (default) or 'erk', with `filter_fn`, `custom_sparsity_map` and,
          for 'erk', `erk_power_scale`; global pruners ignore `dist_type`. A ConfigDict takes
          regular expressions with dots as keys only with `allow_dotted_keys=True`.
        - `update_freq`, `update_start_step`, `update_end_step`: without a start, masks are never
          updated (`NoUpdateSchedule`); with start and end equal, once (`OneShotSchedule`); else by
          a `PolynomialSchedule`, with `power` and `initial_sparsity`. `schedule_type` chooses
          another: 'none', 'one_shot', 'periodic', 'polynomial'. Without this key, algorithms that
          move masks get a `PeriodicSchedule`, from step 0 on if only `update_freq` is given;
          'snip' gets a `OneShotSchedule` at the start, by default at step 0; the ignored keys are
          logged.
        - `sparsity_type`: a pattern, or 'unstructured', 'nm_2,4', 'nm_2,4,-2', '2:4', 'block_4,4',
          'channel_-1', 'fanin_16'.
        - `scope`: a scope such as `Coupled(graph)`, or 'layerwise' or 'global', with
          `use_normalization` and `normalization_eps`.
        - `drop_fraction`: for SET, RigL, GlobalRigL and SRigL, 0.3 by default; a cosine takes the
          fraction to zero at `update_end_step`; without that step the fraction is constant.
        - any other field of the algorithm's class. A key whose value is `None` counts as missing.

    Raises:
      ValueError: a key, a name or a value is unknown; the message lists the known ones.

    Example:
      >>> create_updater_from_config({"algorithm": "magnitude", "sparsity": 0.8}).scheduler
      NoUpdateSchedule()
    """
    if isinstance(config, type) or not hasattr(config, "items"):
        raise ValueError(f"config must be a ConfigDict or a dict, got {config!r}.")
    options: Options = {key: _copy(value) for key, value in config.items() if value is not None}
    name = options.pop("algorithm", None)
    algorithm = ALGORITHM_REGISTRY.find(name)
    for key in {"sparsity", "drop_fraction"} & options.keys():
        check_fraction(key, options[key])
    if isinstance(options.get("sparsity_type"), str):
        options["sparsity_type"] = parse_sparsity_type(options["sparsity_type"])
    algorithm_keys = {*_read_keys(algorithm), "scheduler"}
    read_keys, arguments = set(algorithm_keys), dict(options)
    if "scheduler" not in options:
        arguments["scheduler"] = _make_schedule(name, algorithm, options, read_keys)
    check_schedule(arguments["scheduler"])
    if isinstance(options.get("scope"), str):
        arguments["scope"] = _make(SCOPES.find(options["scope"]), options, read_keys)
    distribution = _make_distribution(name, algorithm, options, read_keys)
    if distribution is not None:
        arguments["sparsity_distribution_fn"] = distribution
    if unread := sorted(options.keys() - read_keys):
        _refuse_key(unread[0], options, algorithm)
    fields: Options = algorithm.read_config(
        {key: value for key, value in arguments.items() if key in algorithm_keys}
    )
    return algorithm(**fields)


def _make(factory: Callable[..., T], options: Options, read_keys: set[str]) -> T:
    """Returns an instance of a class by the keys that the class reads; adds them to `read_keys`."""
    keys = {key: field for key, field in _read_keys(factory).items() if key in options}
    read_keys.update(keys)
    try:
        return factory(**{field: options[key] for key, field in keys.items()})
    except TypeError as error:
        raise ValueError(f"{factory} cannot be made of {list(keys)}: {error}") from None


def _make_schedule(
    name: str, algorithm: type[BaseUpdater], options: Options, read_keys: set[str]
) -> Schedule:
    """Returns the schedule of a configuration without `scheduler`; adds its keys to `read_keys`."""
    read_keys.add("schedule_type")
    if "schedule_type" in options:
        return _make(SCHEDULES.find(options["schedule_type"]), options, read_keys)
    schedule_type, ignored = _infer_schedule_type(name, algorithm, options)
    read_keys |= ignored
    if schedule_type == "none":
        return algorithm.scheduler
    if schedule_type == "one_shot":
        options = options | {"update_end_step": options["update_start_step"]}
    return _make(SCHEDULES[schedule_type], options, read_keys)


def _make_distribution(
    name: str, algorithm: type[BaseUpdater], options: Options, read_keys: set[str]
) -> Distribution | None:
    """Returns the distribution of a configuration, `None` for one that is given or not taken."""
    fields, dist_type = _list_field_names(algorithm), options.get("dist_type", "uniform")
    factory = DISTRIBUTIONS.find(dist_type)
    takes_distribution = algorithm.takes_distribution and "sparsity_distribution_fn" in fields
    is_made = takes_distribution and "sparsity_distribution_fn" not in options
    if "sparsity" not in options and ("sparsity" in fields or is_made):
        raise ValueError(f"sparsity is missing in the configuration of {name!r}.")
    if is_made or not takes_distribution:
        read_keys |= {"dist_type", *_read_keys(factory)}
    if not takes_distribution and dist_type != "uniform" and "sparsity" in fields:
        _log.warning("%s takes no distribution and has no use for %r.", name, dist_type)
    return _make(factory, options, read_keys) if is_made else None


def _infer_schedule_type(
    name: str, algorithm: type[BaseUpdater], options: Options
) -> tuple[str, set[str]]:
    """Returns the kind of schedule that the steps of a ramp ask for, and keys that it ignores."""
    start, end = options.get("update_start_step"), options.get("update_end_step")
    if start is None and end is None and "update_freq" in options:
        return ("periodic" if algorithm.schedule_type == "periodic" else "none"), {"update_freq"}
    if (start is None) != (end is None):
        missing = "an update_start_step" if start is None else "an update_end_step"
        raise ValueError(f"update steps from {start} to {end}: the configuration needs {missing}.")
    if start == end:
        return "none" if start is None else "one_shot", {"update_freq", "update_start_step"}
    if "update_freq" not in options:
        raise ValueError("update_start_step and update_end_step need an update_freq.")
    kind = algorithm.schedule_type
    ramp = {"power", "initial_sparsity", "update_freq", "update_start_step", "update_end_step"}
    ignored = ramp & options.keys() - _read_keys(SCHEDULES[kind]).keys()
    unlogged = {"update_start_step", "update_freq"} if kind == "one_shot" else set()
    if logged := sorted(ignored - unlogged):
        names = ", ".join(logged)
        _log.warning("%s follows no ramp: its schedule is %r, which ignores %s.", name, kind, names)
    return kind, ignored


def _refuse_key(key: str, options: Options, algorithm: type[BaseUpdater]) -> None:
    """Raises a ValueError for a key that no class of a configuration reads."""
    registries = ALGORITHM_REGISTRY, DISTRIBUTIONS, SCHEDULES, SCOPES
    readers = {
        f"{registry.role} {name!r}": _read_keys(factory)
        for registry in registries
        for name, factory in registry.items()
    }
    all_keys = {"dist_type", "schedule_type", "scope"}.union(*readers.values())
    if key not in all_keys:
        raise ValueError(f"{key!r} is no key of a configuration. {suggest(key, sorted(all_keys))}")
    takers = [reader for reader, keys in readers.items() if key in keys]
    raise ValueError(
        f"Remove {key!r} = {options[key]!r}: {algorithm.__name__} does not read this key beside "
        f"{', '.join(options.keys() - {key})}. Readers: {', '.join(takers) or 'other choices'}."
    )


def _read_keys(factory: object) -> dict[str, str]:
    """Returns {key of a configuration: field} of a class; a tuple lists keys of one name.

    Fields that subclasses of the class with `config_keys` add are keys, too. Those of algorithms
    are all keys.
    """
    stated: Mapping[str, str] | Iterable[str] = getattr(factory, "config_keys", {})
    keys = dict(stated) if isinstance(stated, Mapping) else {key: key for key in stated}
    if not isinstance(factory, type):
        return keys
    base = next((x for x in factory.__mro__ if "config_keys" in vars(x)), object)
    inherited = [] if issubclass(factory, BaseUpdater) else _list_field_names(base)
    return keys | {x: x for x in _list_field_names(factory) if x not in inherited}


def _list_field_names(cls: type) -> list[str]:
    """Returns the names of the arguments of a dataclass."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return [field.name for field in fields if field.init]


def _copy(value: PyTree) -> PyTree:
    """Returns a copy of a mapping, which may change later, and other values as they are."""
    is_mapping = hasattr(value, "items") and not isinstance(value, type)
    return dict(value.items()) if is_mapping else value
