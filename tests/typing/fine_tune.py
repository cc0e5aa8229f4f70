"""Trains chosen entries, and stores them as a delta."""

from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import optax

import sparsity

params = {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}
pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
masks = pruner.instant_sparsify(params)[1]
tx: optax.GradientTransformation = sparsity.train_only(optax.adam(0.1), masks)
state = tx.init(params)
updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
tuned = optax.apply_updates(params, updates)
delta: sparsity.Delta = sparsity.Delta.between(params, tuned, masks)
with TemporaryDirectory() as folder:
    path = Path(folder) / "delta.safetensors"
    delta.save(path)
    delta = sparsity.Delta.merge([sparsity.Delta.load(path)], [0.5])
merged = delta.apply(params)
size: int = delta.nbytes
