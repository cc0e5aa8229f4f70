"""The smaller model takes what the model takes: flags, numbers, containers, dtypes."""

import collections
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import Coupled, Plan, Uniform, shrink, trace


def cut(fn, params, *args):
    """(masked parameters, the smaller model) at half of the channels."""
    graph = trace(fn, params, *args)
    pruner = sparsity.MagnitudePruning(
        scope=Coupled(graph),
        sparsity_distribution_fn=Uniform(0.5, filter_fn=graph.is_weight),
    )
    masked, masks = pruner.instant_sparsify(params)
    return masked, shrink(graph, masked, masks)


def mlp():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"up": jax.random.normal(keys[0], (5, 8)), "down": jax.random.normal(keys[1], (8, 2))}
    return params, jax.random.normal(keys[2], (6, 5))


def test_a_mask_of_other_entries_than_0_and_1_is_refused():
    params, x = mlp()
    graph = trace(lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"], params, x)
    mask = np.ones((5, 8), np.uint8)
    for value in (2, 255):
        mask[0, 0] = value
        with pytest.raises(ValueError, match=f"mask of 'up' has entries .* such as {value}"):
            shrink(graph, params, {"up": mask, "down": None})


def test_macs_of_a_path_that_is_no_parameter_are_refused():
    params, x = mlp()
    _, small = cut(lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"], params, x)
    assert small.macs(("up",)) == 6 * 5 * 4
    for path in ("up", ("left",)):
        with pytest.raises(ValueError, match=r"path must be one of .*'up'.*, got path = "):
            small.macs(path)


@pytest.mark.parametrize("function", [shrink, sparsity.compact])
def test_traced_masks_are_refused(function):
    params, x = mlp()
    graph = trace(lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"], params, x)
    masks = jax.tree.map(jnp.ones_like, params)
    with pytest.raises(ValueError, match=r"masks\['down'\] has no values yet.*outside of jit"):
        jax.jit(lambda masks: function(graph, params, masks).params)(masks)


@pytest.mark.parametrize("function", [shrink, sparsity.compact])
def test_parameters_without_a_leaf_of_the_graph_are_refused(function):
    def fn(variables, x):
        return x @ variables["params"]["up"] @ variables["params"]["down"] + variables["mean"]

    params = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}
    graph = trace(fn, {"params": params, "mean": jnp.ones(2)}, jnp.ones((5, 3)))
    masks = {"up": jnp.ones((3, 4)).at[:, 0].set(0)}
    if function is shrink:  # cuts a collection by itself; a compact model needs all of them
        assert function(graph, params, masks).params["up"].shape == (3, 3)
    else:
        with pytest.raises(ValueError, match=r"an array 'down' of shape \(4, 2\).*complete tree"):
            function(graph, params, masks)
    with pytest.raises(ValueError, match="have no 'params/down', with which the graph"):
        function(graph, {"up": params["up"]}, masks)


def test_a_flag_and_a_number_that_are_no_arrays_are_those_of_the_call():
    def fn(params, x, t, train):
        hidden = jnp.tanh(t * (x @ params["up"]))
        return (3 * hidden if train else hidden) @ params["down"]

    params, x = mlp()
    masked, small = cut(fn, params, x, 1.0, True)
    assert small.params["up"].shape == (5, 4)
    for args in [(x, 1.0, True), (x, 5.0, True), (x, 1.0, False), (x[:2], 2, True)]:
        expected = fn(masked, *args)
        assert jnp.allclose(small.apply(small.params, *args), expected, atol=1e-5)
        compiled = jax.jit(functools.partial(fn_at(small), args=args[1:]))
        assert jnp.allclose(compiled(small.params, args[0]), expected, atol=1e-5)


def fn_at(small):
    return lambda params, x, args: small.apply(params, x, *args)


def test_a_number_that_changes_from_call_to_call_fills_no_memory():
    def fn(params, x, t):
        return jnp.tanh(t * (x @ params["up"])) @ params["down"]

    params, x = mlp()
    masked, small = cut(fn, params, x, 1.0)
    for t in np.linspace(0, 1, 40):
        actual = small.apply(small.params, x, float(t))
        assert jnp.allclose(actual, fn(masked, x, float(t)), atol=1e-5)
    assert len(small.before._retraced) <= 16


def test_containers_in_another_order_are_read_by_name():
    def fn(params, inputs):
        return jnp.tanh(inputs["a"] @ params["up"] - inputs["b"] @ params["up"]) @ params["down"]

    params, x = mlp()
    ordered = collections.OrderedDict([("a", x), ("b", 2 * x)])
    turned = collections.OrderedDict([("b", 2 * x), ("a", x)])
    masked, small = cut(fn, params, ordered)
    actual = small.apply(small.params, turned)
    assert jnp.allclose(actual, fn(masked, turned), atol=1e-5)
    reordered = collections.OrderedDict(sorted(small.params.items(), reverse=True))
    assert jnp.allclose(small.apply(reordered, ordered), fn(masked, ordered), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_of_another_dtype_are_computed_in_it(dtype):
    def fn(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"]

    params, x = mlp()
    masked, small = cut(fn, params, x)
    narrow, masked = (
        jax.tree.map(lambda leaf: leaf.astype(dtype), tree) for tree in (small.params, masked)
    )
    actual, expected = small.apply(narrow, x.astype(dtype)), fn(masked, x.astype(dtype))
    assert actual.dtype == expected.dtype == dtype
    assert jnp.allclose(actual.astype(float), expected.astype(float), atol=0.1)
    assert small.apply(narrow, x).dtype == fn(masked, x).dtype == jnp.float32


def test_flags_within_the_parameters_are_those_of_the_call():
    class Net(eqx.Module):
        up: jax.Array
        down: jax.Array
        train: bool
        activation: object

        def __call__(self, x):
            hidden = self.activation(x @ self.up)
            return (2 * hidden if self.train else hidden) @ self.down

    params, x = mlp()
    net = Net(params["up"], params["down"], True, jnp.tanh)
    masked, small = cut(lambda net, x: net(x), net, x)
    for train, activation in [(True, jnp.tanh), (False, jnp.tanh), (True, jax.nn.relu)]:
        flags = lambda net: (net.train, net.activation)  # noqa: E731
        one, other = (
            eqx.tree_at(flags, tree, (train, activation)) for tree in (small.params, masked)
        )
        assert jnp.allclose(small.apply(one, x), other(x), atol=1e-5)


def test_a_flag_under_which_channels_cannot_be_removed_is_refused():
    def fn(params, x, train):
        hidden = x @ params["up"]
        return (hidden if train else jax.nn.softmax(hidden)) @ params["down"]

    params, x = mlp()
    _, small = cut(fn, params, x, True)
    small.apply(small.params, x, True)
    with pytest.raises(ValueError, match=r"axis 0 of 'down', which this model needs.*reduce_max"):
        small.apply(small.params, x, False)


def test_a_flag_under_which_layers_are_no_scan_is_refused_where_they_keep_different_channels():
    shift = np.linspace(-3, 3, 18, dtype=np.float32).reshape(3, 6)  # [rows of a batch, channels]

    def fn(params, x, is_scan):
        def layer(x, p):
            hidden = x @ p["up"] if is_scan else x @ p["up"] + shift
            return x + jax.nn.relu(hidden) @ p["down"], None

        if is_scan:
            return jax.lax.scan(layer, x, params)[0]
        for i in range(3):
            x, _ = layer(x, jax.tree.map(lambda w: w[i], params))  # noqa: B023
        return x

    params = {"up": jnp.ones((3, 4, 6)), "down": jnp.ones((3, 6, 4))}
    masks = {"up": np.ones((3, 4, 6)), "down": np.ones((3, 6, 4))}
    layers = np.arange(3)
    masks["up"][layers, :, layers] = masks["down"][layers, layers] = 0
    graph = trace(fn, params, jnp.ones((3, 4)), True)
    small = shrink(graph, params, masks)
    assert small.plan.kept["up",][2].shape == (3, 5)
    small.apply(small.params, jnp.ones((2, 4)), True)
    with pytest.raises(ValueError, match=r"different channels of 'up:2' in each of 3 layers"):
        small.apply(small.params, jnp.ones((3, 4)), False)
    with pytest.raises(ValueError, match=r"different channels of 'up:2' in each of 3 layers"):
        shrink(trace(fn, params, jnp.ones((3, 4)), False), params, small.plan)


def test_a_plan_of_a_model_that_needs_the_channels_is_refused():
    params, x = mlp()
    _, small = cut(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], params, x)
    other = trace(lambda p, x: jax.nn.softmax(x @ p["up"]) @ p["down"], params, x)
    with pytest.raises(ValueError, match=r"axis 0 of 'down', which this model needs.*reduce_max"):
        shrink(other, params, Plan.from_json(small.plan.to_json()))


def test_a_plan_that_cuts_a_part_of_a_group_is_refused():
    params, x = mlp()
    graph = trace(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], params, x)
    with pytest.raises(ValueError, match=r"'(up|down)' along axis [01] that do not belong"):
        shrink(graph, params, Plan({("up",): {1: np.array([0, 2])}}, {("up",): (5, 8)}))


def test_parameters_that_lack_a_leaf_are_named():
    params, x = mlp()
    _, small = cut(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], params, x)
    with pytest.raises(ValueError, match="'down' differ"):
        small.apply({"up": small.params["up"]}, x)


@jax.custom_vjp
def kernel(x):
    return jnp.maximum(x, 0)


def _no_gradient(*_):
    raise NotImplementedError("this kernel is forward-only")


kernel.defvjp(lambda x: (kernel(x), None), _no_gradient)


@jax.custom_vjp
def inference(x):
    return jnp.maximum(x, 0)


inference.defvjp(_no_gradient, _no_gradient)


@jax.custom_jvp
def table(x):
    return jnp.maximum(x, 0)


table.defjvp(_no_gradient)


@pytest.mark.parametrize("activation", [kernel, inference, table])
@pytest.mark.parametrize("loop", [False, True])
def test_functions_without_derivatives_are_cut_and_stay_without(activation, loop):
    def fn(params, x):
        hidden = x @ params["up"]
        if loop:
            hidden = jax.lax.fori_loop(0, 2, lambda _, x: activation(x) + x, hidden)
        return jax.jit(activation)(hidden) @ params["down"]

    params, x = mlp()
    masked, small = cut(fn, params, x)
    assert small.params["up"].shape == (5, 4)
    assert jnp.allclose(small.apply(small.params, x), fn(masked, x), atol=1e-5)
    with pytest.raises(NotImplementedError, match="forward-only"):
        jax.grad(lambda p: small.apply(p, x).sum())(small.params)


@pytest.mark.parametrize("width", [4, 8])  # 8: no channel is dead
def test_a_state_without_a_leaf_of_the_parameters_is_refused(width):
    params, x = mlp()
    graph = trace(lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"], params, x)
    masks = {"up": np.tile(np.arange(8) < width, (5, 1)).astype(np.uint8), "down": None}
    with pytest.raises(ValueError, match=r"No leaf of opt_state belongs .*'0/mu/other'"):
        shrink(graph, params, masks, optax.adam(0.1).init({"other": jnp.ones(3)}))
    state = sparsity.MagnitudePruning().wrap_optax(optax.sgd(0.1)).init(params)
    with pytest.raises(ValueError, match=r"No leaf of opt_state belongs .*'inner_state/other'"):
        shrink(graph, params, masks, state._replace(inner_state={"other": jnp.ones(3)}))
    with pytest.raises(ValueError, match=r"opt_state must be an optimizer's state, got .* = 'x'"):
        shrink(graph, params, masks, "x")
    shrink(graph, params, masks, optax.sgd(optax.constant_schedule(0.1)).init(params))


def test_a_state_may_hold_numbers_and_integers_below_a_parameter_but_no_other_floats():
    params, x = mlp()
    graph = trace(lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"], params, x)
    masks = {"up": np.tile(np.arange(8) < 4, (5, 1)).astype(np.uint8), "down": None}
    stats = {"norm": jnp.float32(2), "steps": jnp.arange(3)}
    small = shrink(graph, params, masks, {"trace": params, "stats": {"up": stats}})
    assert jax.tree.map(jnp.shape, small.opt_state["trace"]) == {"up": (5, 4), "down": (4, 2)}
    jax.tree.map(np.testing.assert_array_equal, small.opt_state["stats"], {"up": stats})
    with pytest.raises(
        ValueError, match=r"array 'stats/up/rows' of shape \(3,\).* for 'up' of shape"
    ):
        shrink(graph, params, masks, {"trace": params, "stats": {"up": {"rows": jnp.ones(3)}}})
