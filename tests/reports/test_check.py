"""Faults of a set-up that parameters and state show."""

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsity
from tests import helpers

_NAMES = [name for name in sparsity.all_algorithm_names() if name != "no_prune"]


def _step(tx, params, state=None):
    updates, state = tx.update(
        helpers.grads(0), tx.init(params) if state is None else state, params
    )
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
@pytest.mark.parametrize("after", [optax.scale(0.5), optax.add_decayed_weights(0.1)])
def test_a_wrapper_that_is_not_outermost_is_told_by_check_and_table(packed, after):
    pruner = helpers.make_updater("static_sparse", sparsity=0.5, use_packed_masks=packed)
    tx = optax.chain(pruner.wrap_optax(optax.adam(0.1)), after)
    params, state = _step(tx, helpers.params())
    [fault] = sparsity.check(params, state)
    zeros = float((params["kernel"] == 0).mean())
    assert fault.startswith(
        f"Masked weights are not 0 in 'kernel' (masks 0.50, weights {zeros:.2f}): wrap the complete"
    )
    assert sparsity.sparsity_table(params, state, pruner).splitlines()[-1] == fault
    tx = pruner.wrap_optax(optax.chain(optax.adam(0.1), after))
    params, state = _step(tx, helpers.params())
    assert sparsity.check(params, state) == []
    assert "Masked weights" not in sparsity.sparsity_table(params, state, pruner)


def test_a_first_step_with_dense_weights_is_told_before():
    pruner = helpers.make_updater("rigl")
    tx = pruner.wrap_optax(optax.sgd(0.1))
    [fault] = sparsity.check(helpers.params(), tx.init(helpers.params()))
    assert fault.endswith(
        "start with params, opt_state = updater.init(tx, params), which masks them."
    )
    assert sparsity.check(*pruner.init(tx, helpers.params())) == []


@pytest.mark.filterwarnings("ignore:.* target sparsit")
def test_masks_of_ones_and_no_masks_are_told():
    params = helpers.params()
    tx = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.half).wrap_optax(optax.sgd(0.1))
    [fault] = sparsity.check(*_step(tx, params))
    assert fault.startswith("All masks are ones after 1 steps")
    once = sparsity.OneShotSchedule(0)
    tx = sparsity.MagnitudePruning(scheduler=once).wrap_optax(optax.sgd(0.1))
    [fault] = sparsity.check(*_step(tx, params))
    assert fault.startswith("No parameter is pruned")


@pytest.mark.parametrize("name", _NAMES)
def test_every_algorithm_passes_with_the_parameters_that_the_model_uses(name):
    updater = helpers.make_updater(name, update_start_step=0, update_end_step=2)
    tx = updater.wrap_optax(optax.adam(0.1))
    params, state = updater.init(tx, helpers.params())
    for _ in range(3):
        params, state = _step(tx, params, state)
    seen = updater.pre_forward_update(params, state)
    assert sparsity.check(seen, state) == []


def test_traced_values_are_an_error():
    tx = helpers.make_updater("set").wrap_optax(optax.sgd(0.1))
    with pytest.raises(ValueError, match="Call check outside of jit"):
        jax.jit(lambda params: sparsity.check(params, tx.init(params)))({"w": jnp.ones((2, 4))})
