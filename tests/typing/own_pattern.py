"""Adds a pattern of one's own, and chooses patterns by path."""

import dataclasses

import jax
import jax.numpy as jnp

import sparsity


@dataclasses.dataclass(frozen=True)
class Rows(sparsity.SparsityType):
    def pool(self, scores: jax.Array, batch_axes: int = 0) -> jax.Array:
        return jnp.max(scores, axis=-1)

    def expand(self, units: jax.Array, shape: tuple[int, ...], batch_axes: int = 0) -> jax.Array:
        return jnp.broadcast_to(units[..., None], shape)


def choose(path: tuple[str, ...], param: jax.Array) -> sparsity.SparsityType:
    return Rows() if path[-1] == "kernel" else sparsity.NByM(2, 4)


pruner = sparsity.MagnitudePruning(
    sparsity_distribution_fn=sparsity.Uniform(0.5, custom_sparsity_map={"kernel": 0.25}),
    sparsity_type=choose,
)
pruned, masks = pruner.instant_sparsify({"kernel": jnp.ones((8, 4))})
mask: jax.Array = masks["kernel"]
