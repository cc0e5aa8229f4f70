"""What a sparse network looks like: sparsity by layer, overlap of masks, a table and a plot."""

from __future__ import annotations

import functools
import io
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity import masks as masks_lib
from sparsity.base_updater import BaseUpdater
from sparsity.core import extras, trees
from sparsity.training.state import SparseState, get_sparse_state


def summarize_sparsity(
    param_tree: chex.ArrayTree, only_total_sparsity: bool = False
) -> dict[str, Any]:
    """Returns the fraction of zeros of every leaf and of the whole tree.

    Args:
      param_tree: tree of parameters or masks, or an optimizer state whose masks are meant.
      only_total_sparsity: leave out the entries of the single leaves.

    Returns:
      A dictionary with `_total_sparsity`, `_nparams` and `_nparams_nnz` (non-zeros), which are
      exact for trees of any size, and a sparsity for each path, joined by '/'; `None` for a leaf
      that is `None`. Inside `jit` the values are float32 arrays.

    Raises:
      ValueError: an optimizer state holds more than one SparseState, or its masks are packed.

    Example:
      >>> summarize_sparsity({"a": jnp.array([1.0, 0.0]), "b": jnp.zeros(2)})["_total_sparsity"]
      0.75
    """
    leaves = _with_none(_masks_of(param_tree, packed=False))
    sizes = {path: jnp.size(leaf) for path, leaf in leaves.items() if leaf is not None}
    nonzeros = _fetch({path: jnp.count_nonzero(leaves[path]) for path in sizes})
    size, nonzero = sum(sizes.values()), _total(nonzeros)
    single = {path: (sizes[path] - nonzeros[path]) / max(sizes[path], 1) for path in sizes}
    summary = {} if only_total_sparsity else _named(dict.fromkeys(leaves) | single)
    summary["_total_sparsity"] = (size - nonzero) / max(size, 1)
    summary["_nparams"] = size
    summary["_nparams_nnz"] = nonzero
    return summary


def summarize_intersection(
    mask_tree1: chex.ArrayTree, mask_tree2: chex.ArrayTree, only_total_intersection: bool = False
) -> dict[str, Any]:
    """Returns which fraction of the ones of the first masks are ones of the second, too.

    Args:
      mask_tree1: tree of masks, or an optimizer state that holds them; packed masks are counted by
        their bits.
      mask_tree2: as `mask_tree1`, with the same paths.
      only_total_intersection: leave out the entries of the single leaves.

    Returns:
      A dictionary with `_total_intersection`, exact for trees of any size, and a fraction for each
      path, joined by '/'; `None` for a leaf that is `None`. Inside `jit` the values are float32
      arrays.

    Raises:
      ValueError: the trees have different paths or shapes; they are named. Or an optimizer state
        holds more than one SparseState.

    Example:
      >>> summarize_intersection({"a": jnp.array([1, 1])}, {"a": jnp.array([0, 1])})
      {'a': 0.5, '_total_intersection': 0.5}
    """
    leaves1, leaves2 = (_with_none(_masks_of(tree)) for tree in (mask_tree1, mask_tree2))
    shapes = {p: (_shape(leaves1.get(p)), _shape(leaves2.get(p))) for p in leaves1 | leaves2}
    if differing := {path: pair for path, pair in shapes.items() if pair[0] != pair[1]}:
        raise ValueError(
            "mask_tree1 and mask_tree2 must have the same paths and shapes; they differ at "
            + ", ".join(f"{name} ({a}, {b})" for name, (a, b) in _named(differing).items())
        )
    pairs = {path: (m, leaves2[path]) for path, m in leaves1.items() if m is not None}
    ones = _fetch({path: _count_ones(a) for path, (a, _) in pairs.items()})
    both = _fetch({path: _count_ones(a, b) for path, (a, b) in pairs.items()})
    single = {path: both[path] / _at_least_one(ones[path]) for path in pairs}
    summary = {} if only_total_intersection else _named(dict.fromkeys(leaves1) | single)
    summary["_total_intersection"] = _total(both) / _at_least_one(_total(ones))
    return summary


def active_masks(params: chex.ArrayTree, opt_state: Any) -> chex.ArrayTree:
    """Returns which weights are in use, however an algorithm keeps its masks.

    Two of them, before and after some steps, show with `summarize_intersection` how masks moved.

    Args:
      params: tree of parameters, as they are used (masked ones for straight-through methods).
      opt_state: optimizer state with one SparseState.

    Returns:
      Tree like `params`: uint8, never packed, 1 = in use; `None` for a dense leaf. Where no mask is
      stored, weights in use are those that are not zero.

    Example:
      >>> state = SparseState(target_sparsities={"a": jnp.float32(0.5)})
      >>> active_masks({"a": jnp.array([3.0, 0.0]), "b": jnp.ones(2)}, state)
      {'a': Array([1, 0], dtype=uint8), 'b': None}
    """
    state = get_sparse_state(opt_state)

    def active(_: trees.KeyPath, param: Any, target: Any, mask: Any) -> Any:
        if mask is not None:
            return masks_lib.unpack(mask, param)
        return None if target is None else (param != 0).astype(jnp.uint8)

    return trees.map_matched(active, params, state.target_sparsities, state.masks)


def sparsity_table(params: chex.ArrayTree, opt_state: Any, updater: BaseUpdater) -> str:
    """Returns a table of all leaves: path, shape, type, target, achieved sparsity, mask bytes.

    Its last row sums up the leaves that have a target.

    Args:
      params: tree of parameters, as they are used (masked ones for straight-through methods).
      opt_state: optimizer state with one SparseState.
      updater: the updater that wrapped the optimizer.

    Returns:
      Text of several lines.
    """
    table = extras.load("rich.table", "summary").Table(
        "path", "shape", "type", box=extras.load("rich.box", "summary").SIMPLE
    )
    for column in ("target", "achieved", "mask bytes"):
        table.add_column(column, justify="right")
    rows = layer_summary(params, opt_state, updater)
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        numbers = ("dense", "") if row["target"] is None else (row["target"], row["achieved"])
        shown = [f"{n:.4f}" if isinstance(n, float) else n for n in numbers]
        table.add_row(row["path"], shape, row["type"], *shown, f"{row['mask_bytes']:,}")
    leaves = zip(trees.leaves_by_path(params).values(), rows, strict=True)
    sparse = [leaf for leaf, row in leaves if row["target"] is not None]
    total = summarize_sparsity(sparse, only_total_sparsity=True)
    table.add_section()
    table.add_row(
        "sparse layers",
        f"{total['_nparams']:,}",
        *("", "", f"{total['_total_sparsity']:.4f}"),
        f"{sum(row['mask_bytes'] for row in rows):,}",
    )
    console = extras.load("rich.console", "summary").Console(
        file=io.StringIO(), width=200, color_system=None, force_jupyter=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().strip("\n").splitlines())


def layer_summary(
    params: chex.ArrayTree, opt_state: Any, updater: BaseUpdater
) -> list[dict[str, Any]]:
    """Returns what `sparsity_table` shows: a dictionary for each leaf, in tree order.

    Its keys are `path`, `shape`, `type` ('' for a dense leaf), `target` (`None` for a dense leaf),
    `achieved` (fraction of zeros) and `mask_bytes`.
    """
    state: SparseState = get_sparse_state(opt_state)
    targets = trees.leaves_by_path(state.target_sparsities)
    masks = trees.leaves_by_path(state.masks)
    achieved = summarize_sparsity(params)
    rows = []
    for path, leaf in trees.leaves_by_path(params).items():
        target, mask = targets.get(path), masks.get(path)
        kind = "" if target is None else repr(updater.type_of(path, leaf)[0])
        rows.append(
            {
                "path": trees.path_string(path),
                "shape": jnp.shape(leaf),
                "type": kind.removesuffix("()"),
                "target": None if target is None else float(target),
                "achieved": achieved[trees.path_string(path)],
                "mask_bytes": 0 if mask is None else mask.nbytes,
            }
        )
    return rows


def plot_sparsity(
    params: chex.ArrayTree, opt_state: Any, updater: BaseUpdater, ax: Any = None
) -> Any:
    """Draws target and achieved sparsity of every leaf that can be sparse.

    Args:
      params: tree of parameters, as in `sparsity_table`.
      opt_state: optimizer state with one SparseState.
      updater: the updater that wrapped the optimizer.
      ax: matplotlib axes to draw on; new ones by default.

    Returns:
      The matplotlib axes.
    """
    layers = layer_summary(params, opt_state, updater)
    rows = [row for row in layers if row["target"] is not None or len(row["shape"]) > 1]
    if ax is None:
        height = 1.2 + 0.32 * max(len(rows), 1)
        ax = extras.load("matplotlib.pyplot", "summary").subplots(
            figsize=(7, height), layout="constrained"
        )[1]
    position = np.arange(len(rows))
    ax.barh(position, [row["achieved"] for row in rows], color="#0072B2", label="achieved")
    goals = [(i, row["target"]) for i, row in enumerate(rows) if row["target"] is not None]
    if goals:
        ax.plot(*zip(*((t, i) for i, t in goals), strict=True), "|", color="#D55E00", ms=14, mew=3)
        ax.plot([], [], "|", color="#D55E00", ms=10, mew=3, label="target")
    for i, row in enumerate(rows):
        ax.annotate(f"{row['achieved']:.1%}", (1.01, i), va="center", annotation_clip=False)
    ax.set_yticks(position, [row["path"] for row in rows])
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.set_xlabel("sparsity (fraction of zeros)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return ax


def _masks_of(tree: Any, packed: bool = True) -> chex.ArrayTree:
    """The masks of an optimizer state; other trees as they are."""
    if not trees.find_nodes(tree, SparseState):
        return tree
    masks = get_sparse_state(tree).masks
    for path, mask in {} if packed else trees.leaves_by_path(masks).items():
        if not isinstance(mask, jax.core.Tracer) and jnp.max(mask, initial=0) > 1:
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} is packed to bits, so that its number of "
                "entries is not known. Summarize the parameters, or "
                "sparsity.sparse_state.unpack_masks(masks, params)."
            )
    return masks


def _count_ones(*masks: chex.Array) -> jax.Array:
    """Number of entries that are not zero in all masks; of bits where masks are uint8."""
    if all(mask.dtype == jnp.uint8 for mask in masks):
        bits = functools.reduce(jnp.bitwise_and, masks)
        return jnp.sum(jax.lax.population_count(bits), dtype=jnp.int32)
    return jnp.count_nonzero(functools.reduce(jnp.logical_and, [mask != 0 for mask in masks]))


def _with_none(tree: chex.ArrayTree) -> dict[trees.KeyPath, Any]:
    return dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None))


def _named(by_path: dict[trees.KeyPath, Any]) -> dict[str, Any]:
    return {trees.path_string(path): value for path, value in by_path.items()}


def _shape(leaf: Any) -> Any:
    return None if leaf is None else jnp.shape(leaf)


def _fetch(counts: dict[trees.KeyPath, jax.Array]) -> dict[trees.KeyPath, Any]:
    """Counts as Python ints, which do not overflow; float32 while tracing."""
    if any(isinstance(count, jax.core.Tracer) for count in counts.values()):
        return {path: count.astype(jnp.float32) for path, count in counts.items()}
    counts = dict(zip(counts, jax.device_get(list(counts.values())), strict=True))
    return {path: int(count) for path, count in counts.items()}


def _total(counts: dict[trees.KeyPath, Any]) -> Any:
    return sum(counts.values())


def _at_least_one(count: Any) -> Any:
    return jnp.maximum(count, 1) if isinstance(count, jax.Array) else max(count, 1)
