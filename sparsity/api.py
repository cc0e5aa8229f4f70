"""Makes updaters from configurations, and registers names for configurations."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

from sparsity.core.checks import check_fraction, check_function
from sparsity.core.names import suggest
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
    check_function("distribution", distribution, "the fields of a distribution, such as its class")
    if dataclasses.is_dataclass(distribution) and not isinstance(distribution, type):
        raise ValueError(_describe_instance("distribution", "Uniform", distribution))
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
    check_function("schedule", schedule, "the fields of a schedule, such as its class")
    method = find_missing_schedule_method(schedule)
    if isinstance(schedule, type):
        _check_methods("schedule", schedule, method)
    elif method is None:
        raise ValueError(_describe_instance("schedule", "OneShotSchedule", schedule))
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
    if not (isinstance(scope, type) and dataclasses.is_dataclass(scope)):
        raise ValueError(
            f"scope must be a dataclass such as Global, and no instance of one, got scope = "
            f"{scope!r}. Decorate the class with @dataclasses.dataclass, and register the class."
        )
    _check_methods("scope", scope, find_missing_scope_method(scope))
    SCOPES.add(name, scope)


def _describe_instance(role: str, example: str, instance: object) -> str:
    """Returns the error for an instance in place of a class."""
    return (
        f"{role} must be a class of {role}s, such as {example}, got the instance {role} = "
        f"{instance!r}. Register its class {type(instance).__name__}."
    )


def _check_methods(role: str, cls: type, missing: str | None) -> None:
    """Raises a ValueError if a class lacks a method."""
    if missing is not None:
        raise ValueError(
            f"{role} must be a class with a method {missing}, got {role} = {cls!r}. "
            f"sparsity.{role.title()} lists the methods to define."
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
    options = {key: value for key, value in _as_dict(config).items() if value is not None}
    name = _take_name(options)
    algorithm = ALGORITHM_REGISTRY[name]
    fields = {*_list_field_names(algorithm)}
    config_keys = _list_config_keys(ALGORITHM_REGISTRY.values())
    algorithm_keys = fields | config_keys
    other_keys = algorithm_keys | _list_config_keys(DISTRIBUTIONS.values())
    _check_keys(name, other_keys, options)
    if isinstance(options.get("sparsity_type"), str):
        options["sparsity_type"] = parse_sparsity_type(options["sparsity_type"])
    options["scheduler"] = _take_scheduler(name, algorithm, options, other_keys)
    scope = _take_scope(algorithm, options, other_keys)
    if scope is not None:
        options["scope"] = scope
    distribution = _take_distribution(name, algorithm, options, algorithm_keys)
    if distribution is not None:
        options["sparsity_distribution_fn"] = distribution
    if "drop_fraction" in options:
        check_fraction("drop_fraction", options["drop_fraction"])
    _take_keys_of_others(algorithm, options, config_keys - fields)
    arguments: Options = algorithm.read_config(options)
    return algorithm(**arguments)


def _take_name(options: Options) -> str:
    """Takes the name of the algorithm out of the options."""
    name = options.pop("algorithm", None)
    if name is None:
        raise ValueError(
            "The configuration names no algorithm, or None; its keys are "
            f"{', '.join(options) or 'none'}. Add the key algorithm, one of "
            f"{', '.join(ALGORITHM_REGISTRY)}."
        )
    if not isinstance(name, str) or name not in ALGORITHM_REGISTRY:
        raise ValueError(
            f"algorithm: {name!r} is not known. {suggest(name, ALGORITHM_REGISTRY)} "
            "sparsity.all_algorithm_names() lists them, sparsity.register_algorithm() adds one."
        )
    return name


def _check_keys(name: str, other_keys: set[str], options: Options) -> None:
    """Raises a ValueError for a key that no class takes; `other_keys` as in `_take_scheduler`."""
    allowed = other_keys | {"dist_type", "schedule_type", "scope"}
    allowed |= _list_config_keys([*SCHEDULES.values(), *SCOPES.values()])
    for key in options:
        if key not in allowed:
            raise ValueError(
                f"{key!r} is no key of a configuration for {name!r}. "
                f"{suggest(key, sorted(allowed))}"
            )


def _take_keys_of_others(
    algorithm: type[BaseUpdater], options: Options, config_keys: set[str]
) -> None:
    """Takes keys of other algorithms out of the options; one that no class reads is an error."""
    roles = (options.get(x) for x in ("scheduler", "scope", "sparsity_distribution_fn"))
    read_keys = _list_config_keys(map(type, roles))
    for key in sorted(config_keys.intersection(options) - _list_config_keys([algorithm])):
        if key not in read_keys:
            names = [x for x, cls in ALGORITHM_REGISTRY.items() if key in _list_config_keys([cls])]
            raise ValueError(
                f"Remove {key!r} = {options[key]!r}: {algorithm.__name__} does not read this key; "
                f"{', '.join(names)} do."
            )
        del options[key]


def _take_scheduler(
    name: str, algorithm: type[BaseUpdater], options: Options, other_keys: set[str]
) -> Schedule:
    """Takes the keys of schedules out of the options and makes the schedule.

    Args:
      name: the name of the algorithm.
      algorithm: the class of the algorithm.
      options: keys of the configuration; those that only schedules take are removed.
      other_keys: keys of algorithms and distributions; a schedule with such a field gets the value,
        too.
    """
    schedule_type = options.pop("schedule_type", None)
    # By default that of the polynomial, which has the keys of defaults.
    schedule_class = SCHEDULES.find("polynomial" if schedule_type is None else schedule_type)
    removed, keys = _take_keys(options, SCHEDULES, schedule_class, other_keys)
    if "scheduler" in options:
        if removed or schedule_type:
            raise ValueError(
                f"{_quote([*removed, *(['schedule_type'] if schedule_type else [])])} cannot go "
                "with scheduler."
            )
        scheduler: Schedule = options.pop("scheduler")
        check_schedule(scheduler)
        return scheduler
    if schedule_type is None:
        schedule_type, keys = _infer_schedule_type(name, algorithm, keys)
        for unused in other_keys - _list_config_keys([SCHEDULES.find(schedule_type)]):
            keys.pop(unused, None)
        if schedule_type == "none" and not keys:
            return algorithm.scheduler
    return _make_instance(SCHEDULES.find(schedule_type), keys, f"schedule_type {schedule_type!r}")


def _infer_schedule_type(
    name: str, algorithm: type[BaseUpdater], keys: Options
) -> tuple[str, Options]:
    """Returns the kind of schedule that the steps of a ramp ask for, and the keys of this kind."""
    start, end = keys.get("update_start_step"), keys.get("update_end_step")
    if algorithm.schedule_type == "periodic" and keys.keys() == {"update_freq"}:
        return "periodic", keys
    if start is None and end is not None:
        raise ValueError(
            f"update_end_step = {end} needs an update_start_step: without a start, masks are never "
            "updated."
        )
    if start is not None and end is None:
        raise ValueError(f"update_start_step = {start} needs an update_end_step.")
    if start is None or start == end:
        unused = {"update_freq", "update_start_step"}
        used = {key: value for key, value in keys.items() if key not in unused}
        return "none" if start is None else "one_shot", used
    schedule_type = algorithm.schedule_type
    if "update_freq" not in keys:
        raise ValueError("update_start_step and update_end_step need an update_freq.")
    return schedule_type, keys if schedule_type == "polynomial" else _drop_ramp(
        name, schedule_type, keys
    )


def _drop_ramp(name: str, schedule_type: str, keys: Options) -> Options:
    """Converts the keys of a ramp to those of another kind of schedule; logs ignored keys."""
    keys = dict(keys)
    if schedule_type == "one_shot":
        keys["update_end_step"] = keys.pop("update_start_step", keys.get("update_end_step"))
        keys.pop("update_freq", None)
    ignored = sorted(keys.keys() - _read_config_keys(SCHEDULES[schedule_type]).keys())
    if ignored:
        names = ", ".join(ignored)
        _log.warning(
            "%s follows no ramp: its schedule is %r, which ignores %s.", name, schedule_type, names
        )
    return {key: value for key, value in keys.items() if key not in ignored}


def _take_scope(
    algorithm: type[BaseUpdater], options: Options, other_keys: set[str]
) -> Scope | None:
    """Takes the keys of scopes out of the options; `None` means the default of the class.

    Args:
      algorithm: the class of the algorithm.
      options: keys of the configuration; those that only scopes take are removed.
      other_keys: keys of algorithms and distributions; a scope with such a field gets the value,
        too.
    """
    scope = options.pop("scope", None)
    if scope is not None and "scope" not in _list_field_names(algorithm):
        raise ValueError(f"scope = {scope!r} cannot be given: this algorithm sets its own scope.")
    scope_class = SCOPES.find(scope) if isinstance(scope, str) else None
    removed, keys = _take_keys(options, SCOPES, scope_class, other_keys)
    for key in sorted(removed.keys() - _list_config_keys([scope_class])):
        names = [repr(name) for name, cls in SCOPES.items() if key in _list_field_names(cls)]
        raise ValueError(
            f"{key!r} needs scope = {' or '.join(names)}, by its name, got scope = {scope!r}."
        )
    return scope_class(**keys) if scope_class else scope


def _take_distribution(
    name: str, algorithm: type[BaseUpdater], options: Options, algorithm_keys: set[str]
) -> Distribution | None:
    """Takes the keys of distributions out of the options; `None` means the default of the class.

    Args:
      name: the name of the algorithm.
      algorithm: the class of the algorithm.
      options: keys of the configuration; those that only distributions take are removed.
      algorithm_keys: keys that algorithms take; a distribution with such a field gets the value,
        too.
    """
    dist_type = options.pop("dist_type", None)
    distribution = DISTRIBUTIONS.find("uniform" if dist_type is None else dist_type)
    missing = f"sparsity is missing in the configuration of {name!r}."
    fields = _list_field_names(algorithm)
    removed, keys = _take_keys(options, DISTRIBUTIONS, distribution, algorithm_keys)
    if not algorithm.takes_distribution or "sparsity_distribution_fn" not in fields:
        if "sparsity" not in fields:
            unshared = {key: value for key, value in keys.items() if key not in fields}
            _make_instance(distribution, unshared, "a distribution")  # checks values
        elif "sparsity" not in options:
            raise ValueError(missing)
        elif dist_type not in (None, "uniform"):
            _log.warning("%s takes no distribution and has no use for %r.", name, dist_type)
        return None
    if "sparsity_distribution_fn" in options:
        if removed or dist_type:
            raise ValueError(
                f"{_quote([*removed, *(['dist_type'] if dist_type else [])])} cannot go with "
                "sparsity_distribution_fn."
            )
        return None
    if "sparsity" not in keys:
        raise ValueError(missing)
    return _make_instance(distribution, keys, f"dist_type {dist_type or 'uniform'!r}")


def _make_instance(factory: Callable[..., T], keys: Mapping[str, object], label: str) -> T:
    """Makes an instance of a class from keys of a configuration."""
    fields = _read_config_keys(factory)
    if unknown := sorted(keys.keys() - fields.keys()):
        words = "is no key" if len(unknown) == 1 else "are no keys"
        raise ValueError(
            f"{_quote(unknown)} {words} of {label}, which takes {', '.join(fields) or 'none'}."
            + _name_takers(unknown[0])
        )
    try:
        return factory(**{fields[key]: value for key, value in keys.items()})
    except TypeError as error:
        raise ValueError(f"{label} cannot be made of {dict(keys)}: {error}") from None


def _quote(keys: Iterable[str]) -> str:
    """Returns keys in alphabetical order, as errors list them."""
    return ", ".join(map(repr, sorted(keys)))


def _name_takers(key: str) -> str:
    """Returns the end of a message: the distributions or schedules that take a key."""
    takers = [
        f"{registry.role} {name!r}"
        for registry in (DISTRIBUTIONS, SCHEDULES)
        for name, factory in registry.items()
        if key in _read_config_keys(factory)
    ]
    return f" {key!r} belongs to {' and '.join(takers)}."


def _take_keys(
    options: Options, registry: Mapping[str, object], chosen: object, other_keys: set[str]
) -> tuple[Options, Options]:
    """Removes the keys that only one role takes; returns them, and the keys of the chosen class.

    Args:
      options: keys of the configuration.
      registry: the classes of the role: schedules, scopes or distributions.
      chosen: the class of the role that the configuration chooses; `None` takes no keys.
      other_keys: keys of other roles, which stay in the options.
    """
    role_keys, chosen_keys = map(_list_config_keys, (registry.values(), [chosen]))
    exclusive_keys = role_keys - other_keys
    removed = {key: options.pop(key) for key in [*options] if key in exclusive_keys}
    return removed, removed | {key: options[key] for key in options if key in chosen_keys}


def _list_config_keys(factories: Iterable[object]) -> set[str]:
    """Returns the keys of a configuration that the classes take."""
    return {key for factory in factories for key in _read_config_keys(factory)}


def _read_config_keys(factory: object) -> Mapping[str, str]:
    """Returns {key of a configuration: field} of a class; a tuple lists keys of one name.

    Fields that subclasses of the class with `config_keys` add are keys, too. Those of algorithms
    are keys of one algorithm only, see `_check_keys`.
    """
    stated: Mapping[str, str] | Iterable[str] = getattr(factory, "config_keys", {})
    keys = stated if isinstance(stated, Mapping) else {key: key for key in stated}
    if not isinstance(factory, type) or issubclass(factory, BaseUpdater):
        return keys
    base = next((x for x in factory.__mro__ if "config_keys" in vars(x)), object)
    inherited = _list_field_names(base)
    return {**keys, **{x: x for x in _list_field_names(factory) if x not in inherited}}


def _list_field_names(cls: type) -> list[str]:
    """Returns the names of the arguments of a dataclass."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return [field.name for field in fields if field.init]


def _as_dict(config: Config) -> Options:
    if not _has_items(config):
        raise ValueError(f"config must be a ConfigDict or a dict, got {config!r}.")
    return {
        key: dict(value.items()) if _has_items(value) else value for key, value in config.items()
    }


def _has_items(value: object) -> TypeGuard[Config]:
    return hasattr(value, "items") and not isinstance(value, type)
