"""Schedules and distributions, the library's and one's own."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import sparsity

ramp = sparsity.PolynomialSchedule(update_freq=10, update_start_step=0, update_end_step=100)
at_step: Any = ramp.get_sparsity_at_step({"w": 0.5}, 7)


class Often:
    def is_mask_update_iter(self, count: int | jax.Array) -> bool | jax.Array:
        return count % 2 == 0

    def get_sparsity_at_step(self, targets: Any, count: int | jax.Array) -> Any:
        return targets


def half(params: Any) -> Any:
    def choose(leaf: jax.Array) -> float | None:
        return 0.5 if leaf.ndim > 1 else None

    return jax.tree.map(choose, params)


schedules: Mapping[str, sparsity.Schedule] = {"ramp": ramp, "often": Often()}
for schedule in schedules.values():
    pruner = sparsity.GlobalMagnitudePruning(scheduler=schedule)
pruner_of_halves = sparsity.MagnitudePruning(scheduler=Often(), sparsity_distribution_fn=half)
pruned, masks = pruner_of_halves.instant_sparsify({"w": jnp.ones((4, 4))})
