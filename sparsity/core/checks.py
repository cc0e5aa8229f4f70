"""Checks of arguments; each error names the argument and its value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

K = TypeVar("K")
V = TypeVar("V")


def is_traced(value: object) -> bool:
    """Returns whether jax traces the value, so that it has no number yet."""
    return isinstance(value, jax.core.Tracer)


def check_int(name: str, value: object, least: int | None = None, most: int | None = None) -> None:
    """Raises a ValueError that names the argument unless it is an integer in [least, most]."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {name} = {value!r}.")
    value = int(value)
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {name} = {value}.")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {name} = {value}.")


def check_number(name: str, value: object, least: float = -math.inf) -> None:
    """Raises a ValueError that names the argument unless it is a finite number >= `least`."""
    if (
        not isinstance(value, numbers.Real)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < least
    ):
        raise ValueError(f"{name} must be a finite number >= {least}, got {name} = {value!r}.")


def check_bool(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless it is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {name} = {value!r}.")


def check_fraction(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless it is a number in [0, 1]; tracers pass."""
    if not is_traced(value) and not 0 <= _as_float(value) <= 1:
        raise ValueError(f"{name} must be in [0, 1] (0.8 means 80 %), got {name} = {value!r}.")


def check_density(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless it is a number in (0, 1]; tracers pass."""
    if not is_traced(value) and not 0 < _as_float(value) <= 1:
        raise ValueError(
            f"{name} is the fraction to keep and must be in (0, 1], got {name} = {value!r}."
        )


def unique_keys(pairs: Iterable[tuple[K, V]]) -> dict[K, V]:
    """Returns a dict of the pairs; an `object_pairs_hook` for parsers of JSON and msgpack.

    Raises:
      ValueError: a key occurs twice.

    Example:
      >>> unique_keys([("a", 1), ("a", 2)])
      Traceback (most recent call last):
      ValueError: 'a' comes twice
    """
    unique: dict[K, V] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"{key!r} comes twice")
        unique[key] = value
    return unique


def _as_float(value: Any) -> float:
    """Returns the value of a real scalar, NaN for anything else."""
    is_number = np.ndim(value) == 0 and jnp.issubdtype(np.asarray(value).dtype, jnp.number)
    return float(value) if is_number else math.nan
