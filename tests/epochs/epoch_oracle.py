"""Parameters, strategies and the masks that they must make, for the tests of epoch strategies."""

import jax.numpy as jnp
import numpy as np

from tests.helpers import num_kept
from tests.selection_oracle import best, n_of_m


def parameters(seed=0):
    """Parameters like those of the README's CNN, smaller; the last layer does not divide by 4."""
    shapes = {"Conv_0": (3, 3, 1, 8), "Conv_1": (3, 3, 8, 12), "Dense_0": (24, 16)}
    shapes["Dense_1"] = (16, 10)
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {n: {"kernel": draw(*s), "bias": draw(s[-1])} for n, s in shapes.items()}


def strategy(epoch, method, pattern):
    return {epoch: {"method": method, "prune_rate_pattern": pattern}}


def kernels(tree):
    return {name: layer["kernel"] for name, layer in tree.items()}


def assert_masks(masks, expected):
    """Kernels have the expected masks; all else is dense."""
    for name, layer in masks.items():
        assert layer["bias"] is None
        if expected.get(name) is None:
            assert layer["kernel"] is None
        else:
            assert layer["kernel"].dtype == jnp.uint8
            np.testing.assert_array_equal(layer["kernel"], expected[name], err_msg=name)


def local(params, density):
    return {n: best(np.abs(w), num_kept(w.size, 1 - density)) for n, w in kernels(params).items()}


def ranked(params, density):
    flat = np.concatenate([np.abs(w).ravel() for w in kernels(params).values()])
    mask = best(flat, num_kept(flat.size, 1 - density))
    ends = np.cumsum([w.size for w in kernels(params).values()])[:-1]
    parts = zip(kernels(params).items(), np.split(mask, ends), strict=True)
    return {name: part.reshape(w.shape) for (name, w), part in parts}


def grouped(params, n, m, axis=-1):
    return {name: n_of_m(w, n, m, axis) != 0 for name, w in kernels(params).items()}
