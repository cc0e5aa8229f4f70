"""Budgets of random networks are never exceeded, by any scope or algorithm."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.core import trees
from tests.properties import strategies as draws

# A budget below what dense parameters and one weight of each matrix cost is refused.
REFUSED = "cannot be met"
SCOPES = {
    "layerwise": lambda graph, kind: sparsity.Layerwise(),
    "global": lambda graph, kind: sparsity.Global(),
    "coupled": lambda graph, kind: sparsity.Coupled(graph),
    "across": lambda graph, kind: sparsity.Coupled(
        graph, across="nbytes" if kind == "nbytes" else True
    ),
}


@st.composite
def networks(draw):
    """Draws (graph, params): dense layers and a convolution, with biases, of odd sizes."""
    rng = np.random.default_rng(draw(draws.seeds))
    width, hidden, window = (int(n) for n in rng.integers(1, 7, 3))
    params = {
        "conv": draws.finite(rng, (window, 3, width)),
        "up": draws.finite(rng, (width, hidden)),
        "bias": draws.finite(rng, (hidden,)),
        "down": draws.finite(rng, (hidden, 2)),
    }

    def model(params, x):
        x = jax.lax.conv_general_dilated(
            x, params["conv"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )
        return jnp.tanh(jnp.tanh(x).mean(1) @ params["up"] + params["bias"]) @ params["down"]

    return sparsity.trace(model, params, jax.ShapeDtypeStruct((2, 9, 3), jnp.float32)), params


def nbytes(params, masks):
    """Bytes of kept values, and a bit for each weight with a mask."""
    masks = trees.leaves_by_path(masks)
    bits = 0
    for path, leaf in trees.leaves_by_path(params).items():
        kept = int(masks[path].sum()) if path in masks else leaf.size
        bits += 8 * leaf.dtype.itemsize * kept + leaf.size * (path in masks)
    return bits / 8


@pytest.mark.slow
@draws.examples(12)
@hypothesis.given(
    networks(),
    st.sampled_from(["macs", "nbytes"]),
    st.floats(0.0625, 1, width=32),
    st.sampled_from([*SCOPES]),
    st.sampled_from([sparsity.Uniform(), sparsity.ERK()]),
)
def test_masks_of_a_budget_leave_no_more_than_the_budget(network, kind, part, scope, spread):
    graph, params = network
    try:
        masks = sparsity.MagnitudePruning(
            sparsity_distribution_fn=sparsity.budget(graph, **{kind: part}, distribution=spread),
            scope=SCOPES[scope](graph, kind),
        ).instant_sparsify(params)[1]
    except ValueError as error:
        assert REFUSED in str(error)  # noqa: PT017
        hypothesis.reject()
    if kind == "macs":
        assert graph.macs(masks) <= part * graph.macs()
    elif scope in ("layerwise", "global"):
        assert nbytes(params, masks) <= part * nbytes(params, {})
    else:
        small = sparsity.shrink(graph, params, masks)
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(small.params))
        assert total <= part * nbytes(params, {})


@pytest.mark.slow
@draws.examples(3)
@pytest.mark.filterwarnings("ignore:.*skips the gradients of steps")
@hypothesis.given(networks(), st.floats(0.375, 1, width=32), st.sampled_from(["set", "rigl"]))
def test_a_budget_holds_while_masks_move(network, part, name):
    graph, params = network
    updater = sparsity.ALGORITHM_REGISTRY[name](
        sparsity_distribution_fn=sparsity.budget(graph, macs=part),
        scheduler=sparsity.PeriodicSchedule(1),
    )
    tx = updater.wrap_optax(optax.sgd(0.125))
    try:
        state = tx.init(params)
    except ValueError as error:
        assert REFUSED in str(error)  # noqa: PT017
        hypothesis.reject()
    update = jax.jit(tx.update)
    for step in range(3):
        grads = jax.tree.map(lambda x, step=step: jnp.sin(x + step), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert graph.macs(state.masks) <= part * graph.macs()
