"""Updaters as values: compared and hashed by their fields."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import DataclassBase, is_traced


@dataclasses.dataclass
class ComparedByFields(DataclassBase):
    """Dataclass whose instances compare and hash by class and fields.

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
        """Returns a hash that updaters of equal fields share; values without one are left out."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        result = hash((type(self), *map(_hash, fields)))
        object.__setattr__(self, "_is_hashed", True)
        return result

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_is_hashed") and name in {x.name for x in dataclasses.fields(self)}:
            raise dataclasses.FrozenInstanceError(
                f"{name} of this {type(self).__name__} cannot be assigned: it was hashed, as a "
                "static argument or a key, and compiled functions would keep the old value. "
                f"Use dataclasses.replace(updater, {name}=...)."
            )
        super().__setattr__(name, value)


def _hash(value: object) -> int:
    if isinstance(value, functools.partial):
        keywords = sorted(value.keywords)
        return hash((value.func, *map(_hash, value.args), *keywords))
    if isinstance(value, jax.Array | np.ndarray):
        return hash((value.shape, str(value.dtype)))
    try:
        return hash(value)
    except TypeError:  # a dict of overrides, perhaps within a distribution
        return hash(type(value))


def _are_equal(lhs: object, rhs: object) -> bool:
    if lhs is rhs:
        return True
    if isinstance(lhs, functools.partial) and isinstance(rhs, functools.partial):
        lhs, rhs = ((part.func, part.args, part.keywords) for part in (lhs, rhs))
    if isinstance(lhs, jax.Array | np.ndarray) and isinstance(rhs, jax.Array | np.ndarray):
        if is_traced(lhs) or is_traced(rhs) or lhs.dtype != rhs.dtype:
            return False
        if jnp.issubdtype(lhs.dtype, jax.dtypes.prng_key):
            lhs, rhs = jax.random.key_data(lhs), jax.random.key_data(rhs)
        return np.array_equal(lhs, rhs)
    if any(isinstance(value, jax.Array | np.ndarray) for value in (lhs, rhs)):
        return False
    try:
        return bool(lhs == rhs)
    except ValueError:  # arrays within, which have no one truth value
        return False
