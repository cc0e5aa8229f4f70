"""Classes that users derive, in ways that the library's own classes do not need."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.training.hooks import keeps_dense_weights

HALF = {"sparsity_distribution_fn": sparsity.Uniform(0.5)}
ONCE = {"scheduler": sparsity.OneShotSchedule(0)}
PARAMS = {"k": jnp.arange(1.0, 33.0).reshape(4, 8), "b": jnp.ones(8)}


@pytest.mark.slow
def test_an_algorithm_state_of_init_state_is_kept():
    class Counting(sparsity.MagnitudePruning):
        def init_state(self, params):
            return super().init_state(params)._replace(algorithm_state=jnp.ones(3))

    tx = Counting(**HALF, **ONCE).wrap_optax(optax.sgd(0.1))
    state = tx.init(PARAMS)
    np.testing.assert_array_equal(state.algorithm_state, [1, 1, 1])
    np.testing.assert_array_equal(tx.update(PARAMS, state, PARAMS)[1].algorithm_state, [1, 1, 1])


def test_a_class_may_have_an_init_of_its_own_or_a_variable_for_it():
    class Scaled(sparsity.MagnitudePruning):
        def __init__(self, alpha, **options):
            super().__init__(**options)
            self.alpha = alpha

    @dataclasses.dataclass
    class Shifted(sparsity.MagnitudePruning):
        shift: dataclasses.InitVar[float] = 0.0

        def __post_init__(self, shift):
            super().__post_init__()
            self.shifted = shift

    assert Scaled(alpha=2.0, **HALF).alpha == 2.0
    assert Shifted(shift=3.0, **HALF).shifted == 3.0


def test_a_class_that_does_not_prune_at_once_has_no_instant_sparsify():
    class Starting(sparsity.MagnitudePruning):
        prunes_at_once = False

    with pytest.raises(RuntimeError, match="Starting trains sparse from the start"):
        Starting(**HALF).instant_sparsify(PARAMS)


def test_a_mixin_that_keeps_dense_weights_is_noticed():
    class Soft:
        def post_gradient_update(self, params, sparse_state):
            return params

    class Pruner(Soft, sparsity.MagnitudePruning):
        pass

    class Child(Pruner):
        pass

    for cls, keeps in ((Pruner, True), (Child, True), (sparsity.MagnitudePruning, False)):
        assert keeps_dense_weights(cls()) is keeps


@pytest.mark.parametrize("keeps", [True, False])
def test_a_mixin_states_attributes_for_the_class_that_it_is_mixed_into(keeps):
    class Soft:
        keeps_dense_weights, keeps_count, regrows = keeps, "exact", False

        def post_gradient_update(self, params, sparse_state):
            return params

        def calculate_scores(self, params, sparse_state=None, grads=None):
            return params

    class Pruner(Soft, sparsity.MagnitudePruning):
        pass

    assert keeps_dense_weights(Pruner()) is keeps
    assert (Pruner.regrows, Pruner.keeps_count) == (False, "exact")
    Pruner(**HALF, **ONCE).wrap_optax(optax.sgd(0.1))  # warnings are errors


@pytest.mark.parametrize("value", [True, False, None])
def test_a_class_names_the_number_of_weights_that_it_keeps(value):
    stating = type("Own", (sparsity.SET,), {"keeps_count": value})
    assigned = type("Own", (sparsity.SET,), {})()
    assigned.keeps_count = value
    for make in (stating, lambda: assigned.wrap_optax(optax.sgd(0.1))):
        with pytest.raises(ValueError, match=r"Own.keeps_count .*'exact', 'at most', 'any'.*got "):
            make()


@pytest.mark.parametrize("base", [sparsity.SET, sparsity.RigL, sparsity.SRigL])
def test_create_masks_of_a_class_that_moves_masks_is_an_error_that_names_the_hook_to_override(base):
    class Chosen:
        def create_masks(self, scores, sparsities, target_sparsities=None):
            raise AssertionError("never called")

    with pytest.raises(TypeError, match=r"Ignored overrides create_masks.*override new_masks"):
        type("Ignored", (Chosen, base), {})


@pytest.mark.parametrize("base", [sparsity.SET, sparsity.RigL, sparsity.SRigL])
def test_scores_of_a_class_that_moves_masks_get_the_arguments_that_they_name(base):
    calls = []

    class Scored(base):
        def get_drop_scores(self, sparse_state, params, grads, *, sites):
            calls.append([site.name for site in sites.values()])
            return jax.tree.map(jnp.abs, params)

        def get_grow_scores(self, sparse_state, params, grads, *, value):
            calls.append(value)
            return sparsity.algorithms.pruners.generate_random_scores(params, 3)

    params = {"k": PARAMS["k"]}
    tx = Scored(**HALF, **ONCE).wrap_optax(optax.sgd(0.1))
    _, state = tx.update(params, tx.init(params), params, value=5)
    assert calls == [["k"], 5]
    assert int(state.masks["k"].sum()) == 16


def test_a_class_may_move_masks_by_its_own_create_masks():
    class Remade(sparsity.RigL):
        def create_masks(self, scores, sparsities, target_sparsities=None):
            return jax.tree.map(lambda x: (x > 16).astype(jnp.uint8), scores)

        def new_masks(self, sparse_state, inputs):
            return self.create_masks(inputs.weights, sparse_state.target_sparsities)

    tx, params = Remade(**HALF, **ONCE).wrap_optax(optax.sgd(0.1)), {"k": PARAMS["k"]}
    _, state = tx.update(params, tx.init(params), params)
    assert state.masks["k"].reshape(-1).tolist() == 16 * [0] + 16 * [1]


@pytest.mark.parametrize("base", [sparsity.MagnitudePruning, sparsity.SET, sparsity.RigL])
@pytest.mark.parametrize("options", [{}, {"use_packed_masks": True}])
def test_new_masks_get_the_arguments_of_the_loop_that_they_name(base, options):
    class Ranked(base):
        def new_masks(self, sparse_state, inputs, *, importance, sites):
            assert [site.name for site in sites.values()] == ["k"]
            targets = sparse_state.target_sparsities
            return sparsity.MagnitudePruning.create_masks(self, importance, targets, sites=sites)

    tx, params = Ranked(**HALF, **ONCE, **options).wrap_optax(optax.sgd(0.1)), {"k": PARAMS["k"]}
    importance = {"k": jnp.zeros((4, 8)).at[:2].set(1)}
    _, state = tx.update(params, tx.init(params), params, importance=importance)
    assert (state.masks["k"] > 0).any(axis=1).tolist() == [True, True, False, False]


def test_new_masks_of_a_compact_step_get_the_arguments_of_the_loop_that_they_name():
    class Ranked(sparsity.RigL):
        keeps_count = "exact"

        def new_masks(self, sparse_state, inputs, *, importance):
            return {"k": importance}

    params, importance = {"k": PARAMS["k"]}, jnp.zeros((4, 8), jnp.uint8).at[:2].set(1)
    options = {"use_compact_state": True, "is_sparse_gradients": True}
    tx = Ranked(**HALF, **ONCE, **options).wrap_optax(optax.adam(0.1))
    _, state = tx.update(params, tx.init(params), params, importance=importance)
    assert state.masks["k"].tolist() == importance.tolist()


@pytest.mark.slow
def test_a_state_made_by_hand_has_the_form_that_update_returns():
    class ByHand(sparsity.StaticRandomSparse):
        def init_state(self, params):
            targets = self.sparsity_distribution_fn(params)
            masks = self.get_initial_masks(params, targets)
            return sparsity.SparseState(masks=masks, target_sparsities=targets)

    tx = ByHand(**HALF).wrap_optax(optax.adam(0.1))
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for _ in range(2):
        _, state = update(PARAMS, state, PARAMS)
    assert update._cache_size() == 1
    assert int(state.count) == 2


_WRONG_HOOKS = {
    "calculate_scores": lambda self, params: params,
    "create_masks": lambda self, scores: scores,
    "get_initial_masks": lambda self, params: params,
    "init_algorithm_state": lambda self, params: params,
    "modify_gradients": lambda self, grads, params, sparse_state, loss: grads,
    "accumulate": lambda self, sparse_state: sparse_state,
    "update_state": lambda self, sparse_state: sparse_state,
}


def _train(hook, function):
    """Makes a step of an updater of a class with one hook."""
    updater = type("Pruner", (sparsity.MagnitudePruning,), {hook: function})(**HALF, **ONCE)
    tx = updater.wrap_optax(optax.sgd(0.1))
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("hook", _WRONG_HOOKS)
def test_a_hook_of_other_arguments_is_an_error_with_its_signature(hook):
    with pytest.raises(
        TypeError, match=r"\(.*\) does not fit its call: .*help\(sparsity.BaseUpdater\)"
    ):
        _train(hook, _WRONG_HOOKS[hook])


@pytest.mark.parametrize("hook", ["init_state", "accumulate", "update_state"])
def test_a_hook_that_returns_no_state_is_an_error_with_its_name(hook):
    with pytest.raises(ValueError, match=f"the result of {hook} must be a SparseState, got"):
        _train(hook, lambda self, *args, **kwargs: None)


@pytest.mark.parametrize("result", [None, {"k": None, "b": None}, {"k": None, "b": jnp.ones(8)}])
@pytest.mark.parametrize("base", [sparsity.MagnitudePruning, sparsity.RigL])
def test_first_masks_without_one_for_a_target_are_an_error_of_init(base, result):
    class Forgetful(base):
        def get_initial_masks(self, params, target_sparsities):
            return result

    for options in ({}, {"use_packed_masks": True}):
        tx = Forgetful(**HALF, **ONCE, **options).wrap_optax(optax.sgd(0.1))
        with pytest.raises(
            ValueError, match=r"Forgetful.get_initial_masks returned no mask for 'k'"
        ):
            tx.init(PARAMS)
    masks = {"k": PARAMS["k"] > 16, "b": None}
    state = Forgetful(**HALF, **ONCE).wrap_optax(optax.sgd(0.1), masks=masks).init(PARAMS)
    assert state.masks["k"].sum() == 16  # masks of the user replace the masks of the hook


def test_masks_without_one_for_a_target_are_an_error_of_instant_sparsify():
    class Forgetful(sparsity.MagnitudePruning):
        def create_masks(self, scores, sparsities):
            pass

    with pytest.raises(ValueError, match=r"Forgetful.create_masks returned no mask for 'k'"):
        Forgetful(**HALF).instant_sparsify(PARAMS)


@pytest.mark.parametrize("names", ["kb", "b"])
def test_gradients_that_a_hook_leaves_out_are_an_error_with_their_paths(names):
    def modify(self, grads, params, sparse_state):
        return None if names == "kb" else {**grads, "b": None}

    listed = ", ".join(map(repr, sorted(names)))
    with pytest.raises(ValueError, match=rf"Pruner.modify_gradients .*no gradient of {listed}\."):
        _train("modify_gradients", modify)


def test_a_gradient_of_another_shape_is_an_error_with_its_path():
    with pytest.raises(ValueError, match=r"gradient of 'k' has shape \(8,\)"):
        _train("modify_gradients", lambda self, grads, *args: {**grads, "k": jnp.ones(8)})


def test_straight_through_methods_refuse_masks_that_they_would_not_use():
    masks = {"k": jnp.ones((4, 8)).at[0].set(0), "b": None}
    with pytest.raises(ValueError, match="set store_masks=True"):
        sparsity.SteMagnitudePruning(**HALF).wrap_optax(optax.sgd(0.1), masks=masks)
    stored = sparsity.SteMagnitudePruning(store_masks=True, **HALF)
    assert stored.wrap_optax(optax.sgd(0.1), masks=masks).init(PARAMS).masks["k"].sum() == 24


def test_stored_masks_without_a_schedule_are_a_warning_inside_jit_too():
    tx = sparsity.SteMagnitudePruning(store_masks=True, **HALF).wrap_optax(optax.sgd(0.1))
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.warns(UserWarning, match="training stays dense"):
            init(PARAMS)


def test_a_strategy_that_updates_now_and_then_trains():
    entry = {"method": "unstr_unified_local", "prune_rate_pattern": 0.5}
    updater = sparsity.EpochStrategy({0: entry, 1: entry, 50: entry}, 1, skip_gradients=True)
    updater.wrap_optax(optax.sgd(0.1)).init(PARAMS)  # without a warning


def test_fields_of_the_class_itself_are_no_keys_of_a_configuration():
    with pytest.raises(ValueError, match="'regrows' is no key"):
        sparsity.create_updater_from_config(
            {"algorithm": "magnitude", "sparsity": 0.5, "regrows": True}
        )
    with pytest.raises(ValueError, match="does not read this key"):
        sparsity.create_updater_from_config(
            {"algorithm": "global_magnitude", "sparsity": 0.5, "scope": sparsity.Global()}
        )


class _Powers(sparsity.MagnitudePruning):
    """Ranks by power * weight + shift, entry by entry."""

    power, shift = 1.0, 0.0

    @sparsity.elementwise
    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda x: x * self.power + self.shift, params)


def _make_mask(updater):
    _, masks = updater.instant_sparsify({"k": PARAMS["k"]})
    return np.asarray(masks["k"]).reshape(-1)


def test_updaters_of_equal_scores_share_what_is_compiled(caplog):
    assert _make_mask(_Powers(sparsity_distribution_fn=sparsity.Uniform(0.25)))[8:].all()
    with jax.log_compiles():
        assert _make_mask(_Powers(sparsity_distribution_fn=sparsity.Uniform(0.75)))[24:].all()
        assert "Compiling" not in caplog.text
        jax.jit(lambda x: x + 1)(1.0)
        assert "Compiling" in caplog.text


def test_a_score_that_changes_is_compiled_again():
    updater = _Powers(**HALF)
    assert _make_mask(updater)[16:].all()
    updater.power = -1.0
    assert _make_mask(updater)[:16].all()


def test_an_elementwise_hook_may_read_an_array_of_its_own():
    updater = _Powers(**HALF)
    for power in (1.0, -1.0):
        updater.power = np.array([[power]], np.float32)
        assert _make_mask(updater)[16 if power > 0 else 0 :][:16].all()


def _score_by_name(params):
    return {name: jnp.abs(w) for name, w in params.items()}


def _score_by_path(params):
    signs = {"a": 1, "b": -1}
    return jax.tree_util.tree_map_with_path(lambda path, w: signs[path[0].key] * w, params)


def _score_by_place(params):
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, [jnp.abs(w) * (-1) ** i for i, w in enumerate(leaves)])


@pytest.mark.parametrize("score", [_score_by_name, _score_by_path, _score_by_place])
def test_an_elementwise_hook_gets_complete_trees(score):
    params = {"a": jnp.cos(PARAMS["k"]), "b": jnp.sin(PARAMS["k"])}

    class Pruner(sparsity.MagnitudePruning):
        @sparsity.elementwise
        def calculate_scores(self, params, sparse_state=None, grads=None):
            assert sparse_state is not None
            return score(params)

    class Mover(sparsity.SET):
        @sparsity.elementwise
        def get_grow_scores(self, sparse_state, params, grads):
            return score(grads)

    for cls in (Pruner, Mover):
        tx = cls(scheduler=sparsity.OneShotSchedule(0), **HALF).wrap_optax(optax.sgd(0.1))
        state = tx.init(params)
        updated = jax.jit(tx.update)(params, state, params)[1].masks
        for name, scores in score(params).items():
            weights, old = (np.asarray(x[name]).reshape(-1) for x in (params, state.masks))
            # SET keeps the 11 largest of 16 active weights, and grows 5 others by their scores.
            largest = np.argsort(np.where(old, -np.abs(weights), 0))[: 11 if cls is Mover else 0]
            scores = np.asarray(scores).reshape(-1).copy()
            scores[largest] = np.inf
            np.testing.assert_array_equal(
                np.flatnonzero(updated[name]), np.sort(np.argsort(-scores, stable=True)[:16])
            )


def test_a_wrapper_of_a_marked_hook_gets_complete_trees():
    class Ranked(sparsity.MagnitudePruning):
        @functools.wraps(sparsity.MagnitudePruning.calculate_scores)
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return {"a": jnp.abs(params["a"]), "b": -jnp.abs(params["b"])}

    params = {"a": PARAMS["k"], "b": PARAMS["k"]}
    updater = Ranked(**HALF)
    masks = updater.update_state(updater.init_state(params), params, params).masks
    assert masks["a"].tolist() == (1 - masks["b"]).tolist()


class _CallsSuper(sparsity.MagnitudePruning):
    """Overrides a loop hook and changes nothing."""

    def post_gradient_update(self, params, sparse_state):
        return super().post_gradient_update(params, sparse_state)


def _step(updater, params, masks=None):
    tx = updater.wrap_optax(optax.adam(0.1), masks=masks)
    updates, state = tx.update(params, tx.init(params), params)
    return optax.apply_updates(params, updates), state


def test_a_class_that_is_assumed_to_keep_dense_weights_is_warned_of_where_it_is_wrapped():
    with pytest.warns(
        UserWarning, match=r"_CallsSuper overrides.*keeps_dense_weights = True"
    ) as seen:
        params, _ = _step(_CallsSuper(**HALF, **ONCE), PARAMS)
    assert [warning.filename for warning in seen] == [__file__]
    assert np.count_nonzero(params["k"]) == 32  # dense, as jaxpruner's classes are


@pytest.mark.parametrize("keeps", [False, True])
def test_a_class_that_states_what_it_keeps_is_not_warned_of(keeps):
    class Stated(_CallsSuper):
        keeps_dense_weights = keeps

    params, _ = _step(Stated(**HALF, **ONCE), PARAMS)
    assert np.count_nonzero(params["k"]) == (32 if keeps else 16)


def test_an_updater_that_says_how_its_updates_land_is_not_warned_of():
    for value in (False, True):
        params, _ = _step(_CallsSuper(is_sparse_updates=value, **HALF, **ONCE), PARAMS)
        assert np.count_nonzero(params["k"]) == (16 if value else 32)


class _Gradients(sparsity.MagnitudePruning):
    """Keeps the weights of the largest gradients, so that masks grow."""

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(jnp.abs, grads)


@pytest.mark.parametrize("state", ["nothing", "regrows", "does not"])
def test_weights_that_a_class_of_ones_own_regrows_have_a_fresh_state(state):
    attributes = {"nothing": {}, "regrows": {"regrows": True}, "does not": {"regrows": False}}
    updater = type("Own", (_Gradients,), attributes[state])(
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=lambda *_: True),
        scheduler=sparsity.PeriodicSchedule(3),
    )
    tx = updater.wrap_optax(optax.adam(0.1))
    params = jnp.array([1.0, 1.0, 1.0, 1.0])
    opt_state = tx.init(params)
    for step in range(4):  # the last one updates the masks
        grads = jnp.array([3.0, 3.0, 1.0, 1.0] if step < 3 else [1.0, 1.0, 3.0, 3.0])
        updates, opt_state = jax.jit(tx.update)(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert opt_state.masks.tolist() == [0, 0, 1, 1]
    mu = opt_state.inner_state[0].mu[2]
    assert mu == pytest.approx(0.1 * 3, rel=1e-5)
    # From zero, by Adam's first step of a weight under an old count.
    expected = -0.1 * (0.3 / (1 - 0.9**4)) / np.sqrt(0.009 / (1 - 0.999**4))
    assert params[2] == pytest.approx(expected, rel=1e-4)


def test_a_class_whose_masks_only_shrink_may_wrap_flatten():
    flat = optax.flatten(optax.adam(0.1))
    _Gradients(**HALF, **ONCE).wrap_optax(flat).init(PARAMS)
    growing = type("Growing", (_Gradients,), {"regrows": True})(**HALF, **ONCE)
    with pytest.raises(ValueError, match=r"Growing may regrow.*regrows = False"):
        growing.wrap_optax(flat).init(PARAMS)
    with pytest.raises(ValueError, match=r"cannot wrap optax\.flatten"):
        sparsity.RigL(**HALF, **ONCE).wrap_optax(flat).init(PARAMS)


def test_a_hook_that_an_object_overrides_is_called():
    updater = sparsity.MagnitudePruning(**HALF, **ONCE)
    kept = {"k": jnp.ones((4, 8), jnp.uint8).at[0].set(0), "b": None}
    updater.update_state = lambda state, params, grads: state._replace(masks=kept)
    tx = updater.wrap_optax(optax.sgd(0.1))
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(state.masks["k"], kept["k"])


class PlainPruner(sparsity.MagnitudePruning):
    noise: float = 0.1


@dataclasses.dataclass
class DecoratedChild(PlainPruner):
    more: int = 3


class RequiredField(sparsity.MagnitudePruning):
    noise: float


class OtherDefault(sparsity.MagnitudePruning):
    use_packed_masks: bool = True


class PlainPattern(sparsity.SparsityType):
    noise: int = 2


class PlainNByM(sparsity.NByM):
    noise: int = 2


class PlainLayerwise(sparsity.Layerwise):
    noise: int = 2


class PlainGlobal(sparsity.Global):
    noise: int = 2


class PlainCoupled(sparsity.Coupled):
    noise: int = 2


@pytest.mark.parametrize(
    ("make", "name", "field"),
    [
        (PlainPruner, "PlainPruner", "noise"),
        (lambda: PlainPruner(noise=0.2), "PlainPruner", "noise"),
        (DecoratedChild, "PlainPruner", "noise"),
        (RequiredField, "RequiredField", "noise"),
        (OtherDefault, "OtherDefault", "use_packed_masks"),
        (PlainPattern, "PlainPattern", "noise"),
        (lambda: PlainNByM(2, 4), "PlainNByM", "noise"),
        (PlainLayerwise, "PlainLayerwise", "noise"),
        (lambda: PlainGlobal(noise=3), "PlainGlobal", "noise"),
        (lambda: PlainCoupled(None), "PlainCoupled", "noise"),
    ],
)
def test_a_field_of_a_class_without_the_decorator_is_an_error(make, name, field):
    with pytest.raises(TypeError, match=f"{name} annotates {field!r}.*@dataclasses.dataclass"):
        make()


def test_annotations_that_are_no_fields_need_no_decorator():
    class Constants(sparsity.MagnitudePruning):
        alpha: ClassVar[float] = 2.0
        beta: "ClassVar[float]" = 3.0
        regrows: bool = True  # a class attribute of the base

    class Initialized(sparsity.MagnitudePruning):
        alpha: float

        def __init__(self, alpha, **options):
            super().__init__(**options)
            self.alpha = alpha

    assert Constants(**HALF).regrows
    assert Initialized(2.0, **HALF).alpha == 2.0


def test_hooks_take_the_state_and_the_trees_by_name():
    updater = sparsity.MagnitudePruning(**HALF, **ONCE)
    params = {"k": PARAMS["k"]}
    state = updater.wrap_optax(optax.sgd(0.1)).init(params)
    named = updater.update_state(sparse_state=state, params=params, grads=params)
    placed = updater.update_state(state, params, params)
    np.testing.assert_array_equal(named.masks["k"], placed.masks["k"])
    assert int(named.masks["k"].sum()) == 16


def test_a_global_pruner_may_set_a_scope_of_its_own():
    class Local(sparsity.GlobalMagnitudePruning):
        def __post_init__(self):
            super().__post_init__()
            self.scope = sparsity.Layerwise()

    updater = Local(sparsity=0.5)
    assert _make_mask(updater)[16:].all()
    updater.scope = sparsity.Global(use_normalization=False)
    with pytest.raises(ValueError, match="Local makes its scope from use_normalization"):
        updater.check_fields()


def test_a_rule_of_ones_own_to_move_masks_gets_scores_and_the_fraction_to_replace():
    seen = []

    class Noting(sparsity.RigL):
        def new_masks(self, sparse_state, inputs):
            *scores, fraction = self.score_move(sparse_state, inputs)
            seen.extend([*scores, fraction])
            return jnp.array([[0, 1]], jnp.uint8)

    updater = Noting(
        scheduler=sparsity.OneShotSchedule(0),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        drop_fraction_fn=optax.constant_schedule(0.25),
    )
    tx, params = updater.wrap_optax(optax.sgd(0.1), jnp.array([[1, 0]])), jnp.array([[-2.0, 0.0]])
    _, state = tx.update(jnp.array([[1.0, -3.0]]), tx.init(params), params)
    drop_scores, grow_scores, fraction = seen
    assert (drop_scores.tolist(), grow_scores.tolist()) == ([[2.0, 0.0]], [[1.0, 3.0]])
    assert fraction == 0.25
    assert state.masks.tolist() == [[0, 1]]
