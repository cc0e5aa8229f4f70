"""Sparse deltas: the entries of a model that fine-tuning changed, as a small file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparsity.core import trees
from sparsity.core.checks import check_iterable, check_kind, check_number
from sparsity.core.trees import Masks, Params, PyTree, Tree
from sparsity.finetuning import delta_file
from sparsity.finetuning.entries import (
    BaseParameter,
    ChangedEntries,
    Term,
    arrays_by_name,
    find_difference,
    format_index,
    have_other_bits,
    make_base_parameter,
    make_entries,
    put_entries,
    to_host,
)
from sparsity.masks import check_masks


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Delta:
    """The changes from a base model to a fine-tuned one: positions and values of changed entries.

    Made by `Delta.between`. `apply` puts the changes into the base, bit for bit. Parameters are
    known by their paths, joined by '/', so that a delta fits the base in any container and in any
    checkpoint format. Everything happens on the host, outside jit, one parameter at a time. Leaves
    that are no numeric arrays, such as random keys and text, have no part in a delta.

    Attributes:
      base: shape, dtype and fingerprint of each array of the base, by path.
      terms: weight and entries of each merged delta; a single one with weight 1 before any merge.

    Example:
      >>> base = {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}
      >>> tuned = base | {"kernel": base["kernel"].at[0, 1].set(0.5)}
      >>> delta = Delta.between(base, tuned)
      >>> delta
      Delta(1 entry in 1 of 2 parameters, 5 bytes)
      >>> delta.apply(base)["kernel"].tolist()
      [[0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]
      >>> Delta.merge([delta, delta], [1.0, -0.5]).apply(base)["kernel"].tolist()
      [[0.0, 0.25, 0.0], [0.0, 0.0, 0.0]]
    """

    base: Mapping[str, BaseParameter]
    terms: tuple[Term, ...]

    @classmethod
    def between(
        cls, base: Params, params: Params, masks: Masks = None, *, dtype: DTypeLike | None = None
    ) -> Delta:
        """Returns the changes from `base` to `params`.

        Args:
          base: the model before training, any pytree.
          params: the model after training, with the same paths, shapes and dtypes.
          masks: tree of uint8 or bool masks with the shapes of the parameters; `None` for a
            parameter that was frozen. Entries outside the masks must equal those of the base. By
            default any entry may have changed. Entries that kept their bits are never stored.
          dtype: `None` stores new values, so that `apply` is exact. A floating dtype stores
            differences, rounded to it: `apply` adds them in float64 and rounds to the dtype of the
            parameter. The error of an entry is at most the sum of both roundings: that of bfloat16
            is 1/256 of the change. Integers and complex numbers are exact whatever `dtype` is.

        Raises:
          ValueError: paths, shapes or dtypes differ; an entry differs outside the masks; a
            difference is not finite in `dtype`. The parameter is named.
        """
        difference_dtype = _read_difference_dtype(dtype)
        _check_leaves(base, params)
        base_arrays, arrays = arrays_by_name(base), arrays_by_name(params)
        masks_by_name = None
        if masks is not None:
            check_masks(params, masks, are_packed=False)
            leaves = trees.leaves_by_path(masks)
            masks_by_name = {trees.path_string(path): mask for path, mask in leaves.items()}
        parameters: dict[str, BaseParameter] = {}
        changes: dict[str, ChangedEntries] = {}
        for name in base_arrays:
            old, new = to_host(name, base_arrays[name]), to_host(name, arrays[name])
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(
                    f"{name!r} has shape {old.shape} and dtype {old.dtype} in base, but "
                    f"{new.shape} and {new.dtype} in params. Cast params to the dtypes of base."
                )
            positions = np.flatnonzero(have_other_bits(old, new))
            if masks_by_name is not None:
                _check_covered(name, old, new, positions, masks_by_name.get(name))
            parameters[name] = make_base_parameter(old)
            if positions.size:
                changes[name] = make_entries(name, old, new, positions, difference_dtype)
        return cls(parameters, (Term(1.0, changes),))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Delta:
        """Reads a file that `save` wrote.

        Raises:
          ValueError: the file is damaged, or holds no delta; its path is named.
        """
        check_kind("path", path, str | os.PathLike, "a path")
        return cls(*delta_file.read(Path(path)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the delta as safetensors: 1 to 4 bytes of index a value, and the values.

        A file at the path is replaced when the new one is complete. The package `safetensors` is
        an extra: `pip install 'jax-sparsity[cli]'`.

        Example:
          >>> import tempfile
          >>> delta = Delta.between({"w": np.zeros(3)}, {"w": np.arange(3.0)})
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     delta.save(f"{folder}/delta.safetensors")
          ...     Delta.load(f"{folder}/delta.safetensors").apply({"w": np.zeros(3)})
          {'w': array([0., 1., 2.])}
        """
        check_kind("path", path, str | os.PathLike, "a path")
        delta_file.write(Path(path), self.base, self.terms)

    @classmethod
    def merge(cls, deltas: Sequence[Delta], weights: Sequence[float] | None = None) -> Delta:
        """Returns the weighted sum of deltas of one base (task arithmetic, arXiv:2212.04089).

        Applied, an entry is that of the base plus the sum of weight times change over all deltas
        that hold the entry. The sum is computed by `apply`, in float64 from the stored values, and
        rounded once; a new value of one delta with weight 1 is exact. So the merged delta takes the
        bytes of all deltas together.

        Args:
          deltas: at least one; merged ones too.
          weights: a finite number for each; by default 1. Negative ones subtract a change. Weights
            of a merged delta are multiplied by its weight here.

        Raises:
          ValueError: the deltas are of different bases; a parameter of integers would be weighted,
            or changed by two deltas. The first such parameter is named.

        Example:
          >>> base = {"w": np.zeros(3)}
          >>> tuned = ({"w": np.array(w)} for w in ([1.0, 0.0, 2.0], [0.0, 3.0, 4.0]))
          >>> Delta.merge([Delta.between(base, p) for p in tuned], [1.0, 0.5]).apply(base)
          {'w': array([1. , 1.5, 4. ])}
        """
        check_iterable("deltas", deltas)
        if weights is not None:
            check_iterable("weights", weights)
        deltas = list(deltas)
        if not deltas:
            raise ValueError("deltas must hold at least one delta, got none.")
        weights = [1.0] * len(deltas) if weights is None else list(weights)
        if len(weights) != len(deltas):
            raise ValueError(f"weights must have {len(deltas)} numbers, one a delta: {weights}.")
        for index, (delta, weight) in enumerate(zip(deltas, weights, strict=True)):
            check_kind(f"deltas[{index}]", delta, Delta, "a Delta")
            check_number(f"weights[{index}]", weight)
            for name in {**deltas[0].base, **delta.base}:
                if reason := find_difference(deltas[0].base.get(name), delta.base.get(name)):
                    raise ValueError(
                        f"deltas[{index}] has another base than deltas[0]: {name!r} {reason}. "
                        "Merge deltas of one base."
                    )
        terms = [
            Term(float(weight) * term.weight, term.entries)
            for delta, weight in zip(deltas, weights, strict=True)
            for term in delta.terms
        ]
        for term in terms:
            check_number("the product of a weight with that of a merged delta", term.weight)
        merged = cls(deltas[0].base, tuple(term for term in terms if term.weight))
        _check_integers(merged)
        return merged

    @property
    def nbytes(self) -> int:
        """Bytes of all positions and values; the file has a header besides."""
        return sum(entries.nbytes for term in self.terms for entries in term.entries.values())

    def apply(self, base: Tree) -> Tree:
        """Returns the fine-tuned model.

        Args:
          base: the model that the delta was made from, in any containers: jax arrays, sharded or
            not, or numpy arrays. Leaves that the delta does not know stay as they are.

        Returns:
          A tree like `base`, with the same dtypes and shardings. Parameters of the delta are new
          arrays and share no memory with `base`; other leaves are those of `base`.

        Raises:
          ValueError: `base` is another model. The message names the first parameter that differs,
            and says whether it is missing or has another shape, dtype or other values.
        """
        arrays = arrays_by_name(base)
        patched = {
            name: _copy(arrays[name]) if array is None else _place_like(arrays[name], array)
            for name, array in self.patches(arrays)
        }
        return trees.map_matched(
            lambda path, leaf: patched.get(trees.path_string(path), leaf), base
        )

    def patches(self, arrays: Mapping[str, PyTree]) -> Iterator[tuple[str, np.ndarray | None]]:
        """Yields the path of each parameter of the base and its new array, one at a time.

        Args:
          arrays: the base, arrays by path.

        Yields:
          A path and an array of the host; `None` in place of a parameter without changes.

        Raises:
          ValueError: as `apply`.
        """
        for name, parameter in self.base.items():
            if name not in arrays:
                _refuse_base(name, "is missing")
            leaf = arrays[name]
            described = BaseParameter(
                tuple(leaf.shape), np.dtype(leaf.dtype).name, parameter.fingerprint
            )
            _refuse_base(name, find_difference(parameter, described))
        for name, parameter in self.base.items():
            array = to_host(name, arrays[name])
            _refuse_base(name, find_difference(parameter, make_base_parameter(array)))
            terms = [
                (term.weight, term.entries[name]) for term in self.terms if name in term.entries
            ]
            yield name, put_entries(name, array, terms) if terms else None

    def __repr__(self) -> str:
        changed = {name for term in self.terms for name in term.entries}
        count = sum(entries.count for term in self.terms for entries in term.entries.values())
        weights = [term.weight for term in self.terms]
        return (
            f"Delta({count:,} {'entry' if count == 1 else 'entries'} in {len(changed)} of "
            f"{len(self.base)} parameters, {self.nbytes:,} bytes"
            + (")" if weights == [1.0] else f", weights {weights})")
        )


def _read_difference_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """Returns the dtype of differences; raises unless it is `None` or real and floating."""
    if dtype is None:
        return None
    try:
        difference_dtype = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype must be a floating dtype, got dtype = {dtype!r}.") from error
    if not jnp.issubdtype(difference_dtype, np.floating) or difference_dtype.type is np.longdouble:
        raise ValueError(
            f"dtype must be None (exact values) or a floating dtype, got dtype = {dtype!r}."
        )
    return difference_dtype


def _check_leaves(base: Params, params: Params) -> None:
    """Raises a ValueError unless two trees have the same paths, and the same Python numbers."""
    one, other = (
        {trees.path_string(path): leaf for path, leaf in trees.leaves_by_path(tree).items()}
        for tree in (base, params)
    )
    for role, names in [("base", other.keys() - one), ("params", one.keys() - other)]:
        if names:
            raise ValueError(
                f"{role} has no leaf at {trees.listed(sorted(names))}. Both must be of one model."
            )
    for name, leaf in one.items():
        if trees.is_numeric(leaf) != trees.is_numeric(other[name]):
            raise ValueError(f"{name!r} is an array in only one of base and params.")
        is_number = isinstance(leaf, int | float | complex) and not trees.is_array(leaf)
        if is_number and repr(leaf) != repr(other[name]):  # -0.0 is not 0.0
            raise ValueError(
                f"{name!r} is {leaf} in base and {other[name]} in params, and no array. Make it an "
                "array, or leave it out of both."
            )


def _check_covered(
    name: str, old: np.ndarray, new: np.ndarray, positions: np.ndarray, mask: PyTree
) -> None:
    """Raises a ValueError that names the first changed entry outside a mask."""
    outside = positions
    if mask is not None:
        outside = positions[to_host(name, mask).reshape(-1)[positions] == 0]
    if outside.size:
        index, first_position = format_index(old.shape, outside[0]), outside[0]
        raise ValueError(
            f"params differ from base outside the masks, first at {name!r}{index}: "
            f"{new.reshape(-1)[first_position]}, not {old.reshape(-1)[first_position]}; "
            f"{outside.size:,} entries of this parameter in all. Train with these masks, or store "
            "all changes by masks=None."
        )


def _check_integers(delta: Delta) -> None:
    """Raises a ValueError if a sum of changes would have to be rounded to integers."""
    for name, parameter in delta.base.items():
        weights = [term.weight for term in delta.terms if name in term.entries]
        if weights not in ([], [1.0]) and not jnp.issubdtype(parameter.dtype, jnp.inexact):
            raise ValueError(
                f"{name!r} of dtype {parameter.dtype} would change with the weights {weights}; "
                "integers have no weighted sum. Make the deltas without this parameter."
            )


def _refuse_base(name: str, reason: str | None) -> None:
    """Raises a ValueError that names the parameter if there is a reason."""
    if reason:
        raise ValueError(
            f"The base is not the one that the delta was made from: {name!r} {reason}. Apply the "
            "delta to its base."
        )


def _place_like(leaf: PyTree, array: np.ndarray) -> PyTree:
    """Returns a new array of the host where a parameter lies."""
    if not isinstance(leaf, jax.Array):
        array = array.astype(leaf.dtype, copy=False)  # the byte order, nothing else
        return array[()] if isinstance(leaf, np.generic) else array
    with jax.enable_x64(True):  # without x64 jax would round 64 bits to 32
        return jax.device_put(array, leaf.sharding if leaf.committed else None)


def _copy(leaf: PyTree) -> PyTree:
    if not isinstance(leaf, jax.Array):
        return leaf.copy()
    return jax.device_put(leaf, leaf.sharding if leaf.committed else None, may_alias=False)
