"""Training continues in the smaller model: with an old updater, a new state, or a new process."""

import subprocess
import sys
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import Coupled, Uniform, budget, shrink, trace
from tests.helpers import ROOT
from tests.scripts import smaller


def model(params, x):
    hidden = jax.nn.relu(x @ params["up"] + params["bias"])
    return jnp.tanh(hidden @ params["middle"]) @ params["down"]


def case():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"up": (5, 16), "middle": (16, 12), "down": (12, 3)}
    params = {
        name: jax.random.normal(key, shape)
        for (name, shape), key in zip(shapes.items(), keys[1:], strict=True)
    }
    x = jax.random.normal(keys[0], (6, 5))
    params["bias"] = jnp.ones(16)
    graph = trace(model, params, x)
    pruner = sparsity.MagnitudePruning(
        scope=Coupled(graph),
        sparsity_distribution_fn=Uniform(0.5, filter_fn=graph.is_weight),
    )
    masked, masks = pruner.instant_sparsify(params)
    return graph, shrink(graph, masked, masks), x


DISTRIBUTIONS = {
    "uniform": lambda graph: Uniform(0.75, filter_fn=graph.is_weight),
    "erk": lambda graph: sparsity.ERK(0.75, filter_fn=graph.is_weight),
    "macs": lambda graph: budget(graph, macs=0.2),
    "bytes": lambda graph: budget(graph, nbytes=0.3),
}


@pytest.mark.parametrize("value", [None, 3, sparsity.RigL])
def test_an_updater_or_a_plan_of_another_type_is_refused_by_its_argument(value):
    _, small, _ = case()
    with pytest.raises(ValueError, match="updater must be an updater"):
        small.updater(value)
    with pytest.raises(ValueError, match="later must be a Plan"):
        small.plan.then(value)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["coupled", "layerwise", "global"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_an_updater_of_the_model_before_starts_anew_in_the_smaller_one(name, scope):
    graph, small, x = case()
    scopes = {
        "coupled": Coupled(graph), "layerwise": sparsity.Layerwise(), "global": sparsity.Global()
    }  # fmt: skip
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=DISTRIBUTIONS[name](graph),
        scope=scopes[scope],
        scheduler=sparsity.OneShotSchedule(0),
    )
    for updater in (pruner, small.updater(pruner)):
        tx = updater.wrap_optax(optax.adam(0.1))
        state = tx.init(small.params)
        grads = jax.grad(lambda p: jnp.sum(small.apply(p, x) ** 2))(small.params)
        updates, state = jax.jit(tx.update)(grads, state, small.params)
        params = optax.apply_updates(small.params, updates)
        kept = {key: int(np.count_nonzero(leaf)) for key, leaf in params.items()}
        assert all(kept[key] < small.params[key].size for key in ("up", "middle", "down"))
    if (name, scope) == ("uniform", "coupled"):
        # A quarter of the 16 and 12 channels of the model before.
        assert (kept["bias"], kept["down"]) == (4, 3 * 3)


def test_nm_of_the_model_before_serves_the_smaller_one():
    graph, small, _ = case()
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=Uniform(0.5, filter_fn=lambda path, _: path == ("middle",)),
        sparsity_type=graph.nm(2, 4),
    )
    _, masks = pruner.instant_sparsify(small.params)
    assert (np.asarray(masks["middle"]).reshape(2, 4, 6).sum(axis=1) == 2).all()
    with pytest.raises(ValueError, match=r"16 divides none.*of shape \(8, 6\)"):
        graph.nm(2, 16)(("middle",), small.params["middle"])


def test_cutting_does_not_change_the_graph():
    graph, small, x = case()
    before = {name: value for name, value in vars(graph).items() if name != "_traces"}
    _ = small.graph.groups, small.apply(small.params, x), small.report()
    after = {name: value for name, value in vars(graph).items() if name != "_traces"}
    # What the class computes when asked, `report` may have asked first.
    assert all(isinstance(getattr(type(graph), x), cached_property) for x in after.keys() - before)
    assert all(before[name] is after[name] for name in before)


@pytest.mark.slow
def test_a_process_without_the_large_arrays_goes_on_with_the_ramp(tmp_path):
    """The plan and the small checkpoint are all that it gets: the same weights as without it."""
    expected = smaller.train(smaller.cut(tmp_path), smaller.END - smaller.CUT)
    command = [sys.executable, "-m", "tests.scripts.smaller", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    with np.load(tmp_path / "end.npz") as end:
        for name, leaf in expected.items():
            np.testing.assert_array_equal(end[name], leaf)
