"""Reports on sparse networks: sparsity by layer, faults, tables, plots, measured times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import extras, trees
from sparsity.core.checks import check_bool, check_int, check_kind, check_values, is_traced
from sparsity.core.extras import DARK, add_legend, label_rows, pick_axes
from sparsity.core.trees import Masks, Params, PyTree, Sparsities
from sparsity.graph import Coupled
from sparsity.graph.coupled import PlacedGroup
from sparsity.masks import read_masks
from sparsity.training.hooks import UpdaterHooks
from sparsity.training.state import SparseState, get_sparse_state

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WARM_UP = 2  # calls: the first compiles, the second fills caches

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
      ValueError: an optimizer state holds more than one SparseState, or a uint8 leaf has bytes
        above 1, as packed masks do; inside `jit` such bytes make NaN. Packed masks with only bytes
        0 and 1 look like unpacked ones: summarize the parameters instead.

    Example:
      >>> summarize_sparsity({"a": jnp.array([1.0, 0.0]), "b": jnp.zeros(2)})["_total_sparsity"]
      0.75
    """
    check_bool("only_total_sparsity", only_total_sparsity)
    leaves = _read_arrays(param_tree)
    arrays = {path: leaf for path, leaf in leaves.items() if leaf is not None}
    nonzeros = _fetch({path: _count_ones(leaf != 0) for path, leaf in arrays.items()})
    masks = {path: x for path, x in arrays.items() if x.dtype == jnp.uint8 and x.size}
    for path, largest in _fetch({path: jnp.max(x) for path, x in masks.items()}).items():
        if is_traced(largest):
            nonzeros[path] = jnp.where(largest > 1, jnp.nan, nonzeros[path])
        elif largest > 1:
            raise ValueError(
                f"Leaf {trees.path_string(path)!r} is uint8 with a byte of {largest}: no mask, but "
                "packed bits or an integer parameter. Unpack masks by sparsity.unpack_masks("
                "masks, params), cast parameters to another dtype."
            )
    size, nonzero = sum(leaf.size for leaf in arrays.values()), sum(nonzeros.values())
    fractions = {path: (x.size - nonzeros[path]) / max(x.size, 1) for path, x in arrays.items()}
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
      ValueError: the trees differ in paths or shapes, as packed masks and others do, or an
        optimizer state holds more than one SparseState.

    Example:
      >>> summarize_intersection({"a": jnp.array([1, 1])}, {"a": jnp.array([0, 1])})
      {'a': 0.5, '_total_intersection': 0.5}
    """
    leaves1, leaves2 = _read_arrays(mask_tree1), _read_arrays(mask_tree2)
    for path in leaves1 | leaves2:
        shapes = [getattr(leaves.get(path), "shape", None) for leaves in (leaves1, leaves2)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "mask_tree1 and mask_tree2 must have the same paths and shapes; they differ at "
                f"{trees.path_string(path)} ({shapes[0]}, {shapes[1]})."
            )
    pairs = {path: (x, leaves2[path]) for path, x in leaves1.items() if x is not None}
    for path, pair in pairs.items():
        if any(mask.dtype != jnp.uint8 for mask in pair):  # uint8 may be packed, and counts bits
            pairs[path] = pair[0] != 0, pair[1] != 0
    ones = _fetch({path: _count_ones(one) for path, (one, _) in pairs.items()})
    shared = _fetch({path: _count_ones(one & other) for path, (one, other) in pairs.items()})
    fractions = dict.fromkeys(leaves1) | {x: shared[x] / _at_least_one(ones[x]) for x in pairs}
    summary = {} if only_total_intersection else _key_by_name(fractions)
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


def _read_arrays(tree: PyTree) -> dict[trees.KeyPath, PyTree]:
    """Returns arrays of numbers and `None` of a tree, or of the masks of an optimizer state."""
    if trees.find_nodes(tree, SparseState):
        tree = get_sparse_state(tree).masks
    return {
        path: leaf if leaf is None or trees.is_array(leaf) else jnp.asarray(leaf)
        for path, leaf in trees.leaves_and_none(tree).items()
        if leaf is None or trees.is_numeric(leaf) or isinstance(leaf, int | float | complex)
    }


def _count_ones(mask: chex.Array) -> jax.Array:
    """Counts the ones of booleans, or the bits of uint8."""
    with jax.enable_x64(8 * mask.size >= 2**31):  # int32 would overflow
        return (
            jnp.count_nonzero(mask)
            if mask.dtype == bool
            else jnp.bitwise_count(mask).sum(dtype=int)
        )


def _key_by_name(by_path: dict[trees.KeyPath, PyTree]) -> dict[str, PyTree]:
    return {trees.path_string(path): value for path, value in by_path.items()}


def _fetch(counts: dict[trees.KeyPath, jax.Array]) -> dict[trees.KeyPath, PyTree]:
    """Returns counts as Python ints, which do not overflow; as float32 while tracing."""
    if any(is_traced(count) for count in counts.values()):
        return {path: count.astype(jnp.float32) for path, count in counts.items()}
    counts = dict(zip(counts, jax.device_get(list(counts.values())), strict=True))
    return {path: int(count) for path, count in counts.items()}


def _at_least_one(count: PyTree) -> PyTree:
    return jnp.maximum(count, 1) if isinstance(count, jax.Array) else max(count, 1)


def check(params: Params, opt_state: optax.OptState) -> list[str]:
    """Returns what is wrong with a set-up, a sentence or two for each fault; [] if nothing is.

    Call it after the first steps: it says that nothing is pruned, that all masks are ones, or that
    masked weights are not 0, as where the wrapper is not the outermost transformation.

    Args:
      params: tree of parameters as the model uses them (masked for straight-through methods).
      opt_state: optimizer state with one SparseState.

    Raises:
      ValueError: values are traced, or the state is of other parameters.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> masks = {"w": jnp.array([[1, 0]], jnp.uint8)}
      >>> pruner = sparsity.StaticRandomSparse()
      >>> tx = optax.chain(pruner.wrap_optax(optax.sgd(0.1), masks), optax.scale(0.5))
      >>> params = {"w": jnp.ones((1, 2))}
      >>> updates, opt_state = tx.update(params, tx.init(params), params)
      >>> [fault] = check(optax.apply_updates(params, updates), opt_state)
      >>> fault.partition(':')[0]
      "Masked weights are not 0 in 'w' (masks 0.50, weights 0.00)"
    """
    remedy = "Call check outside of jit, scan and vmap."
    check_values("params", params, remedy)
    check_values("opt_state", opt_state, remedy)
    state = get_sparse_state(opt_state)
    faults = []
    if not jax.tree.leaves((state.masks, state.target_sparsities)):
        faults.append(
            "No parameter is pruned: set sparsity_distribution_fn, for example Uniform(0.8)."
        )
    masks = jax.tree.leaves(active_masks(params, state)) if state.masks is not None else []
    if masks and all(np.all(mask) for mask in masks):
        faults.append(
            f"All masks are ones after {int(state.count)} steps: training is dense until the "
            "scheduler updates them."
        )
    return faults + explain_dense_weights(params, state)


def explain_dense_weights(params: Params, state: SparseState) -> list[str]:
    """Returns what to do about masked weights that are not 0, [] if all are."""
    if state.masks is None:
        return []
    masks = trees.leaves_by_path(read_masks(state.masks, params, may_be_packed=True))
    weights, shares = trees.leaves_by_path(params), []
    for path, mask in masks.items():
        weight, name = np.asarray(weights[path]), trees.path_string(path)
        if np.any(weight[np.asarray(mask) == 0]):
            masked, zeros = np.mean(np.asarray(mask) == 0), np.mean(weight == 0)
            shares.append(f"{name!r} (masks {masked:.2f}, weights {zeros:.2f})")
    if not shares:
        return []
    places = ", ".join(shares[:4]) + (f" and {len(shares) - 4} more" if len(shares) > 4 else "")
    if state.count == 0:
        remedy = "start with params, opt_state = updater.init(tx, params), which masks them."
    else:
        remedy = (
            "wrap the complete optimizer, updater.wrap_optax(optax.chain(...)), as another "
            "transformation changes the updates of the wrapper. For straight-through methods, give "
            "the parameters that the model uses."
        )
    return [f"Masked weights are not 0 in {places}: {remedy}"]


class LayerSummary(NamedTuple):
    """A row of `sparsity_table`. Made by `layer_summary`.

    Attributes:
      path: path of the leaf, joined by '/'.
      shape: shape of the parameter.
      type: the pattern, "channels" under `Coupled`, '' for a dense leaf.
      target: target sparsity, `None` for a dense leaf, and for one without a sparsity that loses
        channels with others, such as a bias.
      achieved: fraction of zeros.
      mask_bytes: bytes of the mask.

    Example:
      >>> row = LayerSummary("kernel", (4, 8), "Unstructured", 0.5, 0.5, 32)
      >>> row.achieved == row.target
      True
    """

    path: str
    shape: tuple[int, ...]
    type: str
    target: float | None
    achieved: float
    mask_bytes: int


def sparsity_table(params: Params, opt_state: optax.OptState, updater: UpdaterHooks) -> str:
    """Returns a table of all parameters: path, shape, pattern, target, achieved, bytes of the mask.

    Target and achieved are sparsities. The last row sums up the parameters that are not dense. A
    line below names masked weights that are not 0, as `check` does.
    Under `Coupled` a second table shows each group: how many channels stay at the target, the
    factors of a width that groups share, and which parameters keep a group whole.

    Args:
      params: tree of parameters as the model uses them (masked for straight-through methods).
      opt_state: optimizer state with one SparseState.
      updater: the updater that wrapped the optimizer.

    Returns:
      Text of several lines.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> params = {"w": jnp.array([[1.0, 0.0]])}
      >>> updater = sparsity.StaticRandomSparse()
      >>> masks = {"w": jnp.array([[1, 0]], jnp.uint8)}
      >>> opt_state = updater.wrap_optax(optax.sgd(0.1), masks=masks).init(params)
      >>> "0.5000" in sparsity_table(params, opt_state, updater)
      True
    """
    table = extras.make_table(("path", "shape", "type"), ("target", "achieved", "mask bytes"))
    rows = layer_summary(params, opt_state, updater)
    for row in rows:
        shape = trees.shape_text(row.shape)
        target = "" if row.target is None else f"{row.target:.4f}"
        shown = (target, f"{row.achieved:.4f}") if row.type else ("dense", "")
        table.add_row(row.path, shape, row.type, *shown, f"{row.mask_bytes:,}")
    names = {row.path for row in rows if row.type}
    leaves = trees.leaves_by_path(params).items()
    sparse = [leaf for path, leaf in leaves if trees.path_string(path) in names]
    total = summarize_sparsity(sparse, only_total_sparsity=True)
    table.add_section()
    table.add_row(
        "sparse layers",
        f"{total['_nparams']:,}",
        *("", "", f"{total['_total_sparsity']:.4f}"),
        f"{sum(row.mask_bytes for row in rows):,}",
    )
    text, state = extras.as_text(table), get_sparse_state(opt_state)
    if isinstance(updater.scope, Coupled):
        scope = updater.scope.bind(updater.sites(params), None)
        text += "\n" + show_groups(scope, params, state.target_sparsities)
    return "\n".join([text, *explain_dense_weights(params, state)])


def layer_summary(
    params: Params, opt_state: optax.OptState, updater: UpdaterHooks
) -> list[LayerSummary]:
    """Returns the rows of `sparsity_table`: a `LayerSummary` for each array, in tree order."""
    check_kind("updater", updater, UpdaterHooks, "the updater that wrapped the optimizer")
    state = get_sparse_state(opt_state)
    targets = trees.leaves_by_path(state.target_sparsities)
    masks = trees.leaves_by_path(state.masks)
    trees.check_paths(trees.leaves_by_path(params), masks, "params", "masks of the state")
    achieved = summarize_sparsity(params)
    sites, scope, cut = updater.sites(params), updater.scope, set[trees.KeyPath]()
    if isinstance(scope, Coupled):
        groups = scope.bind(sites, None).list_groups(params, state.target_sparsities)
        cut = {x.key_path for group in groups if not group.excluded for x in group.members}
    rows = []
    for path, leaf in trees.leaves_by_path(params).items():
        name = trees.path_string(path)
        if not hasattr(leaf, "shape") or name not in achieved:
            continue
        target, mask = targets.get(path), masks.get(path)
        pattern = "" if target is None else repr(sites[path].pattern).removesuffix("()")
        if isinstance(scope, Coupled):
            is_masked = mask is not None or path in cut
            target, pattern = (target, "channels") if is_masked else (None, "")
        rows.append(
            LayerSummary(
                path=name,
                shape=leaf.shape,
                type=pattern,
                target=None if target is None else float(np.mean(target)),  # of the slices
                achieved=achieved[name],
                mask_bytes=0 if mask is None else mask.nbytes,
            )
        )
    return rows


def plot_sparsity(
    params: Params, opt_state: optax.OptState, updater: UpdaterHooks, ax: Axes | None = None
) -> Axes:
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
    rows = [row for row in layers if row.target is not None or len(row.shape) > 1]
    ax = pick_axes(ax, len(rows))
    position = np.arange(len(rows))
    ax.barh(position, [row.achieved for row in rows], color=DARK, label="achieved")
    targets = [(i, row.target) for i, row in enumerate(rows) if row.target is not None]
    if targets:
        ax.plot(
            *zip(*((t, i) for i, t in targets), strict=True), "|", color="#D55E00", ms=14, mew=3
        )
        ax.plot([], [], "|", color="#D55E00", ms=10, mew=3, label="target")
    label_rows(ax, [row.path for row in rows], [f"{row.achieved:.1%}" for row in rows])
    ax.set_xlim(0, 1)
    ax.set_xlabel("sparsity (fraction of zeros)")
    add_legend(ax)
    return ax


def show_groups(scope: Coupled, params: Params, targets: Sparsities) -> str:
    """Returns a table of groups: channels, those that stay at the target, and what decides.

    Args:
      scope: the scope, with the sites of its updater.
      params: tree of parameters.
      targets: tree of target sparsities.
    """
    table = extras.make_table(("group of channels", "decided by"), ("channels", "stay"))
    groups = scope.list_groups(params, targets)
    cut = [group for group in groups if not group.excluded]
    counts = dict(zip(map(id, cut), scope.count_by_sparsity(cut), strict=True))
    for group in groups:
        count = counts.get(id(group), group.full.size)
        is_open = scope.across and not group.excluded  # scores decide
        table.add_row(
            group.full.name,
            _explain(group),
            f"{group.full.size:,}",
            "" if is_open else f"{int(count):,}",
        )
    return extras.as_text(table)


def _explain(group: PlacedGroup) -> str:
    """Returns what decides how many channels of a group stay."""
    if group.excluded:
        names = trees.listed([trees.path_string(key_path) for key_path in group.excluded])
        return f"{names} left out: stays whole"
    for width in group.widths:
        sizes = [variable.size for variable in width.variables]
        if len(sizes) > 1:
            return f"a factor of {' x '.join(map(str, sizes))}"
    return ""


def time_in_turn(*programs: Callable[[], object], rounds: int = 20) -> list[float]:
    """Returns the median seconds of each program, all measured in turn in one process.

    Other work of the machine slows programs that take turns alike, so that the ratio of their times
    is steadier than the times. Each program first runs twice, to compile and to fill caches.

    Args:
      programs: functions without arguments. The measurement waits for their results, asynchronous
        arrays included. A training step that donates its state keeps the new one itself.
      rounds: number of measurements of each program.

    Returns:
      Seconds, in the order of the programs.

    Raises:
      ValueError: `rounds` is no integer, or below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> square = jax.jit(lambda x: x @ x)
      >>> large, small = jnp.ones((512, 512)), jnp.ones((64, 64))
      >>> before, after = time_in_turn(lambda: square(large), lambda: square(small))
      >>> print(f"{after / before:.2f}x of the time")  # doctest: +SKIP
      0.04x of the time
    """
    return [statistics.median(seconds) for seconds in rounds_in_turn(*programs, rounds=rounds)]


def rounds_in_turn(*programs: Callable[[], object], rounds: int) -> list[list[float]]:
    """Returns the seconds of each program in each round; see `time_in_turn`."""
    check_int("rounds", rounds, 1)
    seconds: list[list[float]] = [[] for _ in programs]
    for round_index in range(-_WARM_UP, rounds):
        for program, program_seconds in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program())
            if round_index >= 0:
                program_seconds.append(time.perf_counter() - start)
    return seconds
