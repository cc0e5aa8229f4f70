"""ERK, checked against another way to solve for its scale, and against published sizes."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.sparsity_distributions import erk, uniform
from tests.helpers import arrays


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
    actual = [sparsities[key] for key in ("stack", "experts", "w")]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


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
