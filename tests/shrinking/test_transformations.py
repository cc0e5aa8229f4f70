"""What is left of a model is a function like any other: exported, mapped, differentiated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from sparsity import shrink, trace
from tests.graph import models
from tests.shrinking.oracles import drawn, make_masks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["mobilenet", "scanned"])
def small(request):
    """(a smaller model, its input)."""
    model = models.SMALL[request.param]()
    params, (x,) = drawn(model, jnp.float32)
    graph = trace(model.fn, params, x)
    return shrink(graph, params, make_masks(graph, params, graph.groups, 0)), x


def take_rows(x):
    """Any number of rows of an input."""
    return jax.ShapeDtypeStruct((*export.symbolic_shape("rows"), *x.shape[1:]), x.dtype)


def test_it_is_exported_and_by_row_for_any_batch_size(small):
    small, x = small
    by_row = jax.vmap(lambda params, row: small.apply(params, row[None])[0], (None, 0))
    for fn, inputs, batches in (
        (small.apply, x, [x]),
        (by_row, take_rows(x), [x, jnp.concatenate([x, x + 1, x])]),
    ):
        exported = export.export(jax.jit(fn))(small.params, inputs)
        for batch in batches:
            expected = small.apply(small.params, batch)
            actual = exported.call(small.params, batch)
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_sizes_that_are_not_known_are_refused_with_the_way_to_export_them(small):
    small, x = small
    with pytest.raises(ValueError, match=r"\(rows, .*jax.vmap"):
        export.export(jax.jit(small.apply))(small.params, take_rows(x))


def test_it_is_mapped_over_inputs_and_params_and_computed_again_backwards(small):
    small, x = small
    expected = small.apply(small.params, x)
    two = jnp.stack([x, x])
    for actual in jax.vmap(small.apply, (None, 0))(small.params, two):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), small.params)
    for actual in jax.vmap(small.apply)(stacked, two):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)

    def loss(apply, params):
        return jnp.sum(jnp.sin(apply(params, x)))

    plain, again = (
        jax.jit(jax.grad(functools.partial(loss, apply)))(small.params)
        for apply in (small.apply, jax.checkpoint(small.apply))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), again, plain)
