"""Programs that vmap and pad write: lookups at a mapped index, named axes, padded channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sparsity.graph import trace
from tests.graph import models, removal

WIDTH, HIDDEN = 6, 5
TOKENS = np.array([[1, 0, 3], [2, 2, 1]])


def embed(params, tokens):
    """A language model that looks up one token at a time, as Equinox does."""
    stream = jax.vmap(jax.vmap(lambda token: params["table"][token]))(tokens)
    stream += jnp.tanh(stream @ params["up"]) @ params["down"]
    return stream @ params["head"]


def slice_rows(params, rows):
    hidden = jnp.tanh(rows @ params["up"])
    starts = jnp.arange(len(rows) - 1)
    pairs = jax.vmap(lambda i: lax.dynamic_slice(hidden, (i, 0), (2, hidden.shape[1])))(starts)
    return pairs @ params["down"]


def write_cache(params, rows):
    hidden = jnp.tanh(rows @ params["up"])
    caches, places = jnp.zeros((len(rows), 3, hidden.shape[1])), jnp.arange(len(rows)) % 3

    def write(cache, row, place):
        return lax.dynamic_update_slice(cache, row[None], (place, 0))

    return jax.vmap(write)(caches, hidden, places) @ params["down"]


def normalize(statistics):
    """A norm over the batch, whose axis vmap names."""

    def fn(params, rows):
        def apply(row):
            hidden = row @ params["up"]
            return jnp.tanh(statistics(hidden)) @ params["down"]

        return jax.vmap(apply, axis_name="batch")(rows)

    return fn


def batch_norm(x):
    centred = x - lax.pmean(x, "batch")
    return centred * lax.rsqrt(lax.pmean(centred * centred, "batch") + 1e-3)


def pad(low, high, value=0.0):
    """A shortcut whose channels are padded where a block has more of them."""

    def fn(params, rows):
        hidden = jnp.tanh(rows @ params["up"])
        wide = jnp.pad(hidden, ((0, 0), (low, high)), constant_values=value)
        return jnp.tanh(wide + hidden @ params["more"]) @ params["down"]

    return fn


ROWS = {"up": (4, HIDDEN), "down": (HIDDEN, 3)}
PADDED = {"up": (4, HIDDEN), "more": (HIDDEN, HIDDEN + 3), "down": (HIDDEN + 3, 2)}
STREAM = {"table": (4, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "head": (WIDTH, 4)}
HIDDEN_GROUP = [("up:1", HIDDEN)]
PROGRAMS = {
    "a mapped lookup": (embed, STREAM, TOKENS, [("down:1", WIDTH), ("up:1", HIDDEN)]),
    "a mapped slice": (slice_rows, ROWS, (4, 4), HIDDEN_GROUP),
    "a mapped update": (write_cache, ROWS, (4, 4), HIDDEN_GROUP),
    "pmean": (normalize(batch_norm), ROWS, (4, 4), HIDDEN_GROUP),
    "psum": (normalize(lambda x: x / (1 + lax.psum(x * x, "batch"))), ROWS, (4, 4), HIDDEN_GROUP),
    "pmax": (normalize(lambda x: x - lax.pmax(x, "batch")), ROWS, (4, 4), HIDDEN_GROUP),
    "pmin": (normalize(lambda x: x + lax.pmin(x, "batch")), ROWS, (4, 4), HIDDEN_GROUP),
    "a pad after": (pad(0, 3), PADDED, (2, 4), 8),
    "a pad before": (pad(3, 0), PADDED, (2, 4), 8),
    "a pad on both sides": (pad(1, 2), PADDED, (2, 4), 7),
    "a pad of ones": (pad(1, 2, 1.0), PADDED, (2, 4), 7),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_smaller_program_computes_what_masks_give(name):
    fn, shapes, inputs, expected = PROGRAMS[name]
    with jax.enable_x64(True):
        params = models.draw(shapes, jnp.float64)
        x = (
            inputs
            if isinstance(inputs, np.ndarray)
            else np.random.default_rng(1).normal(size=inputs)
        )
        graph = trace(fn, params, x)
        if isinstance(expected, int):  # channels of the shortcut, and two or more beside it
            assert sum(group.size for group in graph.groups) == expected
        else:
            assert sorted(removal.names(graph)) == sorted(expected)
        removal.check(graph, fn, params, (x,), 1e-10)


def test_negative_pads_drop_channels_exactly():
    def fn(params, rows):
        hidden = jnp.tanh(rows @ params["up"])
        return lax.pad(hidden, 0.0, ((0, 0, 0), (-1, -1, 0))) @ params["down"]

    with jax.enable_x64(True):
        params = models.draw({"up": (4, 6), "down": (4, 2)}, jnp.float64)
        x = np.random.default_rng(1).normal(size=(3, 4))
        graph = trace(fn, params, x)
        assert sum(group.size for group in graph.groups) >= 4
        removal.check(graph, fn, params, (x,), 1e-10)


def test_a_pad_between_channels_is_refused_by_name():
    def fn(params, rows):
        hidden = jnp.tanh(rows @ params["up"])
        return lax.pad(hidden, 0.0, ((0, 0, 0), (0, 0, 1))) @ params["down"]

    graph = trace(fn, models.abstract({"up": (4, 3), "down": (5, 2)}), jnp.ones((2, 4)))
    assert graph.groups == []
    assert any("a pad between entries" in refusal.reason for refusal in graph.refused)


def test_a_lookup_of_some_channels_names_the_axis_that_is_looked_up():
    def fn(params, places):
        hidden = params["table"][0]
        pick = jax.vmap(lambda i: lax.dynamic_slice(hidden, (i,), (2,)))
        return pick(places) @ params["head"]

    graph = trace(fn, models.abstract({"table": (3, 6), "head": (2, 4)}), np.arange(3))
    [refusal] = [r for r in graph.refused if (r.path, r.axis) == (("table",), 1)]
    assert "a lookup of some entries along axis 0 of an array of shape (6,)" in refusal.reason


def test_a_metric_of_the_name_and_shape_of_a_parameter_is_no_state():
    def fn(params, rows):
        hidden = jnp.tanh(rows @ params["up"])
        return hidden @ params["down"], {"scale": jnp.square(hidden).mean(0)}

    def with_scale(params, rows):
        outputs, metrics = fn(params, rows)
        return outputs * params["scale"].sum(), metrics

    params = models.draw(ROWS | {"scale": (HIDDEN,)}, jnp.float32)
    assert trace(with_scale, params, jnp.ones((2, 4))).state == {}

    def averaged(params, rows):
        outputs, metrics = with_scale(params, rows)
        return outputs, {"scale": 0.9 * params["scale"] + 0.1 * metrics["scale"]}

    assert trace(averaged, params, jnp.ones((2, 4))).state == {("1", "scale"): ("scale",)}
