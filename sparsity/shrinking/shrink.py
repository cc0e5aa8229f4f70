"""`sparsity.shrink`: a model without its dead channels, and the optimizer's state with it."""

from __future__ import annotations

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind
from sparsity.core.trees import Masks, Params, Path, PyTree, Tree
from sparsity.graph import Graph
from sparsity.masks import apply_masks
from sparsity.masks.slice_layout import check_entries
from sparsity.shrinking import cutting
from sparsity.shrinking.dead import find_dead
from sparsity.shrinking.plan import Plan, plan_cut, solve_proven_indices
from sparsity.shrinking.small import Small
from sparsity.training.base_updater import WrappedOptimizer
from sparsity.training.checks import check_masks_and_state
from sparsity.training.state import get_sparse_state


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
        SparseState. The program of its update must prove that training continues as on the masked
        model. Entrywise optimizers pass, and norms to which removed entries add 0
        (`clip_by_global_norm`, `lars`). Means over an array (`clip_by_block_rms`), noise, factored
        moments, factors that depend on the shape (`muon`) and norms of moments that removed entries
        still have (`lamb`) are refused. Without `tx` you vouch for the optimizer.

    Raises:
      ValueError: params lack a parameter, masks are traced or of another model, hold other entries
        than 0 and 1 or remove a group, the state cannot be cut, or no proof is found for `tx`.

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
    check_masks_and_state(masks, opt_state, tx, may_hold_masks=True)
    graph.parameters.check_complete(params)
    plan, by_path = _read_plan(graph, masks)
    cuts = cutting.list_cut_parameters(graph, params, plan.kept, by_path)
    small_params = cutting.cut_params(cuts, params)
    small_masks = cutting.cut_masks(cuts, small_params)
    state = None if opt_state is None else cutting.cut_state(cuts, params, small_params, opt_state)
    if tx is not None:
        cutting.check_optimizer(tx, *trees.strip_variables((params, opt_state)), cuts)
        tx = _convert_optimizer(tx, plan, state)
    replicated = _find_replicated(graph, params, small_params)
    masked = apply_masks(small_params, small_masks)
    return Small(masked, state, plan, graph, replicated, small_masks, tx)


def _convert_optimizer(
    tx: optax.GradientTransformation, plan: Plan, small_state: PyTree
) -> optax.GradientTransformation:
    """Returns the optimizer of the smaller model: a wrapped one, whose updater knows the cut."""
    if not isinstance(tx, WrappedOptimizer) or tx.updater is None or tx.inner is None:
        return tx
    masks = None if tx.masks is None else get_sparse_state(small_state).masks
    return plan.updater(tx.updater).wrap_optax(tx.inner, masks)


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
