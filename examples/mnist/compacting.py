"""Compact training: values, gradients and moments of the kept weights only."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from ml_collections import ConfigDict

import sparsity
from examples.mnist.data import Digits
from examples.mnist.network import IMAGE, Network, TrainState, make_optimizer, mean_loss
from sparsity import sparsity_schedules
from sparsity.compacting.compact import Compact


class CompactState(NamedTuple):
    """All that compact training changes."""

    model: Compact  # positions of the kept values
    params: Any  # kept values; parameters without a mask are dense
    opt_state: sparsity.SparseState  # of the kept values, without masks


class Stage(NamedTuple):
    """The compact part of a run."""

    step: int  # the first compact step
    graph: sparsity.Graph
    network: Network


def make_stage(masked: Network, config: ConfigDict, num_steps: int) -> Stage:
    """Returns the compact part of a run that `masked` begins; raises as `first_step`."""
    step = first_step(masked.updater, config.sparsity.algorithm)
    graph = sparsity.trace(masked.model.apply, jax.eval_shape(masked.model.init), IMAGE)
    return Stage(step, graph, make_compact(masked, make_optimizer(config, num_steps)))


def first_step(updater: sparsity.BaseUpdater, algorithm: str) -> int:
    """Returns the first compact step: 0, or the first step after the ramp of a pruner.

    Raises:
      ValueError: the algorithm cannot train a compact network.
    """
    if isinstance(updater, sparsity.NoPruning):
        raise ValueError(refusal(algorithm, "The algorithm has no masks."))
    if updater.keeps_dense_weights:
        raise ValueError(refusal(algorithm, "Pruned weights keep values, which must be stored."))
    if updater.keeps_count == "at most":
        raise ValueError(refusal(algorithm, "Mask updates may change the number of kept weights."))
    if updater.keeps_count == "exact":
        return 0
    updates = sparsity_schedules.update_range(updater.scheduler)
    return updates[1] + 1 if updates else 0


def refusal(algorithm: str, reason: object) -> str:
    """Returns the message that an algorithm cannot train a compact network."""
    return (
        f"--config.compact=True cannot train --config.sparsity.algorithm={algorithm}. {reason} Use "
        "rigl, set, static_sparse, or a pruner with a ramp such as magnitude; or "
        "--config.compact=False."
    )


def make_compact(masked: Network, tx: optax.GradientTransformation) -> Network:
    """Returns what trains the kept values of a masked network with a plain optimizer."""
    updater = masked.updater

    def train_step(state: CompactState, batch: Digits) -> tuple[CompactState, jax.Array]:
        model, params, opt_state = state
        loss_fn = functools.partial(mean_loss, model.apply, batch=batch)
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, inner = tx.update(grads, opt_state.inner_state, params)
        opt_state = opt_state._replace(inner_state=inner, count=opt_state.count + 1)
        return CompactState(model, optax.apply_updates(params, updates), opt_state), loss

    def move_step(state: CompactState, batch: Digits) -> tuple[CompactState, jax.Array]:
        model, params, opt_state = state
        loss_fn = functools.partial(mean_loss, batch=batch)
        *moved, inner = model.move(updater, params, opt_state.inner_state, opt_state.count, loss_fn)
        opt_state = opt_state._replace(inner_state=inner)
        if not updater.skip_gradients:
            return train_step(CompactState(*moved, opt_state), batch)
        opt_state = opt_state._replace(count=opt_state.count + 1)
        return CompactState(*moved, opt_state), loss_fn(model.apply, params)

    def view(state: CompactState) -> TrainState:
        masks = state.model.masks
        opt_state = state.opt_state._replace(masks=masks, inner_state=None)
        return TrainState(state.model.dense(state.params), opt_state)

    return masked._replace(
        name=f"{masked.name}, compact",
        train_step=jax.jit(train_step, donate_argnums=0),
        move_step=jax.jit(move_step, donate_argnums=0),
        view=jax.jit(view),
    )


def compact(
    graph: sparsity.Graph, state: TrainState, masks: Any, formats: Mapping[str, Any] | None = None
) -> CompactState:
    """Returns kept values and moments, and the counters, from which training continues.

    Args:
      graph: the graph of the network.
      state: state of the masked network.
      masks: its masks, not packed.
      formats: {path: format} of masked parameters; chosen for the masks by default.
    """
    model = sparsity.compact(graph, state.params, masks, state.opt_state, formats=formats)
    opt_state = sparsity.get_sparse_state(state.opt_state)._replace(
        masks=None, inner_state=model.opt_state, algorithm_state=None
    )
    return CompactState(model, model.params, opt_state)


def masked_state(network: Network, state: CompactState) -> TrainState:
    """Returns a state of the masked network: dense parameters with zeros, moments, and masks."""
    params, opt_state = network.view(state)
    moments = state.model.dense_state(state.opt_state.inner_state)
    return TrainState(params, opt_state._replace(inner_state=moments))


def check_moves(stage: Stage, state: CompactState, batch: Digits, algorithm: str) -> None:
    """Raises a ValueError if the masks of a compact network cannot move."""
    try:
        jax.eval_shape(stage.network.move_step, state, batch)
    except ValueError as error:
        raise ValueError(refusal(algorithm, error)) from error


def formats_by_name(model: Compact) -> dict[str, str]:
    """Returns the formats of the masked parameters by path, joined by '/'."""
    return {"/".join(path): name for path, name in model.formats.items()}
