"""The report of a one-shot run: its table, its picture, and how sensitive each layer is."""

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import sparsity
from sparsity.calibration import LayerReport, Report, Sensitivity
from tests import helpers

matplotlib.use("Agg")

REPORT = Report(
    {
        ("a", "kernel"): LayerReport(0.5, 0.02, 0.08, 40, 1.5),
        ("b",): LayerReport(0.25, 0.01, 0.01, 40, 0.5),
    }
)
PARAMS = {"one": jnp.diag(jnp.array([3.0, 1.0])), "two": jnp.diag(jnp.array([2.0, 1.0]))}
BATCH = jnp.eye(2)


def model(params, x):
    return x @ params["one"] @ params["two"]


def test_the_picture_shows_errors_before_and_after_the_refit():
    ax = REPORT.plot()
    before, after = ax.containers
    assert [bar.get_width() for bar in before] == pytest.approx([8, 1])
    assert [bar.get_width() for bar in after] == pytest.approx([2, 1])
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a/kernel", "b"]
    assert [text.get_text() for text in ax.texts] == ["50.0% pruned", "25.0% pruned"]
    only = Report({("b",): REPORT[("b",)]}).plot(ax.figure.subplots())
    assert len(only.containers) == 1
    matplotlib.pyplot.close("all")


def test_the_table_shows_what_the_report_holds():
    assert "a/kernel 0.5000 0.08000 0.02000 40 1.50" in " ".join(REPORT.table().split())


@pytest.mark.slow
def test_sensitivity_is_the_error_of_the_output_if_one_layer_is_pruned():
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.half, use_packed_masks=True)
    report = Report(dict.fromkeys([("one",), ("two",)], REPORT[("b",)]))
    found = report.sensitivity(pruner, model, PARAMS, iter([BATCH, BATCH]), rates=(0.5, 0.75))
    # The outputs are diag(6, 1): of four weights two stay, then one, the largest.
    assert found == {
        ("one",): {0.5: 0.0, 0.75: pytest.approx(1 / 37)},
        ("two",): {0.5: 0.0, 0.75: pytest.approx(1 / 37)},
    }


def test_rates_reach_the_mean_with_the_smallest_sum_of_errors():
    # Errors by weight and rate: `one` 0.1 / 0.4 / 300, then 0.3 / 0.4 / 300; `two` goes straight to
    # 0.8 along its hull, 0.2 / 0.8 / 100, as the point at 0.5 lies above it.
    curves = Sensitivity({("one",): {0.4: 0.1, 0.8: 0.4}, ("two",): {0.5: 0.2, 0.8: 0.2}})
    sizes = {"one": np.ones(300), "two": np.ones(100), "other": np.ones(7)}
    for mean, one, two in ((0.15, 0.2, 0.0), (0.45, 0.4, 0.6), (0.65, 0.6, 0.8), (0.8, 0.8, 0.8)):
        rates = curves.distribution(sizes, mean)(sizes)
        assert rates == {"one": pytest.approx(one), "two": pytest.approx(two), "other": None}
    with pytest.raises(ValueError, match=r"above the mean 0\.8000 of the highest rates"):
        curves.distribution(sizes, 0.85)
