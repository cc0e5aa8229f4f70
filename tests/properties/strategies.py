"""Draws for the properties: trees, shapes, dtypes, values, sparsities, patterns, schedules.

Shapes come from a small pool, because each one compiles programs of its own.
"""

import os
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity

# Set by the long profile: how many cases to draw, and how many were drawn before.
EXAMPLES, FIRST = (int(os.environ.get(f"SPARSITY_{name}", 0)) for name in ("EXAMPLES", "FIRST"))
# Scalars, sizes of zero, primes, six axes.
SHAPES = ((), (0,), (7,), (4, 0), (1, 1), (13, 2), (4, 8), (3, 8, 4), (2, 1, 3, 1, 2, 4))
DTYPES = ("float32", "float16", "bfloat16", "complex64")
PATTERNS = (
    sparsity.Unstructured(),
    sparsity.NByM(1, 2),
    sparsity.NByM(2, 4, axis=-2),
    sparsity.Block((2, 3)),
    sparsity.Channel(-1),
    sparsity.Channel(0),
    sparsity.FanIn(),
    sparsity.FanIn(3, axis=-1),
)

seeds = st.integers(0, 2**32 - 1)
sparsities = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 1 / 3, 0.999999, 1e-7]), st.floats(0, 1, width=32)
)


def examples(few, cases=1):
    """Draws a few examples of a property, always the same, or those of the long profile.

    An example stands for that many cases.
    """
    settings = hypothesis.settings(
        max_examples=-(-EXAMPLES // cases) or few,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )

    def decorate(test):
        seeded = hypothesis.seed(FIRST)(test) if EXAMPLES else test
        return pytest.mark.drawn(2_000)(settings(seeded))

    return decorate


class Pair(NamedTuple):
    first: object
    second: object


def values(rng, shape, dtype):
    """Returns values with ties, zeros of both signs, NaN, infinities, denormals or huge numbers."""
    drawn = rng.normal(size=shape)
    kind = rng.integers(7)
    if kind == 0:
        drawn = np.round(drawn)
    elif kind == 1:
        drawn = np.zeros(shape)
    elif kind == 2:
        drawn = drawn * 10.0 ** rng.integers(-45, 38, shape)
    if kind >= 3:
        special = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-42, -1e-42, 6e-8, 3e38, 1.0, -1.0]
        drawn = np.where(rng.random(shape) < 0.5, rng.choice(special, shape), drawn)
    with np.errstate(all="ignore"):
        array = np.asarray(drawn).astype(jnp.dtype(dtype))
        if dtype == "complex64" and shape:
            array.imag = array.real[..., ::-1]
    return jnp.asarray(array)


def nest(rng, leaves):
    """Returns the leaves in nested dicts, lists, tuples and NamedTuples, with None among them."""
    leaves = list(leaves)
    if len(leaves) == 1:
        return leaves[0]
    at = int(rng.integers(1, len(leaves)))
    one, other = nest(rng, leaves[:at]), nest(rng, leaves[at:])
    kinds = [
        lambda: {"b": one, "a": other},
        lambda: [one, None, other],
        lambda: (one, {"none": None, "x": other}),
        lambda: Pair(one, other),
    ]
    return kinds[rng.integers(4)]()


@st.composite
def trees(draw, shapes=SHAPES, dtypes=DTYPES, most=4):
    """Draws a tree of arrays, with at least one entry."""
    rng = np.random.default_rng(draw(seeds))
    chosen = draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=most))
    hypothesis.assume(any(np.prod(shape) for shape in chosen))
    return nest(rng, [values(rng, shape, rng.choice(dtypes)) for shape in chosen])


def everything(sparsity_):
    """A distribution that prunes all leaves alike."""
    return sparsity.Uniform(sparsity_, filter_fn=lambda path, param: True)


def fits(pattern, shape):
    """Whether a pattern accepts a shape."""
    try:
        pattern.check(shape)
    except ValueError:
        return False
    return True


def finite(rng, shape, dtype="float32"):
    """Returns finite values with ties and zeros, multiples of 1 / 8."""
    return jnp.asarray(np.round(8 * rng.normal(size=shape)) / 8, dtype)


def equal_bits(one, other):
    """Whether two trees have one structure, and arrays of the same bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(*map(jax.tree.leaves, jax.device_get((one, other))), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes(), (a, b)
    return True
