"""Counts of masks, and the number of weights kept, against Python's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sparsity.core.arrays import count
from sparsity.selection.topk import num_kept
from tests import helpers

NUM_KEPT = jax.jit(num_kept)
WITH_STATIC_N = jax.jit(num_kept, static_argnums=0)
SPARSITIES = [0.0, 0.5, 0.25, 0.1, 0.9, 0.8, 1.0, 1e-9, 1e-45, 0.99999, 0.75, 1 - 2.0**-24]


def test_counts_of_a_mask_store_no_integer_for_each_entry():
    mask = jax.ShapeDtypeStruct((64, 512), jnp.bool_)
    program = jax.jit(lambda x: count(x, (1,))).lower(mask).compile()
    assert program.memory_analysis().temp_size_in_bytes < mask.size
    entries = np.arange(64 * 512).reshape(64, 512) % 5 == 0
    np.testing.assert_array_equal(program(entries), entries.sum(axis=1))


# ------------------------------------------------------------------ num_kept
def test_num_kept_rounds_half_to_even_and_keeps_one():
    assert [num_kept(n, 0.5) for n in (0, 1, 2, 3, 5, 7)] == [0, 1, 1, 2, 2, 4]
    assert num_kept(10, 1.0) == 1
    assert type(num_kept(np.int32(10), np.float32(0.3))) is int
    assert type(num_kept(jnp.int32(10), jnp.float32(0.3))) is int


@pytest.mark.parametrize("n", [0, 1, 5, 1000, 2**24 + 1, 2**30, 2**31 - 1])
def test_num_kept_is_the_same_traced_and_concrete(n):
    some = np.random.default_rng(n % 1000).random(20).astype(np.float32)
    for sparsity in [*SPARSITIES, *some]:
        k = int(WITH_STATIC_N(n, jnp.float32(sparsity)))
        assert k == num_kept(n, sparsity) == helpers.num_kept(n, sparsity)


def test_num_kept_of_billions_is_a_python_integer_or_refused_where_it_is_traced():
    assert num_kept(2**40, 0.3) == helpers.num_kept(2**40, 0.3)
    with pytest.raises(ValueError, match="n must be an integer in"):
        WITH_STATIC_N(2**31, 0.3)


@given(st.integers(0, 2**31 - 1), st.floats(0, 1, width=32))
@settings(max_examples=200, deadline=None)
def test_num_kept_of_a_traced_n_is_exact(n, sparsity):
    assert int(NUM_KEPT(jnp.uint32(n), sparsity)) == helpers.num_kept(n, sparsity)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_num_kept_works_elementwise_eagerly_and_traced(dtype):
    n = np.array([[0, 1, 2], [5, 77, 200]], dtype)
    for sparsity in (0.5, 0.3, 1.0):
        expected = [[helpers.num_kept(int(x), sparsity) for x in row] for row in n]
        for kept in (
            num_kept(n, sparsity),
            num_kept(jnp.asarray(n), jnp.float32(sparsity)),
            NUM_KEPT(n, sparsity),
        ):
            assert kept.dtype == jnp.int32
            assert kept.tolist() == expected
    many = num_kept(10, np.array([0.5, 0.75], np.float32))
    assert many.tolist() == [5, 2]


def test_num_kept_refuses_concrete_and_clamps_traced_sparsities():
    for sparsity in (-0.1, 1.1, 1 + 1e-9, -1e-50, float("nan"), jnp.float32(2), [0.5, 2.0]):
        with pytest.raises(ValueError, match="sparsity must be in"):
            num_kept(10, sparsity)
    assert [int(NUM_KEPT(10, s)) for s in (-1.0, 2.0, float("nan"))] == [10, 1, 10]
    for n in (-1, 2.0, np.array([3, -1]), np.array([2**31])):
        with pytest.raises(ValueError, match="n must be an integer in"):
            num_kept(n, 0.5)
