"""Faults of a strategy are errors before any mask is made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity import EpochStrategy, masks, pruning
from tests.epochs.epoch_oracle import (
    parameters,
    strategy,
)
from tests.helpers import normal


@pytest.fixture(params=["function", "updater"])
def attempt(request, monkeypatch):
    """Calls either form of the library; fails if a mask is made."""

    def refuse(*args, **kwargs):
        pytest.fail("A mask was made before the strategy was checked.")

    monkeypatch.setattr(masks, "adapt_scope", refuse)
    if request.param == "function":
        return lambda schedule: pruning(parameters(), 1, None, schedule)
    return lambda schedule: EpochStrategy(schedule, 10).init_state(parameters())


GOOD = strategy(1, "unstr_global", 0.5)  # a fault at another epoch is found all the same


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (None, "A strategy is a dictionary"),
        ([(1, 0.5)], "A strategy is a dictionary"),
        (GOOD | strategy(2, "unstr_global", 0), r"prune_rate_pattern .*epoch 2.* in \(0, 1\]"),
        (GOOD | strategy(2, "unstr_global", 1.5), r"in \(0, 1\], got .*1\.5"),
        (GOOD | strategy(2, "unstr_local", {"Dense_0": 0.0}), r"\['Dense_0'\].*in \(0, 1\]"),
        (GOOD | strategy(2, "str_global", (5, 4)), "epoch 2.*is no pattern.*Did you mean"),
        (GOOD | strategy(2, "str_global", (0, 4)), "n must be at least 1"),
        (GOOD | strategy(2, "str_global", "2 of 4"), "is no pattern"),
        (GOOD | strategy(2, "unstr_globl", 0.5), "mean 'unstr_global'.*str_local"),
        (GOOD | strategy(2, None, 0.5), "method = None .* is not known"),
        (GOOD | strategy("2", "unstr_global", 0.5), "an epoch of a strategy must be an integer"),
        (GOOD | strategy(2.0, "unstr_global", 0.5), "an epoch of a strategy must be an integer"),
        (GOOD | strategy(-1, "unstr_global", 0.5), "must be at least 0"),
        (GOOD | strategy(2, "unstr_global", (2, 4)), r"in \(0, 1\], got .*\(2, 4\)"),
        (GOOD | strategy(2, "str_unified_local", 0.5), "is no pattern"),
        (GOOD | strategy(2, "unstr_local", 0.5), "'unstr_local' .*needs a dictionary"),
        (GOOD | strategy(2, "str_global", {"Dense_0": (2, 4)}), "'str_global' .*needs one value"),
        (GOOD | {2: {"method": "unstr_global"}}, "'method' and 'prune_rate_pattern'"),
        (GOOD | {2: 0.5}, "'method' and 'prune_rate_pattern'"),
        (
            GOOD | strategy(2, "unstr_local", {"Dense_9-kernel": 0.5}),
            "epoch 2 names no layer. Did you mean 'Dense_1-kernel'.*Conv_0-bias",
        ),
        (
            GOOD | strategy(2, "unstr_local", {"Dense_0/kernal": 0.5}),
            "names no layer. Did you mean 'Dense_0-kernel'",
        ),
        (
            GOOD | strategy(2, "unstr_local", {"Dense_0-bias": 0.5, "Dense_0/bias": 0.4}),
            "'Dense_0/bias' .*names the same layer as 'Dense_0-bias'",
        ),
        (GOOD | strategy(2, "unstr_local", {3: 0.5}), "named by a string or a tuple, got 3"),
        (
            GOOD | strategy(2, "str_local", {"Dense_0": sparsity.NByM(2, 4, -2)}),
            r"'Dense_0/bias' of shape \(16,\) has no axis -2",
        ),
    ],
)
def test_faults_of_a_strategy_are_errors_before_any_mask_is_made(attempt, schedule, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        attempt(schedule)


def test_a_name_with_two_meanings_is_an_error_that_a_tuple_resolves():
    params = {"a-b": {"c": normal(4, 4)}, "a": {"b": {"c": normal(4, 4)}}}
    with pytest.raises(ValueError, match=r"'a-b-c'.* may mean any of"):
        pruning(params, 1, None, strategy(1, "unstr_local", {"a-b-c": 0.5}))
    masks = pruning(params, 1, None, strategy(1, "unstr_local", {("a", "b", "c"): 0.5}))[1]
    assert masks["a-b"]["c"] is None
    assert int(masks["a"]["b"]["c"].sum()) == 8


@pytest.mark.parametrize("epoch", [1.0, "1", None, True])
def test_an_epoch_that_is_no_integer_is_an_error(epoch):
    with pytest.raises(ValueError, match="epoch must be an integer"):
        pruning(parameters(), epoch, None, GOOD)


def test_a_traced_epoch_and_an_array_of_floats_are_errors():
    with pytest.raises(ValueError, match="epoch must be an integer, got epoch = JitTracer"):
        jax.jit(lambda epoch: pruning(parameters(), epoch, None, GOOD))(1)
    with pytest.raises(ValueError, match="epoch must be an integer"):
        pruning(parameters(), jnp.float32(1), None, GOOD)


@pytest.mark.slow
def test_epochs_may_be_integers_of_numpy_and_jax():
    for epoch in (np.int64(1), jnp.int32(1)):
        assert pruning(parameters(), epoch, None, GOOD)[0]
    assert pruning(parameters(), 1, None, strategy(np.int32(1), "unstr_global", 0.5))[0]


def test_options_that_the_strategy_decides_and_bad_lengths_of_epochs_are_errors():
    for name in ("scheduler", "sparsity_type", "sparsity_distribution_fn", "topk_fn"):
        with pytest.raises(TypeError, match=f"EpochStrategy has no argument '{name}'"):
            EpochStrategy(GOOD, 1, **{name: None})
    for steps in (0, 1.5, None):
        with pytest.raises(ValueError, match="steps_per_epoch"):
            EpochStrategy(GOOD, steps)
