"""Rates by outliers: against a plain program, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.calibration import Rates
from tests.calibration import oracles


def layers():
    """Three kernels of which two have outliers, with statistics; and a bias without."""
    made = {f"layer{i}": oracles.layer(64, 8 * (i + 1), seed=i, dtype=np.float32) for i in range(3)}
    params = {
        name: {"kernel": jnp.asarray(w.T), "bias": jnp.ones(3)} for name, (w, *_) in made.items()
    }
    for i, x in enumerate(x for _, x, _ in made.values()):
        x[:, :3] *= 30 * i
    statistics = {(name, "kernel"): oracles.make_statistic(x) for name, (_, x, _) in made.items()}
    return params, statistics


@pytest.mark.slow
def test_rates_are_those_of_a_plain_program_and_average_to_the_target():
    params, statistics = layers()
    shares, sizes = {}, {}
    for path, seen in statistics.items():
        weights = np.asarray(params[path[0]]["kernel"], np.float64)
        scores = np.abs(weights) * np.sqrt(np.asarray(seen.squares))[:, None]
        shares[path], sizes[path] = np.mean(scores > 5 * scores.mean()), scores.size
    low, high = min(shares.values()), max(shares.values())
    unit = {path: (share - low) / (high - low) for path, share in shares.items()}
    mean = sum(unit[path] * sizes[path] for path in unit) / sum(sizes.values())
    assert low < high
    rates = sparsity.owl(statistics, params, sparsity=0.6)(params)
    for path, unit_scores in unit.items():
        assert rates[path[0]]["kernel"] == pytest.approx(
            0.6 - 0.16 * (unit_scores - mean), abs=1e-6
        )
        assert rates[path[0]]["bias"] is None
    total = sum(rates[path[0]]["kernel"] * size for path, size in sizes.items())
    assert total / sum(sizes.values()) == pytest.approx(0.6, abs=1e-9)


@pytest.mark.slow
def test_an_updater_prunes_by_the_rates():
    params, statistics = layers()
    rates = sparsity.owl(statistics, params, sparsity=0.5)
    updater = sparsity.WandaPruning(sparsity_distribution_fn=rates)
    masks = updater.instant_sparsify(params, statistics=statistics)[1]
    for name, rate in rates(params).items():
        kept = np.asarray(masks[name]["kernel"]).sum(0)
        assert (kept == round(64 * (1 - rate["kernel"]))).all()


@pytest.mark.slow
def test_layers_that_are_alike_get_the_same_rate():
    seen = sparsity.Statistic(squares=jnp.ones(4), count=1, contracting=(0,), output=(1,))
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 8))}
    rates = sparsity.owl({("a",): seen, ("b",): seen}, params, sparsity=0.6)
    assert rates(params) == {"a": 0.6, "b": 0.6}
    only = sparsity.owl(
        {("a",): seen, ("b",): seen}, params, filter_fn=lambda path, _: path == ("b",)
    )
    assert only(params) == {"a": None, "b": 0.6}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.2}, r"sparsity must be in \[0, 1\]"),
        ({"sparsity": 0.99}, r"sparsity 1\.\d+, outside \[0, 1\].*Lower the spread"),
        ({"filter_fn": lambda path, param: False}, "filter_fn selects no parameter"),
        ({"spread": -1.0}, "spread must be a finite number >= 0"),
    ],
)
def test_rates_that_cannot_be_are_refused(options, message):
    params, statistics = layers()
    with pytest.raises(ValueError, match=message):
        sparsity.owl(statistics, params, **options)


def test_statistics_of_another_model_are_refused():
    params, statistics = layers()
    del params["layer1"]
    with pytest.raises(ValueError, match="entries for 'layer1/kernel', where the params have no"):
        sparsity.owl(statistics, params)


def test_rates_of_no_parameter_are_refused():
    params = {"w": jnp.ones((4, 8)), "n": jnp.ones((4, 8), jnp.int8)}
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=Rates({("v",): 0.5, ("w",): 0.5}))
    for call in (pruner.instant_sparsify, pruner.wrap_optax(optax.sgd(0.1)).init):
        with pytest.raises(ValueError, match=r"sparsity for 'v', which is no parameter. .*: n, w"):
            call(params)
    integers = sparsity.MagnitudePruning(sparsity_distribution_fn=Rates({("n",): 0.5}))
    with pytest.raises(ValueError, match="gives sparsities to parameters that stay dense"):
        integers.instant_sparsify(params)
    with pytest.raises(ValueError, match=r"Give each path of Rates as a tuple .* got 'w'"):
        Rates({"w": 0.5})


def test_rates_serve_each_group_of_a_partition():
    params = {name: {"w": jnp.ones((4, 8))} for name in "ab"}
    rates = Rates({("a", "w"): 0.5, ("b", "w"): 0.25})
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=rates, scheduler=sparsity.OneShotSchedule(0)
    )
    groups = {name: pruner.wrap_optax(optax.sgd(0.1)) for name in "ab"}
    states = optax.partition(groups, {name: name for name in "ab"}).init(params).inner_states
    targets = [jax.tree.leaves(states[name].inner_state.target_sparsities) for name in "ab"]
    assert targets == [[0.5], [0.25]]
