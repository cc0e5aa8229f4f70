"""`sparsity prune` writes a copy of a checkpoint that `instant_sparsify` has pruned."""

from __future__ import annotations

import argparse
import dataclasses
import sys

import jax
import numpy as np

from sparsity import api
from sparsity.cli import checkpoints
from sparsity.core import extras, trees
from sparsity.patterns import SparsityType
from sparsity.patterns.base import REMEDY
from sparsity.training.base_updater import BaseUpdater

WIDE = {"int64", "uint64", "float64", "complex128"}
UNKNOWN = ("float6_", "float128", "complex256")  # no arrays of jax, or XLA ends the process


def prune(arguments: argparse.Namespace) -> int:
    """Writes a copy of a checkpoint with some of its weights at zero."""
    checkpoints.check_target(arguments.source, arguments.target, arguments.overwrite)
    config = {"algorithm": arguments.algorithm, "sparsity": arguments.sparsity}
    config |= {"sparsity_type": arguments.type, "scope": arguments.scope}
    updater = api.create_updater_from_config(config)
    tree = checkpoints.read(arguments.source)
    leaves = {trees.path_string(path): path for path in trees.leaves_by_path(tree)}
    selected = checkpoints.filter_names(leaves, arguments.filter).values()
    params = trees.map_matched(
        lambda path, array: np.asarray(array) if path in selected else None, tree
    )
    pruned, reasons = _prune(updater, params)
    checkpoints.write(arguments.source, arguments.target, pruned)
    for reason in reasons:
        print(f"sparsity: left dense: {extras.escape_controls(reason)}", file=sys.stderr)
    size, nonzeros = (sum(map(count, pruned.values())) for count in (np.size, np.count_nonzero))
    print(f"{len(pruned)} of {len(leaves)} parameters pruned to {1 - nonzeros / max(size, 1):.4f}.")
    return 0


def _prune(updater: BaseUpdater, params: trees.PyTree) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns pruned parameters by name, and why others stay dense."""
    arrays, reasons = trees.leaves_by_path(params), []
    dtypes = {array.dtype.name for array in arrays.values()}
    for path, array in arrays.items():
        if array.dtype.name.startswith(UNKNOWN):
            name = trees.path_string(path)
            raise ValueError(
                f"jax does not hold {name!r} of {array.dtype}. Leave it out by --filter."
            )
    pattern = updater.sparsity_type
    assert isinstance(pattern, SparsityType)  # a configuration names one for all parameters

    def choose_pattern(path: trees.Path, param: jax.Array) -> SparsityType | None:
        try:
            pattern.check(param.shape, 0, trees.join_names(path))
        except ValueError as error:
            reasons.append(str(error).removesuffix(REMEDY).rstrip())
            return None
        return pattern

    with jax.enable_x64(not dtypes.isdisjoint(WIDE)):  # else jax would round 64 bits to 32
        updater = dataclasses.replace(updater, sparsity_type=choose_pattern)
        native = jax.tree.map(lambda x: x.astype(x.dtype.newbyteorder("="), copy=False), params)
        pruned, masks = updater.instant_sparsify(native)
    if not jax.tree.leaves(masks):
        raise ValueError(f"{updater} prunes no parameter.")
    values = trees.leaves_by_path(pruned)
    return {
        trees.path_string(path): np.asarray(values[path]).astype(arrays[path].dtype)  # byte order
        for path in trees.leaves_by_path(masks)
    }, reasons
