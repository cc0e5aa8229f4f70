"""Updaters from configurations: every key, what is left unchanged, what is refused."""

import dataclasses
import re

import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from ml_collections import config_dict

import sparsity
from sparsity import algorithms, api
from sparsity.api import create_updater_from_config as create
from tests import helpers

PARAMS = {"kernel": np.ones((4, 8)), "head": np.ones((4, 4)), "bias": np.ones(8)}
DENSE_BIAS = {"kernel": 0.5, "head": 0.5, "bias": None}

NAMES = sparsity.all_algorithm_names()


def config(**keys):
    return {"algorithm": "magnitude", "sparsity": 0.5} | keys


def targets(updater):
    return updater.get_distribution_fn()(PARAMS)


# What configurations may be, and that they stay as they are.


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_is_made_by_its_name(name):
    updater = create({"algorithm": name, "sparsity": 0.5})
    assert type(updater) is sparsity.ALGORITHM_REGISTRY[name]
    assert updater.scheduler == sparsity.ALGORITHM_REGISTRY[name].scheduler
    if helpers.prunes(name):
        assert targets(updater) == DENSE_BIAS


def test_all_names_are_listed():
    assert sparsity.all_algorithm_names() == tuple(sparsity.ALGORITHM_REGISTRY)


def locked(keys):
    return ml_collections.ConfigDict(keys).lock()


KINDS = [dict, ml_collections.ConfigDict, locked, ml_collections.FrozenConfigDict]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_any_kind_of_configuration_is_read_and_never_changed(make):
    keys = config(
        algorithm="rigl",
        dist_type="erk",
        update_freq=10,
        update_start_step=0,
        update_end_step=100,
        sparsity_type="nm_2,4",
        drop_fraction=0.2,
        custom_sparsity_map={"head": 0.25},
        use_packed_masks=True,
    )
    entry = make(keys)
    updater = create(entry)
    assert entry == make(keys)
    assert updater.sparsity_type == sparsity.NByM(2, 4)
    assert updater.use_packed_masks is True
    assert targets(updater)["head"] == 0.25
    # And what the updater holds does not change with the configuration.
    if make in (dict, ml_collections.ConfigDict):
        entry["custom_sparsity_map"]["head"] = 0.75
        assert targets(updater)["head"] == 0.25


@pytest.mark.parametrize("bad", [None, "magnitude", 3, [("algorithm", "magnitude")]])
def test_what_is_no_configuration_is_an_error(bad):
    with pytest.raises(ValueError, match="config must be a ConfigDict or a dict"):
        create(bad)


def test_none_counts_as_missing():
    schedule = dict.fromkeys(["update_freq", "update_start_step", "update_end_step"])
    distribution = dict.fromkeys(["dist_type", "filter_fn", "custom_sparsity_map"])
    fields = dict.fromkeys(["sparsity_type", "rng_seed", "use_packed_masks", "batch_axes"])
    updater = create(config(**schedule, **distribution, **fields))
    assert updater.scheduler == sparsity.NoUpdateSchedule()
    assert updater.sparsity_type == sparsity.Unstructured()
    assert (updater.rng_seed, updater.use_packed_masks, updater.batch_axes) == (8, False, 0)
    assert targets(updater) == DENSE_BIAS


def test_placeholders_of_a_config_dict_count_as_missing():
    entry = ml_collections.ConfigDict(config())
    entry.update_start_step = config_dict.placeholder(int)
    entry.sparsity_type = config_dict.placeholder(str)
    assert create(entry).scheduler == sparsity.NoUpdateSchedule()


# Single keys.


@pytest.mark.parametrize(
    ("keys", "scheduler"),
    [
        ({}, sparsity.NoUpdateSchedule()),
        ({"update_freq": 5}, sparsity.NoUpdateSchedule()),
        ({"update_start_step": 7, "update_end_step": 7}, sparsity.OneShotSchedule(7)),
        (
            {"update_start_step": 7, "update_end_step": 7, "update_freq": 3},
            sparsity.OneShotSchedule(7),
        ),
        ({"update_start_step": 0, "update_end_step": 0}, sparsity.OneShotSchedule(0)),
        (
            {"update_freq": 3, "update_start_step": 0, "update_end_step": 10},
            sparsity.PolynomialSchedule(3, 0, 10),
        ),
        ({"scheduler": sparsity.PeriodicSchedule(4)}, sparsity.PeriodicSchedule(4)),
        ({"algorithm": "rigl", "update_freq": 5}, sparsity.PeriodicSchedule(5)),
        ({"algorithm": "set", "update_freq": 5}, sparsity.PeriodicSchedule(5)),
    ],
)
def test_the_schedule_follows_from_start_and_end(keys, scheduler):
    made = create(config(**keys)).scheduler
    assert made == scheduler
    assert type(made) is type(scheduler)


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ("unstructured", sparsity.Unstructured()),
        ("nm_2,4", sparsity.NByM(2, 4)),
        ("nm_2,4,-2", sparsity.NByM(2, 4, axis=-2)),
        ("2:4", sparsity.NByM(2, 4)),
        ("block_4,4", sparsity.Block((4, 4))),
        ("channel_0", sparsity.Channel(0)),
        (sparsity.NByM(1, 8), sparsity.NByM(1, 8)),
        (sparsity.Block((2, 2), use_avg_pooling=False), sparsity.Block((2, 2), False)),
        (sparsity.Channel(1), sparsity.Channel(1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_the_sparsity_type_is_a_type_or_its_name(entry, kind, make):
    assert create(make(config(sparsity_type=entry))).sparsity_type == kind


def test_the_sparsity_type_may_be_a_function():
    choose = lambda path, param: sparsity.Channel() if param.ndim > 2 else sparsity.NByM(2, 4)  # noqa: E731
    assert create(config(sparsity_type=choose)).sparsity_type is choose


def test_the_distribution_is_uniform_or_erk():
    assert targets(create(config())) == DENSE_BIAS
    assert targets(create(config(dist_type="uniform"))) == DENSE_BIAS
    # 32 and 16 weights, raw densities 12/32 and 8/16: 24 = eps * (12 + 8), so 0.45 and 0.6 stay.
    erk = targets(create(config(dist_type="erk")))
    assert erk == {"kernel": pytest.approx(0.55), "head": pytest.approx(0.4), "bias": None}


@pytest.mark.parametrize("name", ["magnitude", "global_magnitude", "set"])
def test_filter_and_overrides_reach_the_distribution(name):
    updater = create(
        config(
            algorithm=name,
            filter_fn=lambda path, param: path != ("head",) and param.ndim > 1,
            custom_sparsity_map={"bias": 0.25},
        )
    )
    assert targets(updater) == {"kernel": 0.5, "head": None, "bias": 0.25}


@pytest.mark.parametrize("dist_type", ["uniform", "erk"])
def test_batch_axes_reach_updater_and_distribution(dist_type):
    updater = create(config(batch_axes=1, dist_type=dist_type))
    params = {"stack": jnp.ones((2, 4, 8)), "biases": jnp.ones((2, 8))}
    targets = updater.init_state(params).target_sparsities
    assert updater.batch_axes == 1
    assert targets["stack"] == 0.5
    assert targets["biases"] is None


def test_a_global_pruner_refuses_batch_axes():
    with pytest.raises(ValueError, match="batch_axes must be 0, got batch_axes = 1"):
        create(config(algorithm="global_magnitude", batch_axes=1))


def test_a_distribution_function_is_used_as_it_is():
    distribution = helpers.uniform(0.25)
    updater = create({"algorithm": "magnitude", "sparsity_distribution_fn": distribution})
    assert updater.sparsity_distribution_fn is distribution


@pytest.mark.parametrize("name", ["set", "rigl"])
def test_the_drop_fraction_follows_a_cosine_to_the_end(name):
    updater = create(
        config(
            algorithm=name,
            drop_fraction=0.4,
            update_freq=10,
            update_start_step=0,
            update_end_step=100,
        )
    )
    for step in (0, 10, 50, 90, 100, 150):
        expected = 0.4 * 0.5 * (1 + np.cos(np.pi * min(step, 100) / 100))
        assert float(updater.drop_fraction_fn(jnp.int32(step))) == pytest.approx(expected, abs=1e-6)


def test_the_drop_fraction_is_constant_without_an_end_and_three_tenths_by_default():
    for step in (0, 1000):
        assert float(create(config(algorithm="set")).drop_fraction_fn(step)) == 0.3
        updater = create(config(algorithm="set", drop_fraction=0.1))
        assert float(updater.drop_fraction_fn(step)) == 0.1


@pytest.mark.parametrize("drop_fraction", [0, 0.0, 1, 1.0])
def test_the_drop_fraction_may_be_nothing_or_everything(drop_fraction):
    updater = create(config(algorithm="rigl", drop_fraction=drop_fraction))
    assert float(updater.drop_fraction_fn(3)) == drop_fraction


def test_a_drop_fraction_function_is_used_as_it_is():
    schedule = optax.linear_schedule(0.5, 0.0, 100)
    assert create(config(algorithm="set", drop_fraction_fn=schedule)).drop_fraction_fn is schedule


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("magnitude", "skip_gradients", True),
        ("magnitude", "is_sparse_gradients", True),
        ("magnitude", "rng_seed", 3),
        ("magnitude", "use_packed_masks", True),
        ("magnitude", "topk_fn", jnp.greater),
        ("magnitude", "is_sparse_updates", False),
        ("rigl", "skip_gradients", False),
        ("rigl", "is_sparse_gradients", False),
        ("magnitude_ste", "store_masks", True),
        ("global_magnitude", "use_normalization", True),
        ("no_prune", "use_packed_masks", True),
        ("no_prune", "rng_seed", 3),
    ],
)
def test_any_field_of_the_class_is_a_key(name, key, value):
    assert getattr(create(config(algorithm=name, **{key: value})), key) is value


# Bad input.


@pytest.mark.parametrize("name", [None, "magnitud", "MAGNITUDE", 3, ["magnitude"]])
def test_an_unknown_algorithm_is_an_error_with_all_names(name):
    with pytest.raises(ValueError, match="algorithm") as error:
        create({"algorithm": name, "sparsity": 0.5})
    assert repr(name) in str(error.value)
    assert all(choice in str(error.value) for choice in NAMES)


def test_a_missing_algorithm_is_an_error():
    with pytest.raises(ValueError, match=r"algorithm.*magnitude"):
        create({"sparsity": 0.5})


def test_the_nearest_algorithm_is_suggested():
    with pytest.raises(ValueError, match="Did you mean 'global_magnitude'"):
        create(config(algorithm="global_magnitud"))


@pytest.mark.parametrize(
    ("name", "key", "nearest"),
    [
        ("magnitude", "sparsty", "sparsity"),
        ("magnitude", "update_freqency", "update_freq"),
        ("magnitude", "dist_typ", "dist_type"),
        ("magnitude", "use_packed_mask", "use_packed_masks"),
        ("magnitude", "custom_sparsity_maps", "custom_sparsity_map"),
        ("rigl", "drop_fractions", "drop_fraction"),
        ("no_prune", "sparsty", "sparsity"),
        ("global_saliency", "use_normalisation", "use_normalization"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_and_all_keys(name, key, nearest):
    with pytest.raises(ValueError, match=f"Did you mean '{nearest}'") as error:
        create(config(algorithm=name, **{key: 1}))
    assert repr(key) in str(error.value)
    for choice in ("sparsity", "dist_type", "update_freq", "update_start_step", "update_end_step"):
        assert choice in str(error.value)


def test_a_key_of_another_algorithm_is_an_error():
    with pytest.raises(ValueError, match=r"Remove 'drop_fraction_fn'.*rigl"):
        create(config(drop_fraction_fn=lambda step: 0.3))
    with pytest.raises(ValueError, match=r"Remove 'drop_fraction' = 0.3: MagnitudePruning.*rigl"):
        create(config(drop_fraction=0.3))
    with pytest.raises(ValueError, match="drop_fraction must be in"):
        create(config(drop_fraction=1.3))


@pytest.mark.parametrize("dist_type", ["erdos", "ERK", 3, ["erk"]])
def test_an_unknown_distribution_is_an_error_with_both_names(dist_type):
    with pytest.raises(ValueError, match=r"dist_type.*uniform, erk") as error:
        create(config(dist_type=dist_type))
    assert repr(dist_type) in str(error.value)


def test_the_nearest_distribution_is_suggested():
    with pytest.raises(ValueError, match="Did you mean 'uniform'"):
        create(config(dist_type="unifrom"))


@pytest.mark.parametrize("sparsity_type", ["nb_2,4", "nm_2", "block_4", "chanel_0", "2;4"])
def test_an_unknown_type_string_is_an_error_with_all_forms(sparsity_type):
    with pytest.raises(ValueError, match=re.escape(repr(sparsity_type))) as error:
        create(config(sparsity_type=sparsity_type))
    for choice in ("unstructured", "nm_2,4", "2:4", "block_4,4", "channel_-1"):
        assert choice in str(error.value)


@pytest.mark.parametrize("sparsity_type", [5, ("nm", 2, 4), sparsity.NByM(2, 4).m])
def test_what_is_no_type_is_an_error(sparsity_type):
    with pytest.raises(ValueError, match="sparsity_type"):
        create(config(sparsity_type=sparsity_type))


@pytest.mark.parametrize("name", helpers.list_names(helpers.prunes))
def test_a_missing_sparsity_is_an_error(name):
    with pytest.raises(ValueError, match="sparsity is missing"):
        create({"algorithm": name})
    with pytest.raises(ValueError, match="sparsity is missing"):
        create({"algorithm": name, "sparsity": None})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), 80, "0.8"])
def test_a_sparsity_outside_zero_to_one_is_an_error(name, value):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        create({"algorithm": name, "sparsity": value})


@pytest.mark.parametrize("name", ["set", "rigl", "srigl"])
@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), 30, "0.3"])
def test_a_drop_fraction_outside_zero_to_one_is_an_error(name, value):
    with pytest.raises(ValueError, match=r"drop_fraction.*\[0, 1\]"):
        create(config(algorithm=name, drop_fraction=value))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"update_start_step": 1}, "needs an update_end_step"),
        ({"update_start_step": 1, "update_freq": 2}, "needs an update_end_step"),
        ({"update_start_step": 1, "update_end_step": 5}, "need an update_freq"),
        ({"update_start_step": 5, "update_end_step": 1, "update_freq": 2}, "before"),
        ({"update_start_step": 0, "update_end_step": 9, "update_freq": 0}, "update_freq"),
        ({"update_start_step": 0, "update_end_step": 9, "update_freq": 1.5}, "update_freq"),
        ({"update_start_step": -1, "update_end_step": 9, "update_freq": 2}, "update_start_step"),
        ({"update_start_step": -1, "update_end_step": -1}, "step"),
        ({"update_start_step": 0.5, "update_end_step": 0.5}, "step"),
        ({"scheduler": 5}, "scheduler"),
    ],
)
@pytest.mark.parametrize("name", ["magnitude", "rigl"])
def test_a_schedule_that_cannot_be_made_is_an_error(name, keys, message):
    with pytest.raises(ValueError, match=message):
        create(config(algorithm=name, **keys))


# Keys given beside what they would build.

DISTRIBUTION = helpers.half
PERIODIC = sparsity.PeriodicSchedule(3)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"sparsity": 0.5, "sparsity_distribution_fn": DISTRIBUTION}, "sparsity"),
        (
            {"filter_fn": lambda *_: True, "sparsity_distribution_fn": DISTRIBUTION},
            "filter_fn",
        ),
        (
            {"custom_sparsity_map": {"a": 0.5}, "sparsity_distribution_fn": DISTRIBUTION},
            "custom_sparsity_map",
        ),
        ({"dist_type": "erk", "sparsity_distribution_fn": DISTRIBUTION}, "dist_type"),
        ({"sparsity": 0.5, "scheduler": PERIODIC, "update_freq": 3}, "update_freq"),
        ({"sparsity": 0.5, "scheduler": PERIODIC, "update_start_step": 0}, "update_start_step"),
        ({"sparsity": 0.5, "scheduler": PERIODIC, "update_end_step": 9}, "update_end_step"),
        (
            {
                "algorithm": "set",
                "sparsity": 0.5,
                "drop_fraction": 0.2,
                "drop_fraction_fn": optax.constant_schedule(0.1),
            },
            "drop_fraction",
        ),
        (
            {
                "algorithm": "global_magnitude",
                "sparsity": 0.5,
                "sparsity_distribution_fn": DISTRIBUTION,
            },
            "sparsity_distribution_fn",
        ),
    ],
)
def test_a_key_beside_what_it_would_build_is_an_error(keys, named):
    with pytest.raises(ValueError, match=named):
        create({"algorithm": "magnitude"} | keys)


# The registry.


@dataclasses.dataclass
class Mine(algorithms.MagnitudePruning):
    """An algorithm of a user."""

    temperature: float = 1.0


def test_a_registered_algorithm_is_made_by_its_name_with_its_fields(registry):
    sparsity.register_algorithm("mine", Mine)
    assert "mine" in sparsity.all_algorithm_names()
    assert "mine" in registry
    updater = create({"algorithm": "mine", "sparsity": 0.5, "temperature": 2.0})
    assert type(updater) is Mine
    assert updater.temperature == 2.0
    assert targets(updater) == DENSE_BIAS


def test_a_registered_baseline_without_masks_needs_no_sparsity(registry):
    class Baseline(algorithms.NoPruning):
        pass

    sparsity.register_algorithm("baseline", Baseline)
    for keys in ({}, {"sparsity": 0.5}):
        updater = create({"algorithm": "baseline"} | keys)
        assert type(updater) is Baseline
        assert updater.sparsity_distribution_fn is None


def test_a_field_named_sparsity_takes_nothing_from_the_distribution(registry):
    @dataclasses.dataclass(kw_only=True)
    class Reported(sparsity.MagnitudePruning):
        sparsity: float = 0.0

    sparsity.register_algorithm("reported", Reported)
    updater = create(config(algorithm="reported", dist_type="erk"))
    assert updater.sparsity == 0.5
    assert updater.get_distribution_fn() == sparsity.ERK(0.5)
    with pytest.raises(ValueError, match="sparsity is missing"):
        create({"algorithm": "reported"})


@dataclasses.dataclass(frozen=True)
class Listed(sparsity.NoUpdateSchedule):
    """Updates masks in the steps of a list."""

    steps: tuple[int, ...] = ()
    decay: float = 1.0
    filter_fn: object = None

    def is_mask_update_iter(self, step):
        return jnp.isin(step, jnp.array(self.steps))


def test_the_fields_of_a_registered_schedule_are_its_keys(registries):
    sparsity.register_schedule("listed", Listed)
    listed = config(schedule_type="listed", steps=(1, 5))
    assert create(listed).scheduler == Listed((1, 5))
    assert create(listed | {"decay": 0.5}).scheduler == Listed((1, 5), 0.5)
    with pytest.raises(ValueError, match=r"^Remove 'steps' = \(1, 5\).* schedule_type 'listed'"):
        create(config(schedule_type="periodic", update_freq=2, steps=(1, 5)))
    # A field of the algorithm stays a key of the algorithm.
    updater = create(config(algorithm="sr_ste", decay=0.5))
    assert (updater.decay, updater.scheduler) == (0.5, sparsity.NoUpdateSchedule())
    # And a key of distributions stays one.
    assert targets(create(config(filter_fn=lambda path, param: True)))["bias"] == 0.5


@dataclasses.dataclass(frozen=True)
class Shared(sparsity.PeriodicSchedule):
    """Has fields of the names of other keys."""

    drop_fraction: float = 0.3
    sparsity: float = 0.3
    rng_seed: int = 0


def test_a_schedule_shares_keys_with_algorithms_and_distributions(registries):
    sparsity.register_schedule("shared", Shared)
    steps = {"update_freq": 2, "update_start_step": 1, "update_end_step": 5}
    options = {"algorithm": "rigl", "sparsity": 0.5, "drop_fraction": 0.2, "rng_seed": 7} | steps
    for kind in ({}, {"schedule_type": "shared"}):
        updater = create(options | kind)
        assert updater.drop_fraction_fn == sparsity.algorithms.sparse_trainers.DropFraction(0.2, 5)
        assert updater.sparsity_distribution_fn == sparsity.Uniform(0.5)
        assert updater.rng_seed == 7
        chosen = Shared(2, 1, 5, 0.2, 0.5, 7) if kind else sparsity.PeriodicSchedule(2, 1, 5)
        assert updater.scheduler == chosen


def make_distribution(name, default):
    """A distribution of one sparsity for all parameters, with one more field."""
    fields = [("sparsity", float), (name, type(default), default)]
    hooks = {"__call__": lambda self, params: dict.fromkeys(params, self.sparsity)}
    return dataclasses.make_dataclass("Made", fields, namespace=hooks, frozen=True)


def test_a_distribution_shares_keys_with_algorithms(registries):
    Dropped = make_distribution("drop_fraction", 0.1)
    sparsity.register_distribution("dropped", Dropped)
    for name in ("rigl", "magnitude"):
        options = config(algorithm=name, drop_fraction=0.2)
        dropped = create(options | {"dist_type": "dropped"}).sparsity_distribution_fn
        assert dropped == Dropped(0.5, 0.2)


def test_a_scope_shares_keys_with_algorithms_and_distributions(registries):
    @dataclasses.dataclass(frozen=True)
    class Scaled(sparsity.Layerwise):
        drop_fraction: float = 0.1
        sparsity: float = 0.1

    sparsity.register_scope("scaled", Scaled)
    options = config(algorithm="rigl", drop_fraction=0.2)
    assert create(options).scope == sparsity.Layerwise()
    scaled = create(options | {"scope": "scaled"})
    assert scaled.scope == Scaled(0.2, 0.5)
    assert scaled.sparsity_distribution_fn == sparsity.Uniform(0.5)
    with pytest.raises(ValueError, match=r"^Remove 'use_normalization' = True.* scope 'global'"):
        create(config(use_normalization=True))


def test_an_algorithm_may_set_its_distribution(registry):
    @dataclasses.dataclass(kw_only=True)
    class OwnDistribution(sparsity.MagnitudePruning):
        sparsity: float = 0.0
        sparsity_distribution_fn: object = dataclasses.field(default=None, init=False)

        def get_distribution_fn(self):
            return sparsity.Uniform(self.sparsity)

    sparsity.register_algorithm("own_distribution", OwnDistribution)
    updater = create(config(algorithm="own_distribution"))
    assert updater.get_distribution_fn() == sparsity.Uniform(0.5)
    assert updater.sparsity_distribution_fn is None


def test_fields_of_a_registered_distribution_leave_those_of_algorithms(registries):
    Sliced = make_distribution("batch_axes", 0)
    sparsity.register_distribution("sliced", Sliced)
    assert create(config(batch_axes=1)).batch_axes == 1
    updater = create(config(batch_axes=1, dist_type="sliced"))
    assert (updater.batch_axes, updater.sparsity_distribution_fn) == (1, Sliced(0.5, 1))


def test_registering_the_same_class_again_changes_nothing(registry):
    sparsity.register_algorithm("mine", Mine)
    sparsity.register_algorithm("mine", Mine)
    sparsity.register_algorithm("magnitude", algorithms.MagnitudePruning)
    assert len(registry) == len(NAMES) + 1


def test_a_name_that_is_taken_is_an_error(registry):
    with pytest.raises(ValueError, match="'magnitude' is taken by MagnitudePruning"):
        sparsity.register_algorithm("magnitude", Mine)
    assert registry["magnitude"] is algorithms.MagnitudePruning


@pytest.mark.parametrize("algorithm", [None, "Mine", dict, Mine(), lambda: None])
def test_what_is_no_updater_class_cannot_be_registered(registry, algorithm):
    with pytest.raises(ValueError, match="subclass of BaseUpdater"):
        sparsity.register_algorithm("other", algorithm)
    assert "other" not in registry


@pytest.mark.parametrize("register", ["register_distribution", "register_schedule"])
def test_what_cannot_be_called_cannot_be_registered(register):
    with pytest.raises(ValueError, match="or a function that makes one, got"):
        getattr(sparsity, register)("mine", 3)


@pytest.mark.parametrize("key", ["sparsity", "scope", "scheduler"])
def test_a_class_of_mappings_is_no_value_of_a_configuration(key):
    config = {"algorithm": "magnitude", "sparsity": 0.5}
    for wrong in (dict, {**config, key: dict}):
        with pytest.raises(ValueError, match=r"got .*<class 'dict'>"):
            sparsity.create_updater_from_config(wrong)


def test_the_registry_of_the_package_is_the_one_of_the_module():
    assert sparsity.ALGORITHM_REGISTRY is api.ALGORITHM_REGISTRY


def test_erk_for_a_global_pruner_is_reported(caplog):
    config = {"algorithm": "global_magnitude", "sparsity": 0.5, "dist_type": "erk"}
    sparsity.create_updater_from_config(config)
    assert "'erk'" in caplog.text
