"""Updaters from configurations, and what can be registered for them by name."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from sparsity.base_updater import ALGORITHM_REGISTRY, BaseUpdater, NoPruning
from sparsity.core.checks import check_fraction
from sparsity.core.names import known
from sparsity.masks import SCOPES, Scope
from sparsity.patterns import parse_sparsity_type
from sparsity.sparsity_distributions import DISTRIBUTIONS, Distribution
from sparsity.sparsity_schedules import SCHEDULES, Schedule

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Config(Protocol):
    """A dict, an `ml_collections.ConfigDict` or a `FrozenConfigDict`."""

    def items(self) -> Iterable[tuple[str, object]]:
        """Returns its keys with their values."""


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
      ValueError: the name is taken by another class, or the class is not a subclass of BaseUpdater.
    """
    if not (isinstance(algorithm, type) and issubclass(algorithm, BaseUpdater)):
        raise ValueError(f"algorithm must be a subclass of BaseUpdater, got {algorithm!r}.")
    ALGORITHM_REGISTRY.add(name, algorithm)


def register_distribution(name: str, distribution: type[Distribution]) -> None:
    """Makes a class of distributions known as a `dist_type`.

    Args:
      name: of the configuration's `dist_type`.
      distribution: a class, whose instances are distributions; its attribute `config_keys` maps the
        keys of a configuration that it takes to arguments of the class.

    Raises:
      ValueError: the name is taken by another class.
    """
    DISTRIBUTIONS.add(name, distribution)


def register_schedule(name: str, schedule: type[Schedule]) -> None:
    """Makes a class of schedules known as a `schedule_type`; as `register_distribution`."""
    SCHEDULES.add(name, schedule)


def register_scope(name: str, scope: type[Scope]) -> None:
    """Makes a class of scopes known by name; its dataclass fields are keys of a configuration."""
    SCOPES.add(name, scope)


def create_updater_from_config(config: Config) -> BaseUpdater:
    """Makes an updater from a configuration, which is not changed.

    Args:
      config: an `ml_collections.ConfigDict` or `FrozenConfigDict`, or a dict, with the keys

        - `algorithm`: one of `all_algorithm_names()`.
        - `sparsity`: fraction of the weights to remove, in [0, 1].
        - `dist_type`: 'uniform' (default) or 'erk', with `filter_fn`, `custom_sparsity_map` and,
          for 'erk', `erk_power_scale`; global pruners have no use for it. A ConfigDict takes
          regular expressions with dots as keys only with `allow_dotted_keys=True`.
        - `update_freq`, `update_start_step`, `update_end_step`: without a start, masks are never
          updated (`NoUpdateSchedule`); with start and end equal, once (`OneShotSchedule`); else by
          a `PolynomialSchedule`, with `power` and `initial_sparsity`. `schedule_type` chooses
          another: 'none', 'one_shot', 'periodic', 'polynomial'. Algorithms without a use for a ramp
          get a `PeriodicSchedule`, 'snip' a `OneShotSchedule` at the start, by default at step 0;
          what they ignore is logged.
        - `sparsity_type`: a type, or 'nm_2,4', 'nm_2,4,-2', '2:4', 'block_4,4', 'channel_-1'.
        - `scope`: a scope, as `Coupled(graph)`, 'layerwise' or 'global', with `use_normalization`
          and `normalization_eps`.
        - `drop_fraction`: for SET, RigL and SRigL, 0.3 by default; follows a cosine from there to
          zero at `update_end_step`, and is constant without one. Others have no use for it.
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
            f"algorithm: {name!r} is not known. {known(name, ALGORITHM_REGISTRY)} "
            "sparsity.all_algorithm_names() lists them, sparsity.register_algorithm() adds one."
        )
    algorithm = ALGORITHM_REGISTRY[name]
    fields = _fields_of(algorithm)
    _check_keys(name, fields, options)
    if isinstance(options.get("sparsity_type"), str):
        options["sparsity_type"] = parse_sparsity_type(options["sparsity_type"])
    options["scheduler"] = _take_scheduler(name, algorithm, options)
    if scope := _take_scope(options, fields):
        options["scope"] = scope
    distribution = _take_distribution(name, algorithm, options, fields)
    if distribution is not None:
        options["sparsity_distribution_fn"] = distribution
    if "drop_fraction" in options:
        check_fraction("drop_fraction", options["drop_fraction"])
    for key in _config_keys(ALGORITHM_REGISTRY.values()) - fields - {*algorithm.config_keys}:
        options.pop(key, None)  # one configuration serves several algorithms
    arguments: dict[str, Any] = algorithm.read_config(options)
    return algorithm(**arguments)


def _check_keys(name: str, fields: set[str], options: Mapping[str, Any]) -> None:
    allowed = (
        fields | {"dist_type", "schedule_type", "scope"} | _config_keys(ALGORITHM_REGISTRY.values())
    )
    allowed |= _config_keys(DISTRIBUTIONS.values()) | _config_keys(SCHEDULES.values())
    for scope in SCOPES.values():
        allowed |= _fields_of(scope)
    for key in options:
        if key not in allowed:
            raise ValueError(
                f"{key!r} is no key of a configuration for {name!r}. {known(key, sorted(allowed))}"
            )


def _take_scheduler(name: str, algorithm: type[BaseUpdater], options: dict[str, Any]) -> Schedule:
    """Takes the keys of schedules out of the options and makes the schedule that they ask for."""
    given = _take(options, _config_keys(SCHEDULES.values()))
    kind = options.pop("schedule_type", None)
    if "scheduler" in options:
        if given or kind:
            raise ValueError(
                f"{sorted([*given, *(['schedule_type'] if kind else [])])} cannot go with "
                "scheduler."
            )
        scheduler: Schedule = options.pop("scheduler")
        return scheduler
    start, end = given.get("update_start_step"), given.get("update_end_step")
    if kind is None:
        if start is None and end is not None:
            raise ValueError(
                f"update_end_step = {end} needs an update_start_step: without a start, masks are "
                "never updated."
            )
        if start is not None and end is None:
            raise ValueError(f"update_start_step = {start} needs an update_end_step.")
        if start is None or start == end:
            kind = "none" if start is None else "one_shot"
            for unused in ("update_freq", "update_start_step"):
                given.pop(unused, None)
        else:
            kind = "polynomial"
            if "update_freq" not in given:
                raise ValueError("update_start_step and update_end_step need an update_freq.")
        if kind == "none" and not given:
            return algorithm.scheduler
    if kind == "polynomial" and algorithm.schedule_type != kind:
        kind = algorithm.schedule_type
        given = _without_ramp(name, kind, given)
    return _make(SCHEDULES.find(kind), given, f"schedule_type {kind!r}")


def _without_ramp(name: str, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keys that a schedule of that kind takes, of those of a ramp; logs what is ignored."""
    given = dict(given)
    if kind == "one_shot":
        given["update_end_step"] = given.pop("update_start_step", given.get("update_end_step"))
        given.pop("update_freq", None)
    ignored = sorted(given.keys() - getattr(SCHEDULES[kind], "config_keys", {}).keys())
    if ignored:
        what = ", ".join(ignored)
        _log.warning("%s follows no ramp: its schedule is %r, which ignores %s.", name, kind, what)
    return {key: value for key, value in given.items() if key not in ignored}


def _take_scope(options: dict[str, Any], fields: set[str]) -> Scope | None:
    """Takes the keys of scopes out of the options; `None` leaves the scope to the class."""
    scope = options.pop("scope", None)
    own = {key for kind in SCOPES.values() for key in _fields_of(kind)}
    given = _take(options, own - fields)
    if scope is not None and "scope" not in fields:
        raise ValueError(f"scope = {scope!r} cannot be given: this algorithm sets its own scope.")
    if scope is None or not isinstance(scope, str):
        if given:
            raise ValueError(f"{sorted(given)} needs scope = 'global'.")
        return scope
    kind = SCOPES.find(scope)
    if strange := sorted(given.keys() - _fields_of(kind)):
        raise ValueError(f"{strange} is no key of scope {scope!r}.")
    return kind(**given)


def _take_distribution(
    name: str, algorithm: type[BaseUpdater], options: dict[str, Any], fields: set[str]
) -> Distribution | None:
    """Takes the keys of distributions out of the options; `None` leaves it to the class."""
    kind = options.pop("dist_type", None)
    if kind is not None:
        DISTRIBUTIONS.find(kind)
    given = _take(options, _config_keys(DISTRIBUTIONS.values()) - fields)
    if algorithm is NoPruning:
        _make(DISTRIBUTIONS.find(kind or "uniform"), given, "a distribution")  # checks the values
        return None
    if "sparsity" in fields:
        if kind not in (None, "uniform"):
            _log.warning("%s ranks all leaves together and has no use for %r.", name, kind)
        missing = "sparsity" not in options
    elif "sparsity_distribution_fn" in options:
        if given or kind:
            raise ValueError(
                f"{sorted([*given, *(['dist_type'] if kind else [])])} cannot go with "
                "sparsity_distribution_fn."
            )
        return None
    else:
        missing = "sparsity" not in given
    if missing:
        raise ValueError(f"sparsity is missing in the configuration of {name!r}.")
    if "sparsity" in fields:
        return None
    return _make(DISTRIBUTIONS.find(kind or "uniform"), given, f"dist_type {kind or 'uniform'!r}")


def _make(kind: Callable[..., T], given: Mapping[str, object], what: str) -> T:
    """An instance of a class from the keys that it takes."""
    taken: Mapping[str, str] = getattr(kind, "config_keys", {})
    if strange := sorted(given.keys() - taken.keys()):
        raise ValueError(
            f"{strange} is no key of {what}, which takes {', '.join(taken) or 'none'}."
            + _who_takes(strange[0])
        )
    try:
        return kind(**{taken[key]: value for key, value in given.items()})
    except TypeError as error:
        raise ValueError(f"{what} cannot be made of {dict(given)}: {error}") from None


def _who_takes(key: str) -> str:
    """Which distributions or schedules take a key, as the end of a message."""
    takers = [
        f"{registry.role} {name!r}"
        for registry in (DISTRIBUTIONS, SCHEDULES)
        for name, kind in registry.items()
        if key in getattr(kind, "config_keys", {})
    ]
    return f" {key!r} belongs to {' and '.join(takers)}."


def _take(options: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: options.pop(key) for key in keys & options.keys()}


def _config_keys(kinds: Iterable[Any]) -> set[str]:
    """The keys of a configuration that classes take."""
    return {key for kind in kinds for key in getattr(kind, "config_keys", ())}


def _fields_of(kind: Any) -> set[str]:
    """Names of the arguments of a dataclass."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name for field in fields if field.init}


def _as_dict(config: Config) -> dict[str, Any]:
    if not isinstance(config, Mapping) and not hasattr(config, "items"):
        raise ValueError(f"config must be a ConfigDict or a dict, got {config!r}.")
    return {
        key: dict(value.items()) if hasattr(value, "items") else value
        for key, value in config.items()
    }
