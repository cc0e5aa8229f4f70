"""A field called `value` keeps its name everywhere; variables of nnx lose that of their value."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sparsity
from sparsity.core import trees


class Attention(NamedTuple):
    query: Any
    key: Any
    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    query: Any
    key: Any
    value: Any


class Module(nnx.Module):
    """A module whose parameter is called `value`."""

    def __init__(self, query, key, value):
        self.query, self.key, self.value = nnx.Param(query), nnx.Param(key), nnx.Param(value)


_CONTAINERS = {
    "NamedTuple": Attention,
    "dataclass": Layer,
    "dict": lambda query, key, value: {"query": query, "key": key, "value": value},
    "nnx": lambda *parts: nnx.state(Module(*parts), nnx.Param),
    "nested": lambda query, key, value: {"value": Attention(query, key, {"value": value})},
}
containers = pytest.mark.parametrize("kind", _CONTAINERS)


def _params(kind):
    weights = jnp.arange(1.0, 17.0).reshape(2, 8)
    return _CONTAINERS[kind](weights, weights + 1, weights + 2)


def _names(kind):
    names = {"query": "query", "key": "key", "value": "value"}
    nested = {"query": "value/query", "key": "value/key", "value": "value/value/value"}
    return nested if kind == "nested" else names


@containers
def test_paths_keep_a_field_called_value(kind):
    actual = [trees.path_string(path) for path in trees.leaves_by_path(_params(kind))]
    assert sorted(actual) == sorted(_names(kind).values())


@containers
def test_summaries_keep_a_field_called_value(kind):
    summary = sparsity.summarize_sparsity(_params(kind))
    assert {key for key in summary if not key.startswith("_")} == {*_names(kind).values()}


@containers
def test_an_override_and_its_mask_reach_a_field_called_value(kind):
    params, names = _params(kind), _names(kind)
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(
            0.5, custom_sparsity_map={names["value"]: 0.25, names["key"]: None}
        ),
        scheduler=sparsity.OneShotSchedule(0),
    )
    pruned, masks = pruner.instant_sparsify(params)
    kept = {
        trees.path_string(path): int(m.sum()) for path, m in trees.leaves_by_path(masks).items()
    }
    assert kept == {names["query"]: 8, names["value"]: 12}
    state = pruner.wrap_optax(optax.sgd(0.1)).init(params)
    rows = {row.path: row for row in sparsity.reports.layer_summary(pruned, state, pruner)}
    assert rows.keys() == {*names.values()}
    assert rows[names["value"]].target == rows[names["value"]].achieved == 0.25
    assert rows[names["key"]].target is None


@pytest.mark.slow
@containers
def test_training_prunes_a_field_called_value(kind):
    params, names = _params(kind), _names(kind)
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5), scheduler=sparsity.OneShotSchedule(0)
    )
    tx = pruner.wrap_optax(optax.adam(0.1))
    state = tx.init(params)
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    params = optax.apply_updates(params, updates)
    actual = {
        trees.path_string(path): int(np.count_nonzero(leaf))
        for path, leaf in trees.leaves_by_path(params).items()
    }
    assert actual == dict.fromkeys(names.values(), 8)


def test_a_tree_inside_of_a_variable_keeps_its_own_fields():
    class Holder(nnx.Module):
        def __init__(self):
            self.w = nnx.Param({"value": jnp.ones(2), "other": {"value": jnp.ones(3)}})

    params = nnx.state(Holder(), nnx.Param)
    actual = [trees.path_string(path) for path in trees.leaves_by_path(params)]
    assert sorted(actual) == ["w/other/value", "w/value"]


def test_masks_of_variables_meet_plain_gradients_with_a_field_called_value():
    params = _params("nnx")
    plain = dict(zip(("query", "key", "value"), _params("NamedTuple"), strict=True))
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.OneShotSchedule(0),
        is_sparse_gradients=True,
    )
    tx = pruner.wrap_optax(optax.sgd(0.5))
    updates, state = tx.update(plain, tx.init(params), plain)
    for name in plain:
        landed = optax.apply_updates(plain, updates)[name]
        assert int(np.count_nonzero(landed)) == 8, name
    assert int(state.count) == 1
