"""Target sparsities by parameter: containers, filters, bad values, stacked weights."""

import dataclasses
import math

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sparsity
from sparsity.sparsity_distributions import ERK, Uniform, erk, uniform
from tests.helpers import Layer, Module, Pair, arrays

NAN = float("nan")
both = pytest.mark.parametrize("distribution", [uniform, erk])


# Any container of parameters.


CONTAINERS = {
    "dict": lambda k, b: {"kernel": k, "bias": b},
    "list": lambda k, b: [k, b],
    "tuple": lambda k, b: (k, b),
    "NamedTuple": Pair,
    "dataclass": Layer,
    "FrozenDict": lambda k, b: flax.core.freeze({"kernel": k, "bias": b}),
    "nnx.State": lambda k, b: nnx.State({"kernel": nnx.Param(k), "bias": nnx.Param(b)}),
    "equinox": Module,
    "nested": lambda k, b: {"net": [Pair(k, b), (None, {})]},
}


@both
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=list(CONTAINERS))
def test_the_result_is_the_same_container_with_none_for_the_bias(distribution, make):
    sparsities = distribution(make(np.ones((4, 8)), np.ones(8)), 0.75)
    assert jax.tree.leaves(sparsities) == [0.75]
    assert jax.tree.structure(sparsities) == jax.tree.structure(make(0.75, None))


@both
@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 4)])
def test_a_bare_matrix_gets_a_bare_sparsity(distribution, shape):
    assert distribution(np.ones(shape), 0.5) == 0.5


@both
@pytest.mark.parametrize("shape", [(), (8,)])
def test_bare_vectors_and_scalars_stay_dense_and_are_no_aim_of_a_sparsity(distribution, shape):
    assert distribution(np.ones(shape)) is None
    assert distribution(np.ones(shape), 0.0) is None
    with pytest.raises(ValueError, match="nothing to remove"):
        distribution(np.ones(shape), 0.5)


@both
def test_leaves_that_cannot_be_pruned_stay_dense(distribution):
    params = {
        "kernel": np.ones((4, 8), np.float32),
        "half": jnp.ones((4, 8), jnp.bfloat16),
        "complex": np.ones((4, 8), np.complex64),
        "table": np.ones((4, 8), np.int32),
        "flags": np.ones((4, 8), bool),
        "key": jax.random.split(jax.random.key(0), (2, 2)),
        "number": 3,
        "float": 3.0,
        "none": None,
        "masked": optax.MaskedNode(),
    }
    sparsities = distribution(params, 0.5, filter_fn=lambda path, param: True)
    chosen = {key: value for key, value in sparsities.items() if value is not None}
    assert chosen == {"kernel": 0.5, "half": 0.5, "complex": 0.5, "masked": optax.MaskedNode()}
    assert sparsities.keys() == params.keys()


@both
@pytest.mark.parametrize("empty", [None, {}, [], {"a": None}, {"a": 3}])
def test_trees_without_parameters_are_fine(distribution, empty):
    assert jax.tree.leaves(distribution(empty, 0.5)) == []


@both
def test_without_a_sparsity_all_stay_dense(distribution):
    assert distribution(arrays((4, 8), (8, 8))) == {"p0": None, "p1": None}


@both
def test_only_shapes_and_dtypes_are_needed(distribution):
    params = arrays((4, 8), (8,))
    assert distribution(params, 0.5) == {"p0": 0.5, "p1": None}
    assert jax.eval_shape(lambda p: p, params) == params


@both
def test_the_parameters_may_be_traced(distribution):
    seen = []
    jax.jit(lambda p: seen.append(distribution(p, 0.5)))({"w": np.ones((2, 2))})
    assert seen == [{"w": 0.5}]


# The filter.


@both
def test_the_filter_sees_the_path_as_strings_and_the_parameter(distribution):
    seen = {}

    def select(path, param):
        seen[path] = param.shape
        return path[-1] == "kernel"

    params = {"net": [Pair(np.ones((3, 4)), np.ones(4))], "scale": np.ones(5)}
    sparsities = distribution(params, 0.5, filter_fn=select)
    assert sparsities == {"net": [Pair(0.5, None)], "scale": None}
    assert seen == {
        ("net", "0", "kernel"): (3, 4),
        ("net", "0", "bias"): (4,),
        ("scale",): (5,),
    }


def test_the_filter_may_choose_what_the_default_leaves_dense():
    assert uniform(arrays((4, 8), (8,)), 0.5, filter_fn=lambda path, param: param.ndim == 1) == {
        "p0": None,
        "p1": 0.5,
    }


@both
def test_a_filter_that_selects_nothing_is_an_error(distribution):
    with pytest.raises(
        ValueError, match=r"has nothing to remove .* Select some with filter_fn"
    ) as error:
        distribution({"net": arrays((4, 8))}, 0.5, filter_fn=lambda path, param: path[-1] == "w")
    assert "net/p0" in str(error.value)
    assert "0.5" in str(error.value)


@both
@pytest.mark.parametrize(
    ("overrides", "filter_fn"),
    [({".*": None}, None), ({"net/p0": None}, None), ({"net/p1": None}, lambda *_: False)],
)
def test_overrides_that_leave_all_parameters_dense_are_an_error(distribution, overrides, filter_fn):
    params = {"net": arrays((4, 8), (8,))}
    options = {"custom_sparsity_map": overrides, "filter_fn": filter_fn}
    with pytest.raises(ValueError, match=r"nothing to remove .*'net/p0', 'net/p1'. Select some"):
        distribution(params, 0.5, **options)
    for idle in (None, 0.0):
        targets = distribution(params, idle, **options)
        assert not any(jax.tree.leaves(targets))
    zero = distribution(params, 0.5, custom_sparsity_map={"net/p0": 0.0})
    assert zero == {"net": {"p0": 0.0, "p1": None}}


@both
def test_a_tree_of_integers_is_an_error_and_a_tree_without_arrays_is_not(distribution):
    integers = {"w": np.ones((4, 8), np.int8)}
    with pytest.raises(ValueError, match=r"sparsity = 0.5 has nothing to remove"):
        distribution(integers, 0.5)
    assert distribution(integers) == {"w": None}
    masked = {"w": optax.MaskedNode(), "v": None}  # as optax.partition leaves other groups
    assert not jax.tree.leaves(distribution(masked, 0.5))


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity_distribution_fn": sparsity.Uniform(0.5, custom_sparsity_map={"w": None})},
        {"sparsity_distribution_fn": sparsity.Uniform(0.5, filter_fn=lambda *_: False)},
        {"sparsity_distribution_fn": lambda _: {"w": 0.5}, "sparsity_type": lambda *_: None},
        {"sparsity_distribution_fn": lambda _: {"w": None, "n": 0.5}},
    ],
)
def test_updaters_without_a_target_are_an_error(options):
    params = {"w": jnp.ones((4, 8)), "n": jnp.ones((4, 8), jnp.int8)}
    pruner = sparsity.MagnitudePruning(**options)
    calls = [
        pruner.instant_sparsify,
        jax.jit(pruner.instant_sparsify),
        pruner.wrap_optax(optax.sgd(0.1)).init,
        lambda params: sparsity.oneshot(
            pruner, lambda p, x: x @ p["w"], params, [jnp.ones((2, 4))]
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"nothing to remove|that stay dense alone"):
            call(params)


@both
@pytest.mark.parametrize("sparsity", [None, 0.0])
def test_a_filter_that_selects_nothing_is_fine_where_nothing_is_removed(distribution, sparsity):
    assert distribution(arrays((4, 8)), sparsity, filter_fn=lambda *_: False) == {"p0": None}


@both
def test_a_filter_that_selects_nothing_is_fine_beside_overrides(distribution):
    sparsities = distribution(arrays((4, 8), (4, 4)), 0.5, lambda *_: False, {"p1": 0.25})
    assert sparsities == {"p0": None, "p1": 0.25}


@both
def test_a_scalar_that_the_filter_selects_does_no_harm(distribution):
    sparsities = distribution(arrays(()), 0.5, filter_fn=lambda *_: True)
    assert 0.0 <= sparsities["p0"] <= 1.0


@both
@pytest.mark.parametrize(("shape", "batch_axes"), [((0, 4), 0), ((4, 0), 0), ((0, 4, 4), 1)])
def test_empty_parameters_do_no_harm(distribution, shape, batch_axes):
    sparsities = distribution(arrays(shape, (8, 4, 4)), 0.5, batch_axes=batch_axes)
    assert sparsities["p1"] == pytest.approx(0.5)
    alone = distribution(arrays(shape), 0.5, batch_axes=batch_axes)
    assert 0.0 <= alone["p0"] <= 1.0


# Bad sparsities.


@both
@pytest.mark.parametrize("sparsity", [1.5, -0.1, NAN, 80, math.inf, "0.8", "high", [0.5]])
def test_a_sparsity_outside_zero_to_one_is_named(distribution, sparsity):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]") as error:
        distribution(arrays((4, 8)), sparsity)
    assert str(sparsity) in str(error.value)


@both
@pytest.mark.parametrize("sparsity", [1.5, -0.1, NAN, 80])
def test_a_bad_override_is_named_with_its_key(distribution, sparsity):
    with pytest.raises(ValueError, match=r"custom_sparsity_map\['p0'\]") as error:
        distribution(arrays((4, 8)), 0.5, custom_sparsity_map={"p0": sparsity})
    assert str(sparsity) in str(error.value)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.25), jnp.float32(1.0)])
def test_sparsities_from_zero_to_one_pass(value):
    assert uniform(arrays((4, 8)), value)["p0"] == value


def test_a_traced_sparsity_passes():
    assert jax.jit(lambda s: uniform(arrays((4, 8)), s)["p0"])(0.5) == 0.5


# Stacked weights.


@both
def test_batch_axes_count_for_the_default_filter(distribution):
    params = arrays((6, 4, 8), (6, 8), (8,), ())
    assert distribution(params, 0.5, batch_axes=1) == {
        "p0": 0.5,
        "p1": None,
        "p2": None,
        "p3": None,
    }


@both
def test_batch_axes_may_depend_on_the_parameter(distribution):
    params = {"stack": np.ones((6, 8)), "dense": np.ones((6, 8))}
    axes = lambda path, param: int(path == ("stack",) and param.shape == (6, 8))  # noqa: E731
    assert distribution(params, 0.5, batch_axes=axes) == {"stack": None, "dense": 0.5}


@both
@pytest.mark.parametrize("batch_axes", [-1, lambda path, param: 3, lambda path, param: -1])
def test_batch_axes_that_do_not_exist_are_named(distribution, batch_axes):
    with pytest.raises(ValueError, match=r"batch_axes of 'p0' must be at .* = (-1|3)"):
        distribution(arrays((4, 8)), 0.5, batch_axes=batch_axes)


# A number of entries in place of a sparsity.


def make_masks(distribution, **options):
    rng = np.random.default_rng(0)
    shapes = {"wide": (40, 50), "stack": (3, 20, 10), "bias": (7,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=distribution, **options)
    return pruner.instant_sparsify(params)[1]


@pytest.mark.parametrize("kind", [Uniform, ERK])
@pytest.mark.parametrize("entries", [4, 301, 2600])
def test_masks_keep_as_many_entries_as_asked_for(kind, entries):
    for options in (
        {"batch_axes": lambda path, _: int(path[-1] == "stack")},
        {"scope": sparsity.Global()},
    ):
        masks = make_masks(kind(entries=entries), **options)
        kept = sum(int(np.count_nonzero(mask)) for mask in jax.tree.leaves(masks))
        # Three slices of equal sparsity gain an entry together.
        assert entries - 2 <= kept <= entries
    assert masks["bias"] is None


@dataclasses.dataclass(frozen=True)
class Delegating:
    """Scope of a user, no subclass of the one that it calls."""

    scope: sparsity.Scope
    keeps_targets: bool = False
    keeps_total: bool = False

    def check(self, pattern, batch_axes, topk_fn):
        self.scope.check(pattern, batch_axes, topk_fn)

    def select(self, leaves, topk_fn):
        return self.scope.select(leaves, topk_fn)

    def move(self, leaves, drop_fraction):
        return self.scope.move(leaves, drop_fraction)


def test_scopes_that_state_the_numbers_that_they_keep_take_entries():
    scopes = {"keeps_targets": sparsity.Layerwise(), "keeps_total": sparsity.Global()}
    for name, scope in scopes.items():
        stated, silent = Delegating(scope, **{name: True}), Delegating(scope)
        masks = make_masks(Uniform(entries=301), scope=stated)
        expected = make_masks(Uniform(entries=301), scope=scope)
        jax.tree.map(np.testing.assert_array_equal, masks, expected)
        with pytest.raises(ValueError, match=f"entries = 301 counts .*`{name} = True`"):
            make_masks(Uniform(entries=301), scope=silent)


def test_a_subclass_states_what_it_no_longer_keeps():
    silent = type("Silent", (sparsity.Layerwise,), {"keeps_targets": False})
    with pytest.raises(ValueError, match="entries = 301 counts under"):
        make_masks(Uniform(entries=301), scope=silent())


@pytest.mark.parametrize(
    "pattern", [sparsity.FanIn(4), sparsity.Block((4, 4)), sparsity.Channel(-1)]
)
def test_masks_of_patterns_keep_no_more_entries_than_asked_for(pattern):
    masks = make_masks(Uniform(entries=301), sparsity_type=pattern)
    kept = sum(int(np.count_nonzero(mask)) for mask in jax.tree.leaves(masks))
    assert 150 < kept <= 301


@pytest.mark.parametrize("kind", [Uniform, ERK])
def test_parameters_without_a_pattern_stay_dense_and_keep_no_entries(kind):
    masks = make_masks(
        kind(entries=301),
        sparsity_type=lambda path, _: None if path[-1] == "wide" else sparsity.FanIn(1),
    )
    assert masks["wide"] is None
    assert np.count_nonzero(masks["stack"]) == 300


def test_leaves_that_are_no_arrays_keep_no_entries():
    params = {"w": np.ones((4, 8), np.float32), "name": "relu", "steps": 3}
    sparsities = Uniform(entries=8)(params)
    assert sparsities == {
        "w": Uniform(entries=8)({"w": params["w"]})["w"],
        "name": None,
        "steps": None,
    }


def test_overrides_count_and_billions_of_entries_are_within_rounding():
    masks = make_masks(Uniform(entries=301, custom_sparsity_map={"bias": 0.0, "wide": None}))
    assert np.count_nonzero(masks["bias"]) == 7
    assert masks["wide"] is None
    assert np.count_nonzero(masks["stack"]) == 294
    params = {f"layer {i}": jax.ShapeDtypeStruct((4096, 12288), jnp.bfloat16) for i in range(60)}
    target = Uniform(entries=1_000_000)(params, scope=sparsity.Global())["layer 0"]
    kept = round(60 * 4096 * 12288 * (1 - float(np.float32(target))))
    assert 1_000_000 - 60 * 4096 * 12288 * 2**-24 <= kept <= 1_000_000


def test_numbers_of_entries_that_cannot_be_kept_are_errors():
    with pytest.raises(ValueError, match=r"entries = 1 is less than the 2 entries"):
        make_masks(Uniform(entries=1))
    with pytest.raises(ValueError, match="entries = 9 has nothing to remove"):
        make_masks(Uniform(entries=9, filter_fn=lambda path, param: False))
    with pytest.raises(ValueError, match="entries = 9 has nothing to remove"):
        make_masks(Uniform(entries=9), sparsity_type=lambda path, param: None)
    with pytest.raises(ValueError, match=r"sparsity = 0.5 and entries = 3"):
        Uniform(0.5, entries=3)
    with pytest.raises(ValueError, match="entries must be"):
        ERK(entries=0)
    with pytest.raises(ValueError, match=r"entries = 9 counts under .* scope = 'Tree'"):
        Uniform(entries=9)({"w": np.ones((4, 4))}, scope="Tree")
