"""An override of a hook changes the results of an algorithm or is an error.

Each override multiplies its result by a number of its own. A number that no output of the traced
program needs belongs to an override without effect.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.interpreters import partial_eval

import sparsity
from tests.updaters.hook_tables import ROWS

PARAMS = jnp.arange(1.0, 9.0).reshape(2, 4)
ONCE = {"scheduler": sparsity.OneShotSchedule(0)}
HALF = {"sparsity_distribution_fn": sparsity.Uniform(0.5)}
STATED = {"keeps_dense_weights": False, "regrows": True, "keeps_count": "exact"}
_STORED = {"store_masks": True}
CASES = {name: (cls, HALF | ONCE) for name, cls in sparsity.ALGORITHM_REGISTRY.items()}
del CASES["no_prune"]  # calls no hook of a step, which makes a class that prunes dense
CASES |= {
    "global_magnitude": (sparsity.GlobalMagnitudePruning, {"sparsity": 0.5} | ONCE),
    "global_saliency": (sparsity.GlobalSaliencyPruning, {"sparsity": 0.5} | ONCE),
    "magnitude_ste, stored": (sparsity.SteMagnitudePruning, _STORED | HALF | ONCE),
    "sr_ste, stored": (sparsity.SRSTE, _STORED | HALF | ONCE),
    "epochs": (
        sparsity.EpochStrategy,
        {
            "strategy": {0: {"method": "unstr_unified_local", "prune_rate_pattern": 0.5}},
            "steps_per_epoch": 1,
        },
    ),
}
_MOVES = {"calculate_scores", "create_masks"}
_STRAIGHT_THROUGH = {"apply_masks", "get_initial_masks", "new_masks"}
REFUSED = {
    "set": _MOVES,
    "rigl": _MOVES,
    "global_rigl": _MOVES,
    "srigl": _MOVES,
    "static_sparse": {"calculate_scores"},
    "admm": {"new_masks"},
    "top_kast": {"new_masks", "apply_masks"},
    "epochs": {"create_masks"},
    "magnitude_ste": _STRAIGHT_THROUGH,
    "random_ste": _STRAIGHT_THROUGH,
    "sr_ste": _STRAIGHT_THROUGH,
    "magnitude_ste, stored": {"apply_masks"},
    "sr_ste, stored": {"apply_masks"},
}


def _scaled(tree, number):
    return jax.tree.map(lambda x: (x * number).astype(x.dtype), tree)


def _override(hook, numbers):
    """Returns an override of a hook whose result the number of the hook scales."""

    def scale(self, *args, **kwargs):
        result, number = getattr(super(type(self), self), hook)(*args, **kwargs), numbers[hook]
        if hook == "init_state":
            return result._replace(count=_scaled(result.count, number))
        if hook == "accumulate":
            return result._replace(algorithm_state=_scaled(result.algorithm_state, number))
        if hook == "update_state":
            memory = _scaled(result.algorithm_state, number)
            return result._replace(masks=_scaled(result.masks, number), algorithm_state=memory)
        if hook == "get_initial_masks" and result is None:
            return _scaled(jnp.ones(PARAMS.shape, jnp.uint8), number)
        if hook == "init_algorithm_state" and result is None:
            return number
        return _scaled(result, number)

    return scale


def _run(updater, params, grads):
    """Returns the results of all phases, with a step that updates masks."""
    tx = updater.wrap_optax(optax.adam(0.1))
    first = tx.init(params)
    updates, state = tx.update(grads, first, params)
    loop = updater.pre_forward_update(params, state), updater.post_gradient_update(params, state)
    at_once = updater.prunes_at_once and updater.instant_sparsify(params, grads)
    return first, updates, state, loop, at_once


def _refusal(cls, options, hook):
    """Returns the error of a class that overrides one hook, "" for none."""
    try:
        type("Derived", (cls,), {hook: _override(hook, {})} | STATED)(**options)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES)
def test_an_override_changes_the_results_or_is_an_error_that_names_another_hook(name):
    cls, options = CASES[name]
    hooks = [*ROWS, *(x for x in ("get_drop_scores", "get_grow_scores") if hasattr(cls, x))]
    errors = {hook: error for hook in hooks if (error := _refusal(cls, options, hook))}
    assert errors.keys() == REFUSED.get(name, set())
    for hook, error in errors.items():
        pattern = rf"Derived overrides {hook}, which .*override (\w+)"
        replacement = re.search(pattern, error)
        assert replacement, error
        assert replacement.group(1) not in errors, error
    effective, numbers = [hook for hook in hooks if hook not in errors], {}
    derived = type("Derived", (cls,), {x: _override(x, numbers) for x in effective} | STATED)

    def run(params, values):
        numbers.update(zip(effective, values, strict=True))
        return _run(derived(**options), params, params)

    program = jax.make_jaxpr(run)(PARAMS, [jnp.float32(1)] * len(effective)).jaxpr
    _, is_used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    idle = [hook for hook, used in zip(effective, is_used[1:], strict=True) if not used]
    assert not idle


_LOOP = {"pre_forward_update", "post_gradient_update", "apply_masks"}
_INIT = {"init_state", "get_initial_masks", "init_algorithm_state"}
# Hooks that get no arguments of `update`: masks of a forward pass, or of `init`.
_MASK_HOOKS = {"calculate_scores", "create_masks"}
_WITHOUT = dict.fromkeys(("magnitude_ste", "random_ste", "sr_ste", "static_sparse"), _MASK_HOOKS)


@pytest.mark.parametrize("name", CASES)
def test_arguments_of_the_loop_reach_each_override_that_names_them(name):
    cls, options = CASES[name]
    hooks = [*ROWS, *(x for x in ("get_drop_scores", "get_grow_scores") if hasattr(cls, x))]
    seen = {}

    def noting(hook):
        def note(self, *args, importance=None, sites=None, **kwargs):
            seen.setdefault(hook, []).append((importance, sites is None))
            if hook == "update_state":  # it calls other hooks
                kwargs |= {"importance": importance, "sites": sites}
            return getattr(super(type(self), self), hook)(*args, **kwargs)

        return note

    idle = _LOOP | _INIT | REFUSED.get(name, set()) | _WITHOUT.get(name, set())
    effective = [hook for hook in hooks if hook not in idle]
    updater = type("Derived", (cls,), {x: noting(x) for x in effective} | STATED)(**options)
    tx, marker = updater.wrap_optax(optax.sgd(0.1)), object()

    def step(params):
        state = tx.init(params)
        seen.clear()
        return tx.update(params, state, params, importance=marker)

    jax.eval_shape(step, PARAMS)
    assert seen.keys() == set(effective)
    for hook, arguments in seen.items():
        for importance, lacks_sites in arguments:
            assert importance is marker, hook
            assert not lacks_sites, hook


@pytest.mark.parametrize("caller", ["get_initial_masks", "new_masks", "update_state"])
def test_scores_of_a_class_that_moves_masks_may_be_overridden_with_a_hook_that_calls_them(caller):
    hooks = {hook: _override(hook, {}) for hook in ("calculate_scores", caller)}
    type("Derived", (sparsity.RigL,), hooks | STATED)(**HALF)


@pytest.mark.parametrize(
    ("mixin", "base", "hook", "remedy"),
    [
        (sparsity.algorithms.LampPruning, sparsity.RigL, "calculate_scores", "get_drop_scores"),
        (sparsity.MagnitudePruning, sparsity.SRigL, "calculate_scores", "get_drop_scores"),
        (sparsity.MagnitudePruning, sparsity.StaticRandomSparse, "calculate_scores", "get_initial"),
        (sparsity.SET, sparsity.ADMMPruning, "new_masks", "update_state"),
    ],
)
def test_an_algorithm_ahead_of_another_that_ignores_it_is_an_error(mixin, base, hook, remedy):
    message = rf"Mixed overrides {hook}, which \w+ never calls: .*{remedy}"
    with pytest.raises(TypeError, match=message):
        type("Mixed", (mixin, base), {})


def test_algorithms_may_be_mixed_if_every_hook_is_called():
    kinds = sparsity.SET, sparsity.MagnitudePruning  # SET moves the masks
    assert type("Moving", kinds, {}).new_masks is sparsity.SET.new_masks
    kinds = sparsity.MagnitudePruning, sparsity.NoPruning
    assert type("Dense", kinds, {})().instant_sparsify(PARAMS)[1] is None
    kinds = sparsity.MagnitudePruning, sparsity.RigL
    type("Mixed", kinds, {"get_grow_scores": sparsity.MagnitudePruning.calculate_scores})
    kinds = sparsity.algorithms.TopKast, sparsity.RigL  # whose update_state calls its scores
    assert type("Mixed", kinds, {}).update_state is sparsity.algorithms.TopKast.update_state


def test_a_class_made_dense_keeps_its_hooks():
    class Dense(sparsity.NoPruning):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return params

    assert Dense().instant_sparsify(PARAMS)[1] is None


@pytest.mark.parametrize(
    ("hook", "caller"),
    [
        ("calculate_scores", "get_drop_scores"),
        ("calculate_scores", "get_grow_scores"),
        ("create_masks", "get_initial_masks"),
    ],
)
def test_a_hook_may_be_a_helper_of_another_hook(hook, caller):
    with pytest.raises(TypeError, match=f"overrides {hook}, which"):
        type("Derived", (sparsity.RigL,), {hook: _override(hook, {})})
    type("Derived", (sparsity.RigL,), {x: _override(x, {}) for x in (hook, caller)})
