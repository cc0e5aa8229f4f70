"""Trees that return with their type. Type checkers read the functions, and nothing calls them."""

from typing import NamedTuple, assert_type

import jax
import optax

import sparsity


class Params(NamedTuple):
    up: jax.Array
    down: jax.Array


def model(params: Params, x: jax.Array) -> jax.Array:
    return x @ params.up @ params.down


def loss(params: Params, x: jax.Array) -> jax.Array:
    return model(params, x).sum()


def train(start: Params, masks: Params) -> Params:
    return start


def step(pruner: sparsity.BaseUpdater, params: Params, opt_state: optax.OptState) -> None:
    assert_type(pruner.pre_forward_update(params, opt_state), Params)
    assert_type(pruner.post_gradient_update(params, opt_state), Params)
    assert_type(sparsity.SteMagnitudePruning().pre_forward_update(params, opt_state), Params)
    state = sparsity.get_sparse_state(opt_state)
    assert_type(sparsity.set_sparse_state(state, state), sparsity.SparseState)
    assert_type(pruner.apply_masks(params, state.masks), Params)
    assert_type(sparsity.masks.apply_masks(params, state.masks), Params)
    assert_type(sparsity.apply_mask(params, state.masks), Params)
    assert_type(sparsity.merge_lora(params, None, state.masks), Params)
    masks: Params = state.masks
    assert_type(sparsity.unpack_masks(sparsity.masks.pack_masks(masks, params), params), Params)


def prune(pruner: sparsity.BaseUpdater, params: Params, x: jax.Array) -> None:
    assert_type(pruner.instant_sparsify(params)[0], Params)
    assert_type(pruner.instant_sparsify(x)[0], jax.Array)
    assert_type(sparsity.NoPruning().instant_sparsify({"w": x})[0], dict[str, jax.Array])
    assert_type(sparsity.RigL().instant_sparsify([x])[0], list[jax.Array])
    assert_type(sparsity.EpochStrategy({}, 1).instant_sparsify(params)[0], Params)
    assert_type(sparsity.pruning_apply(params, None)[0], Params)
    assert_type(sparsity.prune_at_init("snip", params, 0.5, loss_fn=loss, batches=[x])[0], Params)
    tickets = sparsity.lottery_ticket(train, params, rounds=1)
    assert_type([(start, trained) for start, _, trained in tickets], list[tuple[Params, Params]])
    assert_type(sparsity.oneshot(pruner, model, params, [x])[0], Params)
    statistics = sparsity.calibrate(model, params, [x])
    assert_type(sparsity.calibration.prune(pruner, params, statistics)[0], Params)
    wanda = sparsity.WandaPruning()
    assert_type(wanda.instant_sparsify(params, statistics=statistics)[0], Params)


def store(graph: sparsity.Graph, params: Params, opt_state: optax.OptState) -> None:
    assert_type(sparsity.Delta.between(params, params).apply(params), Params)
    small = sparsity.shrink(graph, params, None)
    assert_type(small.params, Params)
    compact = sparsity.compact(graph, params, None)
    assert_type(compact.params, Params)
    # The model knows the type, whatever the type of the values that an optimizer returns.
    values: object = optax.apply_updates(compact.params, params)
    assert_type(compact.dense(values), Params)
    assert_type(compact.tune(values).params, Params)
    moved, values, _ = compact.move(sparsity.SET(), values, opt_state, 0)
    assert_type(moved.params, Params)
    assert_type(values, Params)
