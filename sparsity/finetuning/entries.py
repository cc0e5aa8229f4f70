"""Changed entries of a parameter: how they are found, stored and put back.

New values are stored, because differences are not exact: no float32 number takes 1.0 to 1e-10 by
one addition, nor 0.0 to -0.0. Differences are a choice for narrow dtypes, where they lose less than
values.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import PyTree
from sparsity.finetuning import gaps

DIGITS = 32  # of a fingerprint, 128 bits


class BaseParameter(NamedTuple):
    """A parameter of a base: shape, name of its dtype, and a fingerprint of its bytes."""

    shape: tuple[int, ...]
    dtype: str
    fingerprint: str


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedEntries:
    """The changed entries of a parameter.

    Attributes:
      gaps: uint8, uint16 or uint32, positions in the flat parameter, coded by `gaps.encode`.
      values: [entries], new values in the parameter's dtype, or differences in any floating dtype.
      is_difference: whether `values` are differences.
      largest: the largest finite difference, absolute, between a new value and that of the base.
    """

    gaps: np.ndarray
    values: np.ndarray
    is_difference: bool
    largest: float

    @property
    def count(self) -> int:
        """Number of entries."""
        return self.values.size

    @property
    def nbytes(self) -> int:
        """Bytes of positions and values."""
        return self.gaps.nbytes + self.values.nbytes


class Term(NamedTuple):
    """The changes of one fine-tuning, by path, and the factor that they are added with."""

    weight: float
    entries: Mapping[str, ChangedEntries]


def to_host(name: str, leaf: PyTree) -> np.ndarray:
    """Returns a parameter as an array of the host in C order and in the byte order of the machine.

    Raises:
      ValueError: the parameter has no values here, or its dtype has bytes without a meaning.
    """
    if is_traced(leaf):
        raise ValueError(f"{name!r} is traced. Deltas are made and applied outside jit.")
    if not getattr(leaf, "is_fully_addressable", True):
        raise ValueError(
            f"{name!r} lies on devices of several processes. Gather it first, by "
            "jax.experimental.multihost_utils.process_allgather(params, tiled=True)."
        )
    array = np.asarray(leaf, order="C")
    if array.dtype.kind == "O" or array.dtype.type in (np.longdouble, np.clongdouble):
        raise ValueError(f"{name!r} of dtype {leaf.dtype} has no bytes that a delta could hold.")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def make_base_parameter(array: np.ndarray) -> BaseParameter:
    """Returns shape, dtype and fingerprint of a parameter, however it was sharded."""
    digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
    return BaseParameter(array.shape, array.dtype.name, digest[:DIGITS])


def find_difference(old: BaseParameter | None, new: BaseParameter | None) -> str | None:
    """Describes the difference of two parameters; `None` for equal ones."""
    if old is None or new is None:
        return "is missing"
    if new.shape != old.shape:
        return f"has the shape {new.shape}, not {old.shape}"
    if new.dtype != old.dtype:
        return f"has the dtype {new.dtype}, not {old.dtype}"
    return None if new == old else "has other values"


def have_other_bits(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns which entries of two flat arrays of one dtype differ in any bit."""
    size = old.dtype.itemsize
    word = min(size, 8)
    bits = [array.reshape(-1).view(f"u{word}").reshape(-1, size // word) for array in (old, new)]
    return np.any(bits[0] != bits[1], axis=1)


def make_entries(
    name: str, old: np.ndarray, new: np.ndarray, positions: np.ndarray, dtype: np.dtype | None
) -> ChangedEntries:
    """Returns the entries at some positions.

    Args:
      name: path of the parameter, for errors.
      old: the parameter of the base.
      new: the parameter after training, of the same shape and dtype.
      positions: int64[entries], ascending.
      dtype: dtype of differences; `None` stores values. Parameters that are not real floating
        numbers always store values.

    Raises:
      ValueError: a difference is not finite in `dtype`.
    """
    old_values, values = (array.reshape(-1)[positions] for array in (old, new))
    with np.errstate(all="ignore"):
        wide = _wide_dtype(old.dtype)
        change = values.astype(wide) - old_values.astype(wide)
        largest = float(np.max(np.abs(change[np.isfinite(change)]), initial=0.0))
        is_difference = dtype is not None and bool(jnp.issubdtype(old.dtype, np.floating))
        if is_difference:
            values = _round(change, np.dtype(dtype))
            is_not_finite = ~np.isfinite(values.astype(wide))
            if is_not_finite.any():
                index = format_index(old.shape, positions[is_not_finite.argmax()])
                raise ValueError(
                    f"The difference at {name!r}{index} is not finite in dtype = {dtype}. "
                    "dtype=None stores new values."
                )
    return ChangedEntries(gaps.encode(positions), values, is_difference, largest)


def put_entries(
    name: str, array: np.ndarray, terms: Sequence[tuple[float, ChangedEntries]]
) -> np.ndarray:
    """Returns a copy of a parameter with the weighted changes of all terms added.

    An entry of one term with weight 1 gets its value bit for bit. Other entries are computed in
    float64 (complex128) and rounded to the parameter's dtype.

    Raises:
      ValueError: a sum is not finite.
    """
    patched = array.reshape(-1).copy()
    positions_by_term = [gaps.decode(entries.gaps) for _, entries in terms]
    if len(terms) == 1 and _is_copied(*terms[0]):
        patched[positions_by_term[0]] = terms[0][1].values
        return patched.reshape(array.shape)
    wide = _wide_dtype(array.dtype)
    positions, inverse = np.unique(np.concatenate(positions_by_term), return_inverse=True)
    indices_by_term = np.split(
        inverse, np.cumsum([len(term_positions) for term_positions in positions_by_term])[:-1]
    )
    old_values = patched[positions].astype(wide)
    change, count = np.zeros_like(old_values), np.zeros(old_values.size, int)
    with np.errstate(all="ignore"):
        for indices, (weight, entries) in zip(indices_by_term, terms, strict=True):
            values = entries.values.astype(wide)
            change[indices] += weight * (
                values if entries.is_difference else values - old_values[indices]
            )
            count[indices] += 1
        sums = _round(old_values + change, array.dtype)
        is_not_finite = ~np.isfinite(sums.astype(wide))
    for indices, (weight, entries) in zip(indices_by_term, terms, strict=True):
        if _is_copied(weight, entries):
            is_single = count[indices] == 1
            sums[indices[is_single]] = entries.values[is_single]
            is_not_finite[indices[is_single]] = False
    if is_not_finite.any():
        index = format_index(array.shape, positions[is_not_finite.argmax()])
        raise ValueError(
            f"The merged value at {name!r}{index} is not finite in {array.dtype}. Merge with "
            "smaller weights, or leave out the delta that is not finite there."
        )
    patched[positions] = sums
    return patched.reshape(array.shape)


def format_index(shape: tuple[int, ...], position: int) -> str:
    """Returns the index of an entry as text.

    Example:
      >>> format_index((3, 4), 6)
      '[1, 2]'
    """
    return str([int(i) for i in np.unravel_index(position, shape)])


def arrays_by_name(tree: PyTree) -> dict[str, PyTree]:
    """Returns the numeric arrays of a tree by their paths, joined by '/'.

    Raises:
      ValueError: the paths of two leaves are the same text.
    """
    arrays: dict[str, PyTree] = {}
    for path, leaf in trees.leaves_by_path(tree).items():
        name = trees.path_string(path)
        if name in arrays:
            raise ValueError(f"Two leaves have the path {name!r}. Rename one.")
        if trees.is_numeric(leaf):
            arrays[name] = leaf
    return arrays


def _is_copied(weight: float, entries: ChangedEntries) -> bool:
    """Returns whether an entry of no other term is copied."""
    return weight == 1 and not entries.is_difference


def _round(wide: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns float64 or complex128 numbers in another dtype, each rounded once.

    Casts of `ml_dtypes` to bfloat16 or float8 round to float32 first. A float32 number with an odd
    last bit in place of each that is not exact leads the second rounding to where one would.
    """
    if dtype.itemsize >= 4:
        return wide.astype(dtype)
    nearest = wide.astype(np.float32)
    is_farther = np.abs(nearest) > np.abs(wide)
    truncated = np.where(is_farther, np.nextafter(nearest, np.float32(0)), nearest)
    odd = truncated.view(np.uint32) | (truncated != wide)
    return odd.view(np.float32).astype(dtype)


def _wide_dtype(dtype: np.dtype) -> type[np.inexact]:
    return np.complex128 if jnp.issubdtype(dtype, np.complexfloating) else np.float64
