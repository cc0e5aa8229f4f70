"""The layers of a sparse network as a list, a table and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import optax

from sparsity.core import extras, trees
from sparsity.core.checks import check_kind
from sparsity.core.pictures import DARK, add_legend, label_rows, pick_axes
from sparsity.core.trees import Params
from sparsity.graph import Coupled
from sparsity.reports.check import explain_dense_weights
from sparsity.reports.groups import show_groups
from sparsity.reports.summary import summarize_sparsity
from sparsity.training.state import get_sparse_state
from sparsity.training.updater_hooks import UpdaterHooks

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
                target=None if target is None else float(target),
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
