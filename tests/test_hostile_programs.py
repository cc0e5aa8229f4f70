"""Programs that do what nobody expects of them, and what they get."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import masks, sparsity_distributions, sparsity_schedules
from tests import helpers

_HALF = sparsity.Uniform(0.5)
_NAMES = sparsity.all_algorithm_names()


def _params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"w": draw(4, 8), "b": draw(8)}


def _config(**options):
    return sparsity.create_updater_from_config(
        {"algorithm": "magnitude", "sparsity": 0.5} | options
    )


# Optimizers around and inside.


def test_a_wrapper_that_flattens_parameters_is_an_error_at_init():
    for cls in (sparsity.MagnitudePruning, sparsity.RigL):
        wrapped = cls(
            sparsity_distribution_fn=_HALF, scheduler=sparsity.PeriodicSchedule(2)
        ).wrap_optax(optax.sgd(0.1))
        with pytest.raises(ValueError, match=r"nothing to remove.*flattens parameters belongs ins"):
            optax.flatten(wrapped).init(_params())


@pytest.mark.slow
def test_a_vector_beside_an_empty_parameter_is_not_taken_for_flattened_ones():
    trainer = sparsity.RigL(
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=lambda path, p: p.size > 0),
        scheduler=sparsity.PeriodicSchedule(2),
    )
    params = {"a": jnp.arange(1.0, 11.0), "e": jnp.zeros(0)}
    state = trainer.wrap_optax(optax.adam(0.1)).init(params)
    assert int(state.masks["a"].sum()) == 5
    # What is flattened still is.
    with pytest.raises(ValueError, match=r"cannot wrap optax\.flatten"):
        trainer.wrap_optax(optax.flatten(optax.adam(0.1))).init(params | {"w": jnp.ones((2, 3))})


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
@pytest.mark.parametrize("name", ["rigl", "magnitude", "no_prune"])
def test_optax_sees_masks_and_targets_as_no_parameters(name, packed):
    schedule = {"update_freq": 2, "update_start_step": 0, "update_end_step": 4}
    updater = _config(algorithm=name, use_packed_masks=packed, **schedule)
    tx = updater.wrap_optax(optax.adam(0.1))
    state = tx.init(_params())
    spec = {"w": "of w", "b": "of b"}
    marked = optax.tree.map_params(
        tx,
        lambda leaf, leaf_spec: leaf_spec,
        state,
        spec,
        transform_non_params=lambda leaf: "other",
    )
    moments = marked.inner_state[0]
    assert (moments.mu, moments.nu, moments.count) == (spec, spec, "other")
    assert marked.count == "other"
    assert marked.masks == "other"
    if name != "no_prune":
        assert marked.target_sparsities == "other"
    halved = optax.tree.map_params(tx, lambda leaf: leaf.astype(jnp.bfloat16), state)
    assert halved.inner_state[0].mu["w"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, halved.masks, state.masks)
    assert type(halved) is type(state)


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_optax_finds_the_state_by_its_name(packed):
    trainer = sparsity.StaticRandomSparse(sparsity_distribution_fn=_HALF, use_packed_masks=packed)
    tx = optax.chain(optax.clip(1.0), trainer.wrap_optax(optax.adam(0.1)))
    state = tx.init(_params())
    assert optax.tree.get(state, "SparseState") is state[1]
    assert int(optax.tree.get(state, "SparseState").count) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sparsity.Block((2, 2)), sparsity.Channel(-1), sparsity.FanIn(2)])
def test_a_loss_has_a_gradient_through_masks_of_units(kind):
    params = jnp.arange(1.0, 25).reshape(4, 6)
    updater = sparsity.MagnitudePruning(
        sparsity_type=kind,
        sparsity_distribution_fn=helpers.half,
        scheduler=sparsity.OneShotSchedule(0),
    )

    def train(scale):
        tx = updater.wrap_optax(optax.sgd(scale))
        updates, _ = tx.update(params, tx.init(params), params * scale)
        return jnp.sum(params * scale + updates)

    traced = jax.make_jaxpr(jax.value_and_grad(train))(1.0)
    assert [x.dtype for x in traced.out_avals] == [jnp.float32] * 2


def test_the_learning_rate_has_a_gradient_through_skipped_steps():
    trainer = sparsity.RigL(sparsity_distribution_fn=_HALF, scheduler=sparsity.PeriodicSchedule(2))
    assert trainer.skip_gradients

    @jax.jit
    def after_four_steps(rate):
        tx, params = trainer.wrap_optax(optax.adam(rate)), _params()
        state = tx.init(params)
        for _ in range(4):  # masks are updated at steps 0 and 2
            updates, state = tx.update(jax.tree.map(lambda w: w - 0.3, params), state, params)
            params = optax.apply_updates(params, updates)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    actual = float(jax.grad(after_four_steps)(0.01))
    difference = (after_four_steps(0.0101) - after_four_steps(0.0099)) / 0.0002
    assert np.isfinite(actual)
    assert abs(actual) > 1
    np.testing.assert_allclose(actual, difference, rtol=2e-2)


# Straight-through methods.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["magnitude_ste", "random_ste"])
def test_straight_through_is_dense_before_its_schedule_starts(name):
    params = _params()

    def nonzeros(store):
        updater = _config(
            algorithm=name, store_masks=store, scheduler=sparsity.PeriodicSchedule(2, 3)
        )
        tx = updater.wrap_optax(optax.set_to_zero())
        update, forward = jax.jit(tx.update), jax.jit(updater.pre_forward_update)
        state, seen = tx.init(params), []
        for _ in range(6):
            seen.append(int(jnp.count_nonzero(forward(params, state)["w"])))
            _, state = update(params, state, params)
        return seen

    # Stored masks are made after the forward pass of the first step that updates.
    assert nonzeros(False) == [32, 32, 32, 16, 16, 16]
    assert nonzeros(True) == [32, 32, 32, 32, 16, 16]


@pytest.mark.slow
def test_stored_masks_agree_with_fresh_ones_before_and_after_the_start():
    params = _params()
    outs = []
    for store in (False, True):
        updater = _config(
            algorithm="magnitude_ste", store_masks=store, scheduler=sparsity.OneShotSchedule(1)
        )
        tx = updater.wrap_optax(optax.set_to_zero())
        state = tx.init(params)
        outs.append([])
        for _ in range(4):
            outs[-1].append(updater.pre_forward_update(params, state)["w"])
            _, state = tx.update(params, state, params)
    for step in (0, 2, 3):  # at step 1 the stored mask is about to be made
        np.testing.assert_array_equal(outs[0][step], outs[1][step])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in _NAMES if n != "no_prune"])
def test_whole_equinox_modules_train_and_are_reported_on(name):
    import equinox as eqx

    model = eqx.nn.MLP(8, 4, 8, 1, key=jax.random.key(0))  # its activation is a leaf
    updater = _config(algorithm=name, scheduler=sparsity.OneShotSchedule(0))
    state = updater.wrap_optax(optax.set_to_zero()).init(model)
    seen = updater.pre_forward_update(model, state)
    assert seen.activation is model.activation
    seen(jnp.ones(8))
    rows = sparsity.reports.layer_summary(seen, state, updater)
    paths = [f"layers/{layer}/{part}" for layer in (0, 1) for part in ("weight", "bias")]
    assert [row.path for row in rows] == paths
    assert "layers/0/weight" in sparsity.sparsity_table(seen, state, updater)
    assert sparsity.summarize_sparsity(seen)["_nparams"] == 64 + 8 + 32 + 4
    assert updater.post_gradient_update(model, state).activation is model.activation


# Leaves that are no weights.


def _square(x):
    return x * x


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_leaves_that_are_no_weights_go_through_untouched(name):
    odd = {
        "key": jax.random.key(0),
        "old_key": jax.random.PRNGKey(0),
        "int4": jnp.ones((4, 4), jnp.int4),
        "count": jnp.int32(3),
        "flags": jnp.ones((2, 2), bool),
        "number": 0.5,
        "index": 7,
        "function": _square,
    }
    params, grads = {**_params(), **odd}, {**_params(), **dict.fromkeys(odd)}
    updater = _config(algorithm=name, scheduler=sparsity.OneShotSchedule(0))
    tx = updater.wrap_optax(optax.set_to_zero())
    state = tx.init(params)
    assert {key: jax.tree.leaves((state.masks or {}).get(key)) for key in odd} == {
        key: [] for key in odd
    }
    updates, state = tx.update(grads, state, params)
    assert all(updates[key] is None for key in odd)
    trees = [updater.pre_forward_update(params, state), updater.post_gradient_update(params, state)]
    if helpers.prunes_at_once(name):
        pruned, masks = updater.instant_sparsify(params, grads)
        trees.append(pruned)
        assert all(masks[key] is None for key in odd)
    for tree in trees:
        assert all(tree[key] is odd[key] for key in odd)
        assert tree["w"].shape == (4, 8)


# Numerics and transfers.


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        sparsity.Channel(0),
        sparsity.Channel(),
        sparsity.Block((3, 3)),
        sparsity.Block((3, 3), False),
    ],
    ids=str,
)
def test_eager_pooling_makes_no_infinity_and_no_nan(kind):
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=_HALF, sparsity_type=kind)
    with jax.debug_infs(True), jax.debug_nans(True):
        pruned, masks = pruner.instant_sparsify(_params())
    assert 0 < int(masks["w"].sum()) < 32
    assert np.count_nonzero(pruned["w"]) == int(masks["w"].sum())


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_an_eager_init_transfers_nothing_implicitly(name, packed):
    schedule = {"update_freq": 2, "update_start_step": 0, "update_end_step": 4}
    tx = _config(algorithm=name, use_packed_masks=packed, **schedule).wrap_optax(optax.sgd(0.1))
    params = _params()
    with jax.transfer_guard("disallow"):
        state = tx.init(params)
    assert int(state.count) == 0
    with jax.transfer_guard_device_to_host("disallow"):  # refuses nothing on CPUs
        _, state = tx.update(params, state, params)
    assert int(state.count) == 1


def test_a_compiled_apply_is_refused():
    import flax.linen as nn

    model = nn.Dense(3)
    with pytest.raises(ValueError, match=r"compiled by jax\.jit.*Pass model\.apply itself"):
        sparsity.sparsify_linen(jax.jit(model.apply), {"x": 0.5})


# Configurations.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"update_end_step": 5}, "to 5: the configuration needs an update_start_step"),
        ({"update_start_step": 5}, "from 5 to None: .* needs an update_end_step"),
        ({"custom_sparsity_map": [1]}, r"custom_sparsity_map must be a dict.*= \[1\]"),
        (
            {"filter_fn": "kernel"},
            r"filter_fn must be a function of \(path, param\) or None, got .* 'kernel'",
        ),
        ({"scope": "globl"}, "scope: 'globl' is not known. Did you mean 'global'. Known: layerwis"),
        ({"dist_type": "erkk"}, "dist_type: 'erkk' is not known. Did you mean 'erk'. Known: unif"),
        ({"schedule_type": "polynomal"}, "schedule_type: .* Did you mean 'polynomial'"),
        ({"schedule_type": 3}, "schedule_type: 3 is not known. Known: none, one_shot"),
        ({"power": 2}, "^Remove 'power' = 2.* schedule_type 'polynomial'"),
        ({"erk_power_scale": 2}, "Remove 'erk_power_scale'.* dist_type 'erk'"),
        ({"use_normalization": True}, "Remove 'use_normalization' = True.* scope 'global'"),
        ({"scope": "layerwise", "use_normalization": True}, "Remove 'use_norm"),
        (
            {"scope": sparsity.Global(), "use_normalization": False},
            "Remove 'use_normalization' = False.* scope 'global'",
        ),
        ({"sparsiti_type": "2:4"}, "'sparsiti_type' is no key.*Did you mean 'sparsity_type'"),
        ({"sparsity_type": "blok_4,4"}, "'blok_4,4' is not known. Did you mean 'block'"),
        (
            {"algorithm": None, "algoritm": 1},
            "algorithm: None is not known. .*Known: no_prune, magnitude",
        ),
        ({"power": 2, "initial_sparsity": 0.1}, "^Remove 'initial_sparsity' = 0.1"),
        (
            {"scheduler": sparsity.NoUpdateSchedule(), "power": 2, "schedule_type": "none"},
            "^Remove 'power' = 2.* beside .*scheduler",
        ),
        (
            {"sparsity_distribution_fn": sparsity.Uniform(0.5), "dist_type": "erk"},
            "^Remove 'dist_type' = 'erk'.* beside .*sparsity_distribution_fn",
        ),
        ({"algorithm": "magnitud"}, "'magnitud' is not known. Did you mean 'magnitude'"),
        (
            {"algorithm": "global_magnitude", "scope": "global"},
            "Remove 'scope' = 'global': GlobalMagnitudePruning does not read",
        ),
    ],
)
def test_slips_in_configurations_are_errors_that_help(options, text):
    with pytest.raises(ValueError, match=text):
        _config(**options)


def test_keys_of_schedules_distributions_and_scopes_reach_them():
    ramp = {"update_freq": 2, "update_start_step": 0, "update_end_step": 10}
    updater = _config(
        **ramp,
        power=1,
        initial_sparsity=0.2,
        dist_type="erk",
        erk_power_scale=0.5,
        scope="global",
        use_normalization=False,
    )
    expected = sparsity.PolynomialSchedule(2, 0, 10, power=1, initial_sparsity=0.2)
    assert updater.scheduler == expected
    assert updater.sparsity_distribution_fn == sparsity.ERK(0.5, power_scale=0.5)
    assert updater.scope == sparsity.Global(use_normalization=False)
    # 0.5 + (0.2 - 0.5) * (1 - 5 / 10) = 0.35
    assert float(updater.scheduler.get_sparsity_at_step(0.5, 5)) == pytest.approx(0.35)
    pruner = _config(algorithm="global_magnitude", use_normalization=False)
    assert pruner.scope == sparsity.Global(use_normalization=False)


@dataclasses.dataclass(frozen=True)
class FirstAxis:
    """Each kernel loses a share that its rows decide."""

    share: float
    config_keys = {"sparsity": "share"}  # noqa: RUF012

    def __call__(self, params):
        return jax.tree.map(lambda p: self.share if p.shape[0] > 4 else None, params)


@dataclasses.dataclass(frozen=True)
class Powers(sparsity.NoUpdateSchedule):
    base: int
    config_keys = {"update_base": "base"}  # noqa: RUF012

    def is_mask_update_iter(self, step):
        return step == self.base

    def update_range(self):
        return self.base, self.base


@dataclasses.dataclass(frozen=True)
class Mine(sparsity.Layerwise):
    strength: float = 1.0


@pytest.fixture
def _user_names():
    """Registries that forget what the test adds."""
    registries = [sparsity_distributions.DISTRIBUTIONS, sparsity_schedules.SCHEDULES, masks.SCOPES]
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("_user_names")
def test_registered_distributions_schedules_and_scopes_are_configured_by_their_keys():
    sparsity.register_distribution("first_axis", FirstAxis)
    sparsity.register_schedule("powers", Powers)
    sparsity.register_scope("mine", Mine)
    updater = _config(
        dist_type="first_axis", schedule_type="powers", update_base=3, scope="mine", strength=2.0
    )
    assert updater.sparsity_distribution_fn == FirstAxis(0.5)
    assert updater.scheduler == Powers(3)
    assert updater.scope == Mine(2.0)
    state = updater.wrap_optax(optax.sgd(0.1)).init({"a": jnp.ones((8, 2)), "b": jnp.ones((4, 2))})
    assert state.masks["b"] is None
    with pytest.raises(ValueError, match="The name 'powers' is taken"):
        sparsity.register_schedule("powers", sparsity.OneShotSchedule)
    with pytest.raises(ValueError, match=r"Remove 'update_base' = 3.*schedule_type 'powers'"):
        _config(update_base=3)
    for scope in (None, "global"):
        with pytest.raises(ValueError, match=r"Remove 'strength' = 2.0.* scope 'mine'"):
            _config(scope=scope, strength=2.0)


@dataclasses.dataclass
class Incomplete:
    """Has the first methods of a scope and of a schedule, and can be called."""

    def check(self, pattern, batch_axes, topk_fn):
        pass

    def is_mask_update_iter(self, step):
        return True

    def __call__(self, params):
        return params


@pytest.mark.usefixtures("_user_names")
@pytest.mark.parametrize(
    ("register", "value", "message"),
    [
        ("schedule", Incomplete, r"got schedule = .*Incomplete.*a method get_sparsity_at_step"),
        ("schedule", int, r"got .*int.*without a method is_mask_update_iter"),
        (
            "distribution",
            sparsity.Uniform(0.5),
            r"a class of distributions.* got distribution = Un",
        ),
        ("scope", Incomplete, r"got scope = .*Incomplete.*without a method select"),
        ("scope", Mine(2.0), r"a class of scopes.*got scope = Mine\(strength=2.0\)"),
    ],
)
def test_classes_that_make_no_schedule_or_scope_cannot_be_registered(register, value, message):
    with pytest.raises(ValueError, match=message):
        getattr(sparsity, f"register_{register}")("mine", value)


@pytest.mark.usefixtures("_user_names")
def test_a_function_that_makes_schedules_can_be_registered():
    sparsity.register_schedule("late", lambda: sparsity.OneShotSchedule(99))
    assert _config(schedule_type="late").scheduler == sparsity.OneShotSchedule(99)


@pytest.mark.usefixtures("_user_names")
def test_a_distribution_may_list_its_keys():
    @dataclasses.dataclass(frozen=True)
    class Shared(sparsity.Uniform):
        config_keys = ("sparsity",)

    sparsity.register_distribution("shared", Shared)
    assert _config(dist_type="shared").sparsity_distribution_fn == Shared(0.5)


# Names of predecessors.


@pytest.mark.slow
def test_programs_for_jaxpruner_find_their_names():
    import sparsity as jaxpruner

    weights = jnp.array([[1.0, -3.0], [2.0, 0.5]])
    mask = jaxpruner.mask_calculator.get_topk_fn(jaxpruner.sparsity_types.Unstructured)(
        jnp.abs(weights), 0.5
    )
    np.testing.assert_array_equal(mask, [[0, 1], [1, 0]])
    np.testing.assert_array_equal(jaxpruner.apply_mask(weights, mask), [[0, -3], [2, 0]])
    assert jaxpruner.utils.summarize_sparsity({"w": mask})["w"] == 0.5
    assert jaxpruner.utils.summarize_intersection({"w": mask}, {"w": mask})["w"] == 1
    choose = jaxpruner.utils.NOT_DIM_ONE_FILTER_FN
    assert [choose(("w",), weights), choose(("b",), weights[0])] == [True, False]
    by_type = jaxpruner.mask_calculator.get_topk_fn(sparsity.NByM(1, 2))
    np.testing.assert_array_equal(by_type(jnp.abs(weights), 0.5), [[0, 1], [1, 0]])


@pytest.mark.slow
def test_programs_for_jax_pruning_find_their_names():
    x = jnp.array([[1.0, 4.0, 3.0, 2.0]])
    np.testing.assert_array_equal(sparsity.pruning_act_unstruct(x, 0.5), [[0, 4, 3, 0]])
    np.testing.assert_array_equal(sparsity.pruning_act_struct(x, (1, 2)), [[0, 4, 3, 0]])
