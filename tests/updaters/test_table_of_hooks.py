"""Tables of docs/howto/own_algorithm.md: when each hook is called, and what an override sets."""

import inspect

import jax.numpy as jnp
import optax
import pytest

import sparsity
from sparsity.training.hooks import HookArgs, UpdaterHooks
from tests.updaters.hook_tables import ARGUMENTS, ROWS

PHASES = {
    "at `init`": "init",
    "in every step": "step",
    "when masks update": "update",
    "by `instant_sparsify`": "instant_sparsify",
    "by the loop": "loop",
    "by `post_gradient_update`": "loop",
}
STATED = {"keeps_dense_weights": False, "regrows": False, "keeps_count": "exact"}
QUESTIONS = {"get_distribution_fn", "sites", "compute_targets", "count_after_move"}
QUESTIONS |= {"make_inputs"}


def _noted(hook, calls):
    def note(self, *args, **kwargs):
        calls.add(hook)
        return getattr(super(type(self), self), hook)(*args, **kwargs)

    return note


def test_each_hook_is_called_when_the_table_says():
    calls, params = set(), jnp.arange(1.0, 9.0).reshape(2, 4)
    start = {"init_algorithm_state": lambda self, params, masks: jnp.zeros(1)}
    base = type("Remembering", (sparsity.MagnitudePruning,), start)
    hooks = {hook: _noted(hook, calls) for hook in ROWS}
    updater = type("Noting", (base,), hooks | STATED)(
        sparsity_distribution_fn=sparsity.Uniform(0.5), scheduler=sparsity.OneShotSchedule(1)
    )
    tx = updater.wrap_optax(optax.sgd(0.1))

    def called(run, *args):
        calls.clear()
        return run(*args), set(calls)

    state, at_init = called(tx.init, params)
    (_, state), in_step = called(tx.update, params, state, params)
    (_, state), in_update = called(tx.update, params, state, params)
    _, at_once = called(updater.instant_sparsify, params)
    _, before = called(updater.pre_forward_update, params, state)
    _, after = called(updater.post_gradient_update, params, state)
    phases = {
        "init": at_init,
        "step": in_step,
        "update": in_update - in_step,
        "instant_sparsify": at_once,
        "loop": before | after,
    }
    for hook, when in ROWS.items():
        named = {phase for words, phase in PHASES.items() if words in when}
        assert named == {phase for phase, hooks in phases.items() if hook in hooks}, hook


def test_every_hook_has_a_row():
    methods = {name for name, x in vars(UpdaterHooks).items() if callable(x) and name[0] != "_"}
    assert ROWS.keys() == methods - QUESTIONS - {"sparsity_distribution_fn"}


@pytest.mark.parametrize("kind", [UpdaterHooks, *sparsity.ALGORITHM_REGISTRY.values()])
def test_hooks_take_what_the_library_offers_by_name_alone(kind):
    for hook in ROWS.keys() - QUESTIONS:
        parameters = inspect.signature(getattr(kind, hook)).parameters
        for name in parameters.keys() & (HookArgs.__annotations__.keys() - {"target_sparsities"}):
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY, (hook, name)
        kinds = [parameter.kind for parameter in parameters.values()]
        assert inspect.Parameter.POSITIONAL_ONLY not in kinds, hook


def _taking(name, hook, takers):
    def take(self, *args, **kwargs):
        if kwargs.pop(name, None) is not None:
            takers.add(hook)
        return getattr(super(type(self), self), hook)(*args, **kwargs)

    everything = inspect.signature(lambda *args, **kwargs: None).parameters.values()
    keyword = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = sorted([*everything, keyword], key=lambda parameter: parameter.kind)
    take.__signature__ = inspect.Signature(parameters)
    return take


def test_the_table_of_arguments_lists_all_that_the_library_passes():
    assert ARGUMENTS.keys() == HookArgs.__annotations__.keys()


@pytest.mark.parametrize("name", HookArgs.__annotations__)
def test_an_argument_is_passed_to_the_hooks_that_the_table_names(name):
    takers, params = set(), jnp.arange(1.0, 9.0).reshape(2, 4)
    for base, hooks in (
        (sparsity.MagnitudePruning, ROWS.keys() - {"apply_masks"}),
        (sparsity.RigL, ("get_drop_scores", "get_grow_scores")),
    ):
        start = {"init_algorithm_state": lambda self, params, masks: jnp.zeros(1)}
        remembering = type("Remembering", (base,), start)
        overrides = {hook: _taking(name, hook, takers) for hook in hooks}
        updater = type("Taking", (remembering,), overrides | STATED)(
            sparsity_distribution_fn=sparsity.Uniform(0.5), scheduler=sparsity.OneShotSchedule(0)
        )
        tx = updater.wrap_optax(optax.sgd(0.1))
        tx.update(params, tx.init(params), params)
    assert takers == ARGUMENTS[name]
