"""Wanda and RIA: their masks by plain programs, at once and along a schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers, selection_oracle
from tests.calibration import oracles

SEEN = {"contracting": (0,), "output": (1,), "count": 9}


def make_masks(pruner, kernel, statistic, half=0.5, **options):
    updater = pruner(sparsity_distribution_fn=helpers.uniform(half), **options)
    pruned, masks = updater.instant_sparsify({"w": kernel}, statistics={("w",): statistic})
    np.testing.assert_array_equal(pruned["w"], np.where(masks["w"], kernel, 0))
    return np.asarray(masks["w"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("half", [0.5, 0.7])
def test_wanda_keeps_the_best_of_each_output_bit_for_bit(half, dtype):
    weights, x, _ = oracles.layer(100, 60, seed=3, dtype=np.float32)
    kernel = jnp.asarray(np.round(weights.T, 1), dtype)  # with ties
    statistic = oracles.make_statistic(np.round(x))
    expected = oracles.wanda(np.asarray(kernel, np.float32).T, np.asarray(statistic.squares), half)
    np.testing.assert_array_equal(
        make_masks(sparsity.WandaPruning, kernel, statistic, half).T, expected
    )


class Named(sparsity.Layerwise):
    """A scope of the user's that selects as `Layerwise` does."""


class Winner(sparsity.Layerwise):
    """The highest score of each slice stays, whatever the sparsity."""

    def select(self, leaves, topk_fn):
        def one(leaf):
            rows = leaf.scores.reshape(*leaf.scores.shape[: leaf.site.batch_axes], -1)
            best = jax.nn.one_hot(jnp.argmax(rows, -1), rows.shape[-1], dtype=jnp.uint8)
            return best.reshape(leaf.scores.shape)

        return [one(leaf) for leaf in leaves]


def test_wanda_ranks_each_output_under_a_subclass_of_layerwise():
    kernel = jnp.array([[4.0, 0.1], [3.0, 0.2], [2.0, 0.3], [1.0, 0.4]])
    even = sparsity.Statistic(squares=jnp.ones(4), **SEEN)
    mask = make_masks(sparsity.WandaPruning, kernel, even, scope=Named())
    np.testing.assert_array_equal(mask.T, [[1, 1, 0, 0], [0, 0, 1, 1]])
    mask = make_masks(sparsity.WandaPruning, kernel, even, scope=Winner())
    np.testing.assert_array_equal(mask.T, [[1, 0, 0, 0], [0, 0, 0, 1]])
    mask = make_masks(sparsity.RIAPruning, kernel, even, scope=Winner())
    assert mask.sum() == 1
    pruner = sparsity.WandaPruning(scope=Winner(), sparsity_distribution_fn=helpers.half)
    mask = sparsity.oneshot(pruner, lambda w, x: x @ w, kernel, [jnp.eye(4)])[1]
    np.testing.assert_array_equal(mask.T, [[1, 0, 0, 0], [0, 0, 0, 1]])
    with pytest.raises(ValueError, match=r"needs scope = Layerwise\(\).*got scope = .*Winner"):
        sparsity.SparseGPTPruning(scope=Winner(), sparsity_distribution_fn=helpers.half)
    sparsity.SparseGPTPruning(scope=Named(), sparsity_distribution_fn=helpers.half)


@pytest.mark.slow
def test_ties_go_to_the_lower_input():
    even = sparsity.Statistic(squares=jnp.ones(4), **SEEN)
    mask = make_masks(sparsity.WandaPruning, jnp.ones((4, 3)), even)
    np.testing.assert_array_equal(mask, [[1] * 3, [1] * 3, [0] * 3, [0] * 3])


@pytest.mark.slow
def test_the_diagonal_of_a_gram_matrix_serves_as_squares():
    weights, x, _ = oracles.layer(dtype=np.float32)
    both = oracles.make_statistic(x)
    only = sparsity.Statistic(gram=both.gram, **SEEN)
    exact = sparsity.Statistic(squares=jnp.diagonal(both.gram), **SEEN)
    for pruner in (sparsity.WandaPruning, sparsity.RIAPruning):
        masks = [
            make_masks(pruner, jnp.asarray(weights.T), calibrated) for calibrated in (only, exact)
        ]
        np.testing.assert_array_equal(*masks)


@pytest.mark.slow
def test_ria_keeps_the_best_of_the_layer():
    weights, x, _ = oracles.layer(48, 20, seed=3)
    with jax.enable_x64(True):
        mask = make_masks(
            sparsity.RIAPruning, jnp.asarray(weights.T), oracles.make_statistic(x), 0.6
        )
    np.testing.assert_array_equal(mask.T, oracles.ria(weights, (x**2).sum(0), 0.6))


@pytest.mark.slow
def test_ria_by_hand():
    # Shares of rows and columns: 1/4 + 1/3, 3/4 + 3/5; 2/4 + 2/3, 2/4 + 2/5. Roots 2, 1.
    squares = sparsity.Statistic(squares=jnp.array([16.0, 1.0]), **SEEN)
    updater = sparsity.RIAPruning()
    kernel = jnp.array([[1.0, -2.0], [3.0, 2.0]])
    scores = updater.calculate_scores(kernel, statistics={(): squares})
    np.testing.assert_allclose(scores, [[7 / 6, 7 / 3], [1.35, 0.9]], rtol=1e-6)


@pytest.mark.slow
def test_ria_takes_rows_and_inputs_of_zeros():
    kernel = jnp.array([[0.0, 0.0, 0.0], [0.0, 1.0, 2.0], [0.0, 3.0, 4.0]])
    squares = sparsity.Statistic(squares=jnp.array([1.0, 1.0, 0.0]), **SEEN)
    mask = make_masks(sparsity.RIAPruning, kernel, squares, 7 / 9)
    np.testing.assert_array_equal(mask, [[0, 0, 0], [0, 1, 1], [0, 0, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("pruner", [sparsity.WandaPruning, sparsity.RIAPruning])
def test_groups_lie_along_the_inputs(pruner):
    weights, x, _ = oracles.layer(dtype=np.float32)
    mask = make_masks(
        pruner,
        jnp.asarray(weights.T),
        oracles.make_statistic(x),
        sparsity_type=sparsity.NByM(2, 4, 0),
    )
    assert (mask.reshape(-1, 4, 16).sum(1) == 2).all()
    if pruner is sparsity.WandaPruning:
        scores = np.abs(weights) * np.sqrt(np.asarray(oracles.make_statistic(x).squares))
        kept = selection_oracle.n_of_m(scores, 2, 4)
        np.testing.assert_array_equal(mask.T, kept != 0)


@pytest.mark.slow
def test_a_constant_fan_in_of_single_outputs_is_what_wanda_keeps_of_each():
    weights, x, _ = oracles.layer(dtype=np.float32)
    kernel, statistic = jnp.asarray(weights.T), oracles.make_statistic(x)
    mask = make_masks(sparsity.WandaPruning, kernel, statistic, 0.7, sparsity_type=sparsity.FanIn())
    expected = oracles.wanda(weights, np.asarray(statistic.squares), 0.7)
    np.testing.assert_array_equal(mask.T, expected)


@pytest.mark.slow
@pytest.mark.parametrize("pruner", [sparsity.WandaPruning, sparsity.RIAPruning])
def test_outputs_that_share_their_inputs_compete_by_sums_of_scores(pruner):
    weights, x, _ = oracles.layer(24, 10, seed=3)
    w, squares = np.abs(weights), (x**2).sum(0)
    scores = w * np.sqrt(squares)
    if pruner is sparsity.RIAPruning:
        scores = (w / w.sum(1, keepdims=True) + w / w.sum(0)) * squares**0.25
    sums = [scores[start : start + 4].sum(0) for start in (0, 4, 8)]
    rows = [selection_oracle.best(group, helpers.num_kept(24, 0.7)) for group in sums]
    with jax.enable_x64(True):
        mask = make_masks(
            pruner,
            jnp.asarray(weights.T),
            oracles.make_statistic(x),
            0.7,
            sparsity_type=sparsity.FanIn(4),
        )
    np.testing.assert_array_equal(mask.T, np.repeat(rows, [4, 4, 2], axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("pruner", [sparsity.WandaPruning, sparsity.RIAPruning])
def test_oneshot_keeps_the_fan_in_of_every_layer(pruner):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {"up": draw(12, 10), "layers": draw(3, 10, 10), "conv": draw(3, 1, 10)}

    def model(p, x):
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ p["up"], p["layers"])[0]
        return jax.lax.conv_general_dilated(
            h[..., None], p["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    graph = sparsity.trace(model, params, draw(4, 12))
    updater = pruner(
        sparsity_type=graph.fan_in(4),
        sparsity_distribution_fn=helpers.half,
        batch_axes=lambda path, leaf: int(path[-1] == "layers"),
    )
    masks = sparsity.oneshot(updater, model, params, [draw(20, 12)])[1]
    for name, inputs, kept in (("up", 12, 6), ("layers", 10, 5), ("conv", 3, 2)):
        each = np.asarray(masks[name]).reshape(-1, inputs, 10)
        for start in (0, 4, 8):
            group = each[:, :, start : start + 4]
            assert (group == group[..., :1]).all()
        assert (each.sum(axis=1) == kept).all()


def test_oneshot_keeps_the_fan_in_along_two_axes_of_a_scanned_layer():
    rng = np.random.default_rng(1)
    params = jnp.asarray(rng.normal(size=(3, 2, 4, 8)), jnp.float32)  # layers, heads, each, out

    def model(p, x):
        split = lambda h: h.reshape(*h.shape[:-1], 2, 4)  # noqa: E731
        step = lambda h, w: (jnp.tanh(jnp.einsum("bhe,heo->bo", split(h), w)), None)  # noqa: E731
        return jax.lax.scan(step, x, p)[0]

    x = jnp.asarray(rng.normal(size=(20, 8)), jnp.float32)
    graph = sparsity.trace(model, params, x)
    updater = sparsity.WandaPruning(
        sparsity_type=graph.fan_in(4), sparsity_distribution_fn=helpers.half, batch_axes=1
    )
    mask = np.asarray(sparsity.oneshot(updater, model, params, [x])[1]).reshape(3, 8, 2, 4)
    assert (mask == mask[..., :1]).all()
    assert (mask[..., 0].sum(1) == 4).all()


@pytest.mark.slow
def test_blocks_and_channels_compete_by_their_scores():
    kernel = jnp.array([[3.0, 1.0], [1.0, 1.0], [2.0, 2.0], [1.0, 1.0]])
    squares = sparsity.Statistic(squares=jnp.array([1.0, 1.0, 1.0, 100.0]), **SEEN)
    rows = make_masks(
        sparsity.WandaPruning, kernel, squares, sparsity_type=sparsity.Channel(0)
    )  # sums 4, 2, 4, 20
    np.testing.assert_array_equal(rows[:, 0], [1, 0, 0, 1])


def test_a_global_scope_ranks_all_leaves_by_their_scores():
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
    seen = {
        ("a",): sparsity.Statistic(squares=jnp.array([1.0, 4.0]), **SEEN),
        ("b",): sparsity.Statistic(squares=jnp.array([9.0, 16.0]), **SEEN),
    }
    updater = sparsity.WandaPruning(
        sparsity_distribution_fn=helpers.half, scope=sparsity.Global(use_normalization=False)
    )
    masks = updater.instant_sparsify(params, statistics=seen)[1]
    assert (int(masks["a"].sum()), int(masks["b"].sum())) == (0, 4)


@pytest.mark.parametrize("pruner", [sparsity.WandaPruning, sparsity.SparseGPTPruning])
def test_groups_along_the_outputs_are_refused_by_what_compares_within_an_output(pruner):
    seen = sparsity.Statistic(gram=jnp.eye(4), **SEEN)
    message = r"NByM\(n=2, m=4, axis=-1\) of 'w'.*within an output.*contracts, \(0,\)"
    with pytest.raises(ValueError, match=message):
        make_masks(pruner, jnp.ones((4, 4)), seen, sparsity_type=sparsity.NByM(2, 4))


@pytest.mark.parametrize("pruner", [sparsity.WandaPruning, sparsity.SparseGPTPruning])
def test_a_fan_in_that_counts_outputs_is_refused(pruner):
    seen = sparsity.Statistic(gram=jnp.eye(4), **SEEN)
    kind = sparsity.FanIn(2, axis=-1)
    message = r"FanIn\(group=2, axis=-1\) of 'w'.*within an output.*the axis of FanIn"
    with pytest.raises(ValueError, match=message):
        make_masks(pruner, jnp.ones((4, 4)), seen, sparsity_type=kind)


def test_groups_that_do_not_divide_the_inputs_are_refused():
    seen = sparsity.Statistic(gram=jnp.eye(6), **SEEN)
    kind = sparsity.NByM(2, 4, axis=0)
    with pytest.raises(ValueError, match=r"'w'.*has 6 entries, which m = 4 does not divide"):
        make_masks(sparsity.WandaPruning, jnp.ones((6, 4)), seen, sparsity_type=kind)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_ramp_follows_the_statistics_of_each_step(packed):
    updater = sparsity.WandaPruning(
        sparsity_distribution_fn=helpers.uniform(0.75),
        scheduler=sparsity.PolynomialSchedule(1, 0, 2, power=1),
        use_packed_masks=packed,
    )
    weights, x, _ = oracles.layer(16, 8, dtype=np.float32)
    params = {"w": jnp.asarray(weights.T), "bias": jnp.ones(8)}
    tx = updater.wrap_optax(optax.sgd(0.0))
    state, step = tx.init(params), jax.jit(tx.update)
    for i, target in enumerate((0.0, 0.375, 0.75)):
        seen = oracles.make_statistic(x * (1 + i))
        dense = np.asarray(params["w"]).T
        updates, state = step(params, state, params, statistics={("w",): seen})
        params = optax.apply_updates(params, updates)
        masks = sparsity.unpack_masks(state.masks, params) if packed else state.masks
        expected = oracles.wanda(dense, np.asarray(seen.squares), target)
        np.testing.assert_array_equal(masks["w"].T, expected)
    np.testing.assert_array_equal(params["w"] != 0, masks["w"])


def test_training_without_statistics_says_how_to_pass_them():
    updater = sparsity.WandaPruning(
        sparsity_distribution_fn=helpers.half, scheduler=sparsity.OneShotSchedule(0)
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    params = {"w": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match="optimizer's update"):
        tx.update(params, tx.init(params), params)
