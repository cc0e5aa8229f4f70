"""`rank_groups`: how much a model needs each channel and each block, by criteria of papers.

Sources: "taylor": Ma et al. 2023, "LLM-Pruner", first-order elements summed over a group;
"activations": Muralidharan et al. 2024, "Compact Language Models via Pruning and Knowledge
Distillation" (Minitron), norms over batches and positions; "flap" and "wanda_sp": An et al. 2024,
"Fluctuation-based Adaptive Structured Pruning for Large Language Models"; "cosine": Men et al.
2024, "ShortGPT", equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.algorithms import snip_scores
from sparsity.algorithms.at_init import LossFn
from sparsity.calibration import Statistic, calibrate
from sparsity.calibration.pruners.channels import ReaderChannels, score_fluctuations
from sparsity.calibration.statistics.grams import broadcast_num_rows
from sparsity.calibration.statistics.sums import StatisticsKind
from sparsity.core import sharding, trees
from sparsity.core.arrays import promote
from sparsity.core.checks import check_function, check_iterable, check_kind
from sparsity.core.trees import KeyPath, Masks, Params, PyTree
from sparsity.graph import Coupled, Graph
from sparsity.graph.coupled import GroupChoice
from sparsity.masks import apply_masks

Criterion: TypeAlias = Literal[
    "activations", "cosine", "error", "flap", "loss", "magnitude", "taylor", "wanda_sp"
]
Importance: TypeAlias = dict[str, np.ndarray]  # {group: [channels] or [layers, channels]}


def rank_groups(
    graph: Graph,
    params: Params,
    batches: Iterable[PyTree] = (),
    by: Criterion = "flap",
    *,
    groups: GroupChoice | None = None,
    loss_fn: LossFn | None = None,
) -> Importance:
    """Returns how much the model needs each channel of its groups, or each of its blocks.

    `Coupled(graph, importance=ranking)` prunes by the importance of channels, and
    `graph.group_table(ranking)` shows it. `graph.drop` takes the names of blocks.

    Args:
      graph: the graph of the model `fn(params, batch)`, from `sparsity.trace`.
      params: tree of parameters.
      batches: second arguments of the model, or of `loss_fn`.
      by: of channels "magnitude", sum of abs(w) over all entries that go with one; "taylor", sum of
        abs(w * gradient) of the mean loss over these; "activations", root mean square of the inputs
        of the weights that read the channel; "wanda_sp", sum of abs(w) * norm of the input over
        these weights; "flap", sum of w ** 2 * variance of the input. Of blocks "cosine", 1 - cosine
        of the streams before and after; "error", relative squared error of the outputs without the
        block; "loss", rise of the mean loss without it.
      groups: the groups to rank, as in `Coupled`, by default all; or the blocks, by names of blocks
        and of their branches, or patterns, as in `graph.drop`.
      loss_fn: for "taylor" and "loss": `loss_fn(params, batch)`, the loss of a batch, a scalar.

    Returns:
      {name: importance}: [channels] for a group, or [layers, channels]; a scalar for a block, the
      least first.

    Raises:
      ValueError: the criterion needs a loss, batches, or statistics that a product does not have.

    Example:
      >>> import sparsity
      >>> params = {"up": jnp.array([[1.0, 5.0]]), "down": jnp.array([[2.0], [-3.0]])}
      >>> model = lambda params, x: x @ params["up"] @ params["down"]
      >>> graph = sparsity.trace(model, params, jnp.ones((1, 1)))
      >>> rank_groups(graph, params, [jnp.array([[2.0]])], by="wanda_sp")
      {'up:1': array([ 4., 30.], dtype=float32)}
    """
    check_kind("graph", graph, Graph, "made by sparsity.trace")
    if by not in get_args(Criterion):
        raise ValueError(f"by must be one of {get_args(Criterion)}, got by = {by!r}.")
    graph.parameters.check_complete(params)
    check_function("loss_fn", loss_fn, "params and a batch", optional=by not in ("loss", "taylor"))
    match by:
        case "cosine" | "error" | "loss":
            return _rank_blocks(graph, params, batches, by, groups, loss_fn)
        case "magnitude":
            scores = jax.tree.map(jnp.abs, trees.prunable(params))
        case "taylor" if loss_fn is not None:
            scores = snip_scores(loss_fn, params, batches)
        case _:
            return _score_readers(graph, params, batches, by, groups)
    return _to_numpy(Coupled(graph, groups=groups).score_channels(scores))


def _to_numpy(importance: Mapping[str, chex.Numeric]) -> Importance:
    return {name: np.asarray(x) for name, x in importance.items()}


def _score_readers(
    graph: Graph,
    params: Params,
    batches: Iterable[PyTree],
    by: Criterion,
    groups: GroupChoice | None,
) -> Importance:
    """Returns the importance of channels by the weights that read them, and their inputs."""
    scope, weights = ReaderChannels(graph, groups=groups), trees.prunable(params)
    placed = scope.place_groups(weights, jax.tree.map(lambda _: 0.0, weights))
    readers = {trees.path_names(x.key_path) for group in placed for x in group.scored}
    kind: StatisticsKind = "moments" if by == "flap" else "squares"
    statistics = calibrate(
        graph.model.fn, params, batches, kind, filter_fn=lambda path, _: path in readers
    )

    def score_tree(score: Callable[[jax.Array, Statistic], jax.Array]) -> Importance:
        def score_leaf(key_path: KeyPath, weight: jax.Array) -> jax.Array:
            path = trees.path_names(key_path)
            if path not in readers:
                return jnp.zeros_like(weight)
            if path not in statistics:
                raise ValueError(
                    f"{trees.path_string(key_path)!r} reads channels in a way that has no "
                    "statistics: see sparsity.calibrate. Leave its groups out with groups, or rank "
                    "by 'magnitude' or 'taylor'."
                )
            return score(weight, statistics[path])

        return _to_numpy(scope.score_channels(trees.map_matched(score_leaf, weights)))

    if by == "flap":
        return score_tree(lambda w, x: score_fluctuations(x.scale_weights(w), x))
    if by == "wanda_sp":
        return score_tree(_score_norms)
    squares = score_tree(lambda w, x: _share(_compute_mean_squares(x), w, x))
    sizes = score_tree(lambda w, x: _share(jnp.ones_like(_compute_mean_squares(x)), w, x))
    return {name: np.sqrt(total / sizes[name]) for name, total in squares.items()}


def _score_norms(weight: jax.Array, statistic: Statistic) -> jax.Array:
    """Returns |W_ij| ||X_j||_2 of each weight."""
    norms = jnp.sqrt(statistic.sums_of_squares())[..., None, :]
    matrices = jnp.abs(statistic.to_matrices(statistic.scale_weights(weight)))
    return statistic.from_matrices(matrices * norms, weight.shape)


def _compute_mean_squares(statistic: Statistic) -> jax.Array:
    squares = statistic.sums_of_squares()
    return squares / broadcast_num_rows(statistic, squares.ndim)


def _share(numbers: jax.Array, weight: jax.Array, statistic: Statistic) -> jax.Array:
    """Returns numbers of inputs, [*batch, inputs], in equal parts for the weights of each."""
    matrices = jnp.empty_like(statistic.to_matrices(weight), numbers.dtype)
    shares = jnp.broadcast_to(numbers[..., None, :] / matrices.shape[-2], matrices.shape)
    return statistic.from_matrices(shares, weight.shape)


def _rank_blocks(
    graph: Graph,
    params: Params,
    batches: Iterable[PyTree],
    by: Criterion,
    groups: GroupChoice | None,
    loss_fn: PyTree,
) -> Importance:
    """Returns {block or branch: score}, a mean over batches, the least first."""
    check_iterable("batches", batches)
    if not (listed := list(batches)):
        raise ValueError("batches has no batch: give at least one.")
    if by != "loss" and len(graph.model.example[1]) != 1:
        raise ValueError(
            "rank_groups calls fn(params, batch), and batches has one value for each call: trace a "
            "function of two arguments."
        )
    if callable(groups):
        raise ValueError("groups must name blocks or branches, got a function.")
    names = [block.name for block in graph.blocks]
    if not names:
        raise ValueError(
            "The model has no residual blocks: no product of parameters is added to a stream that "
            "it reads, outside of loops or in all layers of a scan."
        )
    chosen = [*graph.choose_branches(names if groups is None else groups)]
    if by == "cosine":
        if others := [name for name in chosen if name not in names]:
            raise ValueError(f"groups: {others[0]!r} is a branch, and 'cosine' compares blocks.")
        rows = [_measure_cosines(graph, params, batch, chosen) for batch in listed]
    else:
        masks = _list_masks(graph, params, chosen)
        fn, measure = (graph.model.fn, _measure_error) if by == "error" else (loss_fn, jnp.subtract)
        rows = _measure_without(fn, params, listed, masks, measure)
    means = np.mean(np.asarray(rows, np.float32), axis=0)
    return {name: mean for mean, name in sorted(zip(means, chosen, strict=True))}


def _measure_cosines(
    graph: Graph, params: Params, batch: PyTree, chosen: Sequence[str]
) -> list[jax.Array]:
    arrays = [*trees.split_arrays(params)[0], *trees.split_arrays(batch)[0]]
    distances = graph.retrace(params, batch).compare_streams(arrays)
    by_name = dict(zip((block.name for block in graph.blocks), distances, strict=True))
    return [by_name[name] for name in chosen]


def _list_masks(graph: Graph, params: Params, chosen: Sequence[str]) -> list[Masks]:
    """Returns masks without each block, of one structure, so that one program serves all."""
    zeros = graph.drop(params, chosen)

    def mask(name: str) -> Masks:
        dropped = trees.leaves_by_path(graph.drop(params, name))
        return trees.map_matched(lambda path, x: dropped.get(path, jnp.ones_like(x)), zeros)

    return [mask(name) for name in chosen]


def _measure_without(
    fn: Callable[[Params, PyTree], PyTree],
    params: Params,
    batches: Sequence[PyTree],
    masks: Sequence[Masks],
    measure: Callable[[PyTree, PyTree], jax.Array],
) -> list[list[jax.Array]]:
    """Returns for each batch the change of a function of the parameters under each mask."""
    rows, examples = [], [sharding.abstract((params, batch)) for batch in batches]
    for i, batch in enumerate(batches):
        arrays, rebuild = trees.split_arrays((params, batch))
        if not i or not trees.are_alike(examples[i], examples[i - 1]):

            @jax.jit
            def run(arrays: list[jax.Array], masks: Masks, rebuild: PyTree = rebuild) -> PyTree:
                params, batch = rebuild(arrays)
                return fn(apply_masks(params, masks), batch)

        full = run(arrays, jax.tree.map(jnp.ones_like, masks[0]))
        rows.append([measure(run(arrays, mask), full) for mask in masks])
    return rows


def _measure_error(outputs: PyTree, expected: PyTree) -> jax.Array:
    """Returns the relative squared error of all outputs that have fractions."""
    lost = total = jnp.float32(0)
    for x, y in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(jnp.result_type(y), jnp.inexact):
            wide = promote(jnp.result_type(y), jnp.float32)
            lost += jnp.sum(jnp.square(jnp.abs(x.astype(wide) - y.astype(wide))))
            total += jnp.sum(jnp.square(jnp.abs(y.astype(wide))))
    return lost / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
