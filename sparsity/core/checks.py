"""Checks of arguments; each error names the argument and its value. Warnings at the user's line."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import sys
import warnings
from collections.abc import Iterable
from types import UnionType
from typing import Any, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

# Libraries that call each other between the user's line and a warning.
_LIBRARIES = {"sparsity", "jax", "jaxlib", "optax", "chex", "flax", "contextlib", "functools"}

PyTree: TypeAlias = Any
K = TypeVar("K")
V = TypeVar("V")


class DataclassBase:
    """Base of dataclasses; refuses a subclass that annotates fields without the decorator."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        names = {x.name for x in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else ()
        for base in filter(_takes_no_fields, cls.__mro__):
            for name, annotation in inspect.get_annotations(base).items():
                is_inherited = any(hasattr(parent, name) for parent in base.__bases__)
                if "ClassVar" not in str(annotation) and (name in names or not is_inherited):
                    raise TypeError(
                        f"{base.__name__} annotates {name!r} as a field, but is no dataclass: its "
                        "annotations are not read. Decorate the class with @dataclasses.dataclass, "
                        f"or annotate {name} as ClassVar, which no argument sets."
                    )
        return super().__new__(cls)


def _takes_no_fields(cls: type) -> bool:
    """Returns whether neither a decorator nor an `__init__` of the class reads its annotations."""
    is_read = vars(cls).keys() & {"__dataclass_fields__", "__init__"}
    return issubclass(cls, DataclassBase) and not is_read


def is_real(dtype: np.dtype) -> bool:
    """Returns whether entries of a dtype are real numbers or booleans."""
    return any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, np.integer, np.floating))


def find_missing_method(value: object, names: Iterable[str]) -> str | None:
    """Returns the first of the methods that a value lacks, `None` if it has all."""
    return next((name for name in names if not callable(getattr(value, name, None))), None)


def is_traced(value: object) -> bool:
    """Returns whether jax traces the value, so that it has no number yet."""
    return isinstance(value, jax.core.Tracer)


def check_values(name: str, tree: object, remedy: str, may_be_traced: bool = False) -> None:
    """Raises a ValueError that names an array of a tree that has no values yet."""
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct) or (is_traced(leaf) and not may_be_traced):
            label = f"{name}{jax.tree_util.keystr(key_path)}"
            raise ValueError(f"{label} has no values yet, got {label} = {leaf!r}. {remedy}")


def check_sizes(name: str, tree: object, remedy: str) -> None:
    """Raises a ValueError for an array whose size is a symbol of `jax.export`."""
    for leaf in jax.tree.leaves(tree):
        shape = getattr(leaf, "shape", ())
        if not all(isinstance(size, numbers.Integral) for size in shape):
            raise ValueError(f"{name} needs known sizes, got the shape {shape}. {remedy}")


def check_int(name: str, value: object, least: int | None = None, most: int | None = None) -> None:
    """Raises a ValueError that names the argument unless it is an integer in [least, most]."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {name} = {value!r}.")
    for limit, is_beyond, word in (
        (least, least is not None and int(value) < least, "least"),
        (most, most is not None and int(value) > most, "most"),
    ):
        if is_beyond:
            raise ValueError(f"{name} must be at {word} {limit}, got {name} = {value}.")


def check_number(name: str, value: object, least: float = -math.inf) -> None:
    """Raises a ValueError that names the argument unless it is a finite number >= `least`."""
    if isinstance(value, jax.Array | np.ndarray) or not as_float(value) >= least:
        limit = "" if least == -math.inf else f" >= {least}"
        raise ValueError(f"{name} must be a finite number{limit}, got {name} = {value!r}.")


def check_bool(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless it is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {name} = {value!r}.")


def check_kind(name: str, value: object, kind: type | UnionType, expected: str) -> None:
    """Raises a ValueError that names the argument unless it is an instance of a class.

    Args:
      name: name of the argument.
      value: value of the argument.
      kind: a class, or a union of classes.
      expected: describes what the argument must be.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {expected}, got {name} = {value!r}.")


def check_function(name: str, value: object, arguments: str, *, optional: bool = False) -> None:
    """Raises a ValueError that names the argument unless it can be called."""
    if not callable(value) and not (optional and value is None):
        raise ValueError(
            f"{name} must be a function of {arguments}{' or None' if optional else ''}, got {name} "
            f"= {value!r}."
        )


def check_loss(name: str, value: PyTree) -> None:
    """Raises a ValueError that names a function unless it returned a real scalar of fractions."""
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        is_array = hasattr(value, "shape") and hasattr(value, "dtype")
        kind = f"an array of shape {value.shape} and type {value.dtype}" if is_array else ""
        raise ValueError(
            f"{name} must return a real floating-point scalar, got "
            f"{kind or f'a {type(value).__name__}'}. Return the mean of the losses of the batch."
        )


def check_iterable(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless a loop can run over it."""
    is_scalar = getattr(value, "shape", None) == ()  # has `__iter__`, which fails
    if is_scalar or not (isinstance(value, Iterable) or hasattr(value, "__getitem__")):
        raise ValueError(f"{name} must be a list or an iterator, got {name} = {value!r}.")


def check_real_array(name: str, value: object, shape: tuple[int, ...] | None = None) -> None:
    """Raises a ValueError that names the argument unless it is a real array, of `shape` if any."""
    dtype, actual_shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or actual_shape is None or not is_real(dtype):
        raise ValueError(f"{name} must be an array of real numbers, got {name} = {value!r}.")
    if shape is not None and actual_shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {name}.shape = {actual_shape}.")


def check_fraction(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless it is a number in [0, 1], or traced."""
    if not _is_traced_scalar(value) and not 0 <= as_float(value) <= 1:
        raise ValueError(f"{name} must be in [0, 1] (0.8 means 80 %), got {name} = {value!r}.")


def check_fractions(name: str, value: PyTree) -> None:
    """Raises a ValueError as `check_fraction`, which also takes one number for each slice."""
    if not isinstance(value, np.ndarray | jax.Array) or not value.ndim or not is_real(value.dtype):
        check_fraction(name, value)
    elif not is_traced(value) and not np.all((value >= 0) & (value <= 1)):
        raise ValueError(f"{name} must be in [0, 1] (0.8 means 80 %), got {name} = {value!r}.")


def check_density(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless it is a number in (0, 1], or traced."""
    if not _is_traced_scalar(value) and not 0 < as_float(value) <= 1:
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


def _is_traced_scalar(value: object) -> bool:
    return is_traced(value) and _is_real_scalar(value)


def _is_real_scalar(value: PyTree) -> bool:
    return value.shape == () and value.dtype != np.bool_ and is_real(value.dtype)


def as_float(value: PyTree) -> float:
    """Returns the value of a finite real scalar, NaN for anything else."""
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_traced(value) or not (_is_real_scalar(value) if is_array else is_number):
        return math.nan
    try:
        # An array may be on another device: `float` would transfer unasked.
        number = float(jax.device_get(value))
    except OverflowError:  # of an integer that no float holds
        return math.nan
    return number if math.isfinite(number) else math.nan


def warn(message: str) -> None:
    """Warns at the innermost line outside of this package, of jax, and of libraries around it.

    Example:
      >>> with warnings.catch_warnings(record=True, action="always") as caught:
      ...     warn("All masks are ones.")
      >>> str(caught[0].message)
      'All masks are ones.'
    """
    frame, level = sys._getframe(), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
