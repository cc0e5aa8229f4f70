"""Sparsity of trees and overlap of masks, as numbers."""

from __future__ import annotations

import functools
import operator
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.core import trees
from sparsity.core.checks import check_bool, is_traced
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks import packed_shape, read_masks
from sparsity.training.state import SparseState, get_sparse_state

# Also `None` for a leaf that is `None`, and float32 arrays inside `jit`. A type with all three
# would force users to cast each number.
Summary: TypeAlias = dict[str, float]


def summarize_sparsity(param_tree: PyTree, only_total_sparsity: bool = False) -> Summary:
    """Returns the fraction of zeros of every leaf and of the complete tree.

    Args:
      param_tree: tree of parameters or masks, or an optimizer state with masks.
      only_total_sparsity: omit the entries of single leaves.

    Returns:
      A dictionary with `_total_sparsity`, `_nparams` and `_nparams_nnz` (non-zeros), exact for
      trees of any size, and a sparsity for each path, joined by '/'; `None` for a leaf that is
      `None`. Inside `jit` all but `_nparams` and `None` are float32 arrays.

    Raises:
      ValueError: an optimizer state holds more than one SparseState or packed masks, or a uint8
        leaf has bytes above 1, as packed masks do. Inside `jit` such bytes make NaN. A tree of
        packed masks with only bytes 0 and 1, without its state, looks like unpacked ones: summarize
        the parameters instead.

    Example:
      >>> summarize_sparsity({"a": jnp.array([1.0, 0.0]), "b": jnp.zeros(2)})["_total_sparsity"]
      0.75
    """
    check_bool("only_total_sparsity", only_total_sparsity)
    leaves = _read_arrays(_find_masks(param_tree, may_be_packed=False))
    sizes = {path: jnp.size(leaf) for path, leaf in leaves.items() if leaf is not None}
    nonzeros = _fetch({path: _count_nonzero(leaves[path]) for path in sizes})
    nonzeros |= _refuse_bytes({path: leaves[path] for path in sizes}, nonzeros)
    nonzeros |= _refuse_bits(param_tree, sizes, nonzeros)
    size, nonzero = sum(sizes.values()), sum(nonzeros.values())
    fractions = {path: (sizes[path] - nonzeros[path]) / max(sizes[path], 1) for path in sizes}
    summary = {} if only_total_sparsity else _key_by_name(dict.fromkeys(leaves) | fractions)
    summary["_total_sparsity"] = (size - nonzero) / max(size, 1)
    summary["_nparams"] = size
    summary["_nparams_nnz"] = nonzero
    return summary


def summarize_intersection(
    mask_tree1: PyTree, mask_tree2: PyTree, only_total_intersection: bool = False
) -> Summary:
    """Returns the fraction of the ones of the first masks that are ones of the second, too.

    Args:
      mask_tree1: tree of masks, or an optimizer state with masks; packed masks count by bits.
      mask_tree2: as `mask_tree1`, with the same paths.
      only_total_intersection: omit the entries of single leaves.

    Returns:
      A dictionary with `_total_intersection`, exact for trees of any size, and a fraction for each
      path, joined by '/'; `None` for a leaf that is `None`. Inside `jit` numbers are float32
      arrays.

    Raises:
      ValueError: the trees differ in paths or shapes, one is packed and the other is not, or an
        optimizer state holds more than one SparseState.

    Example:
      >>> summarize_intersection({"a": jnp.array([1, 1])}, {"a": jnp.array([0, 1])})
      {'a': 0.5, '_total_intersection': 0.5}
    """
    leaves1, leaves2 = (_read_arrays(_find_masks(tree)) for tree in (mask_tree1, mask_tree2))
    shapes = {
        p: (_read_shape(leaves1.get(p)), _read_shape(leaves2.get(p))) for p in leaves1 | leaves2
    }
    if differing := {path: pair for path, pair in shapes.items() if pair[0] != pair[1]}:
        raise ValueError(
            "mask_tree1 and mask_tree2 must have the same paths and shapes; they differ at "
            + ", ".join(f"{name} ({a}, {b})" for name, (a, b) in _key_by_name(differing).items())
        )
    pairs = {
        path: _make_alike(mask, leaves2[path]) for path, mask in leaves1.items() if mask is not None
    }
    ones = _fetch({path: _count_ones(a) for path, (a, _) in pairs.items()})
    ones |= _refuse_mixture(pairs, ones)
    shared = _fetch({path: _count_ones(a, b) for path, (a, b) in pairs.items()})
    fractions = {path: shared[path] / _at_least_one(ones[path]) for path in pairs}
    summary = {} if only_total_intersection else _key_by_name(dict.fromkeys(leaves1) | fractions)
    summary["_total_intersection"] = sum(shared.values()) / _at_least_one(sum(ones.values()))
    return summary


def active_masks(params: Params, opt_state: optax.OptState) -> Masks:
    """Returns the masks of the weights in use, for every algorithm.

    `summarize_intersection` compares the masks of two steps.

    Args:
      params: tree of parameters as the model uses them (masked for straight-through methods).
      opt_state: optimizer state with one SparseState.

    Returns:
      Tree like `params`: uint8, never packed, 1 = in use; `None` for a dense parameter. Without a
      stored mask the non-zero weights are in use.

    Example:
      >>> state = SparseState(target_sparsities={"a": jnp.float32(0.5)})
      >>> active_masks({"a": jnp.array([3.0, 0.0]), "b": jnp.ones(2)}, state)
      {'a': Array([1, 0], dtype=uint8), 'b': None}
    """
    state = get_sparse_state(opt_state)
    masks = None if state.masks is None else read_masks(state.masks, params, may_be_packed=True)

    def find_active(
        _: trees.KeyPath, param: jax.Array, target: jax.Array | None, mask: jax.Array | None
    ) -> jax.Array | None:
        if mask is not None:
            return mask
        return None if target is None else (param != 0).astype(jnp.uint8)

    return trees.map_matched(find_active, params, state.target_sparsities, masks)


def _find_masks(tree: PyTree, may_be_packed: bool = True) -> PyTree:
    """Returns the masks of an optimizer state, other trees unchanged."""
    if not trees.find_nodes(tree, SparseState):
        return tree
    state = get_sparse_state(tree)
    if not may_be_packed and _is_packed(state):
        paths = [trees.path_string(path) for path in trees.leaves_by_path(state.masks)]
        raise ValueError(
            f"The masks of {trees.listed(paths)} are packed to bits, so that their number of "
            "entries is not known. Summarize the parameters, or "
            "sparsity.unpack_masks(masks, params)."
        )
    return state.masks


def _is_packed(state: SparseState) -> bool:
    """Returns whether masks have packed shapes of arrays in the optimizer state."""
    ends: dict[trees.KeyPath, tuple[int, ...]] = {}
    for path, leaf in trees.leaves_by_path((state.inner_state, state.algorithm_state)).items():
        ends |= {path[start:]: jnp.shape(leaf) for start in range(len(path))}
    return any(
        ends.get(path, shape) != shape and packed_shape(ends[path]) == shape
        for path, mask in trees.leaves_by_path(state.masks).items()
        for shape in [jnp.shape(mask)]
    )


def _refuse_bytes(
    leaves: dict[trees.KeyPath, PyTree], counts: dict[trees.KeyPath, PyTree]
) -> dict[trees.KeyPath, PyTree]:
    """Raises for uint8 leaves that are no masks; while tracing returns NaN for their counts."""
    checked = {}
    for path, largest in _find_largest_bytes(leaves).items():
        if is_traced(largest):
            checked[path] = jnp.where(largest > 1, jnp.nan, counts[path])
        elif largest > 1:
            raise ValueError(
                f"Leaf {trees.path_string(path)!r} is uint8 with a byte of {largest}: no mask, but "
                "packed bits or an integer parameter. Unpack masks by sparsity.unpack_masks("
                "masks, params), cast parameters to another dtype."
            )
    return checked


def _refuse_bits(
    tree: PyTree, sizes: dict[trees.KeyPath, int], counts: dict[trees.KeyPath, PyTree]
) -> dict[trees.KeyPath, PyTree]:
    """Raises for masks of a state that meet their targets as bits; while tracing returns NaN."""
    nodes = trees.find_nodes(tree, SparseState)
    targets = trees.leaves_by_path(nodes[0][1].target_sparsities) if nodes else {}
    met = [
        (abs(8 * sizes[path] * (1 - target) - counts[path]) < 0.5) & (counts[path] > 0)
        for path, target in targets.items()
        if sizes.get(path)
    ]
    are_bits = functools.reduce(operator.and_, met, bool(met))
    if is_traced(are_bits):
        return {path: jnp.where(are_bits, jnp.nan, count) for path, count in counts.items()}
    if are_bits:
        raise ValueError(
            f"The masks of {trees.listed([*map(trees.path_string, targets)])} have their target "
            "sparsities if they are packed to bits, so that their number of entries is not known. "
            "Summarize the parameters, or sparsity.unpack_masks(masks, params)."
        )
    return {}


def _refuse_mixture(
    pairs: dict[trees.KeyPath, tuple[chex.Array, ...]], counts: dict[trees.KeyPath, PyTree]
) -> dict[trees.KeyPath, PyTree]:
    """Raises if one of two masks [..., 1] is packed, to 128, the other not; or returns NaN."""
    columns = {path: pair for path, pair in pairs.items() if pair[0].shape[-1:] == (1,)}
    first, second = (
        _find_largest_bytes({path: pair[i] for path, pair in columns.items()}) for i in range(2)
    )
    checked = {}
    for path, largest in first.items():
        is_mixed = (largest + second[path] == 129) & (largest * second[path] == 128)
        if is_traced(is_mixed):
            checked[path] = jnp.where(is_mixed, jnp.nan, counts[path])
        elif is_mixed:
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} is packed in only one of mask_tree1 and "
                "mask_tree2. Unpack both: sparsity.unpack_masks(masks, params)."
            )
    return checked


def _find_largest_bytes(leaves: dict[trees.KeyPath, PyTree]) -> dict[trees.KeyPath, PyTree]:
    """Returns the largest entry of each uint8 leaf."""
    return _fetch(
        {
            path: jnp.max(leaf)
            for path, leaf in leaves.items()
            if getattr(leaf, "dtype", None) == jnp.uint8 and leaf.size
        }
    )


def _read_arrays(tree: PyTree) -> dict[trees.KeyPath, PyTree]:
    """Returns the leaves with entries to count and `None`; keys, text and functions have none."""
    return {
        path: leaf if leaf is None or trees.is_array(leaf) else jnp.asarray(leaf)
        for path, leaf in trees.leaves_and_none(tree).items()
        if leaf is None or trees.is_numeric(leaf) or isinstance(leaf, int | float | complex)
    }


def _count_nonzero(array: chex.Array) -> jax.Array:
    with jax.enable_x64(jnp.size(array) >= 2**31):  # int32 would overflow
        return jnp.count_nonzero(array)


def _count_ones(*masks: chex.Array) -> jax.Array:
    """Counts the ones that all masks have: bits of uint8, else entries, which are booleans."""
    ones = functools.reduce(jnp.bitwise_and, masks)
    if ones.dtype == bool:
        return _count_nonzero(ones)
    with jax.enable_x64(8 * ones.size >= 2**31):
        return jnp.sum(jax.lax.population_count(ones), dtype=int)


def _make_alike(*masks: chex.Array) -> tuple[chex.Array, ...]:
    """Returns masks as they are if all are uint8, which may be packed, else as booleans."""
    are_bytes = all(mask.dtype == jnp.uint8 for mask in masks)
    return masks if are_bytes else tuple(mask != 0 for mask in masks)


def _key_by_name(by_path: dict[trees.KeyPath, PyTree]) -> dict[str, PyTree]:
    return {trees.path_string(path): value for path, value in by_path.items()}


def _read_shape(leaf: PyTree) -> tuple[int, ...] | None:
    return None if leaf is None else jnp.shape(leaf)


def _fetch(counts: dict[trees.KeyPath, jax.Array]) -> dict[trees.KeyPath, PyTree]:
    """Returns counts as Python ints, which do not overflow; as float32 while tracing."""
    if any(is_traced(count) for count in counts.values()):
        return {path: count.astype(jnp.float32) for path, count in counts.items()}
    counts = dict(zip(counts, jax.device_get(list(counts.values())), strict=True))
    return {path: int(count) for path, count in counts.items()}


def _at_least_one(count: PyTree) -> PyTree:
    return jnp.maximum(count, 1) if isinstance(count, jax.Array) else max(count, 1)
