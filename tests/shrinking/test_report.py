"""What became smaller: the table, the picture, measured times."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

from sparsity import shrink, trace

mpl.use("Agg")


@pytest.fixture
def model():
    """(function, params, input, the model without two of its four channels)."""

    def fn(params, x):
        return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]

    params = {"up": jnp.ones((3, 4)), "bias": jnp.ones(4), "down": jnp.ones((4, 2))}
    x = jnp.ones((5, 3))
    stays = jnp.array([1, 0, 0, 1])
    masks = {
        "up": jnp.tile(stays, (3, 1)),
        "bias": stays,
        "down": jnp.tile(stays[:, None], (1, 2)),
    }
    return fn, params, x, shrink(trace(fn, params, x), params, masks)


def cells(text):
    return [line.split() for line in text.splitlines()]


def test_the_table_has_shapes_parameters_bytes_and_macs_before_and_after(model):
    *_, small = model
    lines = cells(small.report())
    # up: 5 rows x 3 x 4 MACs; down: 5 rows x 4 x 2.
    assert ["up", "3x4", "3x2", "12", "6", "48", "24", "60", "30"] in lines
    assert ["bias", "4", "2", "4", "2", "16", "8", "0", "0"] in lines
    assert lines[-1] == ["all", "24", "12", "96", "48", "100", "50"]


def test_measured_times_are_shown_below(model):
    *_, small = model
    text = small.report({"training step": (0.02, 0.005), "inference": (1.0, 0.25)})
    assert ["training", "step", "20", "ms", "5", "ms", "0.25"] in cells(text)
    assert ["inference", "1e+03", "ms", "250", "ms", "0.25"] in cells(text)


def test_the_picture_has_a_light_and_a_dark_bar_for_each_leaf_that_can_be_seen(model):
    *_, small = model
    macs, parameters = small.plot()
    assert [text.get_text() for text in macs.get_yticklabels()] == ["down", "up"]
    assert [p.get_width() * 1e6 for p in macs.patches] == pytest.approx([40, 60, 20, 30])
    assert [p.get_width() * 1e6 for p in parameters.patches] == pytest.approx([8, 12, 4, 6])
    texts = [text.get_text() for text in parameters.texts]
    assert texts == ["33.3% to 16.7%", "50.0% to 25.0%"]
    assert macs.yaxis_inverted()  # the first leaf on top
    assert small.plot((macs, parameters)) == (macs, parameters)
    for axes in (macs, [macs], "xy", (macs, mpl.pyplot), {macs: 1, parameters: 2}):
        with pytest.raises(ValueError, match="axes must be two matplotlib axes or None, got axes "):
            small.plot(axes)
    with pytest.raises(ValueError, match="ax must be matplotlib axes or None, got ax = <module"):
        small.graph.plot(ax=mpl.pyplot)
    mpl.pyplot.close(macs.figure)


def test_the_model_before_and_the_smaller_one_are_measured(model, monkeypatch):
    fn, params, x, small = model
    module = importlib.import_module("sparsity.shrinking.small")
    monkeypatch.setattr(
        module, "time_in_turn", lambda *programs, rounds: [run() for run in programs]
    )
    before, after = small.measure(params, x)
    np.testing.assert_allclose(before, fn(params, x), rtol=1e-6)
    np.testing.assert_allclose(after, small.apply(small.params, x), rtol=1e-6)


def test_both_models_are_compiled_before_they_are_measured(model, monkeypatch):
    _, params, x, small = model
    module, measured = importlib.import_module("sparsity.shrinking.small"), []
    monkeypatch.setattr(module, "time_in_turn", lambda *programs, rounds: measured.extend(programs))
    small.measure(params, x)
    for program in measured:
        text = program.func.lower(*program.args).as_text()
        assert text.count("dot_general") == 2


@pytest.mark.slow
def test_a_module_with_functions_among_its_leaves_is_measured():
    mlp = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))

    def fn(mlp, x):
        return jax.vmap(mlp)(x)

    small = shrink(trace(fn, mlp, x := jnp.ones((5, 3))), mlp, jax.tree.map(lambda _: None, mlp))
    assert len(small.measure(mlp, x, rounds=1)) == 2


def test_measure_says_that_it_takes_the_parameters_before_the_cut(model):
    *_, x, small = model
    with pytest.raises(
        ValueError, match=r"takes the parameters before the cut.*'\w+' must have sh"
    ):
        small.measure(small.params, x)
