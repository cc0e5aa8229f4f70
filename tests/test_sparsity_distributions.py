"""Target sparsities by parameter; ERK is checked against another way to solve for its scale."""

import math
import re

import flax
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparsity.sparsity_distributions import erk, uniform
from tests.helpers import Layer, Module, Pair

NAN = float("nan")
both = pytest.mark.parametrize("distribution", [uniform, erk])


def arrays(*shapes):
    return {f"p{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}


def erk_densities(slice_shapes, sizes, sparsity, power):
    """min(1, eps * raw), where a bisection finds the eps that keeps as much as uniform does."""
    raw = np.array([(sum(shape) / math.prod(shape)) ** power for shape in slice_shapes])
    sizes = np.array(sizes, np.float64)
    low, high = 0.0, 1.0 / raw.min()
    for _ in range(200):
        eps = (low + high) / 2
        kept = np.sum(np.minimum(1.0, eps * raw) * sizes)
        low, high = (eps, high) if kept < (1 - sparsity) * sizes.sum() else (low, eps)
    return np.minimum(1.0, high * raw)


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
def test_bare_vectors_and_scalars_stay_dense(distribution, shape):
    assert distribution(np.ones(shape), 0.5) is None


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
    with pytest.raises(ValueError, match="filter_fn selects no parameter") as error:
        distribution({"net": arrays((4, 8))}, 0.5, filter_fn=lambda path, param: path[-1] == "w")
    assert "net/p0" in str(error.value)
    assert "0.5" in str(error.value)


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


# Overrides by name.

NET = {
    "dense": {"kernel": np.ones((4, 8)), "bias": np.ones(8)},
    "layers": [{"kernel": np.ones((8, 8))}, {"kernel": np.ones((8, 2))}],
}


def net(dense=0.5, bias=None, first=0.5, second=0.5):
    return {
        "dense": {"kernel": dense, "bias": bias},
        "layers": [{"kernel": first}, {"kernel": second}],
    }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({("dense", "kernel"): 0.9}, net(dense=0.9)),
        ({("layers", "0", "kernel"): 0.9}, net(first=0.9)),
        ({("layers", 0, "kernel"): 0.9}, net(first=0.9)),
        ({"layers/1/kernel": 0.9}, net(second=0.9)),
        ({"layers/.*/kernel": 0.9}, net(first=0.9, second=0.9)),
        ({".*kernel": 0.9}, net(0.9, None, 0.9, 0.9)),
        ({re.compile("layers"): 0.9}, net(first=0.9, second=0.9)),
        ({re.compile("^l.*1/"): 0.9}, net(second=0.9)),
        ({"dense/bias": 0.1}, net(bias=0.1)),
        ({".*": 0.1}, net(0.1, 0.1, 0.1, 0.1)),
        ({"dense/kernel": None}, net(dense=None)),
        ({re.compile("kernel"): None}, net(None, None, None, None)),
        ({"dense/kernel": 0, "layers/0/kernel": 1}, net(dense=0, first=1)),
        ({}, net()),
        (None, net()),
    ],
)
def test_overrides_by_path_pattern_or_compiled_pattern(overrides, expected):
    assert uniform(NET, 0.5, custom_sparsity_map=overrides) == expected


@both
def test_a_string_matches_whole_paths_only(distribution):
    params = {"conv": {"w": np.ones((2, 2))}, "conv_2": {"w": np.ones((2, 2))}}
    assert distribution(params, 0.5, custom_sparsity_map={"conv/w": 0.1})["conv_2"]["w"] == 0.5
    with pytest.raises(ValueError, match="'conv'] matches no parameter"):
        distribution(params, 0.5, custom_sparsity_map={"conv": 0.1})


@pytest.mark.parametrize(
    "exact", ["layers/0/kernel", ("layers", "0", "kernel"), ("layers", 0, "kernel")], ids=repr
)
@pytest.mark.parametrize("pattern", [".*kernel", "layers/.*", re.compile("0/kernel")], ids=repr)
@pytest.mark.parametrize("exact_comes_first", [True, False])
def test_an_exact_path_beats_a_pattern(exact, pattern, exact_comes_first):
    overrides = [(exact, 0.9), (pattern, 0.1)]
    overrides = dict(overrides if exact_comes_first else reversed(overrides))
    assert uniform(NET, 0.5, custom_sparsity_map=overrides)["layers"][0]["kernel"] == 0.9


def test_the_first_of_several_patterns_wins():
    overrides = {".*/kernel": 0.1, re.compile("layers"): 0.2}
    assert uniform(NET, 0.5, custom_sparsity_map=overrides) == net(0.1, None, 0.1, 0.1)


@both
def test_overrides_reach_beyond_the_filter(distribution):
    sparsities = distribution(
        NET,
        0.5,
        filter_fn=lambda path, param: path[0] == "dense" and param.ndim > 1,
        custom_sparsity_map={"dense/bias": 0.2, "layers/0/kernel": 0.3},
    )
    assert sparsities == net(0.5, 0.2, 0.3, None)


@both
def test_overrides_apply_without_a_sparsity(distribution):
    sparsities = distribution(NET, custom_sparsity_map={"layers/0/kernel": 0.3})
    assert sparsities == net(None, None, 0.3, None)


@both
@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("dense/kernal", "dense/kernel"),
        (("dense", "kernl"), "dense/kernel"),
        (("layers", "00", "kernel"), "layers/0/kernel"),
        (re.compile("densest"), "dense/bias"),
        ("dens.*/biases", "dense/bias"),
    ],
    ids=repr,
)
def test_an_override_that_matches_nothing_is_an_error_with_the_nearest(distribution, key, nearest):
    with pytest.raises(ValueError, match="matches no parameter") as error:
        distribution(NET, 0.5, custom_sparsity_map={key: 0.1})
    assert f"custom_sparsity_map[{key!r}]" in str(error.value)
    assert f"nearest is {nearest!r}" in str(error.value)
    for name in ("dense/kernel", "dense/bias", "layers/0/kernel", "layers/1/kernel"):
        assert name in str(error.value)


def test_the_name_that_messages_give_a_bare_array_is_a_key_for_it():
    with pytest.raises(ValueError, match="parameters are \\['params'\\]"):
        uniform(np.ones((4, 4)), 0.5, custom_sparsity_map={"kernel": 0.2})
    assert uniform(np.ones((4, 4)), 0.5, custom_sparsity_map={"params": 0.2}) == 0.2


@both
def test_names_with_characters_of_patterns_are_keys(distribution):
    params = {"a[0]": np.ones((2, 2)), "w(": np.ones((2, 2)), "b": np.ones((2, 2))}
    sparsities = distribution(params, 0.5, custom_sparsity_map={"w(": 0.1, "a[0]": 0.2})
    assert sparsities == {"a[0]": 0.2, "w(": 0.1, "b": 0.5}


@both
@pytest.mark.parametrize("key", ["*kernel", "dense/(kernel"])
def test_a_string_that_is_no_path_and_no_pattern_is_an_error_with_the_key(distribution, key):
    with pytest.raises(ValueError, match="custom_sparsity_map") as error:
        distribution(NET, 0.5, custom_sparsity_map={key: 0.1})
    assert repr(key) in str(error.value)


def test_names_with_dashes_and_dots_are_addressed_exactly():
    params = {"block-1.conv": {"w-x": np.ones((2, 2))}, "block-1_conv": {"w-x": np.ones((2, 2))}}
    sparsities = uniform(params, 0.5, custom_sparsity_map={("block-1.conv", "w-x"): 0.1})
    assert sparsities == {"block-1.conv": {"w-x": 0.1}, "block-1_conv": {"w-x": 0.5}}


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
    with pytest.raises(ValueError, match=r"batch_axes.*(-1|3).*'p0'.*\(4, 8\)"):
        distribution(arrays((4, 8)), 0.5, batch_axes=batch_axes)


# ERK.

CASES = {
    "two": [(10, 10), (50, 50)],
    "one dense": [(3, 3), (100, 100), (50, 80)],
    "several dense": [(2, 2), (3, 4), (5, 5), (300, 300), (200, 400)],
    "convolutions": [(3, 3, 3, 64), (3, 3, 64, 64), (1, 1, 64, 256), (2048, 1000)],
    "equal": [(16, 16), (16, 16), (16, 16)],
    "one": [(16, 32)],
}


@pytest.mark.parametrize("shapes", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.8, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("power", [1.0, 0.5, 0.0])
def test_erk_agrees_with_a_bisection(shapes, sparsity, power):
    sizes = [math.prod(shape) for shape in shapes]
    sparsities = list(erk(arrays(*shapes), sparsity, erk_power_scale=power).values())
    expected = 1 - erk_densities(shapes, sizes, sparsity, power)
    np.testing.assert_allclose(sparsities, expected, rtol=0, atol=1e-9)
    removed = np.dot(sparsities, sizes)
    assert removed == pytest.approx(sparsity * sum(sizes), rel=1e-9, abs=1e-6)


def test_erk_has_the_values_worked_by_hand():
    # 100 and 2500 weights; half of 2600 is 1300. The raw densities 0.2 and 0.04 are in the ratio
    # 5 : 1; with the small layer dense, the large one keeps 1200 of 2500.
    assert erk(arrays((10, 10), (50, 50)), 0.5) == pytest.approx({"p0": 0.0, "p1": 0.52})
    # 90 % removed keeps 260 = eps * (0.2 * 100 + 0.04 * 2500) = 120 eps: densities 13/30, 13/150.
    assert erk(arrays((10, 10), (50, 50)), 0.9) == pytest.approx(
        {"p0": 1 - 13 / 30, "p1": 1 - 13 / 150}
    )


def test_layers_that_would_exceed_density_one_are_exactly_dense():
    sparsities = erk(arrays((2, 2), (3, 4), (300, 300)), 0.5)
    assert sparsities["p0"] == sparsities["p1"] == 0.0
    assert sparsities["p2"] == pytest.approx(0.5 * (90_016) / 90_000)


@pytest.mark.parametrize(
    "shapes", [[(4, 4), (40, 50), (3, 7)], [(7, 9), (30, 11), (64, 64), (128, 3)]]
)
def test_sparsity_zero_is_exactly_zero_everywhere(shapes):
    assert set(erk(arrays(*shapes), 0.0).values()) == {0.0}


def test_power_zero_is_uniform():
    params = arrays((4, 4), (100, 100), (3, 3, 8, 8))
    assert erk(params, 0.7, erk_power_scale=0.0) == pytest.approx(uniform(params, 0.7))


def test_parameters_with_an_override_take_no_part_in_erk():
    shapes = [(10, 10), (50, 50), (30, 40)]
    alone = erk(arrays(*shapes[:2]), 0.9)
    sparsities = erk(arrays(*shapes), 0.9, custom_sparsity_map={"p2": 0.2})
    assert sparsities == {**alone, "p2": 0.2}
    assert erk(arrays(*shapes), 0.9, custom_sparsity_map={"p2": None}) == {**alone, "p2": None}


def test_parameters_outside_the_filter_take_no_part_in_erk():
    sparsities = erk(arrays((10, 10), (50, 50), (30, 40)), 0.9, lambda path, _: path != ("p2",))
    assert sparsities == {**erk(arrays((10, 10), (50, 50)), 0.9), "p2": None}


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_a_stack_counts_by_the_shape_of_a_slice_and_by_all_its_weights(power):
    params = {
        "stack": np.ones((12, 20, 30)),
        "experts": np.ones((2, 4, 8, 8)),
        "w": np.ones((9, 9)),
    }
    axes = {"stack": 1, "experts": 2, "w": 0}
    sparsities = erk(params, 0.8, erk_power_scale=power, batch_axes=lambda path, _: axes[path[-1]])
    shapes, sizes = [(20, 30), (8, 8), (9, 9)], [12 * 600, 8 * 64, 81]
    expected = 1 - erk_densities(shapes, sizes, 0.8, power)
    found = [sparsities[key] for key in ("stack", "experts", "w")]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_a_stack_is_treated_as_its_layers_would_be_one_by_one():
    apart = {f"layer{i}": np.ones((20, 30)) for i in range(5)} | {"w": np.ones((50, 60))}
    stacked = {"layers": np.ones((5, 20, 30)), "w": np.ones((50, 60))}
    one_by_one, together = erk(apart, 0.7), erk(stacked, 0.7, batch_axes=lambda p, x: x.ndim - 2)
    assert together["layers"] == pytest.approx(one_by_one["layer3"])
    assert together["w"] == pytest.approx(one_by_one["w"])


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    shapes=st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=4), min_size=1, max_size=6),
    sparsity=st.floats(0, 1),
    power=st.floats(0, 1.5),
)
def test_erk_removes_as_many_weights_as_uniform(shapes, sparsity, power):
    sizes = [math.prod(shape) for shape in shapes]
    sparsities = list(erk(arrays(*map(tuple, shapes)), sparsity, erk_power_scale=power).values())
    assert all(0.0 <= value <= 1.0 for value in sparsities)
    assert np.dot(sparsities, sizes) == pytest.approx(sparsity * sum(sizes), rel=1e-6, abs=1e-6)


def resnet50_kernels():
    """Shapes of the 54 kernels of ResNet-50."""
    shapes = {"conv1": (7, 7, 3, 64)}
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(blocks):
            name = f"stage{stage}/block{block}"
            shapes[f"{name}/conv1"] = (1, 1, inputs, width)
            shapes[f"{name}/conv2"] = (3, 3, width, width)
            shapes[f"{name}/conv3"] = (1, 1, width, 4 * width)
            if block == 0:
                shapes[f"{name}/projection"] = (1, 1, inputs, 4 * width)
            inputs = 4 * width
    shapes["fc"] = (2048, 1000)
    return shapes


@pytest.mark.parametrize(
    ("sparsity", "megabytes"), [(0.8, "23.683"), (0.9, "13.499"), (0.95, "8.399")]
)
def test_erk_gives_resnet50_its_published_sizes(sparsity, megabytes):
    # Evci et al. 2020: 32 bits a kept weight (in whole weights, rounded down), 1 bit for every
    # weight of a sparse layer, and 27,560 dense parameters of 32 bits beside the kernels.
    shapes = resnet50_kernels()
    assert len(shapes) == 54
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    assert sum(sizes.values()) == 25_502_912
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    sparsities = erk(params, sparsity)
    bits = 32 * 27_560
    for name, size in sizes.items():
        bits += 32 * math.floor((1 - sparsities[name]) * size)
        bits += size if sparsities[name] > 0 else 0
    assert f"{bits / 8 / 1e6:.3f}" == megabytes


@pytest.mark.parametrize("power", [math.nan, math.inf, -1.0, "a"])
def test_a_power_scale_that_is_no_finite_number_is_an_error(power):
    with pytest.raises(ValueError, match="erk_power_scale must be a finite number"):
        erk({"w": np.ones((4, 4))}, 0.5, erk_power_scale=power)


def test_a_filter_or_overrides_of_another_kind_are_errors():
    with pytest.raises(ValueError, match=r"filter_fn must be a function.*'kernel'"):
        uniform({"w": np.ones((4, 4))}, 0.5, filter_fn="kernel")
    with pytest.raises(ValueError, match=r"custom_sparsity_map must be a dict.*0\.5"):
        uniform({"w": np.ones((4, 4))}, 0.5, custom_sparsity_map=0.5)


def test_a_traced_sparsity_passes_through_uniform_and_is_refused_by_erk():
    params = {"w": np.ones((4, 4)), "b": np.ones(4)}

    def select(path, param):
        return path == ("w",)

    assert jax.jit(lambda s: uniform(params, s, filter_fn=select)["w"])(0.25) == 0.25
    with pytest.raises(ValueError, match="sparsity must not be traced"):
        jax.jit(lambda s: erk(params, s)["w"])(0.25)
