"""Updaters are values: fields by name, copies, pickles, equality, and keys of compiled programs."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.sparsity_distributions import erk, uniform
from sparsity.training.hooks import keeps_dense_weights

_STRATEGY = {1: {"method": "unstr_global", "prune_rate_pattern": 0.9}}
_CLASSES = dict(sparsity.ALGORITHM_REGISTRY)


def _config(name, **options):
    schedule = {"update_freq": 2, "update_start_step": 0, "update_end_step": 9}
    config = {"algorithm": name, "sparsity": 0.5, "sparsity_type": "unstructured"}
    return sparsity.create_updater_from_config(config | schedule | options)


_MAKERS = {name: functools.partial(_config, name) for name in _CLASSES} | {
    "epochs": lambda: sparsity.EpochStrategy(_STRATEGY, 10),
    "partial": lambda: sparsity.MagnitudePruning(
        sparsity_distribution_fn=functools.partial(uniform, sparsity=0.5)
    ),
    "key": lambda: sparsity.RandomPruning(rng_seed=jax.random.key(3)),
    "old key": lambda: sparsity.SET(rng_seed=jax.random.PRNGKey(3)),
    "many fields": lambda: sparsity.RigL(
        sparsity_distribution_fn=sparsity.ERK(0.5, custom_sparsity_map={"a": 0.5}),
        sparsity_type=sparsity.NByM(2, 4),
        scope=sparsity.Layerwise(),
        scheduler=sparsity.PeriodicSchedule(3),
        use_packed_masks=True,
    ),
}
updaters = pytest.mark.parametrize("name", _MAKERS)


def _model(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def test_updaters_of_a_traced_model_are_pickled_with_the_names_of_its_function():
    params = {"up": jnp.arange(32.0).reshape(4, 8), "down": jnp.ones((8, 4))}
    graph = sparsity.trace(_model, params, jnp.ones((2, 4)))
    for options in (
        {"scope": sparsity.Coupled(graph)},
        {"sparsity_distribution_fn": sparsity.budget(graph, macs=0.5)},
        {"sparsity_distribution_fn": sparsity.Uniform(0.5, filter_fn=graph.is_weight)},
        {"sparsity_type": graph.nm(2, 4)},
        {"sparsity_type": graph.fan_in(4)},
    ):
        options = {"sparsity_distribution_fn": sparsity.Uniform(0.5), **options}
        updater = sparsity.MagnitudePruning(**options)
        copied = pickle.loads(pickle.dumps(updater))
        assert repr(copied) == repr(updater)
        pairs = (each.instant_sparsify(params) for each in (copied, updater))
        jax.tree.map(np.testing.assert_array_equal, *pairs)


def test_a_traced_model_without_a_name_says_so_when_it_is_pickled():
    graph = sparsity.trace(lambda p, x: x @ p, jnp.ones((4, 4)), jnp.ones((2, 4)))
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(sparsity.MagnitudePruning(scope=sparsity.Coupled(graph)))


@updaters
def test_copies_are_equal_and_of_the_same_class(name):
    updater = _MAKERS[name]()
    for copied in (
        _MAKERS[name](),
        copy.copy(updater),
        copy.deepcopy(updater),
        pickle.loads(pickle.dumps(updater)),
        dataclasses.replace(updater),
    ):
        assert type(copied) is type(updater)
        assert copied == updater
        assert copied is not updater
        assert repr(copied) == repr(updater)


@updaters
def test_one_field_makes_the_difference(name):
    updater = _MAKERS[name]()
    other = dataclasses.replace(updater, use_packed_masks=not updater.use_packed_masks)
    assert other != updater
    assert other.use_packed_masks != updater.use_packed_masks
    assert dataclasses.replace(other, use_packed_masks=updater.use_packed_masks) == updater


@pytest.mark.slow
@updaters
def test_an_updater_is_a_key_for_compiled_programs(name):
    updater = _MAKERS[name]()
    other = dataclasses.replace(updater, use_packed_masks=not updater.use_packed_masks)
    assert hash(updater) == hash(updater)
    assert {updater: 1}[updater] == 1
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(updater, x):
        traced.append(type(updater))
        return x * (2 if updater.use_packed_masks else 3)

    for one in (updater, other, updater, other):
        assert float(run(one, 1.0)) == (2 if one.use_packed_masks else 3)
    assert len(traced) == 2  # each is traced once


def test_updaters_of_different_classes_or_of_nothing_are_not_equal():
    assert sparsity.SET() != sparsity.RigL()
    assert sparsity.MagnitudePruning() != sparsity.SteMagnitudePruning()
    assert sparsity.SET() != "set"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (functools.partial(uniform, sparsity=0.5), functools.partial(uniform, sparsity=0.25)),
        (functools.partial(uniform, sparsity=0.5), functools.partial(erk, sparsity=0.5)),
        (sparsity.Uniform(0.5), sparsity.ERK(0.5)),
        (sparsity.Uniform(0.5), functools.partial(uniform, sparsity=0.5)),
    ],
)
def test_distributions_make_the_difference(one, other):
    first, second = (sparsity.SET(sparsity_distribution_fn=fn) for fn in (one, other))
    assert first != second
    assert first == sparsity.SET(sparsity_distribution_fn=one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (jax.random.key(0), jax.random.key(1)),
        (jax.random.key(0), jax.random.PRNGKey(0)),
        (jax.random.PRNGKey(0), 0),
        (0, jax.random.PRNGKey(0)),
        (jax.random.key(0), 0),
        (jax.random.split(jax.random.key(0)), jax.random.key(0)),
        (np.uint32([1, 2]), np.uint32([1, 3])),
    ],
)
def test_seeds_make_the_difference(one, other):
    assert sparsity.SET(rng_seed=one) != sparsity.SET(rng_seed=other)
    assert sparsity.SET(rng_seed=one) == sparsity.SET(rng_seed=one)


def test_traced_seeds_are_equal_to_themselves_only():
    def compare(a, b):
        first, second = sparsity.SET(rng_seed=a), sparsity.SET(rng_seed=b)
        assert first == first
        assert first == sparsity.SET(rng_seed=a)
        assert first != second
        return a

    jax.jit(compare)(jax.random.key(0), jax.random.key(0))


def test_no_seed_is_the_default_seed():
    default = sparsity.RandomPruning()
    assert sparsity.RandomPruning(rng_seed=None) == default
    assert sparsity.RandomPruning(rng_seed=None).rng_seed == default.rng_seed == 8
    assert _config("random", rng_seed=None).rng_seed == 8


# Names of fields.


@pytest.mark.parametrize("name", [*_CLASSES, "epochs"])
def test_fields_are_given_by_name(name):
    updater = _MAKERS[name]()
    with pytest.raises(TypeError, match="positional argument"):
        type(updater)(sparsity.NoUpdateSchedule(), False, 1, 2)


@pytest.mark.parametrize("name", [*_CLASSES, "epochs"])
def test_a_misspelled_field_is_an_error_with_the_nearest(name):
    cls = type(_MAKERS[name]())
    arguments = (_STRATEGY, 10) if name == "epochs" else ()
    with pytest.raises(TypeError, match=f"{cls.__name__} has no argument 'use_packed_mask'") as e:
        cls(*arguments, use_packed_mask=True)
    assert "Did you mean 'use_packed_masks'? Known: " in str(e.value)
    with pytest.raises(TypeError, match=r"Did you mean 'use_packed_masks'"):
        cls(*arguments, is_packed=True)
    with pytest.raises(TypeError, match="use_packed_masks"):
        dataclasses.replace(_MAKERS[name](), use_packed_mask=True)


def test_fields_of_other_classes_are_not_known():
    with pytest.raises(TypeError, match="MagnitudePruning has no argument 'drop_fraction_fn'"):
        sparsity.MagnitudePruning(drop_fraction_fn=lambda step: 0.1)
    with pytest.raises(TypeError, match="GlobalMagnitudePruning has no argument 'scope'"):
        sparsity.GlobalMagnitudePruning(scope=sparsity.Global())


# Subclasses.


@dataclasses.dataclass
class Plain(sparsity.BaseUpdater):
    """As tutorials of jaxpruner write a class: a plain dataclass."""

    power: float = 1.0

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda p: jnp.abs(p) ** self.power, params)


class Bare(sparsity.MagnitudePruning):
    """Without a decorator."""


@dataclasses.dataclass(eq=False)
class ByIdentity(sparsity.MagnitudePruning):
    pass


class OwnInit(sparsity.MagnitudePruning):
    def __init__(self, amount, **kwargs):
        super().__init__(sparsity_distribution_fn=sparsity.Uniform(amount), **kwargs)


@pytest.mark.parametrize("cls", [Plain, Bare, ByIdentity])
def test_subclasses_stay_hashable_and_equal_by_their_fields(cls):
    one, same, other = cls(rng_seed=3), cls(rng_seed=3), cls(rng_seed=4)
    assert isinstance(hash(one), int)
    assert one == same
    assert one != other
    assert pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one)


def test_a_plain_dataclass_runs_as_a_static_argument():
    updater = Plain(sparsity_distribution_fn=sparsity.Uniform(0.5), power=2.0)
    prune = jax.jit(lambda updater, x: updater.instant_sparsify(x)[0], static_argnums=0)
    np.testing.assert_array_equal(
        prune(updater, jnp.array([[1.0, -3.0], [2.0, 0.5]])), [[0, -3], [2, 0]]
    )


def test_an_init_of_ones_own_takes_what_it_likes():
    updater = OwnInit(0.5, use_packed_masks=True)
    assert updater.sparsity_distribution_fn == sparsity.Uniform(0.5)
    assert updater.use_packed_masks


def test_dense_weights_are_what_classes_with_their_own_application_keep():
    class OwnPost(sparsity.MagnitudePruning):
        def post_gradient_update(self, params, sparse_state):
            return params

    class OwnApply(sparsity.MagnitudePruning):
        def apply_masks(self, params, masks, is_packed=None):
            return params

    class Neither(sparsity.MagnitudePruning):
        def pre_forward_update(self, params, opt_state):
            return params

    class SaysOtherwise(sparsity.MagnitudePruning):
        keeps_dense_weights = False

        def apply_masks(self, params, masks, is_packed=None):
            return super().apply_masks(params, masks, is_packed)

    class Below(OwnPost):
        pass

    expected = {
        sparsity.MagnitudePruning: False,
        sparsity.SteMagnitudePruning: True,
        OwnPost: True,
        OwnApply: True,
        Neither: False,
        SaysOtherwise: False,
        Below: True,
    }
    assert {cls: keeps_dense_weights(cls()) for cls in expected} == expected


def test_functions_that_hold_arrays_are_equal_to_themselves_only():
    def make_targets(params, rates):
        return jax.tree.map(lambda _: 0.5, params)

    one, other = (
        sparsity.MagnitudePruning(
            sparsity_distribution_fn=functools.partial(make_targets, rates=np.ones(3))
        )
        for _ in range(2)
    )
    assert one == copy.copy(one)
    assert one != other
    assert hash(one) == hash(other)


def test_a_field_of_an_updater_that_was_a_static_argument_cannot_be_assigned():
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.9))
    pruner.sparsity_distribution_fn = sparsity.Uniform(0.5)  # no function has seen it

    @functools.partial(jax.jit, static_argnums=0)
    def count_kept(pruner, params):
        return pruner.instant_sparsify(params)[1].sum()

    params = jnp.arange(20.0).reshape(4, 5)
    assert count_kept(pruner, params) == 10
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"replace\(updater, sparsity_dist"):
        pruner.sparsity_distribution_fn = sparsity.Uniform(0.9)
    other = dataclasses.replace(pruner, sparsity_distribution_fn=sparsity.Uniform(0.9))
    assert count_kept(other, params) == 2


@pytest.mark.parametrize(
    ("updater", "changes", "match"),
    [
        (sparsity.SRigL(), {"topk_fn": jnp.greater}, "needs topk_fn = None"),
        (sparsity.MagnitudePruning(), {"scheduler": 3}, "must have a method"),
        (sparsity.SteMagnitudePruning(), {"is_sparse_updates": True}, "store_masks=True"),
        (sparsity.NoPruning(), {"batch_axes": -1}, "batch_axes"),
        (sparsity.GlobalMagnitudePruning(), {"use_normalization": False}, "replace"),
        (sparsity.GlobalSaliencyPruning(), {"scope": sparsity.Layerwise()}, "replace"),
    ],
)
def test_assigned_fields_are_checked_when_the_updater_is_used(updater, changes, match):
    for name, value in changes.items():
        setattr(updater, name, value)
    with pytest.raises(ValueError, match=match):
        updater.wrap_optax(optax.sgd(0.1))
