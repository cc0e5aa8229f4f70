"""Reports of what became smaller: the table, measured times."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity import shrink, trace


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


def test_the_model_before_and_the_smaller_one_are_measured(model, monkeypatch):
    fn, params, x, small = model
    module = importlib.import_module("sparsity.shrinking.shrink")
    monkeypatch.setattr(
        module, "time_in_turn", lambda *programs, rounds: [run() for run in programs]
    )
    before, after = small.measure(params, x)
    np.testing.assert_allclose(before, fn(params, x), rtol=1e-6)
    np.testing.assert_allclose(after, small.apply(small.params, x), rtol=1e-6)


def test_both_models_are_compiled_before_they_are_measured(model, monkeypatch):
    _, params, x, small = model
    module, measured = importlib.import_module("sparsity.shrinking.shrink"), []
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
    with pytest.raises(ValueError, match=r"shape \(2,\) at 'bias', the graph was traced with"):
        small.measure(small.params, x)
