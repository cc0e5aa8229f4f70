"""Arrays of more entries than an int32 numbers, by their shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity import selection
from sparsity.core import hashing

_LAYERS = jax.ShapeDtypeStruct((5, 2**29), jnp.bfloat16)


def test_slices_and_groups_of_an_array_beyond_int32_are_chosen():
    mask = jax.eval_shape(lambda x: selection.topk_mask(x, 3, batch_axes=1), _LAYERS)
    assert mask.shape == _LAYERS.shape
    assert jax.eval_shape(lambda x: selection.nm_mask(x, 2, 4), _LAYERS).shape == _LAYERS.shape


def test_a_slice_beyond_int32_is_refused():
    with pytest.raises(ValueError, match=r"Fewer than 2\*\*31 scores .* of shape \(5, 536870912\)"):
        jax.eval_shape(lambda x: selection.topk_mask(x, 3), _LAYERS)


def test_random_scores_of_an_array_beyond_32_bits_differ_by_layer(monkeypatch):
    assert jax.eval_shape(lambda x: selection.hash_scores(x.shape, 0), _LAYERS).dtype == jnp.uint32
    with_bits = np.asarray(selection.hash_scores((2, 3, 4), 7))
    monkeypatch.setattr(hashing, "_INDEXED", 48)  # as if 24 entries were 2**31
    np.testing.assert_array_equal(selection.hash_scores((2, 3, 4), 7), with_bits)
    monkeypatch.setattr(hashing, "_INDEXED", 8)  # as if 8 entries were 2**32
    scores = np.asarray(selection.hash_scores((2, 3, 4), 7)).reshape(6, 4)
    # Without the leading axes, index 4 would be index 0 again: all rows alike.
    assert len(np.unique(scores)) == 24
