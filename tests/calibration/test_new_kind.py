"""A kind of statistic that the library does not have: a field, an entry of the table, the sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import ScoredPruning, StatisticsPruning
from sparsity.calibration.statistics import alignment, capture
from sparsity.calibration.statistics.sums import FIELDS_BY_KIND, sum_inputs
from tests import helpers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WithQuartics(sparsity.Statistic):
    quartics: jax.Array | None = None  # sums of x^4


def _sum_quartics(alignment, kind, x, row_weights=None):
    statistic = sum_inputs(alignment, kind, x, row_weights)
    if "quartics" not in FIELDS_BY_KIND[kind]:
        return statistic
    quartics = sum_inputs(alignment, "squares", jnp.square(x)).squares
    return dataclasses.replace(statistic, quartics=quartics)


@pytest.fixture
def quartic_kind(monkeypatch):
    monkeypatch.setattr(alignment, "Statistic", WithQuartics)
    fields = frozenset({"squares", "sums", "quartics"})
    monkeypatch.setitem(FIELDS_BY_KIND, "quartics", fields)
    monkeypatch.setattr(capture, "sum_inputs", _sum_quartics)


@dataclasses.dataclass
class ByQuartics(StatisticsPruning):
    """Keeps the weights whose inputs have the largest sums of x^4."""

    statistics_kind = "quartics"

    def solve(self, site, param, statistic, target):
        matrices = statistic.to_matrices(param)
        scores = jnp.broadcast_to(statistic.quartics[..., None, :], matrices.shape)
        scores = statistic.from_matrices(scores, param.shape)
        return param, site.pattern.select(scores, target, batch_axes=site.batch_axes)


class KeepWeights:
    statistics_kind = "squares"

    def __call__(self, dense, pruned, mask, statistic, select):
        return pruned, mask


PARAMS = {"up": jnp.ones((2, 1))}
X = jnp.array([[3.0, 2.0], [0.0, 2.5], [0.0, 2.0]])  # squares 9 and 14.25, quartics 81 and 71.0625
HALF = {"sparsity_distribution_fn": helpers.half}


def model(params, x):
    return x @ params["up"]


def test_calibrate_returns_the_sums_of_a_kind_of_ones_own(quartic_kind):
    statistic = sparsity.calibrate(model, PARAMS, [X, X], "quartics")["up",]
    np.testing.assert_allclose(statistic.quartics, [162, 142.125])
    np.testing.assert_allclose(statistic.squares, [18, 28.5])
    np.testing.assert_allclose(statistic.sums, [6, 13])


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("refit", [None, KeepWeights()])
def test_oneshot_collects_the_sums_of_a_kind_of_ones_own(quartic_kind, refit, sequential):
    pruner = ByQuartics(**HALF)
    _, masks, report = sparsity.oneshot(pruner, model, PARAMS, [X], refit, sequential=sequential)
    np.testing.assert_array_equal(masks["up"], [[1], [0]])
    assert 0 < report["up",].error < 1


def test_a_statistic_without_the_sums_of_a_kind_of_ones_own_is_refused_by_name(quartic_kind):
    seen = sparsity.calibrate(model, PARAMS, [X], "moments")
    with pytest.raises(ValueError, match=r"ByQuartics needs the quartics of 'up'.*kind='quartics'"):
        ByQuartics(**HALF).instant_sparsify(PARAMS, statistics=seen)
    statistic = dataclasses.replace(seen["up",], quartics=jnp.ones(3))
    with pytest.raises(ValueError, match=r"The quartics of 'up', .* must have shape \(2,\), got"):
        ByQuartics(**HALF).instant_sparsify(PARAMS, statistics={("up",): statistic})


def test_sums_that_no_kind_gives_together_are_refused_by_the_names_of_both(quartic_kind):
    message = r"ByQuartics and ADMM: no statistics_kind gives \['gram', 'quartics', .*'sums'\]"
    with pytest.raises(ValueError, match=message):
        sparsity.oneshot(ByQuartics(**HALF), model, PARAMS, [X], sparsity.ADMM())


def test_batch_axes_of_a_site_repeat_the_sums_of_a_kind_of_ones_own(quartic_kind):
    stack = jnp.ones((2, 2, 1))
    seen = sparsity.calibrate(lambda w, x: jnp.einsum("bi,sio->bso", x, w), stack, [X], "quartics")
    masks = ByQuartics(batch_axes=1, **HALF).instant_sparsify(stack, statistics=seen)[1]
    np.testing.assert_array_equal(masks[..., 0], [[1, 0], [1, 0]])


def test_pruners_of_the_library_read_the_sums_of_a_kind_of_ones_own(quartic_kind):
    class Scored(ScoredPruning):
        statistics_kind = "quartics"

        def score(self, weights, squares):
            return weights**2 * squares

    masks = sparsity.oneshot(Scored(**HALF), model, PARAMS, [X])[1]
    np.testing.assert_array_equal(masks["up"], [[0], [1]])
