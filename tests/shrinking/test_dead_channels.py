"""Masks of any pattern: dead channels go, the others compute what the masked model computes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import Coupled, Plan, Uniform, shrink, trace
from sparsity.core import trees
from tests import helpers
from tests.graph import fuzz, models
from tests.shrinking.networks import Network
from tests.shrinking.oracles import difference, drawn, gradients


def masked_by(params, masks):
    """Parameters with zeros where masks are 0."""
    return trees.map_matched(
        lambda _, x, mask: x if mask is None else jnp.where(mask, x, 0), params, masks
    )


def check(fn, params, masks, *args, tolerance=1e-12):
    """Shrinks, and compares outputs and gradients of kept entries with those of masking."""
    graph = trace(fn, params, *args)
    small = shrink(graph, params, masks)
    masked = masked_by(params, masks)
    assert difference(shrink(graph, masked, small.plan).params, small.params) == 0

    @functools.partial(jax.jit, compiler_options=helpers.WITHOUT_EMITTERS)
    def run(masked, params):
        return gradients(fn, masked, args), gradients(small.apply, params, args)

    (expected, grads), (outputs, small_grads) = run(masked, small.params)
    grads = masked_by(shrink(graph, grads, small.plan).params, small.masks)
    small_grads = masked_by(small_grads, small.masks)
    assert difference((expected, grads), (outputs, small_grads)) <= tolerance
    return small


# Networks of dense layers, beside connections that numpy finds.


SIZES = (20, 30, 24, 16, 5)


def network(activation, params, x):
    for i, size in enumerate(SIZES[1:]):
        x = x @ params[f"kernel{i}"]
        x = x + params[f"bias{i}"] if f"bias{i}" in params else x
        x = activation(x) if size != SIZES[-1] else x
    return x


def draw_network(has_biases, density, seed=0):
    """Parameters and masks of kernels."""
    rng = np.random.default_rng(seed)
    params, masks = {}, {}
    for i, shape in enumerate(itertools.pairwise(SIZES)):
        params[f"kernel{i}"] = jnp.asarray(rng.normal(size=shape))
        masks[f"kernel{i}"] = (rng.random(shape) < density).astype(np.uint8)
        if has_biases:
            params[f"bias{i}"] = jnp.asarray(rng.normal(size=shape[1]))
    return params, masks


def connected(masks, sources):
    """Returns the channels of each hidden layer on a path from a source to an output."""
    ahead, behind = [np.ones(SIZES[0], bool)], [np.ones(SIZES[-1], bool)]
    depth = len(SIZES) - 1
    for i in range(depth - 1):
        ahead.append((ahead[-1] @ masks[f"kernel{i}"] > 0) | (sources[i] > 0))
    for i in reversed(range(1, depth)):
        behind.insert(0, masks[f"kernel{i}"] @ behind[0] > 0)
    return [np.flatnonzero(a & b) for a, b in zip(ahead[1:], behind, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "biases"),
    [
        (jax.nn.relu, "none"),
        (jnp.tanh, "dense"),  # a channel that reads nothing has the value of its bias
        (jax.nn.gelu, "masked"),
        (jax.nn.softplus, "masked"),  # softplus(0) = log 2
    ],
)
def test_channels_stay_on_paths_from_an_input_or_a_constant_to_an_output(activation, biases):
    fn = functools.partial(network, activation)
    with jax.enable_x64(True):
        params, masks = draw_network(biases != "none", 0.08)
        hidden = SIZES[1:-1]
        sources = [np.full(n, float(biases == "dense")) for n in hidden]
        if biases == "masked":
            sources = [np.arange(n) % 3 == 0 for n in hidden]
            masks |= {f"bias{i}": stays.astype(np.uint8) for i, stays in enumerate(sources)}
        if activation is jax.nn.softplus:
            sources = [np.ones(n) for n in hidden]
        x = jnp.asarray(np.random.default_rng(1).normal(size=(7, SIZES[0])))
        small = check(fn, params, masks, x)
    expected = connected(masks, sources)
    assert 4 < sum(map(len, expected)) < sum(hidden) - 10
    for i, index in enumerate(expected):
        np.testing.assert_array_equal(small.plan.kept[f"kernel{i}",][1], index)
        rows = expected[i - 1] if i else slice(None)
        kept = masks[f"kernel{i}"][rows][:, index]
        np.testing.assert_array_equal(small.masks[f"kernel{i}"], kept)
        np.testing.assert_array_equal(np.asarray(small.params[f"kernel{i}"]) != 0, kept)
    assert small.masks["kernel0"].dtype == jnp.uint8
    again = shrink(small.before, params, Plan.from_json(small.plan.to_json()))
    assert jax.tree.map(jnp.shape, again.params) == jax.tree.map(jnp.shape, small.params)


def test_a_chain_of_channels_goes_channel_by_channel_forwards_and_backwards():
    def fn(params, x):
        return functools.reduce(lambda x, w: jnp.tanh(x @ w), params["chain"], x) @ params["last"]

    params = {"chain": [jnp.ones((3, 3))] * 4, "last": jnp.ones((3, 2))}
    masks = [jnp.eye(3, dtype=jnp.uint8)] * 4
    masks[0] = masks[0].at[1, 1].set(0)  # channel 1 of the first layer reads nothing,
    masks[3] = masks[3].at[2, 2].set(0)  # channel 2 of the third one has no reader.
    small = shrink(trace(fn, params, jnp.ones((1, 3))), params, {"chain": masks, "last": None})
    shapes = [w.shape for w in small.params["chain"]]
    assert shapes == [(3, 1), (1, 1), (1, 1), (1, 1)]
    assert small.params["last"].shape == (1, 2)
    np.testing.assert_array_equal(small.masks["chain"][0][:, 0], [1, 0, 0])
    assert small.masks["chain"][1:] == [None, None, None]  # nothing is masked there any more


def test_a_branch_without_readers_vanishes():
    fn = lambda params, x: x @ params["skip"] + jnp.tanh(x @ params["up"]) @ params["down"]  # noqa: E731
    params = {"skip": jnp.ones((3, 2)), "up": jnp.ones((3, 8)), "down": jnp.ones((8, 2))}
    masks = {"up": jnp.ones((3, 8)), "down": jnp.zeros((8, 2), jnp.uint8)}
    small = shrink(trace(fn, params, jnp.ones((1, 3))), params, masks)
    assert (small.params["up"].shape, small.params["down"].shape) == ((3, 0), (0, 2))
    np.testing.assert_array_equal(small.apply(small.params, jnp.ones((1, 3))), [[3, 3]])


# Other models, under masks that remove single entries and slices of each leaf for itself.


def draw_masks(params, seed):
    """Masks of most parameters, drawn entry by entry, and along each axis slice by slice."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if trees.path_names(path)[-1] in ("mean", "var") or rng.random() < 0.1:
            return None
        mask = rng.random(leaf.shape) < (0.8 if leaf.ndim > 1 else 1)
        for axis, size in enumerate(leaf.shape):
            shape = [-1 if i == axis else 1 for i in range(leaf.ndim)]
            mask &= (rng.random(size) < 0.7).reshape(shape) | (size < 4)
        mask.flat[0] = True  # no group vanishes
        return mask.astype(np.uint8)

    return trees.map_matched(draw, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet", "densenet", "scanned", "language_model"])
def test_models_compute_what_the_masked_models_compute(name):
    with jax.enable_x64(True):
        model = models.SMALL[name]()
        params, inputs = drawn(model, jnp.float64)
        for seed in range(2):
            small = check(model.fn, params, draw_masks(params, seed), *inputs, tolerance=1e-10)
            assert small.plan.kept
            assert jax.tree.leaves(small.masks)


@pytest.mark.slow
def test_random_programs_compute_what_the_masked_programs_compute():
    cases = []
    with jax.enable_x64(True):
        for seed in range(14):
            model, params, x = fuzz.make(seed)
            masks = draw_masks(params, seed)
            small = shrink(trace(model, params, x), params, masks)
            if small.plan.kept:
                cases.append((model, small, masked_by(params, masks), x))

        def run(masked, params):
            return [
                (model(one, x), small.apply(other, x))
                for (model, small, _, x), one, other in zip(cases, masked, params, strict=True)
            ]

        run = jax.jit(run, compiler_options=helpers.WITHOUT_EMITTERS)
        outputs = run([case[2] for case in cases], [case[1].params for case in cases])
    assert len(outputs) > 4
    for expected, computed in outputs:
        np.testing.assert_allclose(computed, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_batch_norm_keeps_the_statistics_of_channels_that_stay():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(1), (4, 6, 6, 2), jnp.float64)
        variables = Network().init(jax.random.key(0), x)
        variables = jax.tree.map(lambda w: w.astype(jnp.float64), variables)
        masks = {"params": draw_masks(variables["params"], 3)}

        def fn(variables, x):
            return Network(train=True, parent=None).apply(variables, x, mutable="batch_stats")

        graph = trace(fn, variables, x)
        small = shrink(graph, variables, masks)
        expected, state = fn(masked_by(variables, masks), x)
        outputs, small_state = small.apply(small.params, x)
        assert difference(expected, outputs) < 1e-12
        cut = shrink(graph, state, small.plan).params
        assert difference(cut, small_state) < 1e-12
    before, after = (sum(x.size for x in jax.tree.leaves(s)) for s in (state, small_state))
    assert after < before


def stacked(params, x):
    def layer(x, p):
        return x + jax.nn.relu(x @ p["up"]) @ p["down"], None

    return jax.lax.scan(layer, x, params)[0]


def test_layers_of_a_scan_keep_equally_many_channels_each_its_own():
    with jax.enable_x64(True):
        draw = np.random.default_rng(0).standard_normal
        params = {"up": jnp.asarray(draw((3, 4, 6))), "down": jnp.asarray(draw((3, 6, 4)))}
        masks = jax.tree.map(lambda w: np.ones(w.shape, np.uint8), params)
        masks["up"][0][:, [0, 2]] = 0
        masks["down"][1][[1, 3, 5]] = 0
        masks["up"][2][:, [4, 5]] = 0
        masks["up"][2, 0, 0] = 0
        small = check(stacked, params, masks, jnp.asarray(draw((5, 4))))
    # Layer 1 has three dead channels, and keeps the last one, beside those that live.
    expected = [[1, 3, 4, 5], [0, 2, 4, 5], [0, 1, 2, 3]]
    np.testing.assert_array_equal(small.plan.kept["up",][2], expected)
    assert small.params["down"].shape == (3, 4, 4)
    np.testing.assert_array_equal(small.masks["down"][1].sum(axis=1), [4, 4, 4, 0])


def test_layers_and_the_stream_may_lose_channels_of_one_axis():
    def fn(params, x):
        def layer(x, p):
            outputs = x @ p["up"]  # hidden channels of the layer, then channels of the stream
            return x + outputs[:, 2:] + jax.nn.relu(outputs[:, :2]) @ p["down"], None

        return jax.lax.scan(layer, x @ params["embed"], params["layers"])[0] @ params["out"]

    shapes = {"embed": (5, 4), "layers": {"up": (3, 4, 6), "down": (3, 2, 4)}, "out": (4, 2)}
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
        params = jax.tree.map(lambda n: jnp.asarray(rng.normal(size=n)), shapes, is_leaf=is_shape)
        masks = jax.tree.map(lambda w: np.ones(w.shape, np.uint8), params)
        masks["layers"]["up"][[0, 1, 2], :, [0, 1, 0]] = 0
        for mask in (masks["embed"], masks["layers"]["up"][..., 2:], masks["layers"]["down"]):
            mask[..., 1] = 0
        x = jnp.asarray(rng.normal(size=(5, 5)))
        small = check(fn, params, masks, x)
        np.testing.assert_array_equal(
            small.plan.kept["layers", "up"][2], [[1, 2, 4, 5], [0, 2, 4, 5], [1, 2, 4, 5]]
        )
        computed = small.apply(small.params, x[:2])  # another trace, with the same evidence
        expected = fn(masked_by(params, masks), x[:2])
        np.testing.assert_allclose(computed, expected, rtol=1e-12, atol=1e-12)


def test_inputs_that_no_output_reads_go_under_constant_fan_in():
    with jax.enable_x64(True):
        params, _ = draw_network(True, 1.0)
        fn = functools.partial(network, jax.nn.relu)
        x = jnp.asarray(np.random.default_rng(1).normal(size=(3, SIZES[0])))
        graph = trace(fn, params, x)
        pruner = sparsity.MagnitudePruning(
            sparsity_type=graph.fan_in(8),
            sparsity_distribution_fn=Uniform(0.9, filter_fn=graph.is_weight),
        )
        masks = pruner.instant_sparsify(params)[1]
        small = check(fn, params, masks, x)
    read = [
        np.count_nonzero(np.asarray(masks[f"kernel{i}"]).any(axis=1))
        for i in range(1, len(SIZES) - 1)
    ]
    assert small.params["kernel3"].shape[0] == read[-1] < SIZES[3]
    assert small.params["kernel0"].shape[1] <= read[0] < SIZES[1]


# Training.


@pytest.fixture
def pruned():
    """(function, params, masks, x) of a network, in float64."""
    with jax.enable_x64(True):
        params, masks = draw_network(True, 0.1)
        x = jnp.asarray(np.random.default_rng(1).normal(size=(7, SIZES[0])))
        yield functools.partial(network, jnp.tanh), params, masks, x


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_the_optimizer_continues_as_on_the_masked_model(pruned, packed):
    fn, params, masks, x = pruned
    graph = trace(fn, params, x)
    masks |= {f"bias{i}": None for i in range(len(SIZES) - 1)}
    updater = sparsity.StaticRandomSparse(is_sparse_gradients=True, use_packed_masks=packed)
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    tx = updater.wrap_optax(inner, masks=masks)

    @functools.partial(jax.jit, static_argnums=0)
    def step(apply, params, state):
        grads = jax.grad(lambda p: jnp.mean((apply(p, x) - 1) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = masked_by(params, masks)
    params, state = step(fn, params, tx.init(params))
    small = shrink(graph, params, masks, state, tx)
    small_params, small_state = small.params, small.opt_state
    for _ in range(5):
        params, state = step(fn, params, state)
        small_params, small_state = step(small.apply, small_params, small_state)
    expected = shrink(graph, params, small.plan, state)
    assert difference(expected.params, small_params) < 1e-10
    assert difference(expected.opt_state, small_state) < 1e-10
    kept = small_state.masks
    if packed:
        kept = sparsity.unpack_masks(kept, small_params)
    jax.tree.map(np.testing.assert_array_equal, kept, small.masks)


def test_norms_of_weights_that_dead_channels_still_have_are_refused(pruned):
    fn, params, masks, x = pruned
    graph = trace(fn, params, x)
    with pytest.raises(ValueError, match=r"of '.*0' in scale_by_trust_ratio returns another"):
        shrink(graph, params, masks, optax.lars(1e-3).init(params), optax.lars(1e-3))
    tx = optax.adam(1e-3)
    shrink(graph, params, masks, tx.init(params), tx)  # the proof succeeds


# What is shown, and what is refused.


def test_the_table_has_the_density_of_parameters_that_stay_masked():
    fn = lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"]  # noqa: E731
    params = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}
    masks = {"up": jnp.array([[1, 0, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1]]), "down": None}
    small = shrink(trace(fn, params, jnp.ones((1, 3))), params, masks)
    rows = [line.split() for line in small.report().splitlines()]
    # 7 of the 9 entries that stay are not masked.
    assert ["up", "3x4", "3x3", "12", "9", "48", "36", "12", "9", "0.778"] in rows
    assert ["down", "4x2", "3x2", "8", "6", "32", "24", "8", "6"] in rows


def test_masks_of_whole_channels_leave_nothing_masked():
    fn = lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"]  # noqa: E731
    params = {"up": jnp.arange(12.0).reshape(3, 4), "down": jnp.ones((4, 2))}
    graph = trace(fn, params, jnp.ones((1, 3)))
    pruner = sparsity.MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=Uniform(0.5))
    small = shrink(graph, params, pruner.instant_sparsify(params)[1])
    assert small.masks == {"up": None, "down": None}
    np.testing.assert_array_equal(small.plan.kept["up",][1], [2, 3])
    assert "density" not in small.report()


def test_arguments_under_which_the_model_reads_what_masks_leave_are_refused():
    def fn(params, x, train):
        hidden = jnp.tanh(x @ params["up"])
        penalty = jnp.sum(hidden**2) if train else 0.0
        return hidden @ params["down"] + penalty

    params, x = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}, jnp.ones((5, 3))
    unread = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2)).at[1].set(0)}
    graph = trace(fn, params, x, False)
    small = shrink(graph, params, unread)
    assert small.params["up"].shape == (3, 3)
    expected = fn(masked_by(params, unread), x[:2], False)
    np.testing.assert_allclose(small.apply(small.params, x[:2], False), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"'up:1' in part.*reads the other part"):
        small.apply(small.params, x, True)
    # The penalty reads hidden channels; those that read nothing are 0 there.
    assert shrink(trace(fn, params, x, True), params, unread).params["up"].shape == (3, 4)
    small = shrink(graph, params, unread | {"up": jnp.ones((3, 4)).at[:, 1].set(0)})
    expected = fn(masked_by(params, {"up": jnp.ones((3, 4)).at[:, 1].set(0)}), x, True)
    np.testing.assert_allclose(small.apply(small.params, x, True), expected, rtol=1e-6)


def test_a_stored_plan_refuses_arguments_under_which_the_model_reads_what_masks_leave():
    def fn(params, x, is_soft):
        hidden = (jax.nn.softplus if is_soft else jax.nn.relu)(x @ params["up"])
        return hidden @ params["down"]

    params, x = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}, jnp.ones((5, 3))
    masks = {"up": jnp.ones((3, 4)).at[:, 1].set(0)}
    graph = trace(fn, params, x, False)
    small = shrink(graph, params, masks)
    assert small.params["up"].shape == (3, 3)
    expected = fn(masked_by(params, masks | {"down": None}), x[:2], False)
    stored = Plan.from_json(small.plan.to_json())
    assert stored == small.plan
    # A channel of `down` goes in the second cut, which relies on nothing of `up`.
    later = shrink(small.graph, small.params, {"down": jnp.ones((3, 2)).at[2].set(0)})
    both = small.plan.then(later.plan)
    soft = trace(fn, params, x, True)
    np.testing.assert_allclose(stored.apply(graph, small.params, x[:2], False), expected)
    np.testing.assert_allclose(
        both.apply(graph, later.params, x, False), later.apply(later.params, x, False)
    )
    for plan, arrays in ((stored, small.params), (both, later.params)):
        for other in (graph, soft):
            with pytest.raises(ValueError, match=r"'up:1' in part.*reads the other part"):
                plan.apply(other, arrays, x, True)
        with pytest.raises(ValueError, match=r"'up:1' in part.*reads the other part"):
            shrink(soft, params, plan)
    # Without the first cut, softplus reads nothing that masks leave.
    masks = {"down": jnp.ones((4, 2)).at[1].set(0)}
    small = shrink(graph, params, masks)
    stored = Plan.from_json(small.plan.to_json())
    expected = fn(masked_by(params, masks | {"up": None}), x, True)
    np.testing.assert_allclose(stored.apply(soft, small.params, x, True), expected, rtol=1e-6)


def test_packed_masks_are_refused():
    fn = lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"]  # noqa: E731
    params = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}
    graph = trace(fn, params, jnp.ones((1, 3)))
    masks = sparsity.masks.pack_masks(jax.tree.map(jnp.ones_like, params), params)
    with pytest.raises(ValueError, match=r"shape \(4, 1\) at 'down'.*unpack_masks"):
        shrink(graph, params, masks)


def test_parameters_may_be_traced():
    fn = lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"]  # noqa: E731
    params = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}
    graph = trace(fn, params, jnp.ones((1, 3)))
    masks = {"up": jnp.ones((3, 4)).at[0, 1].set(0), "down": jnp.ones((4, 2)).at[0].set(0)}
    small = jax.jit(lambda params: shrink(graph, params, masks).params)(params)
    np.testing.assert_array_equal(small["up"], [[0, 1, 1], [1, 1, 1], [1, 1, 1]])
