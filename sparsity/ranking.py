"""`rank_groups`: how much a model needs each channel and each block, by criteria of papers.

Sources: "taylor": Ma et al. 2023, "LLM-Pruner", first-order elements summed over a group;
"activations": Muralidharan et al. 2024, "Compact Language Models via Pruning and Knowledge
Distillation" (Minitron), norms over batches and positions; "flap" and "wanda_sp": An et al. 2024,
"Fluctuation-based Adaptive Structured Pruning for Large Language Models"; "cosine": Men et al.
2024, "ShortGPT", equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from sparsity.core import trees
from sparsity.core.checks import check_iterable, check_kind
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
      groups: the groups to rank, as in `Coupled`; by default all.
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
    match by:
        case "loss" if loss_fn is not None:
            return _measure_losses(graph, params, batches, loss_fn)
        case "cosine" | "error":
            return _to_numpy(graph.rank_blocks(params, batches, by))
        case "magnitude":
            scores = jax.tree.map(jnp.abs, trees.prunable(params))
        case "taylor" if loss_fn is not None:
            scores = snip_scores(loss_fn, params, batches)
        case "loss" | "taylor":
            raise ValueError(f"by = {by!r} needs loss_fn(params, batch), got loss_fn = None.")
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


def _measure_losses(
    graph: Graph,
    params: Params,
    batches: Iterable[PyTree],
    loss_fn: LossFn,
) -> Importance:
    """Returns {block: rise of the mean loss without it}, the least first."""
    check_iterable("batches", batches)
    if not (listed := list(batches)):
        raise ValueError("batches has no batch: give at least one.")
    names = [block.name for block in graph.blocks]
    zeros = graph.drop(params, names)

    @jax.jit
    def measure(params: Params, masks: Masks, batch: PyTree) -> jax.Array:
        return loss_fn(apply_masks(params, masks), batch)

    def mask(block: str | None) -> Masks:
        """Returns masks of one structure for all blocks, so that one program serves all."""
        dropped = {} if block is None else trees.leaves_by_path(graph.drop(params, block))
        return trees.map_matched(lambda path, x: x if path in dropped else jnp.ones_like(x), zeros)

    def measure_mean(block: str | None) -> np.float32:
        masks = mask(block)
        return np.mean([measure(params, masks, batch) for batch in listed], dtype=np.float32)

    full = measure_mean(None)
    rises = {name: np.asarray(measure_mean(name) - full) for name in names}
    return dict(sorted(rises.items(), key=lambda pair: float(pair[1])))
