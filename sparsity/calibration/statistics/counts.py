"""Numbers of rows that stay exact where jax holds no integer wider than 32 bits."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from sparsity.calibration import host
from sparsity.core.trees import PyTree

_BASE = 16  # bits of a digit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Count:
    """Number of rows below 2**63, or an array of such numbers.

    `int(count)` and `np.asarray(count)` read a count outside of jit, `count.as_float()` anywhere.
    Counts pass through jit and add up leaf by leaf, up to 2**16 of them before a `+` of counts.

    Attributes:
      digits: uint32[4, ...], in base 2**16 from the lowest on; a digit may exceed the base.

    Example:
      >>> count = Count.from_number(2**31)
      >>> count, int(jax.tree.map(jnp.add, count, count))
      (Count(2147483648), 4294967296)
    """

    digits: chex.Array

    @classmethod
    def from_number(cls, number: int | np.ndarray) -> Count:
        """Returns the count of an integer, or of an array of integers."""
        integers = np.asarray(number)
        if integers.dtype.kind not in "iu" or (integers < 0).any() or (integers >= 2**63).any():
            raise ValueError(f"A count must be an integer in [0, 2**63), got {number!r}.")
        integers = integers.astype(np.uint64)
        digits = [integers >> np.uint64(_BASE * i) & np.uint64(0xFFFF) for i in range(4)]
        return cls(np.stack(digits).astype(np.uint32))

    def __add__(self, other: Count) -> Count:
        if not isinstance(other, Count):
            return NotImplemented
        return Count(_carry_digits(_carry_digits(self.digits) + _carry_digits(other.digits)))

    def as_float(self) -> jax.Array:
        """Returns the nearest float32, or a neighbour of the nearest."""
        xp = host.namespace([self.digits])
        low, second, third, high = xp.asarray(_carry_digits(self.digits), np.float32)
        return ((high * 65536 + third) * 65536 + second) * 65536 + low

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        digits = np.asarray(jax.device_get(self.digits)).astype(np.int64)
        return np.asarray(sum(digits[i] << _BASE * i for i in range(4)), dtype)

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __eq__(self, other: object) -> bool | np.ndarray:  # type: ignore[override]
        return np.asarray(self) == np.asarray(other)

    def __rtruediv__(self, sums: chex.Array) -> jax.Array:
        return jnp.asarray(sums) / self.as_float()

    def __repr__(self) -> str:
        is_concrete = isinstance(self.digits, jax.Array | np.ndarray)
        return f"Count({np.asarray(self) if is_concrete else self.digits})"


def _carry_digits(digits: chex.Array) -> chex.Array:
    """Returns the digits of the same number, all below the base but the last.

    Digits of numpy stay there: outside of jit jax would dispatch each operation by itself.
    """
    rows: list[PyTree] = [*(digits if isinstance(digits, np.ndarray) else jnp.asarray(digits))]
    for i in range(3):
        rows[i + 1] = rows[i + 1] + (rows[i] >> _BASE)
        rows[i] = rows[i] & 0xFFFF
    return np.stack(rows) if isinstance(digits, np.ndarray) else jnp.stack(rows)
