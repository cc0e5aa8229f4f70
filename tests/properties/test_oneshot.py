"""One-shot pruning of random programs with loops and branches is what numpy computes step by step.

The definition: weights are pruned in the order in which the program reaches them. Each is pruned by
the rows that it meets where it is read first, in all steps of a loop, in the model whose earlier
weights are pruned. A program is a chain of parts; each part is written for jax and for numpy.
"""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparsity
from tests import helpers, selection_oracle
from tests.calibration import oracles
from tests.properties import strategies as draws

N, LAYERS, STEPS = 6, 3, 4
ROWS = 3 * STEPS
PRUNERS = {
    "magnitude": sparsity.MagnitudePruning,
    "wanda": sparsity.WandaPruning,
    "ria": sparsity.RIAPruning,
    "sparsegpt": sparsity.SparseGPTPruning,
}


# Parts: (names of weights, names of stacks) -> (jax, numpy, weights in the order of pruning).
# `jax(params, h, x)` and `plain(params, h, x, read)`, where `read(name, rows)` is a product.


def dense(weights, stacks):
    name = weights[0]

    def plain(h, x, read):
        return h + np.tanh(read(name, h))

    return jax.checkpoint(lambda p, h, x: h + jnp.tanh(h @ p[name])), plain, [name]


def mapped(weights, stacks):
    name = weights[0]
    return (
        lambda p, h, x: lax.map(lambda row: jnp.tanh(row @ p[name]), h),
        lambda h, x, read: np.tanh(read(name, h)),
        [name],
    )


def halved(weights, stacks):
    """A loop of an unknown number of steps, without weights."""

    def plain(h, x, read):
        while np.abs(h).max() > 1:
            h = h / 2
        return h

    while_loop = lax.while_loop
    return lambda p, h, x: while_loop(lambda h: abs(h).max() > 1, lambda h: h / 2, h), plain, []


def again(weights, stacks):
    """A loop whose steps read the same weights."""
    one, other = weights

    def run(p, h, x):
        return lax.fori_loop(0, STEPS, lambda i, h: x + jnp.tanh(h @ p[one]) @ p[other], h)

    def plain(h, x, read):
        for _ in range(STEPS):
            h = x + read(other, np.tanh(read(one, h)))
        return h

    return run, plain, [one, other]


def recurrent(weights, stacks):
    inner, hidden = weights

    def run(p, h, x):
        def step(state, x):
            state = jnp.tanh(x @ p[inner] + state @ p[hidden])
            return state, state

        xs = h.reshape(STEPS, -1, N)
        return lax.scan(step, jnp.zeros_like(xs[0]), xs)[1].reshape(h.shape)

    def plain(h, x, read):
        xs = h.reshape(STEPS, -1, N)
        states = [np.zeros_like(xs[0])]
        for rows in xs:
            states.append(np.tanh(read(inner, rows) + read(hidden, states[-1])))
        return np.concatenate(states[1:])

    return run, plain, [inner, hidden]


def layers(weights, stacks):
    """A scan over stacked weights, from the last to the first, with a weight of all layers."""
    (stack,), shared = stacks, weights[0]
    order = [f"{stack}/{i}" for i in reversed(range(LAYERS))]

    def run(p, h, x):
        def layer(h, w):
            return h + jnp.tanh(h @ w) @ p[shared], None

        return lax.scan(layer, h, p[stack], reverse=True)[0]

    def plain(h, x, read):
        for name in order:
            h = h + read(shared, np.tanh(read(name, h)))
        return h

    return run, plain, [order[0], shared, *order[1:]]


def branches_of_steps(weights, stacks):
    def run(p, h, x):
        def step(h, number):
            choices = [lambda h, name=name: h @ p[name] for name in weights]
            return jnp.tanh(lax.switch(number % 2, choices, h) + x), None

        return lax.scan(step, h, jnp.arange(STEPS))[0]

    def plain(h, x, read):
        for number in range(STEPS):
            h = np.tanh(read(weights[number % 2], h) + x)
        return h

    return run, plain, [*weights]


def branches_of_data(weights, stacks):
    """One weight for inputs that start with a negative number, one for others."""
    negative, positive = weights

    def run(p, h, x):
        return h + lax.cond(x[0, 0] > 0, lambda: h @ p[positive], lambda: h @ p[negative])

    return (
        run,
        lambda h, x, read: h + read(positive if x[0, 0] > 0 else negative, h),
        [*weights],
    )


PARTS = (
    dense, mapped, halved, again, recurrent, layers, branches_of_steps, branches_of_data,
)  # fmt: skip


@st.composite
def programs(draw):
    """Draws (model, parts of numpy, parameters, weights in order of each part)."""
    rng = np.random.default_rng(draw(draws.seeds))
    params, parts, pruned = {}, [], set()

    def matrix(*lead):
        params[name := f"w{len(params)}"] = rng.normal(size=(*lead, N, N)) / np.sqrt(N)
        return name

    for make in draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4)):
        tied = sorted(name for name in pruned if "/" not in name and rng.random() < 0.2)
        names = [*tied[:1], matrix(), matrix()][:2]
        run, plain, order = make(names, [matrix(LAYERS)] if make is layers else [])
        parts.append((run, plain, [name for name in order if name not in pruned]))
        pruned |= {*order}
    used = {name.partition("/")[0] for name in pruned}
    return parts, {name: leaf for name, leaf in params.items() if name in used}


def run_plainly(parts, weights, x, at=None):
    """Runs a program in numpy; returns the rows that a weight meets in the part that prunes it."""
    h, rows = x, []
    for _, plain, order in parts:

        def read(name, h, order=order):
            if name == at and name in order:
                rows.append(h)
            return h @ weights[name]

        h = plain(h, x, read)
    return np.concatenate(rows) if rows else np.zeros((0, N))


def solve(kind, refit, weights, rows, target):
    """Prunes a matrix [inputs, outputs] by the rows that it meets."""
    matrix, gram, squares = weights.T, rows.T @ rows, (rows**2).sum(0)
    if kind == "sparsegpt":
        return oracles.sparsegpt(matrix, gram, target)[0].T
    if kind == "magnitude":
        mask = selection_oracle.best(np.abs(matrix), helpers.num_kept(matrix.size, target))
    else:
        mask = getattr(oracles, kind)(matrix, squares, target)
    if not refit:
        return np.where(mask, matrix, 0).T
    hypothesis.assume(np.linalg.cond(gram) < 1e8)  # or many weights have the smallest error
    return oracles.least_squares(matrix, mask, gram).T


@pytest.mark.slow
@draws.examples(6)
@hypothesis.given(
    programs(), draws.seeds, st.sampled_from([*PRUNERS]), st.booleans(), st.sampled_from([0.3, 0.5])
)
def test_weights_of_loops_are_pruned_as_numpy_does_step_by_step(
    program, seed, kind, has_refit, target
):
    parts, params = program
    has_refit = has_refit and kind != "sparsegpt"
    batches = list(np.random.default_rng(seed).normal(size=(2, ROWS, N)))
    for batch, sign in zip(batches, (-1, 1), strict=True):
        batch[0, 0] = sign
    weights = {}
    for name, leaf in params.items():
        each = {name: leaf} if leaf.ndim == 2 else {f"{name}/{i}": w for i, w in enumerate(leaf)}
        weights |= each
    dense_weights, errors = dict(weights), {}
    for name in itertools.chain.from_iterable(order for _, _, order in parts):
        rows = np.concatenate([run_plainly(parts, weights, x, name) for x in batches])
        weights[name] = solve(kind, has_refit, dense_weights[name], rows, target)
        lost = rows @ (dense_weights[name] - weights[name])
        errors[name] = (lost**2).sum() / ((rows @ dense_weights[name]) ** 2).sum()

    def model(params, x):
        h = x
        for run, _, _ in parts:
            h = run(params, h, x)
        return h

    if not errors:
        return
    with jax.enable_x64(True):
        pruned, masks, report = sparsity.oneshot(
            PRUNERS[kind](sparsity_distribution_fn=sparsity.Uniform(target)),
            model,
            jax.tree.map(jnp.asarray, params),
            [jnp.asarray(batch) for batch in batches],
            sparsity.LeastSquares() if has_refit else None,
        )
    for name, leaf in params.items():
        each = [name] if leaf.ndim == 2 else [f"{name}/{i}" for i in range(LAYERS)]
        expected = np.stack([weights[one] for one in each]).reshape(leaf.shape)
        np.testing.assert_array_equal(masks[name], expected != 0)
        np.testing.assert_allclose(pruned[name], expected, rtol=1e-6, atol=1e-6)
        mean = np.mean([errors[one] for one in each])
        np.testing.assert_allclose(report[(name,)].error, mean, rtol=1e-6, atol=1e-12)
