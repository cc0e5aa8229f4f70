"""A trained model is pruned in one pass; each layer sees what the pruned ones before it produce."""

import gc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsity
from sparsity import LeastSquares, Uniform, WandaPruning, calibration

LAYERS = 2


@pytest.fixture(scope="module")
def model():
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])

    params = {
        "first": draw(12, 8),
        "layers": {"up": draw(LAYERS, 8, 16), "down": draw(LAYERS, 16, 8)},
        "last": draw(8, 3),
    }
    return params, [draw(20, 12), draw(20, 12)]


def scanned(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return jax.lax.scan(layer, x @ params["first"], params["layers"])[0] @ params["last"]


def unrolled(params, x):
    h = x @ params["first"]
    for i in range(LAYERS):
        h = h + jnp.tanh(h @ params[f"up{i}"]) @ params[f"down{i}"]
    return h @ params["last"]


def as_bfloat16(params):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def as_float32(model):
    """A model of bfloat16 weights that casts all of them at first."""
    return lambda params, x: model(jax.tree.map(jnp.float32, params), x)


def unstacked(params):
    each = {f"{name}{i}": leaf[i] for name, leaf in params["layers"].items() for i in range(LAYERS)}
    return {"first": params["first"], "last": params["last"], **each}


PRUNER = WandaPruning(sparsity_distribution_fn=Uniform(0.5))


@pytest.mark.slow
def test_each_layer_is_pruned_on_what_the_pruned_ones_before_it_produce(model):
    params, batches = model
    dense, x = unstacked(params), jnp.concatenate(batches)
    pruned, masks, report = sparsity.oneshot(PRUNER, unrolled, dense, batches, LeastSquares())
    expected = dict(dense)
    for name in ("first", "up0", "down0", "up1", "down1", "last"):  # one by one, from the start
        statistics = sparsity.calibrate(unrolled, expected, [x], "gram")
        alone = {key: dense[key] if key == name else None for key in dense}
        solved, leaf_masks = calibration.prune(PRUNER, alone, statistics, LeastSquares())
        expected[name] = solved[name]
        np.testing.assert_array_equal(masks[name], leaf_masks[name])
        np.testing.assert_allclose(pruned[name], solved[name], atol=1e-3)
        actual = calibration.relative_error(statistics[(name,)], dense[name], solved[name])
        assert report[(name,)].error == pytest.approx(float(actual), rel=1e-3)
    assert report[("up1",)].error <= report[("up1",)].unrefitted
    assert "up1" in report.table()


@pytest.mark.slow
def test_a_scan_is_pruned_as_its_layers_would_be(model):
    params, batches = model
    stacked, _, report = sparsity.oneshot(PRUNER, scanned, params, batches)
    apart, _, _ = sparsity.oneshot(PRUNER, unrolled, unstacked(params), batches)
    for name, leaf in apart.items():
        np.testing.assert_array_equal(unstacked(stacked)[name], leaf)
    cast, _, _ = sparsity.oneshot(PRUNER, as_float32(scanned), as_bfloat16(params), batches)
    apart, _, _ = sparsity.oneshot(
        PRUNER, as_float32(unrolled), as_bfloat16(unstacked(params)), batches
    )
    for name, leaf in apart.items():
        np.testing.assert_array_equal(unstacked(cast)[name], leaf)
    assert list(report) == [("first",), ("layers", "up"), ("layers", "down"), ("last",)]
    assert report[("layers", "up")].sparsity == 0.5


@pytest.mark.slow
def test_not_sequential_is_one_calibration_of_the_dense_model(model):
    params, batches = model
    dense = unstacked(params)
    actual, _, _ = sparsity.oneshot(PRUNER, unrolled, dense, batches, sequential=False)
    statistics = sparsity.calibrate(unrolled, dense, batches)
    expected, _ = PRUNER.instant_sparsify(dense, statistics=statistics)
    for name in dense:
        np.testing.assert_array_equal(actual[name], expected[name])


@pytest.mark.slow
def test_weights_that_no_product_reads_are_named(model):
    params, batches = model
    params = {**unstacked(params), "unread": jnp.ones((3, 3))}
    with pytest.raises(ValueError, match="'unread'"):
        sparsity.oneshot(PRUNER, unrolled, params, batches)
    with pytest.raises(ValueError, match="no batch"):
        sparsity.oneshot(PRUNER, unrolled, params, [])


@pytest.mark.slow
def test_batches_that_cannot_be_used_are_named(model):
    params, (first, second) = model
    with pytest.raises(ValueError, match=r"'first' are not all finite in batch 1"):
        sparsity.oneshot(PRUNER, scanned, params, [first, second.at[3, 3].set(jnp.nan)])
    with pytest.raises(ValueError, match="No row of the batches reaches 'first'"):
        sparsity.oneshot(PRUNER, scanned, params, [first[:0]])
    huge = params | {"layers": params["layers"] | {"up": params["layers"]["up"].at[1].set(3e38)}}
    with pytest.raises(ValueError, match=r"'layers/down\[1\]' are not all finite in batch 0"):
        sparsity.oneshot(PRUNER, relu, huge, [first, second])


def relu(params, x):
    def layer(h, w):
        return h + jax.nn.relu(h @ w["up"]) @ w["down"], None

    return jax.lax.scan(layer, x @ params["first"], params["layers"])[0] @ params["last"]


def test_arrays_without_values_are_refused_by_their_path():
    params, batch = {"w": jnp.ones((4, 2))}, jnp.ones((3, 4))
    fn = lambda params, x: x @ params["w"]  # noqa: E731
    with pytest.raises(ValueError, match=r"params\['w'\] has no values yet, .*ShapeDtypeStruct"):
        sparsity.oneshot(PRUNER, fn, jax.eval_shape(lambda: params), [batch])
    with pytest.raises(ValueError, match=r"got batches\[0\] = .*outside of jit"):
        jax.jit(lambda x: sparsity.oneshot(PRUNER, fn, params, [x])[0])(batch)


def test_batches_of_other_structures_are_refused():
    def model(params, batch):
        return batch["x"] @ params["kernel"] * batch["scale"]

    params = {"kernel": jnp.ones((2, 2))}
    batches = [{"x": jnp.ones((4, 2)), "scale": scale} for scale in (1.0, 2.0)]
    for run in (sparsity.calibrate, lambda *arguments: sparsity.oneshot(PRUNER, *arguments)):
        with pytest.raises(ValueError, match=r"Batch 1 differs.*\[2\.0, .*numbers that differ"):
            run(model, params, batches)


PRUNERS = {
    "wanda": (PRUNER, None),
    "least squares": (PRUNER, LeastSquares()),
    "admm": (PRUNER, sparsity.ADMM()),
    "sparsegpt": (sparsity.SparseGPTPruning(sparsity_distribution_fn=Uniform(0.5)), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRUNERS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_leaves_without_entries_stay_as_they_are(name, shape):
    pruner, refit = PRUNERS[name]
    params, batch = {"kernel": jnp.zeros(shape)}, jnp.ones((6, shape[0]))
    actual = sparsity.oneshot(pruner, lambda p, x: x @ p["kernel"], params, [batch], refit)
    assert actual[0]["kernel"].shape == actual[1]["kernel"].shape == shape
    assert actual[2][("kernel",)].sparsity == actual[2][("kernel",)].error == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("least squares", "stay near those of the pruner"),
        ("admm", "damping = 0.1 decides"),
        ("sparsegpt", "damping = 0.01 decides"),
    ],
)
def test_fewer_rows_than_inputs_are_a_warning_that_says_what_decides(model, name, says):
    params, (batch, _) = model
    with pytest.warns(UserWarning, match=f"'first' has 9 rows for 12 inputs.*{says}"):
        sparsity.oneshot(
            PRUNERS[name][0], first, {"first": params["first"]}, [batch[:9]], PRUNERS[name][1]
        )


def first(params, x):
    return x @ params["first"]


class Mlp(nnx.Module):
    def __init__(self, layers):
        self.up, self.down = (nnx.Linear(*x.weight.shape[::-1], rngs=nnx.Rngs(0)) for x in layers)
        for layer_weights, other in zip((self.up, self.down), layers, strict=True):
            layer_weights.kernel[...], layer_weights.bias[...] = other.weight.T, other.bias

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.slow
def test_modules_of_nnx_and_equinox_are_pruned_alike(model):
    _, batches = model
    module = eqx.nn.MLP(12, 3, 8, 1, key=jax.random.key(0))
    definition, state = nnx.split(Mlp(module.layers))
    actual, masks, _ = sparsity.oneshot(
        PRUNER, lambda module, x: jax.vmap(module)(x), module, batches, LeastSquares()
    )
    same, _, report = sparsity.oneshot(
        PRUNER, lambda state, x: nnx.merge(definition, state)(x), state, batches, LeastSquares()
    )
    assert list(report) == [("up", "kernel"), ("down", "kernel")]
    for layer, mask, name in zip(actual.layers, masks.layers, ("up", "down"), strict=True):
        kernel = same[name]["kernel"][...]
        np.testing.assert_allclose(layer.weight.T, kernel, atol=1e-4)
        np.testing.assert_array_equal(mask.weight.T, kernel != 0)
    np.testing.assert_allclose(
        jax.vmap(actual)(batches[0]), nnx.merge(definition, same)(batches[0]), atol=1e-4
    )


def test_global_scopes_are_refused(model):
    params, batches = model
    pruner = sparsity.GlobalMagnitudePruning(sparsity=0.5)
    with pytest.raises(ValueError, match=r"needs scope = Layerwise\(\), got Global"):
        sparsity.oneshot(pruner, scanned, params, batches)


@pytest.mark.slow
def test_masks_are_packed_and_params_unchanged(model):
    params, batches = model
    before = jax.tree.map(np.array, params)
    packed = sparsity.MagnitudePruning(sparsity_distribution_fn=Uniform(0.5), use_packed_masks=True)
    pruned, masks, _ = sparsity.oneshot(packed, scanned, params, batches)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    actual = sparsity.unpack_masks(masks, params)["layers"]["up"]
    np.testing.assert_array_equal(actual, pruned["layers"]["up"] != 0)


def carried(params, x):
    """Scans within a scan, which carry all weights along."""

    def outer(h, group):
        def inner(carry, w):
            h, stacks = carry
            return (jnp.tanh(h @ w), stacks / 2), None

        (h, stacks), _ = jax.lax.scan(inner, (h, params), group)
        return h + stacks.sum(), None

    return jax.lax.scan(outer, x, params)[0]


@pytest.mark.slow
def test_stacked_weights_that_are_carried_along_are_those_that_the_loop_started_with(model):
    x = model[1][0]
    params = jax.random.normal(jax.random.key(0), (2, 2, 12, 12)) / 4
    pruned, _, _ = sparsity.oneshot(PRUNER, carried, params, [x])
    expected, start, h = params, params, x
    for group, layer in ((0, 0), (0, 1), (1, 0), (1, 1)):
        start = start / 2 if layer else expected / 2
        layer_weights = expected[group, layer]
        seen = sparsity.calibrate(lambda w, x: x @ w, layer_weights, [h])
        layer_weights = PRUNER.instant_sparsify(layer_weights, statistics=seen)[0]
        expected = expected.at[group, layer].set(layer_weights)
        h = jnp.tanh(h @ layer_weights) + (start.sum() if layer else 0)
    np.testing.assert_array_equal(pruned, expected)


@pytest.mark.slow
def test_depth_costs_no_memory_beyond_the_weights_and_masks(monkeypatch):
    prune, x, temporaries = WandaPruning.instant_sparsify, jnp.ones((64, 8)), []

    def measured(*args, **kwargs):
        held.append(sum(array.nbytes for array in jax.live_arrays()))
        return prune(*args, **kwargs)

    monkeypatch.setattr(WandaPruning, "instant_sparsify", measured)
    for depth in (2, 12):
        layers = {"up": jnp.ones((depth, 8, 16)) / 8, "down": jnp.ones((depth, 16, 8)) / 8}
        params = {"first": jnp.eye(8), "layers": layers, "last": jnp.ones((8, 3))}
        gc.collect()
        held = [sum(array.nbytes for array in jax.live_arrays())]
        sparsity.oneshot(PRUNER, scanned, params, [x])
        layer_weights = sum(
            leaf.nbytes + leaf.size for leaf in layers.values()
        )  # a copy, and its masks
        temporaries.append(max(held) - held[0] - layer_weights)
    assert temporaries[1] <= 1.1 * temporaries[0]


def test_a_leaf_that_a_scan_and_a_product_read_is_pruned_once_and_not_calibrated(model):
    params, batches = model
    pruner = WandaPruning(sparsity_distribution_fn=Uniform(0.5), batch_axes=lambda _, w: w.ndim - 2)

    def read_twice(params, x):
        return scanned(params, x), jnp.einsum("bi,lij->lbj", x[:, :8], params["layers"]["up"])

    pruned, _, _ = sparsity.oneshot(pruner, read_twice, params, batches)
    expected, _, _ = sparsity.oneshot(pruner, scanned, params, batches)
    jax.tree.map(np.testing.assert_array_equal, pruned, expected)
    with pytest.raises(
        ValueError, match=r"'layers/up' is read along other axes by the dot_general"
    ):
        sparsity.calibrate(read_twice, params, batches)


def test_arrays_of_numpy_may_change_after_a_run(model):
    params, batches = jax.tree.map(np.array, model)
    pruner = WandaPruning(
        sparsity_distribution_fn=Uniform(0.5, filter_fn=lambda path, _: path == ("first",))
    )
    pruned, masks, _ = sparsity.oneshot(pruner, scanned, params, batches, held=())
    before = jax.tree.map(np.array, (pruned, masks))
    for array in jax.tree.leaves((params, batches)):
        array[...] = 7
    jax.tree.map(np.testing.assert_array_equal, (pruned, masks), before)
