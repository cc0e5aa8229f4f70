"""Which entries of a tensor are kept or removed together.

Values are frozen and checked when they are made. Axes count within a slice: for stacked weights
(`batch_axes`) the axis 0 is the first one after the leading axes.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Unstructured:
    """Every entry on its own."""


@dataclasses.dataclass(frozen=True)
class NByM:
    """At most `n` non-zeros among every `m` consecutive entries along an axis; density n / m.

    Attributes:
      n: entries kept in each group, in [0, m].
      m: size of a group; must divide the axis.
      axis: the axis along which groups lie. Hardware wants the contraction axis, which is -2 for
        flax kernels of shape [in, out].

    Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks".

    Example:
      >>> NByM(2, 4)
      NByM(n=2, m=4, axis=-1)
    """

    n: int
    m: int
    axis: int = -1

    def __post_init__(self) -> None:
        check_int("NByM.n", self.n, 0)
        check_int("NByM.m", self.m, 1)
        check_int("NByM.axis", self.axis)
        if self.n > self.m:
            raise ValueError(
                f"NByM keeps n of every m entries, so n must be at most m; got n = {self.n}, "
                f"m = {self.m}. Did you mean NByM({self.m}, {self.n})?"
            )


@dataclasses.dataclass(frozen=True)
class Block:
    """Rectangles of the last two axes are kept or removed as a whole; ragged edges included.

    Attributes:
      block_shape: rows and columns of a block; a block that exceeds the array is cut at its edge.
      use_avg_pooling: a block's score is the mean of its entries' scores; otherwise their maximum.

    Source: Narang et al. 2017, "Block-Sparse Recurrent Neural Networks".
    """

    block_shape: tuple[int, int]
    use_avg_pooling: bool = True

    def __post_init__(self) -> None:
        shape = self.block_shape
        if not isinstance(shape, tuple | list) or len(shape) != 2:
            raise ValueError(f"block_shape must be (rows, columns), got block_shape = {shape}.")
        for size in shape:
            check_int("Block.block_shape", size, 1)
        check_bool("Block.use_avg_pooling", self.use_avg_pooling)
        object.__setattr__(self, "block_shape", tuple(shape))


@dataclasses.dataclass(frozen=True)
class Channel:
    """All entries with the same index along `axis` are kept or removed together.

    Attributes:
      axis: the channel axis; a channel's score is the sum of its entries' scores.
    """

    axis: int = -1

    def __post_init__(self) -> None:
        check_int("Channel.axis", self.axis)


SparsityType = Unstructured | NByM | Block | Channel

NbyM = NByM  # as jaxpruner's documentation spells it


def parse_nm(name: str, pattern: Any, axis: int = -1) -> NByM:
    """Reads a pattern that keeps at least one entry of a group.

    Args:
      name: what the pattern is called in messages.
      pattern: (n, m), 'n:m', or an `NByM`, which has an axis of its own.
      axis: the axis of the first two.

    Raises:
      ValueError: the pattern is none of these, or n is not in [1, m].

    Example:
      >>> parse_nm("pattern", "1:4")
      NByM(n=1, m=4, axis=-1)
    """
    given = pattern
    if isinstance(given, str) and (colon := re.fullmatch(_COLON, given)):
        given = int(colon[1]), int(colon[2])
    try:
        if isinstance(given, tuple | list):
            n, m = given
            given = NByM(n, m, axis)
        if not isinstance(given, NByM):
            raise ValueError("A pattern is (n, m), 'n:m' or NByM(n, m, axis).")
        check_int("n", given.n, 1)
    except ValueError as error:
        raise ValueError(f"{name} = {pattern!r} is no pattern. {error}") from None
    return given


def parse_sparsity_type(text: str) -> SparsityType:
    """Reads a type from a configuration string.

    Args:
      text: 'unstructured', 'nm_n,m', 'nm_n,m,axis', 'n:m', 'block_h,w' or 'channel_axis'.

    Raises:
      ValueError: the string is none of these, or its numbers are not valid for the type.

    Example:
      >>> parse_sparsity_type("nm_2,4,-2")
      NByM(n=2, m=4, axis=-2)
    """
    kind, _, rest = text.strip().partition("_")
    colon = re.fullmatch(_COLON, text)
    if colon:
        kind, rest = "nm", f"{colon[1]},{colon[2]}"
    numbers = [int(part) for part in rest.split(",")] if re.fullmatch(_NUMBERS, rest) else []
    match kind, numbers:
        case "unstructured", [] if not rest:
            return Unstructured()
        case "nm", [n, m]:
            return NByM(n, m)
        case "nm", [n, m, axis]:
            return NByM(n, m, axis)
        case "block", [rows, columns]:
            return Block((rows, columns))
        case "channel", [axis]:
            return Channel(axis)
    raise ValueError(
        f"Sparsity type {text!r} is not known. Use 'unstructured', 'nm_2,4', 'nm_2,4,-2' (with the "
        "axis), '2:4', 'block_4,4' or 'channel_-1'."
    )


_COLON = r"\s*(\d+)\s*:\s*(\d+)\s*"
_NUMBERS = r"\s*-?\d+\s*(,\s*-?\d+\s*)*"


def check_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> None:
    """Raises a ValueError that names the argument unless it is an integer in [least, most]."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {name} = {value!r}.")
    value = int(value)
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {name} = {value}.")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {name} = {value}.")


def check_number(name: str, value: Any, least: float = -math.inf) -> None:
    """Raises a ValueError that names the argument unless it is a finite number >= `least`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        raise ValueError(f"{name} must be a finite number >= {least}, got {name} = {value!r}.")


def check_bool(name: str, value: Any) -> None:
    """Raises a ValueError that names the argument unless it is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {name} = {value!r}.")


def check_fraction(name: str, value: Any) -> None:
    """Raises a ValueError that names the argument unless it is a number in [0, 1]; tracers pass."""
    if not isinstance(value, jax.core.Tracer) and not (
        _is_number(value) and 0 <= float(value) <= 1
    ):
        raise ValueError(f"{name} must be in [0, 1] (0.8 means 80 %), got {name} = {value!r}.")


def check_density(name: str, value: Any) -> None:
    """Raises a ValueError that names the argument unless it is a number in (0, 1]; tracers pass."""
    if not isinstance(value, jax.core.Tracer) and not (_is_number(value) and 0 < float(value) <= 1):
        raise ValueError(
            f"{name} is the fraction to keep and must be in (0, 1], got {name} = {value!r}."
        )


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and bool(jnp.issubdtype(np.asarray(value).dtype, jnp.number))
