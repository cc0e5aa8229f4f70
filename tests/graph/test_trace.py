"""What `sparsity.trace` takes, and how it says what it cannot."""

import functools
from contextlib import nullcontext

import jax
import jax.export
import jax.numpy as jnp
import pytest

import sparsity
from sparsity.graph import trace

P = {"a": jnp.ones((4, 6)), "b": jnp.full((6, 2), 2.0)}
X = jnp.ones((3, 4))


def model(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def test_arrays_and_shapes_have_the_same_graph():
    one, other = (
        trace(model, P, X),
        trace(model, jax.eval_shape(lambda: P), jax.eval_shape(lambda: X)),
    )
    assert repr(one) == repr(other)
    assert [*one.parameters] == [*other.parameters]
    leaves = [
        (tuple(entry.key for entry in path), leaf.shape, leaf.dtype)
        for path, leaf in jax.tree_util.tree_flatten_with_path(P)[0]
    ]
    assert [(x.path, x.shape, x.dtype) for x in one.parameters] == leaves


def test_symbolic_sizes_are_refused_with_the_sizes_that_fit():
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("rows"), 4), jnp.float32)
    with pytest.raises(ValueError, match=r"known sizes, got the shape \(rows, 6\).*of one call"):
        trace(model, P, rows)


def test_a_parameter_may_be_the_whole_tree():
    graph = trace(lambda w, x: x @ w, jnp.ones((4, 2)), X)
    assert [leaf.name for leaf in graph.parameters] == ["params"]
    assert graph.is_weight((), jnp.ones((4, 2)))


def test_leaves_that_are_no_arrays_are_static():
    params = P | {"rate": 2.0, "name": "tanh", "none": None, "flag": True}

    def fn(p, x):
        return model(p, x) * p["rate"] if p["flag"] and p["name"] == "tanh" else x

    graph = trace(fn, params, X)
    assert [leaf.name for leaf in graph.parameters] == ["a", "b"]
    assert sparsity.budget(graph, macs=0.5)(params)["rate"] is None


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["new", "old"])
def test_random_keys_among_the_parameters_are_leaves_that_are_never_pruned(key):
    def fn(p, x):
        x = x @ p["a"]
        return jnp.where(jax.random.bernoulli(p["key"], 0.5, x.shape), x, 0) @ p["b"]

    params = P | {"key": key}
    graph = trace(fn, params, X)
    assert [(group.name, group.size) for group in graph.groups] == [("a:1", 6)]
    assert not graph.is_weight(("key",), key)
    assert sparsity.budget(graph, nbytes=0.5)(params)["key"] is None
    assert "key" in graph.table()


def test_flags_and_keywords_are_given_by_partial():
    def fn(params, x, *, is_training):
        return model(params, x) if is_training else x

    assert trace(functools.partial(fn, is_training=True), P, X).macs() == 3 * 36


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x: model(P, x),
        lambda p, x: jax.jit(lambda x: model(P, x))(x),
        lambda p, x: jax.lax.scan(lambda x, _: (model(P, x) @ jnp.ones((2, 4)), None), x, length=2)[
            0
        ],
        lambda p, x: x @ p["a"] @ P["b"],
    ],
    ids=["plain", "jit", "scan", "one of them"],
)
@pytest.mark.parametrize("params", [P, jax.eval_shape(lambda: P)], ids=["arrays", "shapes"])
def test_a_function_that_closes_over_its_parameters_is_found(fn, params):
    with pytest.raises(ValueError, match=r"does not read params at '[ab]'.*closes over"):
        trace(fn, params, X)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_a_constant_stands_in_for_a_parameter_of_two_or_more_axes(ndim):
    w = jnp.ones((2,) * ndim)  # a vector may be a constant of the model, such as a mean
    refused = pytest.raises(ValueError, match="closes over") if ndim > 1 else nullcontext()
    with refused:
        trace(lambda params, x: x * w, {"w": w}, jnp.ones(w.shape))


def test_a_function_may_close_over_traced_arrays_but_not_over_traced_parameters():
    count = lambda params, scale: trace(lambda p, x: model(p, x * scale), params, X).macs()  # noqa: E731
    macs = trace(model, P, X).macs()
    assert jax.jit(count)(P, jnp.ones(X.shape)) == macs
    assert jax.jit(lambda x: count(P, x))(jnp.ones(X.shape)) == macs
    with pytest.raises(ValueError, match=r"does not read params at 'a'.*closes over"):
        jax.jit(lambda p: trace(lambda _, x: model(p, x), p, X).macs())(P)


def test_a_constant_that_only_looks_like_a_lost_leaf_is_none():
    constant = jnp.full((4, 6), 3.0)
    graph = trace(lambda p, x: x @ constant @ p["b"], P, X)
    assert {r.reason for r in graph.refused if r.path == ("a",)} == {"no operation reads it"}


def test_a_state_that_matches_nothing_or_does_not_fit_is_named():
    def fn(params, x):
        mean = 0.9 * params["mean"] + 0.1 * x.mean(0)
        return model(params, x), {"mean": mean, "wrong": x.sum()}

    params = P | {"mean": jnp.ones(4)}
    assert trace(fn, params, X).state == {("1", "mean"): ("mean",)}
    with pytest.raises(ValueError, match=r"state\['2'\] = 'mean' matches nothing.*'1/mean'.*'a'"):
        trace(fn, params, X, state={"2": "mean"})
    with pytest.raises(
        ValueError, match=r"'1/wrong' of shape \(\).*cannot become 'mean' of shape \(4,\)"
    ):
        trace(fn, params, X, state={"1/wrong": "mean"})


@pytest.mark.parametrize("names", [(0, 1), ("first", "second")], ids=["tuple", "names"])
def test_a_hidden_layer_of_the_shape_of_a_weight_is_no_state(names):
    first, second = names

    def fn(params, x):
        hidden = jnp.tanh(x @ params[first])
        outputs = {first: hidden, second: hidden @ params[second]}
        return tuple(outputs.values()) if first == 0 else outputs

    weights = jnp.ones((4, 6)), jnp.ones((6, 4))
    params = weights if first == 0 else dict(zip(names, weights, strict=True))
    graph = trace(fn, params, jnp.ones((4, 4)))  # a batch as large as the fan-in
    assert (graph.state, graph.groups) == ({}, [])
    assert {r.reason for r in graph.refused} == {"an input of the model", "an output of the model"}


def test_what_is_returned_in_the_place_of_a_parameter_without_a_name_is_no_state():
    def fn(params, x):
        weight, mean = params
        return (x - mean) @ weight, 0.9 * mean + 0.1 * x.mean(0)

    params = jnp.ones((4, 6)), jnp.ones(4)
    assert trace(fn, params, X).state == {}
    assert trace(fn, params, X, state={"1": "1"}).state == {("1",): ("1",)}


@pytest.mark.parametrize("loop", [False, True])
def test_a_cache_that_is_multiplied_is_a_state_if_its_next_value_is_made_of_it(loop):
    def step(params, x):
        keys = params["keys"].at[0].set(x[0] @ params["key"])
        return x @ params["key"] @ keys.T, {"keys": keys}

    def fn(params, x):
        def body(carry, _):
            outputs, state = step({**params, **carry}, x)
            return state, outputs

        state, outputs = jax.lax.scan(body, {"keys": params["keys"]}, None, length=2)
        return outputs, state

    params = {"key": jnp.ones((4, 6)), "keys": jnp.ones((3, 6))}
    graph = trace(fn if loop else step, params, X)
    assert graph.state == {("1", "keys"): ("keys",)}
