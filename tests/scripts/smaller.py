"""A ramp over channels that is cut halfway, and goes on in a process without the large arrays."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity

CUT, END = 4, 8  # steps
X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def init(hidden=16):
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "up": jax.random.normal(keys[0], (5, hidden)),
        "bias": jnp.ones(hidden),
        "down": jax.random.normal(keys[1], (hidden, 5)),
    }


def model(params, x):
    return jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]


def trace():
    return sparsity.trace(model, jax.eval_shape(init), X)


def make_tx(graph, plan=None):
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph),
        sparsity_distribution_fn=sparsity.Uniform(0.75, filter_fn=graph.is_weight),
        scheduler=sparsity.PolynomialSchedule(2, 0, END),
    )
    return (plan.updater(pruner) if plan else pruner).wrap_optax(optax.adam(0.01))


def step(apply, tx, params, state):
    grads = jax.grad(lambda p: jnp.mean((apply(p, X) - X) ** 2))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def cut(folder):
    """Trains up to the cut, and writes what another process needs."""
    graph, params = trace(), init()
    tx = make_tx(graph)
    state = tx.init(params)
    for _ in range(CUT):
        params, state = jax.jit(functools.partial(step, model, tx))(params, state)
    small = sparsity.shrink(graph, params, state.masks, state)
    assert 4 < small.params["bias"].size < 16  # the ramp is not over
    (folder / "plan.json").write_text(small.plan.to_json())
    leaves = jax.tree.leaves((small.params, small.opt_state))
    np.savez(folder / "small.npz", *leaves)
    return small.plan, small.params, small.opt_state


def restore(folder):
    plan = sparsity.Plan.from_json((folder / "plan.json").read_text())
    shapes = {leaf.path[0]: jnp.zeros(leaf.shape) for leaf in plan.graph(trace()).parameters}
    like = shapes, make_tx(trace(), plan).init(shapes)
    with np.load(folder / "small.npz") as stored:
        leaves = [jnp.asarray(stored[name]) for name in stored.files]
    return plan, *jax.tree.unflatten(jax.tree.structure(like), leaves)


def train(cut, steps):
    """Goes on from a cut; the parameters after so many steps."""
    plan, params, state = cut
    graph = trace()
    run = jax.jit(
        functools.partial(step, functools.partial(plan.apply, graph), make_tx(graph, plan))
    )
    for _ in range(steps):
        params, state = run(params, state)
    assert int(state.masks["bias"].sum()) == 4
    return params


def main(folder):
    np.savez(folder / "end.npz", **train(restore(folder), END - CUT))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
