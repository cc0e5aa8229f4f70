"""Updaters as values: compared and hashed by their fields."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import DataclassBase


@dataclasses.dataclass
class ComparedByFields(DataclassBase):
    """Dataclass whose instances compare by class and fields, and hash by class.

    An instance that was hashed refuses assignments to its fields.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Otherwise @dataclass writes an __eq__ and, with it, a __hash__ of None.
        for name in {"__eq__", "__hash__"} - vars(cls).keys():
            setattr(cls, name, getattr(ComparedByFields, name))

    def __eq__(self, other: object) -> bool:
        """Returns whether another updater of the class has equal fields.

        A traced seed equals itself only, and so does a function that holds arrays.
        """
        return type(other) is type(self) and all(
            _are_equal(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
        )

    def __hash__(self) -> int:
        """Returns the hash of the class."""
        object.__setattr__(self, "_is_hashed", True)
        return hash(type(self))

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_is_hashed") and name in {x.name for x in dataclasses.fields(self)}:
            raise dataclasses.FrozenInstanceError(
                f"{name} of this {type(self).__name__} cannot be assigned: compiled functions that "
                f"took it would keep the old value. Use dataclasses.replace(updater, {name}=...)."
            )
        super().__setattr__(name, value)


def _are_equal(lhs: object, rhs: object) -> bool:
    try:
        return lhs is rhs or bool(_read_value(lhs) == _read_value(rhs))
    except (ValueError, jax.errors.JAXTypeError):  # arrays within, or traced ones
        return False


def _read_value(field: object) -> object:
    """Returns what tells a field from others by `==`: partial functions and arrays as tuples."""
    if isinstance(field, functools.partial):
        return field.func, field.args, field.keywords
    if isinstance(field, jax.Array | np.ndarray):
        is_key = jnp.issubdtype(field.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(field) if is_key else field
        return str(field.dtype), np.asarray(data).tolist()
    return field
