"""What the tests of algorithms with a memory share: random trees, runs by step, masks by numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests import helpers
from tests.selection_oracle import best

TREES = range(20)
_SHAPES = ({"a": (6, 10), "b": (9, 4)}, {"a": (5, 4, 3), "b": (8, 7)})


def tree(seed, draw=0):
    """Two kernels and a bias, of one of two sets of shapes."""
    rng = np.random.default_rng([seed, draw])
    shapes = _SHAPES[seed % 2] | {"bias": (7,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def draws(seed, count):
    """Gradients of the tree of a seed."""
    return [tree(seed, 1 + step) for step in range(count)]


def runner(updater, inner=None):
    """A function of parameters and gradients that yields (params, state) after each step."""
    tx = updater.wrap_optax(inner or optax.sgd(0.1))
    update = jax.jit(tx.update)

    def run(params, grads):
        params = jax.tree.map(jnp.asarray, params)
        state = tx.init(params)
        for grad in grads:
            updates, state = update(grad, state, params)
            params = optax.apply_updates(params, updates)
            yield params, state

    return run


def wide(values):
    """The kernels of a tree in float64."""
    return {name: np.asarray(values[name], np.float64) for name in ("a", "b")}


def layerwise(scores, sparsity):
    """Masks that keep the best of each leaf."""
    return {k: best(x, helpers.num_kept(x.size, sparsity)) for k, x in scores.items()}


def together(scores, kept):
    """Masks that keep so many of the best of all leaves."""
    mask = best(np.concatenate([x.ravel() for x in scores.values()]), kept)
    ends = np.cumsum([x.size for x in scores.values()])[:-1]
    parts = zip(scores.items(), np.split(mask, ends), strict=True)
    return {name: part.reshape(x.shape) for (name, x), part in parts}


def total(scores):
    return sum(x.size for x in scores.values())


def same_masks(actual, expected):
    for name, mask in expected.items():
        np.testing.assert_array_equal(actual[name], mask, err_msg=name)


def close(actual, expected, tolerance=1e-6):
    """Within the tolerance of the largest value."""
    for name, value in expected.items():
        scale = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(
            actual[name], value, rtol=0, atol=tolerance * scale, err_msg=name
        )
