"""Strategies by epoch: those of the README, every method and pattern, states and masks."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import strategies as st

import sparsity
from sparsity import EpochStrategy, pruning, pruning_apply
from tests.epochs.epoch_oracle import (
    assert_masks,
    grouped,
    kernels,
    local,
    parameters,
    ranked,
    strategy,
)
from tests.helpers import normal
from tests.selection_oracle import n_of_m

# The strategies of the README, as typed.


@pytest.mark.slow
def test_example_1_keeps_90_percent_of_the_whole_model():
    pruning_strategy = {1: {"method": "unstr_global", "prune_rate_pattern": 0.9}}
    params = parameters()
    mask_updated, mask_key = pruning(params, 1, mask_key=None, prune_strategy=pruning_strategy)
    assert mask_updated is True
    assert_masks(mask_key, ranked(params, 0.9))
    total = sum(w.size for w in kernels(params).values())
    assert sum(int(m.sum()) for m in kernels(mask_key).values()) == round(0.9 * total)


@pytest.mark.slow
def test_example_2_keeps_2_of_every_4_in_every_layer():
    pruning_strategy = {10: {"method": "str_unified_local", "prune_rate_pattern": (2, 4)}}
    params = parameters()
    mask_updated, mask_key = pruning(params, 10, mask_key=None, prune_strategy=pruning_strategy)
    assert mask_updated is True
    assert_masks(mask_key, grouped(params, 2, 4))
    by_group = np.asarray(mask_key["Dense_0"]["kernel"]).reshape(-1, 4).sum(axis=1)
    assert (by_group == 2).all()
    assert np.asarray(mask_key["Dense_1"]["kernel"]).sum(axis=1).tolist() == [6] * 16  # 4 + 4 + 2


@pytest.mark.slow
def test_example_3_keeps_2_of_4_and_later_1_of_4():
    pruning_strategy = {
        10: {"method": "str_unified_local", "prune_rate_pattern": (2, 4)},
        20: {"method": "str_unified_local", "prune_rate_pattern": (1, 4)},
    }
    params, mask_key, updated = parameters(), None, []
    first, second = grouped(params, 2, 4), grouped(params, 1, 4)
    for epoch in range(1, 25):
        params, mask_key = pruning_apply(params, mask_key)
        mask_updated, mask_key = pruning(
            params, epoch, mask_key=mask_key, prune_strategy=pruning_strategy
        )
        if mask_updated:
            updated.append(epoch)
            params, mask_key = pruning_apply(params, mask_key)
        if epoch < 10:
            assert mask_key is None
        else:
            assert_masks(mask_key, first if epoch < 20 else second)
    assert updated == [10, 20]
    for name, w in kernels(params).items():
        np.testing.assert_array_equal(w, np.where(second[name], kernels(parameters())[name], 0))


@pytest.mark.slow
def test_example_4_keeps_a_density_in_each_layer_that_is_named():
    pruning_strategy = {
        10: {
            "method": "unstr_unified_local",
            "prune_rate_pattern": {
                "Dense_0-kernel": 0.9,
                "Dense_1-kernel": 0.8,
            },
        }
    }
    params = parameters()
    mask_updated, mask_key = pruning(params, 10, mask_key=None, prune_strategy=pruning_strategy)
    assert mask_updated is True
    expected = {"Dense_0": local(params, 0.9)["Dense_0"], "Dense_1": local(params, 0.8)["Dense_1"]}
    assert_masks(mask_key, expected)
    assert int(mask_key["Dense_0"]["kernel"].sum()) == round(0.9 * 384)
    assert int(mask_key["Dense_1"]["kernel"].sum()) == 128


@pytest.mark.slow
def test_the_gradual_schedule_of_the_readme_is_nested_and_reaches_each_density():
    schedule = {}
    for i in range(1, 10):
        schedule |= strategy(10 * i, "unstr_unified_local", 1 - i / 10)
    params, mask_key = parameters(), None
    for i in range(1, 10):
        before, (_, mask_key) = mask_key, pruning(params, 10 * i, mask_key, schedule)
        assert_masks(mask_key, local(params, 1 - i / 10))
        for name, mask in kernels(mask_key).items():
            assert before is None or (np.asarray(mask) <= np.asarray(before[name]["kernel"])).all()


# Methods, patterns and names.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "pattern", "oracle"),
    [
        ("unstr_global", 0.3, lambda p: ranked(p, 0.3)),
        ("unstr_global", 1, lambda p: ranked(p, 1)),
        ("unstr_unified_local", 0.3, lambda p: local(p, 0.3)),
        ("unstr_local", {"Conv_1-kernel": 0.3}, lambda p: {"Conv_1": local(p, 0.3)["Conv_1"]}),
        ("str_global", (1, 4), lambda p: grouped(p, 1, 4)),
        ("str_unified_local", "3:4", lambda p: grouped(p, 3, 4)),
        ("str_unified_local", [4, 4], lambda p: grouped(p, 4, 4)),
        ("str_unified_local", sparsity.NByM(2, 4, axis=-2), lambda p: grouped(p, 2, 4, -2)),
        (
            "str_local",
            {"Dense_0-kernel": "2:8"},
            lambda p: {"Dense_0": grouped(p, 2, 8)["Dense_0"]},
        ),
        (
            "str_unified_local",
            {"Dense_0-kernel": (1, 4), "Dense_1-kernel": sparsity.NByM(2, 4, 0)},
            lambda p: {
                "Dense_0": grouped(p, 1, 4)["Dense_0"],
                "Dense_1": grouped(p, 2, 4, 0)["Dense_1"],
            },
        ),
    ],
)
def test_every_method_keeps_what_it_says(method, pattern, oracle):
    params = parameters()
    assert_masks(pruning(params, 3, None, strategy(3, method, pattern))[1], oracle(params))
    updater = EpochStrategy(strategy(3, method, pattern), 5)
    assert_masks(updater.instant_sparsify(params)[1], oracle(params))


@pytest.mark.slow
@hypothesis.given(
    st.floats(0.001, 1.0),
    st.sampled_from(["unstr_global", "unstr_unified_local"]),
    st.integers(0, 99),
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_any_density_is_kept_exactly(density, method, seed):
    params = parameters(seed)
    oracle = ranked if method == "unstr_global" else local
    masks = pruning(params, 1, None, strategy(1, method, density))[1]
    assert_masks(masks, oracle(params, density))


@pytest.mark.parametrize("key", ["Dense_0-kernel", "Dense_0/kernel", ("Dense_0", "kernel")])
def test_layers_are_named_in_three_ways(key):
    params = parameters()
    masks = pruning(params, 1, None, strategy(1, "unstr_local", {key: 0.5}))[1]
    assert_masks(masks, {"Dense_0": local(params, 0.5)["Dense_0"]})


def test_names_may_contain_what_joins_them():
    params = {"Dense-0": {"kernel": normal(4, 4)}, "a": [{"b-c": normal(4, 4)}]}
    for keys in (("Dense-0-kernel", "a-0-b-c"), ("Dense-0/kernel", ("a", 0, "b-c"))):
        rules = dict.fromkeys(keys, 0.5)
        masks = pruning(params, 1, None, strategy(1, "unstr_local", rules))[1]
        assert [int(m.sum()) for m in jax.tree.leaves(masks)] == [8, 8]


@pytest.mark.slow
def test_the_name_of_a_module_stands_for_all_that_has_no_name_of_its_own():
    params = parameters()
    rules = {"Dense_0": 0.25, "Dense_1": 0.25, "Dense_1-kernel": 0.5}
    masks = pruning(params, 1, None, strategy(1, "unstr_local", rules))[1]
    assert int(masks["Dense_0"]["kernel"].sum()) == 96
    assert int(masks["Dense_0"]["bias"].sum()) == 4
    assert int(masks["Dense_1"]["kernel"].sum()) == 80
    assert int(masks["Dense_1"]["bias"].sum()) == 2
    assert masks["Conv_0"] == {"kernel": None, "bias": None}


@pytest.mark.slow
def test_layers_that_an_epoch_does_not_name_keep_their_masks():
    params = parameters()
    schedule = strategy(1, "unstr_local", {"Dense_0": 0.5})
    schedule |= strategy(2, "unstr_global", 0.3) | strategy(3, "str_local", {"Conv_1": (1, 4)})
    masks = [None]
    for epoch in (1, 2, 3):
        masks.append(pruning(params, epoch, masks[-1], schedule)[1])
    bias = [tree["Dense_0"]["bias"] for tree in masks[1:]]
    assert all(np.array_equal(mask, bias[0]) for mask in bias)
    for name in ("Conv_0", "Dense_0", "Dense_1"):
        np.testing.assert_array_equal(masks[3][name]["kernel"], masks[2][name]["kernel"])


def test_pruned_weights_stay_pruned_even_if_training_moved_them():
    params = {"kernel": jnp.array([[4.0, -3.0, 2.0, 1.0]])}
    schedule = strategy(1, "unstr_global", 0.5) | strategy(2, "unstr_global", 0.25)
    mask_key = pruning(params, 1, None, schedule)[1]
    moved = {"kernel": jnp.array([[0.5, -3.0, 90.0, -80.0]])}
    assert pruning(moved, 2, mask_key, schedule)[1]["kernel"].tolist() == [[0, 1, 0, 0]]


def test_a_later_epoch_may_keep_more_and_weights_come_back_at_zero():
    params = {"kernel": jnp.array([[4.0, -3.0, 2.0, 1.0]])}
    schedule = strategy(1, "unstr_global", 0.25) | strategy(2, "unstr_global", 0.5)
    pruned, mask_key = pruning_apply(params, pruning(params, 1, None, schedule)[1])
    mask_key = pruning(params, 2, mask_key, schedule)[1]
    assert int(mask_key["kernel"].sum()) == 2
    assert pruning_apply(pruned, mask_key)[0]["kernel"].tolist() == [[4.0, 0.0, 0.0, 0.0]]


# States and masks.


class Named(NamedTuple):
    params: Any
    step: int = 7


@dataclasses.dataclass(frozen=True)
class Data:
    params: Any
    step: int = 7


class Plain:
    def __init__(self, params):
        self.params, self.step = params, 7


def train_state(params):
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    return state.replace(step=7)


@pytest.mark.slow
@pytest.mark.parametrize("make", [train_state, Named, Data, Plain])
def test_any_object_with_params_is_a_state_and_stays_as_it_was(make):
    params = jax.tree.map(jnp.asarray, parameters())
    state = make(params)
    _, mask_key = pruning(state, 1, None, strategy(1, "unstr_unified_local", 0.5))
    assert_masks(mask_key, local(parameters(), 0.5))
    pruned, same = pruning_apply(state, mask_key)
    assert same is mask_key
    assert type(pruned) is type(state)
    assert pruned is not state
    assert pruned.step == 7
    assert state.params is params
    jax.tree.map(np.testing.assert_array_equal, params, parameters())
    expected = pruning_apply(params, mask_key)[0]
    jax.tree.map(np.testing.assert_array_equal, pruned.params, expected)
    assert sum(int((w == 0).sum()) for w in kernels(expected).values()) > 0


@pytest.mark.slow
def test_the_parameters_of_an_nnx_model_are_pruned_in_their_containers():
    params = nnx.state(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.Param)
    mask_key = pruning(params, 1, None, strategy(1, "str_local", {"kernel": (1, 4)}))[1]
    pruned = pruning_apply(params, mask_key)[0]
    assert jax.tree.structure(pruned) == jax.tree.structure(params)
    np.testing.assert_array_equal(pruned["kernel"][...], n_of_m(np.asarray(params["kernel"]), 1, 4))


def test_without_masks_nothing_is_pruned():
    params = parameters()
    pruned, mask_key = pruning_apply(params, None)
    assert mask_key is None
    jax.tree.map(np.testing.assert_array_equal, pruned, params)
    assert pruning(params, 2, None, strategy(1, "unstr_global", 0.5)) == (False, None)
    assert pruning(params, 2, None, {}) == (False, None)


def test_masks_go_through_jit():
    params = parameters()
    make = jax.jit(lambda p: pruning(p, 1, None, strategy(1, "unstr_global", 0.5))[1])
    assert_masks(make(params), ranked(params, 0.5))
    pruned = jax.jit(lambda p, m: pruning_apply(p, m)[0])(params, make(params))
    jax.tree.map(np.testing.assert_array_equal, pruned, pruning_apply(params, make(params))[0])


def test_masks_go_through_a_checkpoint(tmp_path):
    params = parameters()
    mask_key = pruning(params, 1, None, strategy(1, "unstr_global", 0.5))[1]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "masks", mask_key)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "masks", mask_key)
    assert_masks(restored, ranked(params, 0.5))


def test_packed_masks_are_an_error_and_hold_when_they_are_unpacked():
    params = jax.tree.map(jnp.asarray, parameters())
    schedule = strategy(1, "unstr_local", {"Dense_0-kernel": 0.5})
    schedule |= strategy(2, "unstr_local", {"Dense_0-kernel": 0.25})
    packed = EpochStrategy({1: schedule[1]}, 1, use_packed_masks=True).instant_sparsify(params)[1]
    assert packed["Dense_0"]["kernel"].shape == (24, 2)
    with pytest.raises(ValueError, match=r"'Dense_0/kernel'.*\(24, 2\).*\(24, 16\)"):
        pruning(params, 2, packed, schedule)
    mask_key = pruning(params, 2, sparsity.unpack_masks(packed, params), schedule)[1]
    assert_masks(mask_key, {"Dense_0": local(parameters(), 0.25)["Dense_0"]})


@pytest.mark.slow
def test_summaries_read_the_masks():
    params = parameters()
    mask_key = pruning(params, 1, None, strategy(1, "unstr_local", {"Dense_1-kernel": 0.75}))[1]
    assert sparsity.summarize_sparsity(mask_key)["Dense_1/kernel"] == 0.25


# A model.


class CNN(nn.Module):
    """The README's model, with the sparse activations it shows."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = sparsity.prune_act_unstruct(x, 0.9)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = sparsity.prune_act_struct(x, (2, 4))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=16)(x))
        return nn.Dense(features=10)(x)


@pytest.mark.slow
def test_the_training_loop_of_the_readme_prunes_a_flax_model_that_goes_on_learning():
    images, labels = normal(64, 8, 8, 1), np.arange(64) % 10
    model, mask_key, losses = CNN(), None, {}
    params = model.init(jax.random.key(0), images)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))
    pruning_strategy = strategy(10, "str_unified_local", (2, 4))
    pruning_strategy |= strategy(20, "str_unified_local", (1, 4))

    @jax.jit
    def train_epoch(state):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    for epoch in range(1, 60):
        state, losses[epoch] = train_epoch(state)
        state, mask_key = pruning_apply(state, mask_key)
        mask_updated, mask_key = pruning(
            state, epoch, mask_key=mask_key, prune_strategy=pruning_strategy
        )
        if mask_updated:
            state, mask_key = pruning_apply(state, mask_key)
    for w in kernels(state.params).values():
        groups = np.split(np.asarray(w), range(4, w.shape[-1], 4), axis=-1)
        assert max((group != 0).sum(axis=-1).max() for group in groups) == 1
    assert losses[59] < losses[22]
