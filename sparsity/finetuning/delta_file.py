"""Deltas as safetensors files.

The metadata describe the base and the terms in JSON. Term i has the arrays `i/gaps/PATH` and
`i/values/PATH` or `i/differences/PATH` for each changed parameter. Dtypes that the package
`safetensors` cannot return as numpy arrays are stored as bytes. A digest covers all of this.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from sparsity.core import extras
from sparsity.core.checks import check_number, unique_keys
from sparsity.core.files import reading, replacing
from sparsity.core.trees import PyTree
from sparsity.finetuning import gaps
from sparsity.finetuning.entries import BaseParameter, ChangedEntries, Term

FORMAT = "sparsity.delta/1"
KINDS = {False: "values", True: "differences"}
# fmt: off
NUMPY = {
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64",
}
# fmt: on


def write(path: Path, base: Mapping[str, BaseParameter], terms: Sequence[Term]) -> None:
    """Writes a delta, completely or not at all."""
    save_file = extras.load("safetensors.numpy", "cli").save_file
    arrays: dict[str, np.ndarray] = {}
    for index, term in enumerate(terms):
        for name, entries in term.entries.items():
            is_numpy = entries.values.dtype.name in NUMPY
            values = entries.values if is_numpy else entries.values.view(np.uint8)
            arrays[f"{index}/gaps/{name}"] = entries.gaps
            arrays[f"{index}/{KINDS[entries.is_difference]}/{name}"] = values
    described = [
        {
            "weight": term.weight,
            "parameters": {
                name: [entries.is_difference, entries.values.dtype.name, entries.largest]
                for name, entries in term.entries.items()
            },
        }
        for term in terms
    ]
    metadata = {"format": FORMAT, "base": json.dumps(base), "terms": json.dumps(described)}
    metadata["digest"] = _compute_digest(metadata, terms)
    with replacing(path) as new:
        try:
            save_file(arrays, new, metadata=metadata)
        except extras.load("safetensors", "cli").SafetensorError as error:
            raise OSError(str(error)) from error


def read(path: Path) -> tuple[dict[str, BaseParameter], tuple[Term, ...]]:
    """Returns the base and the terms of a delta.

    Raises:
      ValueError: the file is damaged or holds no delta; its path is named.
    """
    safetensors = extras.load("safetensors", "cli")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give the path of a delta.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Give the path of a file that Delta.save wrote.")
    with reading(path), safetensors.safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its metadata do not say {FORMAT!r}: it holds no delta")
        described = json.loads(metadata["base"], object_pairs_hook=unique_keys)
        base = {name: _read_parameter(name, fields) for name, fields in described.items()}
        described = json.loads(metadata["terms"], object_pairs_hook=unique_keys)
        terms = tuple(_read_term(file, i, base, fields) for i, fields in enumerate(described))
        if len(file.keys()) != 2 * sum(len(term.entries) for term in terms):
            raise ValueError("it holds arrays that its metadata do not describe")
        if metadata["digest"] != _compute_digest(metadata, terms):
            raise ValueError("its digest is that of other contents")
    return base, terms


def _compute_digest(metadata: Mapping[str, str], terms: Sequence[Term]) -> str:
    """Returns a hash of the descriptions, positions and values."""
    digest = hashlib.sha256(f"{metadata['base']}\n{metadata['terms']}".encode())
    for term in terms:
        for entries in term.entries.values():
            digest.update(entries.gaps.data)
            digest.update(entries.values.view(np.uint8).data)
    return digest.hexdigest()


def _check_fields(name: str, fields: PyTree, *classes: type) -> PyTree:
    """Returns the fields that describe a parameter; raises a ValueError for other types."""
    if not isinstance(fields, list) or [type(field) for field in fields] != [*classes]:
        expected = ", ".join(cls.__name__ for cls in classes)
        raise ValueError(f"{name!r} is described by {fields!r:.80}, not by [{expected}]")
    return fields


def _read_parameter(name: str, fields: PyTree) -> BaseParameter:
    shape, dtype, fingerprint = _check_fields(name, fields, list, str, str)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name!r} has the shape {shape}")
    return BaseParameter(tuple(shape), np.dtype(dtype).name, fingerprint)


def _read_term(file: PyTree, index: int, base: Mapping[str, BaseParameter], fields: PyTree) -> Term:
    """Returns a term of an open file; raises unless its entries fit the parameters."""
    check_number("weight", fields["weight"])
    entries_by_name = {}
    for name, described in fields["parameters"].items():
        is_difference, dtype, largest = _check_fields(name, described, bool, str, float)
        if not 0 <= largest < math.inf:
            raise ValueError(f"{name!r} has {largest} as its largest change")
        values = file.get_tensor(f"{index}/{KINDS[is_difference]}/{name}")
        values = values if values.dtype.name == dtype else values.view(dtype)
        entries = ChangedEntries(
            file.get_tensor(f"{index}/gaps/{name}"), values, is_difference, largest
        )
        entries_by_name[name] = entries
        _check_entries(name, base[name], entries)
    return Term(fields["weight"], entries_by_name)


def _check_entries(name: str, parameter: BaseParameter, entries: ChangedEntries) -> None:
    """Raises a ValueError unless entries fit their parameter."""
    floats = [jnp.issubdtype(d, np.floating) for d in (parameter.dtype, entries.values.dtype)]
    fits = all(floats) if entries.is_difference else entries.values.dtype.name == parameter.dtype
    if entries.gaps.dtype not in gaps.DTYPES or entries.gaps.ndim != 1 or not fits:
        raise ValueError(f"{name!r} has positions or values of another dtype")
    positions = gaps.decode(entries.gaps)
    size = math.prod(parameter.shape)
    if positions.shape != entries.values.shape or not positions.size or positions[-1] >= size:
        raise ValueError(f"{name!r} has values without a position in the shape {parameter.shape}")
