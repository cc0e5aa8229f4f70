"""Pruning at initialization: scores and masks by numpy, and the flows that they conserve."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers
from tests.algorithms import oracles

_WIDTHS = (7, 12, 9, 3)


def _network(seed, widths=_WIDTHS, bias=0.0):
    rng = np.random.default_rng(seed)
    return [
        {
            "w": rng.normal(size=shape).astype(np.float32),
            "b": np.full(shape[1], bias, np.float32),
        }
        for shape in itertools.pairwise(widths)
    ]


def _apply(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def _linear_batches(seed):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(5, 6)), rng.normal(size=(5, 4))) for _ in range(3)]


def _square_loss(params, batch):
    x, y = batch
    return jnp.sum((x @ params["w"] + params["b"] - y) ** 2) / (2 * len(x))


def _linear(seed):
    rng = np.random.default_rng(1000 + seed)
    return {"w": rng.normal(size=(6, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}


@pytest.mark.slow
def test_snip_and_grasp_scores_are_those_of_a_linear_model():
    snip, grasp = (
        jax.jit(functools.partial(scores, _square_loss))
        for scores in (sparsity.snip_scores, sparsity.algorithms.grasp_scores)
    )
    prune = jax.jit(
        lambda name, params, batches: sparsity.prune_at_init(
            name, params, 0.75, loss_fn=_square_loss, batches=iter(batches)
        ),
        static_argnums=0,
    )
    for seed in oracles.TREES:
        params, batches = _linear(seed), _linear_batches(seed)
        w, b = (np.asarray(params[name], np.float64) for name in ("w", "b"))
        residuals = [x @ w + b - y for x, y in batches]
        gw = np.mean([x.T @ r / 5 for (x, _), r in zip(batches, residuals, strict=True)], 0)
        gb = np.mean([r.mean(0) for r in residuals], 0)
        # H g is the change of the gradient along g: that of the residual is x @ gw + gb.
        turns = [x @ gw + gb for x, _ in batches]
        hw = np.mean([x.T @ t / 5 for (x, _), t in zip(batches, turns, strict=True)], 0)
        hb = np.mean([t.mean(0) for t in turns], 0)
        actual = snip(params, batches)
        oracles.close(actual, {"w": np.abs(w * gw), "b": np.abs(b * gb)})
        actual = grasp(params, batches)
        oracles.close(actual, {"w": w * hw, "b": b * hb})
        for name, scores in (("snip", np.abs(w * gw)), ("grasp", w * hw)):
            pruned, masks = prune(name, params, batches)
            expected = oracles.layerwise({"w": scores}, 0.75)["w"]
            np.testing.assert_array_equal(masks["w"], expected)
            np.testing.assert_array_equal(pruned["w"], params["w"] * expected)
            assert masks["b"] is None


@pytest.mark.slow
def test_grasp_scores_sum_to_the_product_of_weights_hessian_and_gradient():
    batches = np.random.default_rng(1).normal(size=(2, 4, 7))
    loss_fn = lambda params, x: jnp.mean(jnp.tanh(_apply(params, x)) ** 2)  # noqa: E731

    def half_squared_norm(params):  # of the gradient; its slope along params is theta^T H g
        grads = jax.grad(lambda p: sum(loss_fn(p, x) for x in batches) / 2)(params)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)) / 2

    with jax.enable_x64(True):
        params = jax.tree.map(lambda w: jnp.asarray(w, float), _network(0, bias=0.1))
        scores = sparsity.algorithms.grasp_scores(loss_fn, params, batches)
        total = sum(float(jnp.sum(x)) for x in jax.tree.leaves(scores))
        scaled = jax.jit(lambda t: half_squared_norm(jax.tree.map(lambda w: t * w, params)))
        slope = (float(scaled(1 + 1e-5)) - float(scaled(1 - 1e-5))) / 2e-5
    np.testing.assert_allclose(total, slope, rtol=1e-6)


def test_a_grasp_score_of_a_complex_weight_is_half_of_what_its_removal_takes_from_the_gradient():
    rng = np.random.default_rng(0)
    a, w = (rng.normal(size=(5, 4)) + 1j * rng.normal(size=(5, 4)) for _ in range(2))
    w = jnp.asarray(w[0], jnp.complex64)
    loss_fn = lambda w, a: jnp.sum(jnp.abs(a @ w) ** 2) + jnp.real(jnp.sum(w**3))  # noqa: E731

    def squared_norm(w):
        return jnp.sum(jnp.abs(jax.grad(loss_fn)(w, a)) ** 2)

    removals = -jnp.diag(w)
    slopes = [jax.jvp(squared_norm, (w,), (removal,))[1] for removal in removals]
    scores = sparsity.algorithms.grasp_scores(loss_fn, w, [a])
    np.testing.assert_allclose(scores, -np.array(slopes) / 2, rtol=1e-5)


@pytest.mark.slow
def test_the_sign_of_grasp_keeps_what_holds_the_gradient_up():
    # w = 1 and H = 1, so that w . Hg = g.
    g = jnp.array([[8.0, -27.0, 1.0, -1.0]])
    loss_fn = lambda params, _: jnp.sum(params["w"] ** 2 / 2 + (g - 1) * params["w"])  # noqa: E731
    params = {"w": jnp.ones((1, 4))}
    np.testing.assert_array_equal(sparsity.algorithms.grasp_scores(loss_fn, params, [0])["w"], g)
    masks = sparsity.prune_at_init("grasp", params, 0.5, loss_fn=loss_fn, batches=[0])[1]
    np.testing.assert_array_equal(masks["w"], [[1, 0, 1, 0]])


def _flow(weights):
    """SynFlow scores of a network without biases, in float64."""
    sizes = [np.abs(w) for w in weights]
    before = [np.ones(sizes[0].shape[0])]
    for size in sizes:
        before.append(before[-1] @ size)
    after = [np.ones(sizes[-1].shape[1])]
    for size in reversed(sizes):
        after.insert(0, size @ after[0])
    return [np.outer(b, a) * size for b, a, size in zip(before[:-1], after[1:], sizes, strict=True)]


@pytest.mark.slow
def test_synflow_scores_are_those_of_numpy_and_each_layer_holds_the_whole_flow():
    inputs = np.zeros((1, 7), np.float32)
    for seed in oracles.TREES:
        params = _network(seed)
        expected = _flow([np.asarray(layer["w"], np.float64) for layer in params])
        actual = sparsity.algorithms.synflow_scores(_apply, params, inputs)
        for scores, layer in zip(actual, expected, strict=True):
            np.testing.assert_allclose(scores["w"], layer, rtol=1e-5)
        flows = [float(np.sum(np.asarray(layer["w"], np.float64))) for layer in actual]
        np.testing.assert_allclose(flows, flows[0], rtol=1e-6)
        np.testing.assert_allclose(flows[0], expected[0].sum(), rtol=1e-6)


@pytest.mark.slow
def test_synflow_masks_are_those_of_a_loop_in_numpy_and_nothing_returns():
    for seed in range(3):
        params = _network(seed)
        n = sum(layer["w"].size for layer in params)
        weights = [np.asarray(layer["w"], np.float64) for layer in params]
        masks = [np.ones(w.shape) for w in weights]
        for r in range(1, 11):
            scores = _flow([w * m for w, m in zip(weights, masks, strict=True)])
            scores = [np.where(m, s, -1) for s, m in zip(scores, masks, strict=True)]
            kept = helpers.num_kept(n, 1 - 0.1 ** (r / 10))
            masks = list(oracles.together(dict(enumerate(scores)), kept).values())
        pruned, actual = sparsity.prune_at_init(
            "synflow", params, 0.9, fn=_apply, inputs=np.ones((1, 7), np.float32), rounds=10
        )
        for i, mask in enumerate(masks):
            np.testing.assert_array_equal(actual[i]["w"], mask)
            np.testing.assert_array_equal(pruned[i]["w"], params[i]["w"] * mask)  # signs stay


def test_weights_whose_scores_are_below_zero_go_first_and_never_return():
    # y = x @ a - 50 x @ b: with ones as x the scores are |a| and -50 |b|, in every round.
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(5, 4)).astype(np.float32) for name in ("a", "b")}
    model = lambda params, x: x @ params["a"] - 50 * x @ params["b"]  # noqa: E731
    x, kept = np.ones((1, 5), np.float32), []
    for sparsity_ in (0.25, 0.5, 0.75):
        masks = sparsity.prune_at_init("synflow", params, sparsity_, fn=model, inputs=x, rounds=20)[
            1
        ]
        scores = {"a": np.abs(params["a"]), "b": -50 * np.abs(params["b"])}
        expected = oracles.together(scores, helpers.num_kept(40, sparsity_))
        oracles.same_masks(masks, expected)
        kept.append(masks)
    assert [int(sum(mask.sum() for mask in masks.values())) for masks in kept] == [30, 20, 10]
    assert not kept[1]["b"].any()


@pytest.mark.slow
def test_no_layer_collapses_at_99_9_percent():
    params = _network(0, (64, 128, 128, 64, 10))
    prune = functools.partial(sparsity.prune_at_init, "synflow", fn=_apply)
    pruned, masks = prune(params, 0.999, inputs=np.ones((1, 64), np.float32))
    kept = [int(layer["w"].sum()) for layer in masks]
    assert sum(kept) == helpers.num_kept(sum(layer["w"].size for layer in params), 0.999)
    assert min(kept) > 0
    assert np.any(_apply(pruned, jnp.ones((1, 64))) != _apply(pruned, jnp.zeros((1, 64))))


@pytest.mark.slow
def test_integers_of_the_inputs_stay_and_leaves_that_are_no_weights_have_no_scores():
    fn = lambda params, batch: params["table"][batch["token"]] * batch["scale"]  # noqa: E731
    params = {"table": jnp.array([[1.0, 2.0], [-3.0, 4.0]]), "n": jnp.int32(3)}
    inputs = {"token": jnp.array([1]), "scale": jnp.zeros((1, 1))}
    scores = sparsity.algorithms.synflow_scores(fn, params, inputs)
    np.testing.assert_array_equal(scores["table"], [[0, 0], [3, 4]])
    assert scores["n"] is None
    loss_fn = lambda params, batch: jnp.sum(fn(params, batch)) * params["n"]  # noqa: E731
    scores = sparsity.snip_scores(loss_fn, params, [inputs | {"scale": jnp.ones((1, 1))}])
    np.testing.assert_array_equal(scores["table"], [[0, 0], [9, 12]])


@pytest.mark.slow
def test_masks_start_a_static_run():
    params = _linear(0)
    pruned, masks = sparsity.prune_at_init(
        "snip", params, 0.5, loss_fn=_square_loss, batches=_linear_batches(0)
    )
    updater = sparsity.StaticRandomSparse()
    tx = updater.wrap_optax(optax.adam(0.1), masks=masks)
    grads = jax.grad(_square_loss)(pruned, _linear_batches(0)[0])
    updates, state = tx.update(grads, tx.init(pruned), pruned)
    trained = optax.apply_updates(pruned, updates)
    np.testing.assert_array_equal(trained["w"] != 0, masks["w"])
    np.testing.assert_array_equal(state.masks["w"], masks["w"])


# The updater.


def _snip(**options):
    return sparsity.create_updater_from_config({"algorithm": "snip", "sparsity": 0.8} | options)


@pytest.mark.slow
def test_the_updater_ranks_once_and_keeps_its_masks():
    run = oracles.runner(_snip(update_start_step=1, update_end_step=5, update_freq=1))
    for seed in oracles.TREES:
        grads = oracles.draws(seed, 4)
        states = list(run(oracles.tree(seed), grads))
        weights, slopes = oracles.wide(states[0][0]), oracles.wide(grads[1])
        scores = {name: np.abs(w * slopes[name]) for name, w in weights.items()}
        expected = oracles.together(scores, helpers.num_kept(oracles.total(scores), 0.8))
        assert np.all(states[0][1].masks["a"])
        for _, state in states[1:]:
            oracles.same_masks(state.masks, expected)


def test_the_updater_prunes_in_the_first_step_by_default():
    assert _snip().scheduler == sparsity.OneShotSchedule(0)
    ramp = {"update_freq": 10, "update_start_step": 5, "update_end_step": 90}
    assert _snip(**ramp).scheduler == sparsity.OneShotSchedule(5)
    assert _snip(update_start_step=7, update_end_step=7).scheduler == sparsity.OneShotSchedule(7)
    assert _snip().scope == sparsity.Global(use_normalization=False)


@pytest.mark.slow
def test_masks_stay_in_later_updates_of_a_schedule_that_has_some():
    run = oracles.runner(_snip(scheduler=sparsity.PeriodicSchedule(1)))
    (_, first), (_, second) = run(oracles.tree(0), oracles.draws(0, 2))
    jax.tree.map(np.testing.assert_array_equal, first.masks, second.masks)
    assert int(first.masks["a"].sum() + first.masks["b"].sum()) == helpers.num_kept(96, 0.8)


def test_a_ramp_is_an_error_that_names_what_follows_one():
    with pytest.raises(ValueError, match=r"SnipPruning prunes once.*Polynomial.*SaliencyPruning"):
        sparsity.SnipPruning(scheduler=sparsity.PolynomialSchedule(1, 0, 9))


# What is refused.


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("snap", {}, "name: 'snap' is not known. Did you mean 'snip'"),
        (
            "snip",
            {"batches": [0]},
            "by loss_fn and batches, got loss_fn = None",
        ),
        ("grasp", {"loss_fn": _square_loss}, "got batches = None"),
        ("synflow", {"inputs": 1}, r"'synflow' scores weights by fn and inputs, got fn = None"),
        ("synflow", {"rounds": 0}, "rounds must be at least 1"),
        ("snip", {"loss_fn": _square_loss, "batches": []}, "batches is empty"),
    ],
)
def test_what_a_method_lacks_is_named(name, arguments, text):
    with pytest.raises(ValueError, match=text):
        sparsity.prune_at_init(name, _linear(0), 0.5, **arguments)


def test_grasp_names_batches_that_no_loop_runs_over():
    with pytest.raises(ValueError, match=r"batches must be a list or an iterator, got .* = None"):
        sparsity.algorithms.grasp_scores(_square_loss, _linear(0), None)


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda params, batch: batch[0] @ params["w"], r"an array of shape \(5, 4\)"),
        (lambda params, batch: (jnp.sum(params["w"]), 1), "a tuple"),
        (lambda params, batch: jnp.int32(1), r"an array of shape \(\) and type int32"),
        (
            lambda params, batch: 1j * jnp.sum(params["w"]),
            r"an array of shape \(\) and type complex",
        ),
    ],
)
def test_a_loss_that_is_no_scalar_is_an_error_that_says_what_it_is(loss_fn, got):
    for scores in (sparsity.snip_scores, sparsity.algorithms.grasp_scores):
        with pytest.raises(ValueError, match=f"scalar, got {got}"):
            scores(loss_fn, _linear(0), _linear_batches(0))


@pytest.mark.parametrize(
    ("scale", "text"),
    [(np.nan, "'w' are not all finite"), (0.0, r"'w' are all 0\.0 and rank nothing")],
)
def test_scores_that_say_nothing_are_an_error_that_names_the_leaf(scale, text):
    loss_fn = lambda params, batch: scale * _square_loss(params, batch)  # noqa: E731
    with pytest.raises(ValueError, match=f"The snip scores of {text}"):
        sparsity.prune_at_init("snip", _linear(0), 0.5, loss_fn=loss_fn, batches=_linear_batches(0))
