"""The choice of channels, against least squares of every subset, in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.calibration.pruners.exchange import ReaderMatrices, choose_channels
from tests.calibration import oracles

CHANNELS = 10


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def problem(seed, width=1):
    """Weights, Gram, inputs of each channel, and x: inputs of several channels lie in any order."""
    weights, x, _ = oracles.layer(CHANNELS * width, 4, 60, 6, seed)
    input_indices = (
        np.random.default_rng(width).permutation(CHANNELS * width).reshape(CHANNELS, width)
    )
    return weights, x.T @ x, input_indices, x


def chosen(kept, swap, *problems, damping=0.0):
    readers = [
        ReaderMatrices(
            jnp.asarray(weights)[None, None],
            jnp.asarray(gram)[None, None],
            jnp.asarray(input_indices),
        )
        for weights, gram, input_indices, _ in problems
    ]
    return np.flatnonzero(choose_channels(readers, kept, swap, damping)[0])


def error(stay, *problems):
    """What least squares on these channels leave, from the inputs themselves."""
    return sum(
        np.linalg.lstsq(x[:, input_indices[stay].ravel()], x @ weights.T)[1].sum()
        for weights, _, input_indices, x in problems
    )


def one_by_one(kept, *problems):
    """Backward elimination, each time by solving for every candidate."""
    stay = [*range(CHANNELS)]
    while len(stay) > kept:
        smaller = [[j for j in stay if j != i] for i in stay]
        stay = min(smaller, key=lambda indices: error(indices, *problems))
    return stay


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_without_exchanges_channels_go_one_by_one(width):
    for seed in range(2):
        drawn = problem(seed, width)
        for kept in (1, 6):
            np.testing.assert_array_equal(chosen(kept, 0, drawn), one_by_one(kept, drawn))


@pytest.mark.slow
def test_exchanges_come_closer_to_the_best_of_all_subsets():
    gaps = {0: [], 1: [], 4: []}
    for seed in range(10):
        drawn = problem(seed, 2)
        best = min(error(list(x), drawn) for x in itertools.combinations(range(CHANNELS), 3))
        for swap, actual in gaps.items():
            actual.append(error(chosen(3, swap, drawn), drawn) / best)
    none, one, four = map(np.array, gaps.values())
    assert (one <= none * (1 + 1e-9)).all()
    assert (four <= none * (1 + 1e-9)).all()
    assert four.mean() < one.mean() < none.mean()
    assert np.median(four) == pytest.approx(1, abs=1e-9)


def test_no_choice_by_size_or_by_variance_is_better():
    for seed in range(8):
        weights, gram, input_indices, x = problem(seed)
        scores = (weights**2).sum(0), (weights**2).sum(0) * x.var(0)
        actual = error(
            chosen(4, 8, (weights, gram, input_indices, x)), (weights, gram, input_indices, x)
        )
        for score in scores:
            stay = np.argsort(score)[-4:]
            assert actual < error(stay, (weights, gram, input_indices, x))


@pytest.mark.slow
def test_products_that_read_the_same_channels_decide_together():
    drawn = problem(0), problem(1, 2)
    for kept in (2, 5):
        np.testing.assert_array_equal(chosen(kept, 0, *drawn), one_by_one(kept, *drawn))


@pytest.mark.slow
def test_layers_choose_by_themselves():
    layers = problem(0), problem(1)
    weights, grams = (jnp.stack([x[i][None] for x in layers]) for i in range(2))
    masks = choose_channels([ReaderMatrices(weights, grams, jnp.asarray(layers[0][2]))], 4, 8, 0.01)
    for layer, mask in zip(layers, masks, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(mask), chosen(4, 8, layer, damping=0.01))


@pytest.mark.slow
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_dead_channels_and_copies_go_first(damping):
    weights, _, _, x = problem(0)
    x[:, 2] = 0
    x[:, 6] = x[:, 3]
    order = np.arange(CHANNELS)[:, None]
    stay = chosen(6, 0, (weights, x.T @ x, order, x), damping=damping)
    assert 2 not in stay
    assert len({3, 6} & {*stay}) == 1
    nothing = np.zeros_like(weights), np.eye(CHANNELS), order, x
    np.testing.assert_array_equal(chosen(3, 8, nothing), [0, 1, 2])


@pytest.mark.parametrize("width", [1, 2])
def test_any_number_of_channels_may_stay(width):
    drawn = problem(0, width)
    weights, _, input_indices, x = drawn
    singular = weights, x[:3].T @ x[:3], input_indices, x[:3]
    for kept in range(1, CHANNELS + 1):
        assert len(chosen(kept, 8, drawn)) == len(chosen(kept, 8, singular)) == kept
