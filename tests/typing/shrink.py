"""Cuts channels of a traced model."""

import jax
import jax.numpy as jnp
import optax

import sparsity

Params = dict[str, jax.Array]


def model(params: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


params: Params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 2))}
x = jnp.ones((5, 4))
graph: sparsity.Graph = sparsity.trace(model, params, x)
macs: float = graph.macs()
pruner = sparsity.MagnitudePruning(
    scope=sparsity.Coupled(graph), sparsity_distribution_fn=sparsity.budget(graph, macs=0.5)
)
pruned, masks = pruner.instant_sparsify(params)
opt_state = optax.adam(0.1).init(pruned)
small = sparsity.shrink(graph, pruned, masks, opt_state, optax.adam(0.1))
y: jax.Array = small.apply(small.params, x)
plan: sparsity.Plan = sparsity.Plan.from_json(small.plan.to_json())
shapes: dict[str, tuple[int, ...]] = {x.name: x.shape for x in graph.parameters}
small_graph: sparsity.Graph = plan.graph(graph)
for group in graph.groups:
    name: str = group.name
    size: int = group.size
