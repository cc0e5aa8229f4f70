"""FLAP removes the channels that vary least, keeps their means in biases, and is cut for real."""

from dataclasses import fields

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity import Coupled, FLAPPruning, Uniform, shrink, trace
from tests import helpers
from tests.calibration.models import conv_net, draw


def flap(graph, **options):
    scope = Coupled(graph, **options.pop("scope", {}))
    uniform = Uniform(0.5, filter_fn=graph.is_weight)
    return FLAPPruning(scope=scope, sparsity_distribution_fn=uniform, **options)


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"] + params["down"]["bias"]


PARAMS = {
    "up": {"kernel": draw(0, 6, 8), "bias": 3 * draw(29, 8)},  # every channel is above 0 somewhere
    "down": {"kernel": draw(2, 8, 3), "bias": draw(3, 3)},
}
BATCHES = [draw(4, 20, 6), draw(5, 12, 6)]


def compute_hidden(x):
    return np.maximum(np.asarray(x @ PARAMS["up"]["kernel"] + PARAMS["up"]["bias"], np.float64), 0)


@pytest.mark.slow
def test_channels_and_biases_are_those_of_a_plain_program():
    graph = trace(mlp, PARAMS, BATCHES[0])
    statistics = sparsity.calibrate(mlp, PARAMS, BATCHES, "moments")
    pruned, masks = flap(graph).instant_sparsify(PARAMS, statistics=statistics)
    hidden = compute_hidden(np.concatenate(BATCHES))
    down = np.asarray(PARAMS["down"]["kernel"], np.float64)
    importance = hidden.var(0, ddof=1) * (down**2).sum(1)
    gone = np.argsort(importance)[:4]
    np.testing.assert_array_equal(np.flatnonzero(masks["up"]["bias"] == 0), sorted(gone))
    bias = PARAMS["down"]["bias"] + hidden.mean(0)[gone] @ down[gone]
    np.testing.assert_allclose(pruned["down"]["bias"], bias, rtol=1e-5)
    small = shrink(graph, pruned, masks)
    x = draw(6, 9, 6)
    np.testing.assert_allclose(small.apply(small.params, x), mlp(pruned, x), rtol=1e-5)
    assert small.params["down"]["kernel"].shape == (4, 3)


def test_a_bias_gets_the_means_that_all_its_readers_lose():
    def model(params, x):
        hidden = [jax.nn.relu(x @ params[up]) for up in ("up", "left")]
        return hidden[0] @ params["down"] + hidden[1] @ params["right"] + params["bias"]

    shapes = {"up": (6, 8), "left": (6, 4), "down": (8, 3), "right": (4, 3), "bias": (3,)}
    params = {name: draw(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    statistics = sparsity.calibrate(model, params, BATCHES, "moments")
    graph = trace(model, params, BATCHES[0])
    pruned, _ = flap(graph).instant_sparsify(params, statistics=statistics)
    x = jnp.concatenate(BATCHES)
    np.testing.assert_allclose(model(pruned, x).mean(0), model(params, x).mean(0), atol=1e-5)


def test_without_compensation_biases_stay():
    graph = trace(mlp, PARAMS, BATCHES[0])
    statistics = sparsity.calibrate(mlp, PARAMS, BATCHES, "moments")
    pruned, _ = flap(graph, compensate=False).instant_sparsify(PARAMS, statistics=statistics)
    np.testing.assert_array_equal(pruned["down"]["bias"], PARAMS["down"]["bias"])


@pytest.mark.slow
def test_compensation_keeps_the_mean_of_every_output():
    graph = trace(mlp, PARAMS, BATCHES[0])
    statistics = sparsity.calibrate(mlp, PARAMS, BATCHES, "moments")
    packed = flap(graph, use_packed_masks=True)
    pruned, masks = packed.instant_sparsify(PARAMS, statistics=statistics)
    x = jnp.concatenate(BATCHES)
    np.testing.assert_allclose(mlp(pruned, x).mean(0), mlp(PARAMS, x).mean(0), atol=1e-5)
    assert sparsity.unpack_masks(masks, PARAMS)["up"]["bias"].sum() == 4


def scanned(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"] + w["shift"]) @ w["down"] + w["bias"], None

    return jax.lax.scan(layer, x, params)[0]


STACKED = {"up": draw(0, 2, 4, 6), "shift": draw(1, 2, 6), "down": draw(2, 2, 6, 4)}
MODELS = {
    "linen": lambda: conv_net(draw(1, 4, 6, 6, 2)),
    "equinox": lambda: (
        lambda model, x: jax.vmap(model)(x),
        eqx.nn.MLP(5, 3, 8, 2, key=jax.random.key(0)),
        draw(1, 20, 5),
    ),
    "scan": lambda: (scanned, {**STACKED, "bias": draw(3, 2, 4)}, draw(4, 30, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_are_cut_as_they_were_masked(name):
    model, params, x = MODELS[name]()
    graph = trace(model, params, x)
    statistics = sparsity.calibrate(model, params, [x], "moments")
    pruned, masks = flap(graph).instant_sparsify(params, statistics=statistics)
    small = shrink(graph, pruned, masks)
    expected = model(pruned, x)
    np.testing.assert_allclose(small.apply(small.params, x), expected, rtol=1e-4, atol=1e-4)
    plain, _ = flap(graph, compensate=False).instant_sparsify(params, statistics=statistics)
    lost = [float(jnp.sum((model(p, x) - model(params, x)) ** 2)) for p in (pruned, plain)]
    assert lost[0] < lost[1]


@pytest.mark.slow
def test_a_gram_matrix_refits_what_reads_the_channels_that_stay():
    graph = trace(mlp, PARAMS, BATCHES[0])
    statistics = sparsity.calibrate(mlp, PARAMS, BATCHES, "gram")
    pruner = sparsity.MagnitudePruning(
        scope=Coupled(graph), sparsity_distribution_fn=Uniform(0.5, filter_fn=graph.is_weight)
    )
    refit = sparsity.LeastSquares()
    pruned, masks = sparsity.calibration.prune(pruner, PARAMS, statistics, refit)
    kept = np.flatnonzero(masks["up"]["bias"])
    hidden = compute_hidden(np.concatenate(BATCHES))
    expected = np.linalg.lstsq(hidden[:, kept], hidden @ PARAMS["down"]["kernel"])[0]
    np.testing.assert_allclose(pruned["down"]["kernel"][kept], expected, rtol=1e-3)


def test_all_readers_without_a_bias_are_named():
    params = {name: jnp.ones((4, 4)) for name in ("a", "b", "c")}

    def model(params, x):
        for name in params:
            x = jax.nn.relu(x @ params[name])
        return x

    batch = jnp.ones((2, 4))
    statistics = sparsity.calibrate(model, params, [batch], "moments")
    with pytest.raises(ValueError, match=r"no bias of their own to the outputs of 'b', 'c', which"):
        flap(trace(model, params, batch)).instant_sparsify(params, statistics=statistics)


def without_bias(params, x):
    return jax.nn.relu(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


@pytest.mark.slow
def test_what_cannot_be_is_refused():
    graph = trace(mlp, PARAMS, BATCHES[0])
    with pytest.raises(ValueError, match=r"needs scope = Coupled"):
        FLAPPruning(sparsity_distribution_fn=helpers.half)
    with pytest.raises(ValueError, match="Prune with instant_sparsify"):
        flap(graph, scheduler=sparsity.OneShotSchedule(3))
    with pytest.raises(ValueError, match=r"'down/kernel'.*Calibrate with kind='moments'"):
        flap(graph).instant_sparsify(PARAMS, statistics=sparsity.calibrate(mlp, PARAMS, BATCHES))
    with pytest.raises(ValueError, match="got statistics = None"):
        flap(graph).instant_sparsify(PARAMS)
    with pytest.raises(ValueError, match=r"oneshot prunes one parameter after the other.*Coupled"):
        sparsity.oneshot(flap(graph), mlp, PARAMS, BATCHES)
    bare = {name: {"kernel": layer["kernel"]} for name, layer in PARAMS.items()}
    statistics = sparsity.calibrate(without_bias, bare, BATCHES, "moments")
    with pytest.raises(ValueError, match=r"outputs of 'down/kernel', which.*compensate=False"):
        flap(trace(without_bias, bare, BATCHES[0])).instant_sparsify(bare, statistics=statistics)


def test_a_variance_that_rounding_hides_counts_as_none():
    params = {"up": jnp.eye(2), "down": jnp.ones((2, 1)), "bias": jnp.zeros(1)}

    def model(params, x):
        return jax.nn.relu(x @ params["up"]) @ params["down"] + params["bias"]

    # The sums of squares of the first channel are rounded by more than those of the second vary.
    rng = np.random.default_rng(0)
    varied = np.stack([3e4 + rng.normal(size=999), 5 + 0.1 * rng.normal(size=999)], 1)
    x = jnp.asarray(varied, jnp.float32)
    pruner = FLAPPruning(
        scope=Coupled(trace(model, params, x)), sparsity_distribution_fn=Uniform(0.5)
    )
    seen = sparsity.calibrate(model, params, [x], "moments")
    pruned, masks = pruner.instant_sparsify(params, statistics=seen)
    assert masks["down"].T.tolist() == [[0, 1]]
    np.testing.assert_allclose(pruned["bias"], 3e4, rtol=1e-4)


def two_groups(params, x):
    """Channels `a` and `b` cost the same: one input each, and one output."""
    a, b = x @ params["up_a"], x @ params["up_b"]
    return a @ params["down_a"] + b @ params["down_b"] + params["bias"]


def make_two_groups(importance_a, importance_b):
    """Parameters of these importances: orthogonal inputs of one variance, weights their roots."""
    count = len(importance_a)
    params = {"up_a": jnp.eye(count), "up_b": jnp.eye(count), "bias": jnp.zeros(1)}
    params |= {"down_a": jnp.sqrt(jnp.array(importance_a))[:, None]}
    params |= {"down_b": jnp.sqrt(jnp.array(importance_b))[:, None]}
    rows = np.array([[1]])
    while len(rows) < count + 1:
        rows = np.block([[rows, rows], [rows, -rows]])  # columns of +-1, all but one of mean 0
    return params, jnp.asarray(rows[:, 1 : count + 1], jnp.float32)


def standardized(x):
    """Standardizes as the source does: torch.std divides by n - 1."""
    return (np.asarray(x) - np.mean(x)) / np.std(x, ddof=1)


@pytest.mark.parametrize("across", [True, "nbytes"])
def test_across_groups_channels_compete_by_standardized_importance(across):
    importance = [1.0, 2.0, 3.0, 10.0, 11.0, 12.0], [5e3, 1e3, 4e3, 2e3, 9e3, 1.1e3]
    params, x = make_two_groups(*importance)
    statistics = sparsity.calibrate(two_groups, params, [x], "moments")
    pruner = flap(trace(two_groups, params, x), scope={"across": across})
    masks = pruner.instant_sparsify(params, statistics=statistics)[1]
    scores = np.concatenate([standardized(x) for x in importance])
    kept = np.zeros(12)
    kept[np.argsort(-scores)[:6]] = 1  # all of `b` without, [3, 4, 5] and [6, 8, 10] with
    np.testing.assert_array_equal(masks["down_a"][:, 0], kept[:6])
    np.testing.assert_array_equal(masks["down_b"][:, 0], kept[6:])


FEW = [1.0] * 39 + [1e4], [1.0] + [1e2] * 39  # standardized, only one of `a` stands out


@pytest.mark.slow
def test_a_group_of_which_few_channels_stay_is_a_warning_that_names_it():
    params, x = make_two_groups(*FEW)
    statistics = sparsity.calibrate(two_groups, params, [x], "moments")
    graph = trace(two_groups, params, x)
    pruner = flap(graph, scope={"across": True, "min_channels": 1})
    with pytest.warns(UserWarning, match=r"'up_a.*' keeps 1 of 40 channels.*min_channels of Coup"):
        masks = pruner.instant_sparsify(params, statistics=statistics)[1]
    assert (int(masks["down_a"].sum()), int(masks["down_b"].sum())) == (1, 39)


def test_a_tenth_of_each_group_stays_by_default():
    params, x = make_two_groups(*FEW)
    statistics = sparsity.calibrate(two_groups, params, [x], "moments")
    pruner = flap(trace(two_groups, params, x), scope={"across": True})
    masks = pruner.instant_sparsify(params, statistics=statistics)[1]
    assert (int(masks["down_a"].sum()), int(masks["down_b"].sum())) == (4, 36)


def test_few_channels_are_no_warning_where_they_are_asked_for():
    params, x = make_two_groups(*FEW)
    statistics = sparsity.calibrate(two_groups, params, [x], "moments")
    graph = trace(two_groups, params, x)
    uniform = Uniform(0.98, filter_fn=graph.is_weight)
    pruner = FLAPPruning(scope=Coupled(graph), sparsity_distribution_fn=uniform)
    masks = pruner.instant_sparsify(params, statistics=statistics)[1]
    assert int(masks["down_a"].sum()) == 1


def test_hooks_of_scores_get_the_arguments_of_the_call_that_they_name():
    seen = []

    class Weighted(FLAPPruning):
        def calculate_scores(
            self, params, sparse_state=None, grads=None, statistics=None, *, factor, sites
        ):
            seen.append((sparse_state, sorted(grads), factor, len(sites)))
            return super().calculate_scores(params, statistics=statistics)

        def create_masks(self, scores, sparsities, target_sparsities=None, *, factor, sites):
            seen.append((factor, len(sites)))
            return super().create_masks(scores, sparsities, sites=sites)

    graph = trace(mlp, PARAMS, BATCHES[0])
    statistics = sparsity.calibrate(mlp, PARAMS, BATCHES, "moments")
    plain = flap(graph, compensate=False)
    pruner = Weighted(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    expected = plain.instant_sparsify(PARAMS, statistics=statistics)[1]
    masks = pruner.instant_sparsify(PARAMS, PARAMS, statistics=statistics, factor=3)[1]
    jax.tree.map(np.testing.assert_array_equal, masks, expected)
    assert seen == [(None, ["down", "up"], 3, 4), (3, 4)]
