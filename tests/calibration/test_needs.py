"""A run needs what its pruner and its refit state, and one default for what they leave out."""

import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import Means, prune
from sparsity.calibration.run.prune import combine_kinds, read_kind

HALF = {"sparsity_distribution_fn": sparsity.Uniform(0.5)}
MAGNITUDE, GPT = sparsity.MagnitudePruning(**HALF), sparsity.SparseGPTPruning(**HALF)


class Own:
    """A refit that shares no class with others."""

    damping = 0.5

    def __call__(self, dense, pruned, mask, statistic, select):
        return pruned, mask


class Squares(Own):
    statistics_kind = "squares"


@pytest.mark.parametrize(
    ("pruner", "refit", "kind"),
    [
        (MAGNITUDE, None, "moments"),
        (MAGNITUDE, Means(), "moments"),
        (MAGNITUDE, Squares(), "moments"),
        (MAGNITUDE, sparsity.ADMM(), "gram"),
        (MAGNITUDE, Own(), "gram"),
        (GPT, None, "gram"),
        (GPT, Means(), "gram"),
        (GPT, Squares(), "gram"),
    ],
)
def test_a_run_has_gram_matrices_if_its_pruner_or_its_refit_needs_them(pruner, refit, kind):
    assert combine_kinds(pruner, refit) == kind


def test_a_class_that_states_nothing_has_the_defaults():
    assert read_kind(MAGNITUDE) == "squares"
    assert read_kind(lambda dense, pruned, mask, statistic, select: (pruned, mask)) == "gram"


@pytest.mark.parametrize("kind", ["gramm", None, ["gram"]])
def test_a_kind_that_is_none_is_refused_by_name(kind):
    message = r"statistics_kind of (Squares|SparseGPTPruning) must be one of .*'gram'\), got "
    refit, pruner = Squares(), sparsity.SparseGPTPruning(**HALF)
    refit.statistics_kind = pruner.statistics_kind = kind
    params, seen = jnp.ones((2, 3)), {}
    calls = [
        lambda: sparsity.oneshot(MAGNITUDE, lambda w, x: x @ w, params, [jnp.eye(2)], refit),
        lambda: sparsity.oneshot(pruner, lambda w, x: x @ w, params, [jnp.eye(2)]),
        lambda: prune(MAGNITUDE, params, seen, refit),
        lambda: pruner.instant_sparsify(params, statistics=seen),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("kind", ["squares", "moments"])
def test_a_refit_reads_its_sums_beside_the_gram_matrices_of_a_pruner(kind, sequential):
    class Sums(Own):
        statistics_kind = kind

        def __call__(self, dense, pruned, mask, statistic, select):
            np.testing.assert_allclose(statistic.squares, [5, 25])
            if kind == "moments":
                np.testing.assert_allclose(statistic.sums, [3, 7])
            calls.append(statistic)
            return pruned, mask

    calls = []
    model, params, x = (lambda w, x: x @ w), jnp.ones((2, 3)), jnp.array([[1.0, 3.0], [2.0, 4.0]])
    sparsity.oneshot(GPT, model, params, [x], Sums(), sequential=sequential)
    assert len(calls) == 1
