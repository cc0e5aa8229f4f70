"""The report of a one-shot run: its table, its picture, and how sensitive each layer is."""

import sys

import jax
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
        ("a", "kernel"): LayerReport(0.5, 0.02, 0.08, 40, 1.5, 0.3),
        ("b",): LayerReport(0.25, 0.01, 0.01, 40, 0.5, 0.01),
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
    assert "a/kernel 0.5000 0.08000 0.02000 0.30000 40 1.50" in " ".join(REPORT.table().split())


def shifted(params, x):
    """Inputs with a mean far from 0, through a convolution, layers of a scan and a product."""
    x = jax.lax.conv_general_dilated(x + 9, params["conv"], (2,), "SAME", **NWC)
    x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x.reshape(len(x), -1), params["up"])
    return x[0] @ params["down"]


NWC = {"dimension_numbers": ("NWC", "WIO", "NWC")}
SHAPES = {"conv": (3, 2, 3), "up": (2, 6, 6), "down": (6, 4)}


def list_rows(params, batches):
    """Returns the rows that each layer of a weight meets: {name: [float64[rows, inputs], ...]}."""
    x = np.concatenate(batches).astype(np.float64) + 9
    padded = np.pad(x, ((0, 0), (0, 1), (0, 0)))  # SAME of 4 entries, windows of 3, strides of 2
    windows = np.stack([padded[:, i : i + 3].reshape(len(x), -1) for i in (0, 2)], axis=1)
    kernel = np.float64(params["conv"]).reshape(6, 3)
    h = (windows @ kernel).reshape(len(x), -1)
    rows = {"conv": [windows.reshape(-1, 6)], "up": []}
    for w in np.float64(params["up"]):
        rows["up"].append(h)
        h = h + np.tanh(h @ w)
    return rows | {"down": [h]}


@pytest.mark.slow
@pytest.mark.parametrize("by_grams", [False, True])
def test_errors_are_those_of_the_outputs_with_and_without_their_means(by_grams):
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=s) / 3, jnp.float32) for k, s in SHAPES.items()}
    batches = [np.float32(rng.normal(size=(20, 4, 2))) for _ in range(2)]
    pruner = sparsity.WandaPruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=lambda path, x: True)
    )
    refit = sparsity.LeastSquares() if by_grams else None
    pruned, _, report = sparsity.oneshot(pruner, shifted, params, batches, refit=refit)
    rows = list_rows(pruned, batches)  # each layer meets what the pruned ones before it return
    for name in SHAPES:
        dense, new = (np.float64(x[name]) for x in (params, pruned))
        shape = (6, 3) if name == "conv" else dense.shape[-2:]
        pairs = zip(dense.reshape(-1, *shape), new.reshape(-1, *shape), strict=True)
        errors = []
        for x, (w, w_new) in zip(rows[name], pairs, strict=True):
            lost, outputs = x @ (w - w_new), x @ w
            centred = lost.var(axis=0).sum() / outputs.var(axis=0).sum()
            errors.append([(lost**2).sum() / (outputs**2).sum(), centred])
        error, centred = np.mean(errors, axis=0)
        assert report[name,].error == pytest.approx(error, rel=1e-3)
        assert report[name,].centred == pytest.approx(centred, rel=1e-2)
    expected, returned = (
        np.concatenate([shifted(p, x) for x in batches]).astype(np.float64)
        for p in (params, pruned)
    )
    lost = ((expected - returned) ** 2).sum()
    assert report.outputs.error == pytest.approx(lost / (expected**2).sum(), rel=1e-3)
    spread = ((expected - expected.mean(0)) ** 2).sum()
    assert report.outputs.unexplained == pytest.approx(lost / spread, rel=1e-3)


def test_a_collapse_at_small_errors_is_visible():
    # All inputs but the first are near 10, and outweigh the one that tells rows apart.
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(64, 8)) * 0.01 + 10)
    x[:, 0] = rng.choice([-1, 1], size=64)
    params = {"w": jnp.ones((8, 1))}
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.125), sparsity_type=sparsity.Unstructured()
    )
    params["w"] = params["w"].at[0].set(0.9)

    def accuracy(params):
        return np.mean((np.asarray(x @ params["w"])[:, 0] > 70) == (x[:, 0] > 0))

    held = iter([x[:32], x[32:]])
    _, _, report = sparsity.oneshot(
        pruner, lambda p, x: x @ p["w"], params, [x], held=held, metric=accuracy
    )
    assert report["w",].error < 1e-3
    assert report["w",].centred > 0.99
    assert report.outputs.error < 1e-3
    assert report.outputs.unexplained > 0.99
    assert report.outputs.batches == 2
    assert report.outputs.dense_metric == 1
    assert report.outputs.metric < 0.7
    last = report.table().splitlines()[-1]
    assert last.startswith("outputs of the model on 2 batches: error 0.0001")
    assert "% of their variance lost; metric 1 before, 0." in last


def test_no_batches_and_no_metric_leave_out_the_outputs():
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.half)
    assert sparsity.oneshot(pruner, model, PARAMS, [BATCH], held=())[2].outputs is None


def test_progress_of_calibrate_counts_the_batches(capsys):
    batches = iter([BATCH, BATCH])
    sparsity.calibrate(model, PARAMS, batches, progress=True)
    assert "2it" in capsys.readouterr().err


def test_progress_shows_layers_batches_and_time_and_names_its_extra(capsys, monkeypatch):
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.half)
    sparsity.oneshot(pruner, model, PARAMS, [BATCH, BATCH], progress=True, held=())
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "<00:00" in shown  # the time left
    assert "two, 2 batches" in shown
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(
        ImportError, match=r"This needs tqdm: pip install 'jax-sparsity\[progress\]"
    ):
        sparsity.oneshot(pruner, model, PARAMS, [BATCH], progress=True)


@pytest.mark.slow
def test_sensitivity_is_the_error_of_the_output_if_one_layer_is_pruned():
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.half, use_packed_masks=True)
    report = Report(dict.fromkeys([("one",), ("two",)], REPORT[("b",)]))
    actual = report.sensitivity(pruner, model, PARAMS, iter([BATCH, BATCH]), rates=(0.5, 0.75))
    # The outputs are diag(6, 1): of four weights two stay, then one, the largest.
    assert actual == {
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
