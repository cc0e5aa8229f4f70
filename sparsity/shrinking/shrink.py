"""`sparsity.shrink`: a model without its dead channels, and the optimizer's state with it."""

from __future__ import annotations

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from sparsity.comparisons.updates import check_masks_and_state
from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind
from sparsity.core.trees import Masks, Params, Path, PyTree, Tree
from sparsity.graph import Graph
from sparsity.masks import apply_masks
from sparsity.masks.positions import check_entries
from sparsity.shrinking import cutting
from sparsity.shrinking.dead import find_dead
from sparsity.shrinking.plan import Plan, cut_shape, plan_cut, solve_proven_indices
from sparsity.shrinking.small import Small
from sparsity.training.base_updater import WrappedOptimizer
from sparsity.training.state import SparseState, check_optax_state, get_sparse_state


def shrink(
    graph: Graph,
    params: Tree,
    masks: Masks | Plan,
    opt_state: optax.OptState | None = None,
    tx: optax.GradientTransformation | None = None,
) -> Small[Tree]:
    """Removes dead channels from the parameters, the model and the optimizer's state.

    A channel is dead if the masked model provably computes the same without it: all entries that
    read the channel are masked, or all that compute it are, and its readers read 0. Cutting one may
    leave others dead. Other entries keep their masks. The smaller model computes exactly what the
    masked model computes, also gradients of kept entries. Training continues from its state.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      params: the parameters, the tree that was traced, or a part of that tree.
      masks: masks of any pattern, not packed, `None` if dense; or a `Plan`. Layers of a scan keep
        equally many channels, dead ones included; every group keeps one.
      opt_state: state of any optax optimizer of `params`. Moments are cut like their parameters,
        counters and schedules stay, and a SparseState keeps the masks of all entries that stay.
        Factored moments that average over removed channels are refused.
      tx: the optimizer of that state, to train on with `small.tx`; or the inner one of a
        SparseState. Compares at least four updates by random gradients with those of the masked
        model. Entrywise optimizers pass, and norms of masked gradients (`clip_by_global_norm`,
        `lars`). Means over an array (`clip_by_block_rms`), noise, factors that depend on the shape
        (`muon`) and norms that count moments (`lamb`) or removed weights are refused.

    Returns:
      The smaller model.

    Raises:
      ValueError: params lack a parameter, masks are traced or of another model, hold other entries
        than 0 and 1 or remove a group, the state cannot be cut, or `tx` would train otherwise.

    Example:
      >>> import jax.numpy as jnp
      >>> from sparsity.graph import trace
      >>> params = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}
      >>> graph = trace(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], params, jnp.ones((5, 3)))
      >>> masks = {"up": params["up"].at[:, 1].set(0), "down": params["down"].at[1].set(0)}
      >>> small = shrink(graph, params, masks)
      >>> jax.tree.map(jnp.shape, small.params)
      {'down': (3, 2), 'up': (3, 3)}
      >>> small.apply(small.params, jnp.ones((5, 3))).shape
      (5, 2)
    """
    check_kind("graph", graph, Graph, "made by sparsity.trace")
    check_masks_and_state(masks, opt_state, tx)
    check_optax_state(opt_state, tx, may_hold_masks=True)
    graph.parameters.check_complete(params)
    plan, by_path = _read_plan(graph, masks)
    cuts = cutting.list_cut_parameters(graph, params, plan.kept, by_path)
    small_params = cutting.cut_params(cuts, params)
    small_masks = cutting.cut_masks(cuts, small_params)
    state = None if opt_state is None else cutting.cut_state(cuts, params, small_params, opt_state)
    small_tx, error = _convert_optimizer(tx, plan, params, cuts, opt_state, state)
    replicated = _find_replicated(graph, params, small_params)
    masked = apply_masks(small_params, small_masks)
    return Small(masked, state, plan, graph, replicated, error, small_masks, small_tx)


def _convert_optimizer(
    tx: optax.GradientTransformation | None,
    plan: Plan,
    params: Params,
    cuts: cutting.CutParameters,
    opt_state: PyTree,
    small_state: PyTree,
) -> tuple[optax.GradientTransformation | None, float | None]:
    """Returns the optimizer of the smaller model, and the largest difference between updates.

    Raises:
      ValueError: updates differ by more than rounding; the error names the leaf and the entry.
    """
    if tx is None:
        return None, None
    small_tx = tx
    if isinstance(tx, WrappedOptimizer) and tx.updater is not None and tx.inner is not None:
        masks = None if tx.masks is None else get_sparse_state(small_state).masks
        small_tx = plan.updater(tx.updater).wrap_optax(tx.inner, masks)  # knows the cut
    small_shapes = [cut_shape(cut.shape, cut.axes) for cut in cuts.values()]

    def update(
        updates: PyTree, state: PyTree, params: Params | None = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        shapes = [leaf.shape for leaf in jax.tree.leaves(trees.only_arrays(params))]
        chosen = optax.with_extra_args_support(small_tx if shapes == small_shapes else tx)
        return chosen.update(updates, state, params, **extra_args)

    for_both = optax.GradientTransformationExtraArgs(tx.init, update)
    params, state = trees.strip_variables((params, opt_state))
    try:
        return small_tx, cutting.compare_small_updates(for_both, params, cuts, state)
    except ValueError as error:
        is_nested = trees.find_nodes(state, SparseState) and not isinstance(state, SparseState)
        if small_tx is not tx or not is_nested:
            raise
        raise ValueError(
            "tx has a wrapped optimizer within other transformations, where its updater cannot be "
            "told which channels are left. Wrap last: pruner.wrap_optax(optax.chain(...)); or cut "
            f"without tx, and make it again with small.updater(pruner). {error}"
        ) from None


def _read_plan(graph: Graph, masks: Masks | Plan) -> tuple[Plan, dict[Path, jax.Array]]:
    """Returns a checked plan of the channels that masks remove, and the masks by path."""
    if isinstance(masks, Plan):
        solve_proven_indices(graph, masks)  # raises for a plan of another model
        return masks, {}
    by_path = {x.path: mask for x, mask in graph.parameters.match_masks(masks)}
    for path, mask in by_path.items():
        check_entries(np.asarray(mask), trees.join_names(path))
    return plan_cut(graph, *find_dead(graph, by_path)), by_path


def _find_replicated(
    graph: Graph, params: Params, small_params: Params
) -> dict[tuple[Path, int], int]:
    """Returns the attribute `replicated` of a `Small`."""
    parameters, small = graph.parameters.match(params), trees.leaves_by_path(small_params)
    replicated = {}
    for key_path, leaf in trees.leaves_by_path(params).items():
        old_sharding = getattr(leaf, "sharding", None)
        if isinstance(old_sharding, NamedSharding) and leaf.shape != small[key_path].shape:
            for axis, count in enumerate(sharding.count_devices(old_sharding, leaf.ndim)):
                if small[key_path].shape[axis] % count:
                    replicated[parameters[key_path].path, axis] = count
    return replicated
