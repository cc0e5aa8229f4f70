"""Complex inputs and weights: squares are |x|^2, Gram matrices X^H X, errors those of outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import output_error, prune, relative_error
from tests import helpers
from tests.calibration import oracles

AXES = {"contracting": (0,), "output": (1,), "count": 9}


def draw(seed, *shape):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64)


X, W = draw(0, 40, 6) * np.geomspace(0.1, 10, 6).astype(np.float32), draw(1, 6, 4)


def dense(w, x):
    return x @ w


def convolved(w, x):
    x, w = x.reshape(10, 4, 6), w[None].astype(x.dtype)
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, w, [1], "SAME", dimension_numbers=numbers)


@pytest.mark.parametrize("model", [dense, convolved])
@pytest.mark.parametrize("w", [W, W.real], ids=["complex", "real"])
def test_statistics_of_complex_inputs_are_those_of_numpy(model, w):
    computed = {
        kind: sparsity.calibrate(model, w, [X], kind)[()] for kind in ("squares", "moments", "gram")
    }
    squares = (np.abs(X) ** 2).sum(0)
    for statistic in computed.values():
        np.testing.assert_allclose(statistic.sums_of_squares(), squares, rtol=1e-5)
    assert computed["squares"].squares.dtype == computed["moments"].squares.dtype == jnp.float32
    np.testing.assert_allclose(computed["moments"].sums, X.sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(computed["gram"].gram, X.conj().T @ X, rtol=1e-4, atol=1e-3)
    difference = draw(2, 6, 4) if np.iscomplexobj(w) else draw(2, 6, 4).real
    lost = (np.abs(X @ difference) ** 2).sum(0)
    np.testing.assert_allclose(output_error(computed["gram"], difference), lost, rtol=1e-4)
    share = relative_error(computed["gram"], jnp.asarray(w), jnp.asarray(w - difference))
    np.testing.assert_allclose(share, lost.sum() / (np.abs(X @ w) ** 2).sum(), rtol=1e-4)


@pytest.mark.parametrize("w", [W, W.real], ids=["complex", "real"])
def test_wanda_and_ria_rank_by_magnitudes(w):
    squares = (np.abs(X) ** 2).sum(0)
    for pruner, oracle in (
        (sparsity.WandaPruning, oracles.wanda), (sparsity.RIAPruning, oracles.ria),
    ):  # fmt: skip
        pruner = pruner(sparsity_distribution_fn=helpers.half)
        pruned, mask, report = sparsity.oneshot(pruner, dense, jnp.asarray(w), [X])
        np.testing.assert_array_equal(mask, oracle(np.abs(w).T, squares, 0.5).T)
        lost = (np.abs(X @ (w - pruned)) ** 2).sum() / (np.abs(X @ w) ** 2).sum()
        np.testing.assert_allclose(report[()].error, lost, rtol=1e-4)


@pytest.mark.parametrize("refit", [sparsity.LeastSquares(), sparsity.ADMM()])
def test_real_weights_of_complex_inputs_are_refitted_to_the_real_part_of_the_gram(refit):
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=helpers.half)
    pruned, mask, report = sparsity.oneshot(pruner, dense, jnp.asarray(W.real), [X], refit)
    gram = np.asarray(X.conj().T @ X, np.complex128).real
    if isinstance(refit, sparsity.LeastSquares):
        expected = oracles.least_squares(W.real.T.astype(float), np.asarray(mask).T, gram)
    else:
        expected = oracles.admm(W.real.T.astype(float), gram, np.asarray(mask).T)[0]
    np.testing.assert_allclose(pruned.T, expected, rtol=1e-3, atol=1e-4)
    lost = (np.abs(X @ (W.real - pruned)) ** 2).sum() / (np.abs(X @ W.real) ** 2).sum()
    np.testing.assert_allclose(report[()].error, lost, rtol=1e-3)


def test_what_complex_weights_cannot_have_is_refused():
    seen = {(): sparsity.calibrate(dense, W, [X], "gram")[()]}
    wanda = sparsity.WandaPruning(sparsity_distribution_fn=helpers.half)
    with pytest.raises(ValueError, match="'params' is complex64, and only real weights"):
        prune(wanda, jnp.asarray(W), seen, sparsity.LeastSquares())
    with pytest.raises(ValueError, match="'params' is complex64, and only real weights"):
        sparsity.SparseGPTPruning(sparsity_distribution_fn=helpers.half).instant_sparsify(
            jnp.asarray(W), statistics=seen
        )
    for squares in (jnp.ones(6) * 1j, jnp.ones(6).at[5].set(-1.0)):
        statistic = sparsity.Statistic(squares=squares, **AXES)
        with pytest.raises(ValueError, match="squares of the inputs of 'params' must be real and"):
            wanda.instant_sparsify(jnp.asarray(W), statistics={(): statistic})
    with pytest.raises(ValueError, match=r"reads 'params', .* behind a function"):
        sparsity.oneshot(wanda, lambda w, x: x @ jnp.conj(w), jnp.asarray(W), [X])


def test_channels_of_complex_models_keep_their_means():
    params = {"up": draw(0, 6, 8), "down": draw(1, 8, 3), "bias": draw(2, 3)}

    def model(params, x):
        hidden = x @ params["up"]
        return jnp.where(hidden.real > 0, hidden, 0) @ params["down"] + params["bias"]

    graph, seen = (
        sparsity.trace(model, params, X),
        sparsity.calibrate(model, params, [X], "moments"),
    )
    pruner = sparsity.FLAPPruning(
        scope=sparsity.Coupled(graph),
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=graph.is_weight),
    )
    pruned, masks = pruner.instant_sparsify(params, statistics=seen)
    hidden = X @ params["up"]
    hidden = np.where(hidden.real > 0, hidden, 0)
    importance = hidden.var(0, ddof=1) * (np.abs(params["down"]) ** 2).sum(1)
    np.testing.assert_array_equal(masks["down"][:, 0], importance > np.sort(importance)[3])
    np.testing.assert_allclose(model(pruned, X).mean(0), model(params, X).mean(0), rtol=1e-3)

    def with_real_bias(params, x):
        return model(params | {"bias": params["bias"].astype(jnp.complex64)}, x)

    params["bias"] = params["bias"].real
    graph = sparsity.trace(with_real_bias, params, X)
    seen = sparsity.calibrate(with_real_bias, params, [X], "moments")
    pruner = sparsity.FLAPPruning(
        scope=sparsity.Coupled(graph),
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=graph.is_weight),
    )
    with pytest.raises(
        ValueError, match=r"'down' has complex outputs.*'bias', float32, cannot hold"
    ):
        pruner.instant_sparsify(params, statistics=seen)
