"""Means of lost outputs go into biases, or into the BatchNorm that follows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity import Coupled, FLAPPruning, MagnitudePruning, Uniform, trace
from sparsity.calibration import Means
from tests.calibration.models import draw

EPSILON = 1e-3
NORMS = ("mean", "var", "scale", "shift")


def normalize(x, norm, sqrt):
    """A BatchNorm in inference mode, of jax or of numpy."""
    return (x - norm["mean"]) / sqrt(norm["var"] + EPSILON) * norm["scale"] + norm["shift"]


def block(params, x, convolve, relu, sqrt):
    """A residual block without biases of convolutions: the output, and the inputs of both."""
    hidden = relu(normalize(convolve(x, params["first"]["w"]), params["first"], sqrt))
    return relu(x + normalize(convolve(hidden, params["last"]["w"]), params["last"], sqrt)), hidden


def convolve(x, kernel):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)


def resnet(params, x):
    return block(params, x, convolve, jax.nn.relu, jnp.sqrt)[0].mean((1, 2)) @ params["head"]


def patches(x):
    """[rows, 3 x 3 x channels] of images that are padded with zeros."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = x.shape[1:3]
    windows = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return np.stack(windows, 3).reshape(-1, 9 * x.shape[-1])


def convolve_in_numpy(x, kernel):
    rows = patches(x) @ kernel.reshape(-1, kernel.shape[-1])
    return rows.reshape(*x.shape[:3], -1)


def make_norm(seed, size):
    values = np.random.default_rng(seed).uniform(0.5, 1.5, (4, size)).astype(np.float32)
    return dict(zip(NORMS, map(jnp.asarray, values), strict=True))


PARAMS = {
    "first": {"w": draw(0, 3, 3, 4, 6) / 3, **make_norm(1, 6)},
    "last": {"w": draw(2, 3, 3, 6, 4) / 3, **make_norm(3, 4)},
    "head": draw(4, 4, 2),
}
X = draw(5, 3, 5, 5, 4)
STATE = {name: {"mean": PARAMS[name]["mean"]} for name in ("first", "last")}


def with_constant_means(params, x):
    joined = {name: {**params[name], **STATE[name]} for name in STATE}
    return resnet({**params, **joined}, x)


def without_means(params):
    norms = {name: {k: v for k, v in params[name].items() if k != "mean"} for name in STATE}
    return {**params, **norms}


def lost_means(params, masks):
    """The means of the outputs of the last convolution that masks of channels remove, float64."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x, relu = np.asarray(X, np.float64), lambda x: np.maximum(x, 0)
    _, hidden = block(wide, x, convolve_in_numpy, relu, np.sqrt)
    lost = wide["last"]["w"] * (1 - np.asarray(masks["last"]["w"]))
    return patches(hidden).mean(0) @ lost.reshape(-1, 4), wide["last"]


@pytest.mark.slow
@pytest.mark.parametrize("has_means", [True, False])
def test_flap_puts_what_a_resnet_loses_into_its_batch_norms(has_means):
    model = resnet if has_means else with_constant_means
    params = PARAMS if has_means else without_means(PARAMS)
    graph = trace(model, params, X)
    uniform = Uniform(0.5, custom_sparsity_map={"last/w": 0.0, "head": None})
    pruner = FLAPPruning(scope=Coupled(graph), sparsity_distribution_fn=uniform)
    statistics = sparsity.calibrate(model, params, [X], "moments")
    pruned, masks = pruner.instant_sparsify(params, statistics=statistics)
    assert int(masks["last"]["w"].sum()) == 3 * 3 * 3 * 4
    lost, norm = lost_means(PARAMS, masks)
    if has_means:
        np.testing.assert_allclose(pruned["last"]["mean"], norm["mean"] - lost, rtol=1e-5)
        np.testing.assert_array_equal(pruned["last"]["shift"], params["last"]["shift"])
    else:
        shift = norm["shift"] + lost / np.sqrt(norm["var"] + EPSILON) * norm["scale"]
        np.testing.assert_allclose(pruned["last"]["shift"], shift, rtol=1e-5)
    small = sparsity.shrink(graph, pruned, masks)
    np.testing.assert_allclose(small.apply(small.params, X), model(pruned, X), rtol=1e-4)


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["up"] + params["bias"])
    return hidden @ params["down"] - params["mean"]


MLP = {"up": draw(0, 6, 8), "bias": draw(1, 8), "down": draw(2, 8, 3), "mean": draw(3, 3)}
BATCHES = [1 + draw(4, 20, 6), 1 + draw(5, 20, 6)]
PRUNER = MagnitudePruning(sparsity_distribution_fn=Uniform(0.5))


@pytest.mark.slow
def test_a_refit_by_means_keeps_the_mean_of_each_output_of_the_pruned_network():
    pruned, masks, report = sparsity.oneshot(PRUNER, mlp, MLP, BATCHES, Means())
    wide = {name: np.asarray(leaf, np.float64) for name, leaf in MLP.items()}
    lost = {name: wide[name] * (1 - np.asarray(masks[name])) for name in ("up", "down")}
    x = np.concatenate(BATCHES).astype(np.float64)
    bias = wide["bias"] + x.mean(0) @ lost["up"]
    np.testing.assert_allclose(pruned["bias"], bias, rtol=1e-5)
    hidden = np.maximum(x @ (wide["up"] - lost["up"]) + bias, 0)
    mean = wide["mean"] - hidden.mean(0) @ lost["down"]
    np.testing.assert_allclose(pruned["mean"], mean, rtol=1e-4, atol=1e-5)
    total, outputs = ((hidden @ wide["down"]) ** 2).sum(), hidden @ lost["down"]
    row = report[("down",)]
    assert row.error == pytest.approx(((outputs - outputs.mean(0)) ** 2).sum() / total, rel=1e-4)
    assert row.unrefitted == pytest.approx((outputs**2).sum() / total, rel=1e-4)
    with_grams = sparsity.SparseGPTPruning(sparsity_distribution_fn=Uniform(0.5))
    _, _, report = sparsity.oneshot(with_grams, mlp, MLP, BATCHES, Means())
    assert report[("down",)].error < report[("down",)].unrefitted


class HalfOfMeans:
    """A refit of biases that shares no class with `Means`."""

    def shift(self, place, bias, dense, pruned, statistic, read):
        return (bias + Means().shift(place, bias, dense, pruned, statistic, read)) / 2

    def __repr__(self):
        return "HalfOfMeans()"


def test_a_refit_of_ones_own_may_shift_biases():
    means, _, _ = sparsity.oneshot(PRUNER, mlp, MLP, BATCHES, Means())
    pruned, _, _ = sparsity.oneshot(PRUNER, mlp, MLP, BATCHES, HalfOfMeans())
    np.testing.assert_array_equal(pruned["up"], means["up"])
    np.testing.assert_allclose(pruned["bias"], (MLP["bias"] + means["bias"]) / 2, rtol=1e-6)
    with pytest.raises(ValueError, match=r"HalfOfMeans changes .*refit = HalfOfMeans\(\) to"):
        sparsity.calibration.prune(PRUNER, MLP, {}, HalfOfMeans())
    kernel, refit = MLP["up"], HalfOfMeans()
    with pytest.warns(UserWarning, match="HalfOfMeans leaves 'params' as the pruner does"):
        sparsity.oneshot(PRUNER, lambda w, x: x @ w, kernel, BATCHES, refit, dry_run=True)


def scanned(params, x):
    def layer(h, w):
        return jnp.tanh(h @ w["up"] + w["bias"]), None

    return jax.lax.scan(layer, x, params)[0]


@pytest.mark.parametrize("sequential", [True, False])
def test_layers_of_a_scan_shift_their_own_biases(sequential):
    params = {"up": draw(0, 2, 6, 6), "bias": draw(1, 2, 6)}

    def unrolled(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer["up"] + layer["bias"])
        return x

    apart = [{name: leaf[i] for name, leaf in params.items()} for i in range(2)]
    half = Uniform(0.5, filter_fn=lambda path, _: path[-1] == "up")
    pruner = MagnitudePruning(
        sparsity_distribution_fn=half, batch_axes=lambda _, leaf: max(leaf.ndim - 2, 0)
    )
    stacked, _, _ = sparsity.oneshot(
        pruner, scanned, params, BATCHES, Means(), sequential=sequential
    )
    expected, _, _ = sparsity.oneshot(
        pruner, unrolled, apart, BATCHES, Means(), sequential=sequential
    )
    for i, layer in enumerate(expected):
        np.testing.assert_array_equal(stacked["up"][i] == 0, layer["up"] == 0)
        np.testing.assert_allclose(stacked["bias"][i], layer["bias"], rtol=1e-5)


@pytest.mark.slow
def test_a_run_that_continues_keeps_the_biases_that_it_had_moved(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    first = sparsity.oneshot(PRUNER, mlp, MLP, BATCHES, Means(), out=tmp_path / "run")
    second = sparsity.oneshot(PRUNER, mlp, MLP, BATCHES, Means(), out=tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, first[0], second[0])
    assert (second[0]["bias"][...] != MLP["bias"]).any()


def test_leaves_without_a_bias_are_pruned_and_named():
    params = {name: MLP[name] for name in ("up", "down")}

    def bare(params, x):
        return jnp.tanh(jnp.tanh(x @ params["up"]) @ params["down"])

    with pytest.warns(UserWarning, match="Means leaves 'down', 'up' as the pruner does"):
        pruned, _, _ = sparsity.oneshot(PRUNER, bare, params, BATCHES, Means())
    expected, _, _ = sparsity.oneshot(PRUNER, bare, params, BATCHES)
    jax.tree.map(np.testing.assert_array_equal, pruned, expected)
    statistics = sparsity.calibrate(bare, params, BATCHES, "moments")
    with pytest.raises(ValueError, match=r"Means changes the biases.*to oneshot"):
        sparsity.calibration.prune(PRUNER, params, statistics, Means())


def test_scales_of_several_axes_meet_the_axes_of_the_bias():
    """Heads and entries in another order than the bias, and a division."""
    params = {"w": draw(0, 6, 2, 3), "scale": 1 + draw(1, 3, 2) ** 2, "shift": draw(2, 2, 3)}
    half = Uniform(0.5, filter_fn=lambda path, _: path == ("w",))
    pruner = MagnitudePruning(sparsity_distribution_fn=half)

    def model(params, x):
        heads = jnp.einsum("ri,ihk->rkh", x, params["w"]) / params["scale"]
        return heads.transpose(0, 2, 1) + params["shift"]

    pruned, masks, _ = sparsity.oneshot(pruner, model, params, BATCHES, Means())
    mean = np.concatenate(BATCHES).astype(np.float64).mean(0)
    lost = np.asarray(params["w"], np.float64) * (1 - np.asarray(masks["w"]))
    shift = params["shift"] + np.einsum("i,ihk->hk", mean, lost) / params["scale"].T
    np.testing.assert_allclose(pruned["shift"], shift, rtol=1e-5, atol=1e-6)
