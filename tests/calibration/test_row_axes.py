"""Rows of weights are followed through programs: kept exactly, or refused; counts are exact."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration.statistics.capture import merge_counts
from sparsity.calibration.statistics.sums import add_batch

RNG = np.random.default_rng(0)
B, T, D = 3, 5, 4
X = RNG.standard_normal((B, T, D)).astype(np.float32)
W = RNG.standard_normal((D, D)).astype(np.float32)
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])


def calibrate(model, x=X, weights=MASK, **params):
    return sparsity.calibrate(model, {"w": W, **params}, [x], "gram", row_weights=weights)["w",]


def check(statistic, rows, weights):
    rows, weights = np.float64(rows).reshape(-1, rows.shape[-1]), np.ravel(weights)
    np.testing.assert_allclose(statistic.gram, (rows.T * weights) @ rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(statistic.sums, weights @ rows, rtol=1e-5, atol=1e-5)
    assert statistic.count == weights.sum()


def rotate(x):  # as positions of pairs of channels do, without angles
    pairs = x.reshape(*x.shape[:2], -1, 2)
    return jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)


KEPT = {  # the inputs of the product, and the weight of each of its rows
    "merged": (lambda x: x.reshape(-1, D), MASK),
    "merged in other order": (lambda x: x.swapaxes(0, 1).reshape(-1, D), MASK.T),
    "repeated": (lambda x: jnp.repeat(x, 2, axis=0), np.repeat(MASK, 2, axis=0)),
    "cumulative": (lambda x: jnp.cumsum(x, axis=1), MASK),
    "rotated": (lambda x: x + rotate(x), MASK),
    "best channels": (lambda x: jax.nn.one_hot(jax.lax.top_k(x, 2)[1], D).sum(2), MASK),
    "behind a loop": (lambda x: jax.lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h), x), MASK),
    "from zeros": (
        lambda x: jax.lax.scan(lambda h, _: (h + x, None), 0 * X, None, length=2)[0],
        MASK,
    ),
    "batch normalized": (lambda x: (x - x.mean((0, 1))) / x.std((0, 1)), MASK),
}


@pytest.mark.parametrize("name", KEPT)
def test_rows_count_by_their_weight_wherever_they_are(name):
    inputs, weights = KEPT[name]
    check(calibrate(lambda p, x: inputs(x) @ p["w"]), inputs(jnp.asarray(X)), weights)


def shift(x):
    return jax.lax.pad(x, 0.0, [(0, 0, 0), (1, -1, 0), (0, 0, 0)])


def sort_by_scatter(x):
    flat = x.reshape(-1, D)
    return jnp.zeros_like(flat).at[jnp.argsort(flat[:, 0])].set(flat).reshape(x.shape)


MIXED = {  # rows of other places, of the same shape
    "shifted": shift,
    "sorted": lambda x: jnp.sort(x, axis=1),
    "reversed": lambda x: x[:, ::-1],
    "rolled": lambda x: jnp.roll(x, 1, axis=1),
    "looked up": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1),
    "scattered": sort_by_scatter,
    "in a branch": lambda x: jax.lax.cond(x.sum() > 0, jnp.tanh, lambda h: jnp.sort(h, 1), x),
    "behind a barrier": lambda x: jax.lax.optimization_barrier((x, shift(x)))[1],
    "convolved": lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((3, D, D)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
}


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_rows_of_other_places_are_refused_also_where_rows_are_added(name, is_added):
    with pytest.raises(ValueError, match=r"row_weights: the rows of .*'w', cannot be told apart"):
        calibrate(lambda p, x: (MIXED[name](x) + x if is_added else MIXED[name](x)) @ p["w"])


def test_examples_of_a_recurrent_model_count_in_each_step():
    cell = nn.RNN(nn.SimpleCell(D))
    params, weights = cell.init(jax.random.key(0), X), np.array([1, 0, 2])
    seen = sparsity.calibrate(cell.apply, params, [X], "gram", row_weights=weights)
    (statistic,) = (x for path, x in seen.items() if path[-2] == "i")
    check(statistic, X, np.repeat(weights, T))


def test_positions_that_are_chosen_have_the_weights_of_examples_alone():
    last = lambda p, x: x[jnp.arange(B), jnp.array([4, 1, 2])] @ p["w"]  # noqa: E731
    with pytest.raises(ValueError, match="cannot be told apart"):
        calibrate(last)
    first, weights = (lambda p, x: x[:, 0] @ p["w"]), np.array([1, 0, 2])
    check(calibrate(first, weights=weights), X[:, 0], weights)


@pytest.mark.parametrize("shape", [(1, T), (B, 1), (1, 1)])
def test_axes_of_one_row(shape):
    x = X[: shape[0], : shape[1]]
    attend = lambda p, x: jnp.einsum("btd,bsd,bse->bte", x, x, x) @ p["w"]  # noqa: E731
    rows = np.einsum("btd,bsd,bse->bte", x, x, x)
    weights = 1 + MASK[: shape[0], : shape[1]]
    check(calibrate(attend, x, weights), rows, weights)


def test_weights_that_are_no_integers():
    weights = 0.25 + MASK / 2
    check(calibrate(lambda p, x: x @ p["w"], weights=weights), X, weights)
    assert isinstance(calibrate(lambda p, x: x @ p["w"]).count, int)


def test_nan_in_rows_of_weight_0_counts_nowhere():
    x = np.where(MASK[..., None], X, np.nan)
    check(calibrate(lambda p, x: x @ p["w"], x), X, MASK)
    x[0, 0, 0] = np.nan
    with pytest.raises(ValueError, match=r"'w' are not all finite in batch 0"):
        calibrate(lambda p, x: x @ p["w"], x)


def test_a_branch_that_no_batch_takes_has_no_rows():
    def model(p, x):
        return jax.lax.cond(x.sum() > 1e9, lambda: x @ p["w"], lambda: x @ p["other"])

    assert calibrate(model, other=W).count == 0


def test_rows_beyond_31_bits_add_up_over_batches_and_are_refused_in_one():
    def model(p, x):  # rows that are never made
        return jnp.sum(jnp.broadcast_to(x, (2**24, 1)) @ p["w"])

    def loop(p, x):
        return jax.lax.scan(lambda t, _: (t + model(p, x), None), 0.0, None, length=2**7)[0]

    params, one = {"w": jnp.ones((1, 1))}, jnp.ones((1, 1))
    with pytest.raises(ValueError, match=r"has 16,777,216 rows, 128 times, .*'w': 2\*\*31 or more"):
        sparsity.calibrate(loop, params, [one])
    total = None
    for count in (np.int32(2**31 - 1), np.int32(2**31 - 1)):
        sums = sparsity.Statistic(squares=jnp.ones(1), count=count, contracting=(0,), output=(1,))
        total = add_batch(total, sums)
    assert int(merge_counts(total).count) == 2**32 - 2
