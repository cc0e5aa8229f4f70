"""Keys in the order of scores, of every dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.selection.keys import key_bits, to_keys
from tests.selection_oracle import any_bits, ranks

FLOATS = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
    "float8_e3m4",
    "float8_e4m3",
]
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "uint4", "bool"]
WIDE = ["float64", "int64", "uint64"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + WIDE)
def test_keys_are_in_the_order_of_scores_of_every_dtype(dtype):
    with jax.enable_x64(dtype in WIDE), np.errstate(invalid="ignore"):
        scores = any_bits(dtype, 3000)
        keys = np.asarray(to_keys(jnp.asarray(scores)))
        np.testing.assert_array_equal(to_keys(np.asarray(scores)), keys)
        bits = key_bits(np.dtype(scores.dtype))
    rank = ranks(scores)
    order = np.argsort(rank, kind="stable")
    np.testing.assert_array_equal(np.argsort(keys, kind="stable"), order)
    np.testing.assert_array_equal(np.diff(keys[order]) != 0, np.diff(rank[order]) != 0)
    assert keys.dtype == (np.uint64 if dtype in WIDE else np.uint32)
    assert int(keys.max()).bit_length() <= bits
    nan = rank < 0
    if nan.any():
        np.testing.assert_array_equal(keys == 0, nan)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_has_the_lowest_key(dtype):
    dtype = jnp.dtype(dtype)
    scores = np.concatenate([[np.nan], -np.full(1, jnp.finfo(dtype).max, np.float64)]).astype(dtype)
    keys = np.asarray(to_keys(jnp.asarray(scores)))
    assert keys[0] == 0 < keys[1]
