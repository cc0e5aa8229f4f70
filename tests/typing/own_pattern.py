"""Adds a pattern of one's own, and chooses patterns and sparsities by path."""

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


def is_matrix(path: tuple[str, ...], param: jax.Array) -> bool:
    return param.ndim == 2


custom_sparsities = {"kernel": 0.25}
pruner = sparsity.MagnitudePruning(
    sparsity_distribution_fn=sparsity.Uniform(0.5, is_matrix, custom_sparsities),
    sparsity_type=choose,
)
pruned, masks = pruner.instant_sparsify({"kernel": jnp.ones((8, 4))})
mask: jax.Array = masks["kernel"]
