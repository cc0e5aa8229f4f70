"""Packs masks, applies them, and reads reports."""

import jax
import jax.numpy as jnp
import optax

import sparsity

params = {"kernel": jnp.arange(32.0).reshape(8, 4), "bias": jnp.zeros(4)}
pruner = sparsity.MagnitudePruning(
    sparsity_distribution_fn=sparsity.Uniform(0.5),
    scheduler=sparsity.OneShotSchedule(0),
    use_packed_masks=True,
)
packed = pruner.instant_sparsify(params)[1]
masks = sparsity.unpack_masks(packed, params)
masked: jax.Array = sparsity.apply_mask(params["kernel"], masks["kernel"])
total: float = sparsity.summarize_sparsity(params)["_total_sparsity"]
tx = pruner.wrap_optax(optax.sgd(0.1))
opt_state = tx.init(params)
for layer in sparsity.reports.layer_summary(params, opt_state, pruner):
    reached: bool = layer.target is None or layer.achieved >= layer.target
state = sparsity.get_sparse_state(opt_state)
opt_state = sparsity.set_sparse_state(opt_state, state._replace(masks=state.masks))
names: tuple[str, ...] = tuple(sparsity.all_algorithm_names())
