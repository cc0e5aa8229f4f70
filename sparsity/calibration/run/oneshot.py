"""`sparsity.oneshot`: pruning of a trained model in one pass over calibration data.

A run visits the blocks of the model in order, holds one, and writes it when it is done: see `walk`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict, Unpack, overload

import chex
import jax
import numpy as np

from sparsity.calibration.refits.block import BlockRefit
from sparsity.calibration.refits.layers import BiasRefit, Refit
from sparsity.calibration.run.blocks import BlockNameFn, BlockPlan
from sparsity.calibration.run.dry_run import DryRun
from sparsity.calibration.run.one_pass import ModelFn, Options, Run
from sparsity.calibration.run.prune import check_pruner_and_refit
from sparsity.calibration.run.report import Report
from sparsity.calibration.run.task import make_task
from sparsity.calibration.statistics.row_axes import RowWeights
from sparsity.calibration.store import (
    open_checkpoint,
)
from sparsity.core import trees
from sparsity.core.checks import (
    check_bool,
    check_function,
    check_iterable,
    check_kind,
    check_values,
)
from sparsity.core.names import name_blocks
from sparsity.core.trees import Masks, Params, Path, PyTree, Tree
from sparsity.masks import has_statement
from sparsity.training.base_updater import BaseUpdater

AnyRefit: TypeAlias = Refit | BiasRefit | BlockRefit


class _Keywords(TypedDict, total=False):
    """Keyword arguments of `oneshot` that do not change the type of its results."""

    row_weights: RowWeights | None
    blocks: BlockNameFn | None
    held: Iterable[PyTree] | None
    metric: Callable[[PyTree], chex.Numeric] | None
    donate: bool
    progress: bool


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: PyTree,
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = ...,
    sequential: bool = ...,
    out: str | os.PathLike[str] | None = ...,
    *,
    dry_run: Literal[True],
    **options: Unpack[_Keywords],
) -> DryRun: ...


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: str | os.PathLike[str],
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = ...,
    sequential: bool = ...,
    out: str | os.PathLike[str] | None = ...,
    *,
    dry_run: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> tuple[PyTree, Masks, Report]: ...


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = ...,
    sequential: bool = ...,
    out: str | os.PathLike[str] | None = ...,
    *,
    dry_run: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> tuple[Tree, Masks, Report]: ...


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = ...,
    sequential: bool = ...,
    out: str | os.PathLike[str] | None = ...,
    *,
    dry_run: bool,
    **options: Unpack[_Keywords],
) -> tuple[Tree, Masks, Report] | DryRun: ...


def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = None,
    sequential: bool = True,
    out: str | os.PathLike[str] | None = None,
    *,
    row_weights: RowWeights | None = None,
    blocks: BlockNameFn | None = None,
    held: Iterable[PyTree] | None = None,
    metric: Callable[[PyTree], chex.Numeric] | None = None,
    donate: bool = False,
    progress: bool = False,
    dry_run: bool = False,
) -> tuple[Tree, Masks, Report] | DryRun:
    """Prunes a trained model by calibration data, block by block.

    Args:
      pruner: any updater that prunes at once.
      fn: the model, `fn(params, batch)`.
      params: a tree of arrays, of objects with `shape`, `dtype` and `[index]` that are read block
        by block, or the path of a checkpoint for `open_checkpoint`.
      batches: second arguments of `fn`, which may differ in shape; a generator is read once.
      refit: `ADMM()`, another `Refit` or `BiasRefit`, `BlockRefit()`, or a pair with the latter.
      sequential: each layer sees outputs of pruned layers; otherwise those of the dense model.
      out: folder to which each finished block is written; the same call continues from there.
      row_weights: function of the batch, or array of its leading axes: rows of 0 count nowhere.
      blocks: `blocks(path)` names the block of a parameter; a step of a scan is always one.
      held: batches for `report.outputs`; by default `batches`, with `()` none.
      metric: `metric(params) -> number`, for `report.outputs` before and after.
      donate: delete arrays of `params` as they are replaced.
      progress: show a bar of the blocks. Needs tqdm.
      dry_run: only return the bytes of each block; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      (pruned params, masks, report) with the errors of parameters, blocks and the model; with `out`
      arrays are read lazily from the folder. Or a `DryRun`.

    Raises:
      ValueError: an argument does not fit, no product reads a parameter that has a sparsity, or
        activations are not finite.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> params, x = jnp.array([[4.0], [1.0]]), jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> oneshot(pruner, lambda params, x: x @ params, params, [x])[0].T
      Array([[4., 0.]], dtype=float32)
    """
    flags = sequential, donate, progress, dry_run
    options = Options(fn, out, row_weights, blocks, held, metric, *flags)
    _check_arguments(pruner, batches, options)
    return _start(pruner, params, [*batches], refit, options)


def _start(
    pruner: BaseUpdater,
    params: PyTree,
    batches: list[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None,
    options: Options,
) -> tuple[PyTree, Masks, Report] | DryRun:
    """Checks what needs no data, traces the model, and runs."""
    matrix_refit, block_refit = _split_refits(refit)
    check_pruner_and_refit(pruner, matrix_refit)
    if not options.sequential and (options.dry_run or block_refit or options.donate):
        raise ValueError(
            "dry_run, donate and BlockRefit need sequential = True, got sequential = False."
        )
    tree = open_checkpoint(params) if isinstance(params, str | os.PathLike) else params
    if not batches:
        raise ValueError("batches has no batch: give at least one.")
    if not options.dry_run:
        remedy = "Call oneshot outside of jit; shapes are enough for dry_run=True."
        check_values("params", tree, remedy)
        check_values("batches", batches, remedy)
    like, leaves = _read_leaves(tree)
    task = make_task(pruner, matrix_refit, options.fn, like, batches[0])
    names = name_blocks(task.sites)
    if options.blocks is not None:
        names = {path: options.blocks(path) for path in names}
    for path, name in names.items():
        check_kind(f"blocks({path!r})", name or None, str, "the name of a block")
    if options.dry_run:
        window = block_refit.window if block_refit else 1
        plan = BlockPlan(task.make_calibration(), names, window)
        return DryRun.measure(task, plan, len(batches), block_refit)
    if block_refit:
        block_refit.check(leaves)
    return Run(task, block_refit, batches, options, names).run(params, leaves)


def _split_refits(
    refit: AnyRefit | Sequence[AnyRefit] | None,
) -> tuple[Refit | BiasRefit | None, BlockRefit | None]:
    """Returns the refit of matrices and that of blocks; raises a ValueError for other sequences."""
    refits: list[PyTree] = [*refit] if isinstance(refit, list | tuple) else [refit]
    refits = [x for x in refits if x is not None]
    block_refits = [x for x in refits if isinstance(x, BlockRefit)]
    others = [x for x in refits if not isinstance(x, BlockRefit)]
    if len(block_refits) > 1 or len(others) > 1 or refits[:1] == block_refits != refits:
        raise ValueError(
            "refit takes one refit of matrices, one BlockRefit(), or both in this order, got "
            f"{refit!r}."
        )
    return next(iter(others), None), next(iter(block_refits), None)


def _check_arguments(pruner: BaseUpdater, batches: object, options: Options) -> None:
    """Raises a ValueError for other types, and if parameters compete with each other."""
    check_pruner_and_refit(pruner)
    if not has_statement(pruner.scope, "per_slice"):
        raise ValueError(
            "oneshot prunes one parameter after the other and needs scope = Layerwise(), got "
            f"{pruner.scope!r}. Prune all of them at once: pruner.instant_sparsify(params, "
            "statistics=statistics). A scope of your own that does not compare parameters says "
            "`per_slice = True`."
        )
    for name in ("sequential", "donate", "progress", "dry_run"):
        check_bool(name, getattr(options, name))
    held = () if options.held is None else options.held
    for name, value in {"batches": batches, "held": held}.items():
        check_iterable(name, value)
        if isinstance(value, str | bytes | Mapping):
            raise ValueError(f"{name} must be a list or an iterator of batches, got {value!r}.")
    check_function("metric", options.metric, "params", optional=True)
    check_function("blocks", options.blocks, "path", optional=True)
    check_kind("out", options.out, str | os.PathLike | None, "a path or None")


def _read_leaves(params: Params) -> tuple[Params, dict[Path, PyTree]]:
    """Returns the tree with shapes in place of lazily read arrays, and all arrays by path."""

    def describe(leaf: PyTree) -> PyTree:
        is_lazy = not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) and all(
            hasattr(leaf, name) for name in ("shape", "dtype", "__getitem__")
        )
        return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) if is_lazy else leaf

    like = jax.tree.map(describe, params)
    kept = jax.tree.map(lambda x, leaf: leaf if trees.is_array(x) else None, like, params)
    return like, trees.leaves_by_names(kept)
