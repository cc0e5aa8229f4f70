"""`sparsity prune` writes a copy of a checkpoint that `instant_sparsify` has pruned."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sparsity import api
from sparsity.algorithms import NoPruning
from sparsity.cli import checkpoints
from sparsity.cli.output import escape_controls, print_table
from sparsity.core import trees
from sparsity.core.names import suggest
from sparsity.core.trees import KeyPath
from sparsity.patterns import SparsityType
from sparsity.patterns.base import REMEDY
from sparsity.training.base_updater import ALGORITHM_REGISTRY

ABOUT = "Write a copy of a checkpoint with some of its weights at zero."
EXAMPLES = """\
  sparsity prune model.safetensors pruned.safetensors --sparsity 0.5 --type nm_2,4
  sparsity prune model.npz pruned.npz --sparsity 0.9 --scope global --filter '(?!head).*'
"""
OPTIONS = {"sparsity_type": "--type", "filter_fn": "--filter"}  # by the argument in messages
WIDE = {"int64", "uint64", "float64", "complex128"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("source", metavar="in", type=Path, help="the checkpoint")
    parser.add_argument("target", metavar="out", type=Path, help="where the copy is written")
    parser.add_argument(
        "--sparsity", type=float, required=True, help="fraction of the weights to remove, in [0, 1]"
    )
    parser.add_argument(
        "--type",
        help="nm_2,4 or nm_2,4,-2 (with the axis), block_4,4, channel_-1, fanin_16 or fanin_16,-2 "
        "(with one or more axes), or unstructured; parameters that do not fit stay dense",
    )
    parser.add_argument(
        "--algorithm",
        metavar="NAME",
        default="magnitude",
        help=f"magnitude by default; one of {', '.join(_list_algorithms())}",
    )
    parser.add_argument(
        "--scope", help="layerwise (default) or global: all parameters share one threshold"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint at OUT")


def run(arguments: argparse.Namespace) -> int:
    """Writes a pruned copy and prints the sparsity of its pruned parameters."""
    checkpoints.check_target(arguments.source, arguments.target, arguments.overwrite)
    reasons: list[str] = []
    try:
        changed = _prune(arguments, reasons)
    except ValueError as error:
        message = " ".join([str(error), *reasons[:1]])
        terms = [f"{option} stands for {key}" for key, option in OPTIONS.items() if key in message]
        note = f" Here {', '.join(terms)}." if terms else ""
        raise ValueError(f"{message}{note}") from None
    checkpoints.write(arguments.source, arguments.target, changed)
    for reason in reasons:
        print(f"sparsity: left dense: {escape_controls(reason)}", file=sys.stderr)
    _print_sparsities(changed)
    return 0


def _list_algorithms() -> list[str]:
    """Returns the names of algorithms that prune a checkpoint, which comes without gradients."""
    return [
        name
        for name, algorithm in ALGORITHM_REGISTRY.items()
        if algorithm.prunes_at_once
        and not algorithm.needs_gradients
        and not issubclass(algorithm, NoPruning)
    ]


def _prune(arguments: argparse.Namespace, reasons: list[str]) -> dict[str, np.ndarray]:
    """Returns pruned parameters by name; appends why others stay dense."""
    if arguments.algorithm not in _list_algorithms():
        raise ValueError(
            "--algorithm must name an algorithm that prunes without training or gradients, got "
            f"{arguments.algorithm!r}. {suggest(arguments.algorithm, _list_algorithms())}"
        )
    config = {
        "algorithm": arguments.algorithm,
        "sparsity": arguments.sparsity,
        "sparsity_type": arguments.type,
        "scope": arguments.scope,
    }
    updater = api.create_updater_from_config(config)
    tree = checkpoints.read(arguments.source)
    leaves = {trees.path_string(path): path for path in trees.leaves_by_path(tree)}
    selected = checkpoints.filter_names(leaves, arguments.filter).values()
    params = trees.map_matched(lambda path, load: load() if path in selected else None, tree)
    if not any(map(trees.is_prunable, jax.tree.leaves(params))):
        dtypes = trees.listed(sorted({array.dtype.name for array in jax.tree.leaves(params)}))
        raise ValueError(
            f"{arguments.source} has no weights to prune: its selected parameters are {dtypes}. "
            "Only floating and complex arrays can be pruned."
        )
    # Without x64 jax would round 64 bits to 32.
    with jax.enable_x64(any(array.dtype.name in WIDE for array in jax.tree.leaves(params))):
        native = trees.map_matched(_to_native, params)
        pattern = updater.sparsity_type
        assert isinstance(pattern, SparsityType)  # a configuration names one for all parameters
        choose_pattern = functools.partial(_choose_pattern, pattern, reasons)
        updater = dataclasses.replace(updater, sparsity_type=choose_pattern)
        pruned, masks = updater.instant_sparsify(native)
    values, given = trees.leaves_by_path(pruned), trees.leaves_by_path(params)
    return {
        trees.path_string(path): np.asarray(values[path]).astype(given[path].dtype)  # byte order
        for path in trees.leaves_by_path(masks)
    }


def _choose_pattern(
    pattern: SparsityType, reasons: list[str], path: trees.Path, param: jax.Array
) -> SparsityType | None:
    """Returns the pattern; for a parameter that does not fit `None`, and appends the reason."""
    try:
        pattern.check(param.shape, 0, trees.join_names(path))
    except ValueError as error:
        reasons.append(str(error).removesuffix(REMEDY).rstrip())
        return None
    return pattern


def _to_native(path: KeyPath, array: np.ndarray) -> np.ndarray:
    """Returns an array in the byte order of this machine, the only one that jax takes.

    Raises:
      ValueError: the array could have a mask, but jax cannot hold its values or zero exactly.
    """
    dtype = array.dtype.newbyteorder("=")
    if trees.is_prunable(array) and not _is_exact_in_jax(dtype):
        raise ValueError(
            f"{trees.path_string(path)!r} has the dtype {dtype}, whose values, or zero, jax does "
            "not hold. Leave it out by --filter."
        )
    return array.astype(dtype, copy=False)


def _is_exact_in_jax(dtype: np.dtype) -> bool:
    """Returns whether jax holds the values of a dtype exactly, and the dtype has a zero."""
    try:
        zero = np.asarray(jnp.zeros((), dtype) + jnp.zeros((), dtype))
    except (TypeError, RuntimeError):  # jax does not know it, or the compiler does not
        return False
    return zero.dtype == dtype and not zero.any()


def _print_sparsities(pruned: dict[str, np.ndarray]) -> None:
    zeros = {name: array.size - np.count_nonzero(array) for name, array in pruned.items()}
    size = sum(array.size for array in pruned.values())
    print_table(
        ["parameter", "shape", "sparsity"],
        [
            [name, trees.shape_text(array.shape), f"{zeros[name] / max(array.size, 1):.4f}"]
            for name, array in pruned.items()
        ],
        [f"{len(pruned)} pruned", f"{size:,}", f"{sum(zeros.values()) / max(size, 1):.4f}"],
        num_text_columns=2,
    )
