"""Whole channels: masked as the configuration says, then cut, so that the network is smaller."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

import sparsity
from examples.mnist.network import IMAGE, Model, Network, TrainState, make_network
from sparsity import sparsity_distributions, sparsity_schedules


def read_options(options: dict[str, Any], model: Model) -> dict[str, Any]:
    """Returns the options of an updater with the objects that its graph is needed for.

    Args:
      options: with `scope` as a name, `sparsity` or, in its place, `macs`.
      model: what the updater prunes.
    """
    options = dict(options)
    macs = options.pop("macs")
    if options["scope"] != "coupled" and macs is None:
        return options
    graph = sparsity.trace(model.apply, jax.eval_shape(model.init), IMAGE)
    if options["scope"] == "coupled":
        options["scope"] = sparsity.Coupled(graph)
    if macs is not None:
        kind = sparsity_distributions.DISTRIBUTIONS.find(options.pop("dist_type"))
        distribution = kind(filter_fn=options.pop("filter_fn", None))
        options["sparsity_distribution_fn"] = sparsity.budget(
            graph, macs=macs, distribution=distribution
        )
    return options


def cut_step(updater: sparsity.BaseUpdater) -> int:
    """Returns the first step whose masks are final."""
    updates = sparsity_schedules.update_range(updater.scheduler)
    return updates[1] + 1 if updates else 0


def make_plan(network: Network, state: TrainState) -> sparsity.Plan:
    """Returns which channels the masks leave."""
    masks = sparsity.active_masks(network.used_params(state), state.opt_state)
    return sparsity.shrink(network.updater.scope.graph, state.params, masks).plan


def shrink(network: Network, plan: sparsity.Plan) -> sparsity.shrinking.Small[Any]:
    """Returns the initial network with the channels of a plan only."""
    return sparsity.shrink(network.updater.scope.graph, network.model.init(), plan)


def make_smaller(
    network: Network, plan: sparsity.Plan, config: ConfigDict, num_steps: int
) -> Network:
    """Returns what trains the network with the channels of a plan only: a dense one."""
    small = shrink(network, plan)
    model = Model(lambda: jax.tree.map(jnp.copy, small.params), small.apply)
    return make_network(f"{network.name}, cut", model, sparsity.NoPruning(), config, num_steps)


def cut(network: Network, state: TrainState, plan: sparsity.Plan, smaller: Network) -> TrainState:
    """Returns the smaller weights and moments, and the counters, from which training continues."""
    small = sparsity.shrink(
        network.updater.scope.graph, state.params, plan, state.opt_state.inner_state
    )
    opt_state = smaller.init().opt_state._replace(
        inner_state=small.opt_state, count=state.opt_state.count
    )
    return TrainState(small.params, opt_state)
