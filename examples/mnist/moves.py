"""How masks move: what an update takes out of use, and which weights have ever been in use."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sparsity
from examples.mnist.network import Network, TrainState


class Moves(NamedTuple):
    """Masks at the last look, and the union of all masks so far: uint8, `None` for dense leaves."""

    active: Any
    ever_active: Any


def active_masks(network: Network, state: TrainState) -> Any:
    """Returns copies of the masks, since the next training step takes over the state's memory."""
    masks = sparsity.active_masks(network.used_params(state), state.opt_state)
    return jax.tree.map(jnp.copy, masks)


def start(network: Network, state: TrainState) -> Moves:
    masks = active_masks(network, state)
    return Moves(masks, masks)


def look(moves: Moves, network: Network, state: TrainState) -> tuple[Moves, dict[str, Any]]:
    """Returns the moves so far and, for every sparse layer and in `total`,

    - `active`: share of the weights that are in use,
    - `churn`: share of the weights in use at the last look that are in use no more,
    - `ever_active`: share of the weights that have been in use at any look.
    """
    masks = active_masks(network, state)
    union = jax.tree.map(lambda a, b: a | b, moves.ever_active, masks)
    stayed = sparsity.summarize_intersection(moves.active, masks)
    return Moves(masks, union), {
        "active": _by_layer(sparsity.summarize_sparsity(masks)),
        "churn": _by_layer(stayed),
        "ever_active": _by_layer(sparsity.summarize_sparsity(union)),
    }


def _by_layer(summary: dict[str, Any]) -> dict[str, float]:
    """One minus the values of the sparse layers and of the total."""
    total = summary.get("_total_sparsity", summary.get("_total_intersection"))
    layers = {name: v for name, v in summary.items() if name[0] != "_" and v is not None}
    return {name: 1 - value for name, value in (layers | {"total": total}).items()}
