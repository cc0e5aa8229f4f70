"""Rows of weight 0 count nowhere, and others as often as they weigh; compared with chosen rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import ADMM, BlockRefit

RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


ATTENTION = {"embed": draw(50, 16), "head": draw(16, 8)} | {name: draw(16, 16) for name in "qkvo"}


def attend(params, batch):
    x = params["embed"][batch["tokens"]]
    q, k, v = (jnp.reshape(x @ params[name], (*x.shape[:2], 4, 4)) for name in "qkv")
    is_past = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    scores = jnp.where(is_past, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + mixed @ params["o"]
    return (x.reshape(-1, 16) @ params["head"]).reshape(*x.shape[:2], 8)  # merged rows


def make_batch(size, length):
    mask = np.arange(length) < RNG.integers(2, length, (size, 1))
    return {"tokens": RNG.integers(0, 50, (size, length)), "mask": mask}


BATCHES = [make_batch(3, 10), make_batch(3, 10), make_batch(2, 7)]
WANDA = sparsity.WandaPruning(
    sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=lambda path, _: path != ("embed",))
)


def read_mask(batch):
    return batch["mask"]


@pytest.mark.parametrize("kind", ["squares", "gram"])
def test_statistics_are_those_of_the_rows_that_count(kind):
    seen = sparsity.calibrate(attend, ATTENTION, BATCHES, kind, row_weights=read_mask)["q",]
    rows = [np.asarray(ATTENTION["embed"])[b["tokens"]][b["mask"]] for b in BATCHES]
    rows = np.concatenate(rows).astype(np.float64)
    assert seen.count == len(rows)
    np.testing.assert_allclose(seen.sums_of_squares(), (rows**2).sum(0), rtol=1e-5)
    if kind == "gram":
        np.testing.assert_allclose(seen.gram, rows.T @ rows, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(seen.sums, rows.sum(0), rtol=1e-4, atol=1e-4)


def test_a_row_of_weight_two_counts_as_two_rows():
    x, weights = draw(6, 4), np.array([1, 2, 0, 1, 3, 1])
    model = lambda p, x: x @ p  # noqa: E731
    params = draw(4, 3)
    seen = sparsity.calibrate(model, params, [x], "gram", row_weights=weights)[()]
    repeated = sparsity.calibrate(model, params, [jnp.repeat(x, weights, axis=0)], "gram")[()]
    np.testing.assert_allclose(seen.gram, repeated.gram, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(seen.sums, repeated.sums, rtol=1e-5, atol=1e-5)
    assert seen.count == repeated.count == 8


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("refit", [None, ADMM(), (ADMM(), BlockRefit(steps=4))])
def test_padding_changes_nothing(refit, sequential):
    if isinstance(refit, tuple) and not sequential:
        pytest.skip("blocks are refitted in order")
    others = [{**b, "tokens": np.where(b["mask"], b["tokens"], 7)} for b in BATCHES]
    runs = [
        sparsity.oneshot(WANDA, attend, ATTENTION, x, refit, sequential, row_weights=read_mask)
        for x in (BATCHES, others)
    ]
    jax.tree.map(np.testing.assert_array_equal, runs[0][1], runs[1][1])
    for one, other in zip(*(jax.tree.leaves(run[0]) for run in runs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    reports = [run[2] for run in runs]
    assert reports[0].outputs.error == pytest.approx(reports[1].outputs.error, rel=1e-4)
    for path, report in reports[0].items():
        assert report.error == pytest.approx(reports[1][path].error, rel=1e-3)


def test_examples_of_a_convolution_count_by_their_weight():
    def model(params, x):
        dimensions = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, params, (1,), "SAME", dimension_numbers=dimensions)

    x, params = draw(4, 9, 3), draw(3, 3, 5)
    seen = sparsity.calibrate(model, params, [x], "gram", row_weights=np.array([1, 0, 1, 0]))[()]
    expected = sparsity.calibrate(model, params, [x[::2]], "gram")[()]
    np.testing.assert_allclose(seen.gram, expected.gram, rtol=1e-5, atol=1e-5)
    assert seen.count == expected.count


REFUSED = {
    "mixed along the rows": lambda p, x: jnp.roll(x, 1, axis=1) @ p,
    "summed over the rows": lambda p, x: x.sum(1) @ p,
    "sorted": lambda p, x: jnp.sort(x, axis=1) @ p,
    "contracted": lambda p, x: jnp.einsum("btd,df->bf", x, p),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_told_apart_are_refused_by_path(name):
    with pytest.raises(ValueError, match=r"row_weights: the rows of .*'w', cannot be told apart"):
        sparsity.calibrate(
            lambda p, x: REFUSED[name](p["w"], x),
            {"w": draw(4, 3)},
            [draw(2, 5, 4)],
            row_weights=np.ones((2, 5)),
        )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros((3, 4)), "row_weights are 0 for all rows of all batches"),
        (-np.ones((3, 4)), "row_weights of batch 0 must be finite and at least 0"),
        (np.full((3, 4), np.nan), "row_weights of batch 0 must be finite and at least 0"),
        (np.ones(5), r"row_weights have shape \(5,\), with which no array of the batch begins"),
        (lambda batch: 1.0, "row_weights of batch 0 must be an array of leading axes"),
    ],
)
def test_weights_that_weigh_nothing_are_refused(weights, message):
    params, batch = {"w": draw(2, 3)}, draw(3, 4, 2)
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    model = lambda p, x: x @ p["w"]  # noqa: E731
    for call in (
        lambda: sparsity.calibrate(model, params, [batch], row_weights=weights),
        lambda: sparsity.oneshot(pruner, model, params, [batch], row_weights=weights),
    ):
        with pytest.raises(ValueError, match=message):
            call()
