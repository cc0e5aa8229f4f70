"""Sparse deltas: the entries of a model that fine-tuning changed, as a small file.

New values are stored, because differences are not exact: no float32 number takes 1.0 to 1e-10 by
one addition, nor 0.0 to -0.0. Differences are a choice for narrow dtypes, where they lose less than
values.

A file is safetensors. Its metadata have the shape, dtype and digest of each parameter of the base,
and the weights of the merged deltas, as JSON. Delta i has the arrays `i/indices/PATH` and
`i/values/PATH` or `i/differences/PATH`; dtypes that numpy does not get back are stored as bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparsity.core import extras, trees
from sparsity.core.checks import check_kind, check_number, unique_keys
from sparsity.core.extras import reading, replacing
from sparsity.core.trees import Masks, Params, PyTree, Tree
from sparsity.masks import check_masks

FORMAT = "sparsity.delta/2"
FLOATS = ("float16", "bfloat16", "float32", "float64")  # differences, and values stored as they are


class BaseParameter(NamedTuple):
    """A parameter of a base: shape, name of its dtype, and a digest of its bytes."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


class ChangedEntries(NamedTuple):
    """The changed entries of a parameter.

    Attributes:
      indices: uint32[k], ascending, in the flat parameter; uint64[k] beyond 2**32 entries.
      values: [k], new values in the parameter's dtype, or differences in a floating dtype.
      kind: 'values' or 'differences'.
    """

    indices: np.ndarray
    values: np.ndarray
    kind: str


class Term(NamedTuple):
    """The changes of one fine-tuning, by path, and the factor that they are added with."""

    weight: float
    entries: dict[str, ChangedEntries]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Delta:
    """The changes from a base model to a fine-tuned one: indices and values of changed entries.

    Made by `Delta.between`. `apply` puts the changes into the base, bit for bit. Parameters are
    known by their paths, joined by '/', so that a delta fits the base in any container and in any
    checkpoint format. Everything happens on the host, outside jit, one parameter at a time. Leaves
    that are no numeric arrays, such as random keys and text, have no part in a delta.

    Attributes:
      base: shape, dtype and digest of each array of the base, by path.
      terms: weight and entries of each merged delta; a single one with weight 1 before any merge.

    Example:
      >>> base = {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}
      >>> tuned = base | {"kernel": base["kernel"].at[0, 1:].set(0.5)}
      >>> delta = Delta.between(base, tuned)
      >>> delta
      Delta(2 entries in 1 of 2 parameters, 16 bytes)
      >>> delta.apply(base)["kernel"].tolist()
      [[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]
      >>> Delta.merge([delta, delta], [1.0, -0.5]).apply(base)["kernel"].tolist()
      [[0.0, 0.25, 0.25], [0.0, 0.0, 0.0]]
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
          dtype: `None` stores new values, so that `apply` is exact. 'float16', 'bfloat16',
            'float32' or 'float64' stores differences, rounded to it: `apply` adds them in float64
            and rounds to the dtype of the parameter. The error of an entry is at most the sum of
            both roundings: that of bfloat16 is 1/256 of the change. Integers and complex numbers
            are exact whatever `dtype` is.

        Raises:
          ValueError: paths, shapes or dtypes differ; an entry differs outside the masks; a
            difference is not finite in `dtype`. The parameter is named.
        """
        if dtype is not None and np.dtype(dtype).name not in FLOATS:
            raise ValueError(f"dtype must be None or one of {', '.join(FLOATS)}, got {dtype!r}.")
        base_arrays, arrays = arrays_by_name(base), arrays_by_name(params)
        old_types, new_types = (
            {x: _describe(y, "") for x, y in arrays_by_name(tree).items()}
            for tree in (base, params)
        )
        _check_same(old_types, new_types, "params must have the arrays, shapes and dtypes of base")
        if masks is not None:
            check_masks(params, masks, are_packed=False)
        mask_by_name, parameters, changes = arrays_by_name(masks), {}, {}
        for name, leaf in base_arrays.items():
            old, new = to_host(leaf), to_host(arrays[name])
            indices = np.flatnonzero(have_other_bits(old, new))
            mask = mask_by_name.get(name, np.zeros_like(old, bool))
            if masks is not None and np.any(outside := to_host(mask).reshape(-1)[indices] == 0):
                raise ValueError(
                    f"params differ from base outside the masks, at index {indices[outside][0]} of "
                    f"{name!r}. Train with these masks, or store all changes by masks=None."
                )
            parameters[name] = _describe(old)
            if indices.size:
                changes[name] = _make_entries(name, old, new, indices, dtype)
        return cls(parameters, (Term(1.0, changes),))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Delta:
        """Reads a file that `save` wrote.

        Raises:
          ValueError: the file is damaged, or holds no delta; its path is named.
        """
        safe_open = extras.load("safetensors", "cli").safe_open
        with reading(Path(path)), safe_open(path, framework="np") as file:
            if (metadata := file.metadata() or {}).get("format") != FORMAT:
                raise ValueError(f"its metadata do not say {FORMAT!r}: it holds no delta")
            described = json.loads(metadata["base"]).items()
            base = {name: BaseParameter(tuple(shape), *x) for name, (shape, *x) in described}
            terms = tuple(Term(weight, {}) for weight in json.loads(metadata["weights"]))
            for key in file.keys():  # noqa: SIM118  # a file is no mapping
                index, kind, name = key.split("/", 2)
                if kind != "indices":
                    indices, values = (file.get_tensor(x) for x in (f"{index}/indices/{name}", key))
                    values = values.view(base[name].dtype) if kind == "values" else values
                    terms[int(index)].entries[name] = ChangedEntries(indices, values, kind)
        return cls(base, terms)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the delta as safetensors: 4 bytes of index a value, and the values.

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
        save_file = extras.load("safetensors.numpy", "cli").save_file
        arrays: dict[str, np.ndarray] = {}
        for index, term in enumerate(self.terms):
            for name, (indices, values, kind) in term.entries.items():
                is_float = values.dtype.name in FLOATS
                arrays[f"{index}/indices/{name}"] = indices
                arrays[f"{index}/{kind}/{name}"] = values if is_float else values.view(np.uint8)
        weights = json.dumps([term.weight for term in self.terms])
        metadata = {"format": FORMAT, "base": json.dumps(self.base), "weights": weights}
        with replacing(Path(path)) as new:
            save_file(arrays, new, metadata=metadata)

    @classmethod
    def merge(cls, deltas: Sequence[Delta], weights: Sequence[float] | None = None) -> Delta:
        """Returns the weighted sum of deltas of one base (task arithmetic, arXiv:2212.04089).

        Applied, an entry is that of the base plus the sum of weight times change over all deltas
        that hold the entry. The sum is computed by `apply`, in float64 from the stored values; a
        new value of one delta with weight 1 is exact. So the merged delta takes the bytes of all
        deltas together.

        Args:
          deltas: at least one; merged ones too.
          weights: a finite number for each; by default 1. Negative ones subtract a change. Weights
            of a merged delta are multiplied by its weight here.

        Raises:
          ValueError: the deltas are of different bases; the first parameter that differs is named.
            `apply` refuses sums of changes of integers.

        Example:
          >>> base = {"w": np.zeros(3)}
          >>> tuned = ({"w": np.array(w)} for w in ([1.0, 0.0, 2.0], [0.0, 3.0, 4.0]))
          >>> Delta.merge([Delta.between(base, p) for p in tuned], [1.0, 0.5]).apply(base)
          {'w': array([1. , 1.5, 4. ])}
        """
        deltas = list(deltas)
        weights = [1.0] * len(deltas) if weights is None else list(weights)
        if not deltas or len(weights) != len(deltas):
            raise ValueError(f"merge needs a weight a delta, got {len(deltas)}, weights {weights}.")
        terms = []
        for index, (delta, weight) in enumerate(zip(deltas, weights, strict=True)):
            check_kind(f"deltas[{index}]", delta, Delta, "a Delta")
            check_number(f"weights[{index}]", weight)
            _check_same(deltas[0].base, delta.base, f"deltas[{index}] has another base")
            terms += [Term(weight * term.weight, term.entries) for term in delta.terms if weight]
        return cls(deltas[0].base, tuple(terms))

    @property
    def nbytes(self) -> int:
        """Bytes of all indices and values; the file has a header besides."""
        changes = [entries for term in self.terms for entries in term.entries.values()]
        return sum(entries.indices.nbytes + entries.values.nbytes for entries in changes)

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
        actual = {name: _describe(x) for name, x in arrays.items() if name in self.base}
        _check_same(self.base, actual, "The base is not the one that the delta was made from")

        def patch(path: trees.KeyPath, leaf: PyTree) -> PyTree:
            name = trees.path_string(path)
            if name not in self.base:
                return leaf
            changes = [(x.weight, x.entries[name]) for x in self.terms if name in x.entries]
            return _place_like(leaf, _add(name, leaf, changes) if changes else to_host(leaf).copy())

        return trees.map_matched(patch, base)

    def __repr__(self) -> str:
        pairs = [pair for term in self.terms for pair in term.entries.items()]
        count = sum(entries.values.size for _, entries in pairs)
        places = f"{len(dict(pairs))} of {len(self.base)} parameters"
        return f"Delta({count:,} entries in {places}, {self.nbytes:,} bytes)"


def arrays_by_name(tree: PyTree) -> dict[str, PyTree]:
    """Returns the numeric arrays of a tree by their paths, joined by '/', each path once."""
    named = [(trees.path_string(path), leaf) for path, leaf in trees.leaves_by_path(tree).items()]
    return {name: leaf for name, leaf in unique_keys(named).items() if trees.is_numeric(leaf)}


def to_host(leaf: PyTree) -> np.ndarray:
    """Returns an array of the host in C order and in the byte order of the machine."""
    return np.asarray(leaf, leaf.dtype.newbyteorder("="), order="C")


def have_other_bits(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns which entries of two arrays of one dtype, as flat arrays, differ in any bit."""
    word = min(old.dtype.itemsize, 8)
    words = [array.reshape(-1).view(f"u{word}") for array in (old, new)]
    return np.any((words[0] != words[1]).reshape(old.size, old.dtype.itemsize // word), axis=1)


def _describe(leaf: PyTree, digest: str | None = None) -> BaseParameter:
    """Returns shape, dtype and digest of a parameter, however it is sharded."""
    if digest is None:
        digest = hashlib.sha256(to_host(leaf).reshape(-1).view(np.uint8).data).hexdigest()[:32]
    return BaseParameter(leaf.shape, np.dtype(leaf.dtype).name, digest)


def _check_same(
    expected: Mapping[str, BaseParameter], actual: Mapping[str, BaseParameter], role: str
) -> None:
    """Raises a ValueError that names the first parameter that differs between two bases."""
    for name in {**expected, **actual}:
        one, other = (x.get(name, "missing") for x in (actual, expected))
        if one != other:
            raise ValueError(f"{role}: {name!r} is {one}, not {other}.")


def _make_entries(
    name: str, old: np.ndarray, new: np.ndarray, indices: np.ndarray, dtype: DTypeLike | None
) -> ChangedEntries:
    """Returns the entries at indices: values, or differences in `dtype` of real parameters."""
    old_values, values = (array.reshape(-1)[indices] for array in (old, new))
    indices = indices.astype(np.uint32 if old.size <= 2**32 else np.uint64)
    if dtype is None or not jnp.issubdtype(old.dtype, np.floating):
        return ChangedEntries(indices, values, "values")
    with np.errstate(all="ignore"):
        differences = (values.astype(np.float64) - old_values.astype(np.float64)).astype(dtype)
    if not np.isfinite(differences.astype(np.float64)).all():
        raise ValueError(f"A difference of {name!r} is not finite in {dtype}. Use dtype=None.")
    return ChangedEntries(indices, differences, "differences")


def _add(name: str, leaf: PyTree, changes: Sequence[tuple[float, ChangedEntries]]) -> np.ndarray:
    """Returns a copy of a parameter with weighted changes added.

    An entry of one change with weight 1 gets its value bit for bit. Other entries are computed in
    float64 (complex128) and rounded to the parameter's dtype.
    """
    array = to_host(leaf)
    patched = array.reshape(-1).copy()
    indices = functools.reduce(np.union1d, [entries.indices for _, entries in changes])
    old = patched[indices].astype("complex128" if array.dtype.kind == "c" else "float64")
    new, count = old.copy(), np.zeros(old.size, int)  # count above 1: computed, not copied
    with np.errstate(all="ignore"):
        for weight, (entry_indices, values, kind) in changes:
            places = np.searchsorted(indices, entry_indices)
            start = old[places] if kind == "values" else 0
            new[places] += weight * (values.astype(old.dtype) - start)
            is_exact = weight == 1 and kind == "values"
            count[places] += 1 if is_exact else 2
            if is_exact:
                patched[entry_indices] = values
        if np.any(count > 1) and not jnp.issubdtype(array.dtype, jnp.inexact):
            raise ValueError(f"{name!r} of {array.dtype} has no weighted sum: merge without it.")
        patched[indices[count > 1]] = new[count > 1].astype(array.dtype)
    return patched.reshape(array.shape)


def _place_like(leaf: PyTree, array: np.ndarray) -> PyTree:
    """Returns a new array of the host where a parameter lies."""
    if not isinstance(leaf, jax.Array):
        array = array.astype(leaf.dtype, copy=False)  # the byte order, nothing else
        return array[()] if isinstance(leaf, np.generic) else array
    return jax.device_put(array, leaf.sharding if leaf.committed else None)
