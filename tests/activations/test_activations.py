"""Sparse activations: what is kept, what the gradient is, and layers of models not edited."""

import re
import sys
from typing import Any

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

import sparsity
from sparsity import prune_act_struct, prune_act_unstruct
from tests import helpers
from tests.eight_devices import KINDS, run
from tests.selection_oracle import largest, n_of_m

# Single arrays.


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("density", [0.9, 0.5, 0.25, 1, 1e-6])
def test_unstruct_keeps_exactly_the_density_of_the_largest_magnitudes(dtype, density):
    x = helpers.normal(3, 8, 10).astype(jnp.dtype(dtype))
    out = prune_act_unstruct(jnp.asarray(x), density)
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(out, largest(x, density))


def test_unstruct_keeps_large_negative_values_and_breaks_ties_by_the_lowest_index():
    x = jnp.array([[-5.0, 1.0, -1.0], [1.0, 4.0, 0.5]])
    assert prune_act_unstruct(x, 0.5).tolist() == [[-5.0, 1.0, 0.0], [0.0, 4.0, 0.0]]


@pytest.mark.parametrize("batch_axes", [1, 2, 3])
def test_batch_axes_keep_the_density_of_every_slice(batch_axes):
    x = helpers.normal(3, 4, 10)
    x[0] *= 100  # would take all of the share of the others
    slices = x.reshape(*x.shape[:batch_axes], -1)
    expected = np.empty_like(slices)
    for index in np.ndindex(x.shape[:batch_axes]):
        expected[index] = largest(slices[index], 0.3)
    out = prune_act_unstruct(x, 0.3, batch_axes=batch_axes)
    np.testing.assert_array_equal(out, expected.reshape(x.shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize(("pattern", "n", "m"), [((2, 4), 2, 4), ("1:4", 1, 4), ([3, 5], 3, 5)])
def test_struct_keeps_n_of_every_m_and_of_a_shorter_last_group(dtype, axis, pattern, n, m):
    x = helpers.normal(7, 8, 10).astype(jnp.dtype(dtype))
    out = prune_act_struct(jnp.asarray(x), pattern, axis)
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(out, n_of_m(x, n, m, axis))


def test_struct_compares_magnitudes_and_keeps_the_sign():
    x = jnp.array([-5.0, 1.0, 2.0, -3.0, -1.0, 1.0, 1.0, 1.0])
    assert prune_act_struct(x, (2, 4)).tolist() == [-5.0, 0, 0, -3.0, -1.0, 1.0, 0, 0]


def test_struct_takes_a_type_with_an_axis_of_its_own():
    x = helpers.normal(8, 3)
    out = prune_act_struct(x, sparsity.NByM(1, 4, axis=0))
    np.testing.assert_array_equal(out, n_of_m(x, 1, 4, 0))


def test_nan_is_dropped_before_any_number():
    x = jnp.array([jnp.nan, -1.0, 0.5, jnp.nan])
    assert prune_act_unstruct(x, 0.5).tolist() == [0.0, -1.0, 0.5, 0.0]
    assert prune_act_struct(x, (2, 4)).tolist() == [0.0, -1.0, 0.5, 0.0]


def test_the_name_that_the_documents_also_use_is_the_same_function():
    assert sparsity.pruning_act_struct is prune_act_struct


@pytest.mark.slow
@hypothesis.given(
    st.sampled_from([(7,), (4, 6), (3, 1, 5)]),
    st.integers(1, 50),
    st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    st.integers(0, 10**6),
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_what_is_kept_is_as_much_as_asked_and_no_smaller_than_what_is_dropped(
    shape, fiftieths, pattern, seed
):
    density = fiftieths / 50
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    out = np.asarray(jax.jit(prune_act_unstruct)(x, density))
    kept = out != 0
    assert kept.sum() == helpers.num_kept(x.size, 1 - density)
    np.testing.assert_array_equal(out[kept], x[kept])
    assert np.abs(x[kept]).min() >= np.abs(x[~kept]).max(initial=0)
    np.testing.assert_array_equal(prune_act_struct(x, pattern), n_of_m(x, *pattern))


# Gradients and transformations.


@pytest.mark.parametrize(
    "prune",
    [
        lambda x, **options: prune_act_unstruct(x, 0.4, **options),
        lambda x, **options: prune_act_struct(x, (1, 4), **options),
    ],
    ids=["unstruct", "struct"],
)
class TestBothFunctions:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 10)).astype(np.float32))

    @pytest.mark.slow
    def test_the_gradient_passes_where_a_value_is_kept(self, prune):
        weights = jnp.arange(60.0).reshape(6, 10) + 1
        grad = jax.jit(jax.grad(lambda x: (prune(x) * weights).sum()))(self.x)
        np.testing.assert_array_equal(grad, np.where(prune(self.x) != 0, weights, 0))

    def test_straight_through_lets_the_gradient_pass_everywhere(self, prune):
        weights = jnp.arange(60.0).reshape(6, 10) + 1
        grad = jax.grad(lambda x: (prune(x, straight_through=True) * weights).sum())(self.x)
        np.testing.assert_array_equal(grad, weights)
        np.testing.assert_array_equal(prune(self.x, straight_through=True), prune(self.x))

    def test_tangents_pass_where_a_value_is_kept(self, prune):
        _, tangent = jax.jvp(prune, (self.x,), (jnp.ones_like(self.x),))
        np.testing.assert_array_equal(tangent, prune(self.x) != 0)

    @pytest.mark.slow
    def test_jit_and_vmap_and_scan_give_the_same(self, prune):
        rows = np.stack([prune(row) for row in self.x])
        np.testing.assert_array_equal(jax.jit(jax.vmap(prune))(self.x), rows)
        _, scanned = jax.lax.scan(lambda carry, row: (carry, prune(row)), 0, self.x)
        np.testing.assert_array_equal(scanned, rows)
        np.testing.assert_array_equal(jax.jit(prune)(self.x), prune(self.x))

    @pytest.mark.slow
    def test_gradients_pass_through_vmap_and_scan_and_remat(self, prune):
        def loss(x):
            _, out = jax.lax.scan(jax.checkpoint(lambda c, row: (c, prune(row))), 0.0, x)
            return (out**2).sum() + (jax.vmap(prune)(x) ** 2).sum()

        rows = np.stack([prune(row) for row in self.x])
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(self.x), 4 * rows, rtol=1e-6)


def test_the_density_may_be_traced():
    x = helpers.normal(10, 10)
    prune = jax.jit(prune_act_unstruct)
    for density in (0.2, 0.7):
        np.testing.assert_array_equal(prune(x, density), largest(x, density))


@pytest.mark.slow
@KINDS
def test_on_eight_devices_values_and_gradients_are_those_of_one(kind):
    run("activations", kind)


def test_a_density_of_bfloat16_is_subtracted_in_float32():
    x = np.arange(1, 1001, dtype=np.float32)
    assert jnp.count_nonzero(prune_act_unstruct(x, jnp.bfloat16(0.1))) == 100  # 0.10009765625


# Bad input.


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.1, 90, float("nan"), None, "0.9", (2, 4)])
def test_a_density_outside_of_0_to_1_is_an_error(density):
    with pytest.raises(ValueError, match=r"density .* must be in \(0, 1\]"):
        prune_act_unstruct(jnp.ones(4), density)


@pytest.mark.parametrize("density", [[0.5, 0.5], 0.5j, True])
def test_a_traced_density_is_a_real_scalar(density):
    with pytest.raises(ValueError, match=r"density .* must be in \(0, 1\], got density = .*Tracer"):
        jax.eval_shape(lambda density: prune_act_unstruct(np.ones(4), density), jnp.array(density))


@pytest.mark.parametrize("x", [[[1.0], [1.0, 2.0]], ["two"], np.array([1.0, None])])
def test_lists_and_objects_that_are_no_numbers_are_errors(x):
    with pytest.raises((TypeError, ValueError)):
        prune_act_unstruct(x, 0.5)


@pytest.mark.parametrize(
    "pattern", [(5, 4), (0, 4), (-1, 4), (1.5, 4), (2,), (1, 2, 3), "2-4", 0.5]
)
def test_a_pattern_that_is_none_is_an_error(pattern):
    with pytest.raises(ValueError, match=r"pattern = .* is no pattern"):
        prune_act_struct(jnp.ones(8), pattern)


def test_axes_out_of_range_and_integers_are_errors():
    with pytest.raises(ValueError, match="axis must be at most 0, got axis = 1"):
        prune_act_struct(jnp.ones(8), (2, 4), axis=1)
    with pytest.raises(ValueError, match="batch_axes must be at most 1"):
        prune_act_unstruct(jnp.ones(8), 0.5, batch_axes=2)
    with pytest.raises(ValueError, match=r"x must be an array of floating .* int32"):
        prune_act_struct(jnp.arange(8), (2, 4))


# Models.


class CNN(nn.Module):
    """The model of the README of jax_pruning, at its size or a smaller one."""

    features: tuple[int, int, int] = (32, 64, 256)
    is_sparse: bool = True

    @nn.compact
    def __call__(self, x):
        prune = self.is_sparse
        x = nn.Conv(features=self.features[0], kernel_size=(3, 3))(x)
        x = prune_act_unstruct(x, 0.9) if prune else x
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=self.features[1], kernel_size=(3, 3))(x)
        x = prune_act_struct(x, (2, 4)) if prune else x
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=self.features[2])(x))
        return nn.Dense(features=10)(x)


LAYERS = {"Conv_0": 0.9, "Conv_1": (2, 4)}
IMAGES = helpers.normal(2, 8, 8, 1)
EDITED, DENSE = CNN((4, 8, 8)), CNN((4, 8, 8), is_sparse=False)


@pytest.fixture(scope="module")
def variables():
    return DENSE.init(jax.random.key(0), IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_linen_layers_are_sparsified_as_if_the_model_was_edited(variables, jit):
    apply = sparsity.sparsify_linen(DENSE.apply, LAYERS)
    run = jax.jit(apply) if jit else apply
    np.testing.assert_allclose(run(variables, IMAGES), EDITED.apply(variables, IMAGES), rtol=1e-5)
    assert not np.allclose(DENSE.apply(variables, IMAGES), EDITED.apply(variables, IMAGES))


@pytest.mark.slow
def test_linen_gradients_are_those_of_the_edited_model(variables):
    apply = sparsity.sparsify_linen(DENSE.apply, LAYERS)
    grads = [
        jax.jit(jax.grad(lambda v, f=f: (f(v, IMAGES) ** 2).sum()))(variables)
        for f in (apply, EDITED.apply)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *grads)


class Shifted(nn.Dense):
    def __call__(self, x):
        return super().__call__(x) + 1.0


def test_a_linen_layer_that_calls_its_base_class_is_pruned_once():
    x, model = helpers.normal(1, 4), nn.Sequential([Shifted(8)])
    variables = model.init(jax.random.key(0), x)
    apply = sparsity.sparsify_linen(model.apply, {"layers_0": 0.25})
    out, state = apply(variables, x, mutable=["intermediates"])
    np.testing.assert_array_equal(out, prune_act_unstruct(model.apply(variables, x), 0.25))
    assert state["intermediates"]["layers_0"]["activation_sparsity"] == (0.75,)


@pytest.mark.slow
def test_linen_layers_report_the_sparsity_of_their_outputs(variables):
    apply = sparsity.sparsify_linen(DENSE.apply, LAYERS | {"Dense_0": 1.0})
    _, state = apply(variables, IMAGES, mutable=["intermediates"])
    actual = {name: sown["activation_sparsity"] for name, sown in state["intermediates"].items()}
    assert actual == {"Conv_0": (pytest.approx(1 - 461 / 512),), "Conv_1": (0.5,), "Dense_0": (0,)}


@pytest.mark.slow
class Scanned(nn.Module):
    """Three scanned layers, with `variable_axes`, and a last one."""

    axes: Any

    @nn.compact
    def __call__(self, x):
        layer = nn.scan(Block, variable_axes=self.axes, split_rngs={"params": True}, length=3)
        return nn.Dense(4, name="last")(layer(name="blocks")(x, None)[0])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4, name="dense")(x), None


@pytest.mark.parametrize("mutable", [["intermediates"], True])
def test_linen_layers_that_a_scan_keeps_from_reporting_are_named_by_a_warning(mutable):
    layers, x = {"blocks/dense": 0.25, "last": 0.5}, jnp.ones((2, 4))
    models = [Scanned({"params": 0} | axes) for axes in ({}, {"intermediates": 0})]
    variables = models[0].init(jax.random.key(0), x)
    silent, telling = (sparsity.sparsify_linen(model.apply, layers) for model in models)
    assert (silent(variables, x) == 0).mean() == 0.5  # nobody asks for intermediates
    with pytest.warns(UserWarning, match="activation_sparsity of 'blocks/dense' is not reported"):
        report = silent(variables, x, mutable=mutable)[1]["intermediates"]
    assert report == {"last": {"activation_sparsity": (0.5,)}}
    report = telling(variables, x, mutable=mutable)[1]["intermediates"]
    np.testing.assert_array_equal(report["blocks"]["dense"]["activation_sparsity"], [[0.75] * 3])


def test_linen_init_makes_the_same_variables(variables):
    made = sparsity.sparsify_linen(DENSE.init, LAYERS)(jax.random.key(0), IMAGES)
    assert jax.tree.structure(made) == jax.tree.structure(variables)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="b")(nn.Dense(8, name="a")(x))


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        shared = nn.Dense(8, name="shared")
        return shared(shared(Pair(name="block")(x)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "sparsities"),
    [
        ({"block/a": 0.25}, {"block/a": [0.75]}),
        ({("block", "b"): 0.25}, {"block/b": [0.75]}),
        ({"block/.": 0.25}, {"block/a": [0.75], "block/b": [0.75]}),
        ({"block/.": 0.25, "block/a": 0.5}, {"block/a": [0.5], "block/b": [0.75]}),
        ({re.compile("a$"): (1, 4)}, {"block/a": [0.75]}),
        ({"shared": "2:4"}, {"shared": [0.5, 0.5]}),
    ],
)
def test_linen_layers_are_named_by_path_or_pattern(layers, sparsities):
    x = helpers.normal(2, 8)
    variables = Nested().init(jax.random.key(0), x)
    apply = sparsity.sparsify_linen(Nested().apply, layers)
    state = apply(variables, x, mutable=["intermediates"])[1]["intermediates"]
    actual = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        actual.setdefault("/".join(key.key for key in path[:-2]), []).append(float(leaf))
    assert actual == sparsities


def test_linen_layers_share_the_density_by_example_with_batch_axes():
    x = helpers.normal(4, 8) * np.array([[100.0], [1], [1], [1]], np.float32)
    model = nn.Sequential([nn.Dense(8, use_bias=False)])
    variables = model.init(jax.random.key(0), x)
    out = sparsity.sparsify_linen(model.apply, {"layers_0": 0.25}, batch_axes=1)(variables, x)
    assert (np.asarray(out) != 0).sum(axis=1).tolist() == [2, 2, 2, 2]


@pytest.mark.slow
def test_straight_through_reaches_the_functions_of_the_wrappers():
    x, model = helpers.normal(4, 8), nn.Sequential([nn.Dense(8)])
    variables = model.init(jax.random.key(0), x)
    for pattern in (0.25, (1, 4)):
        apply = sparsity.sparsify_linen(model.apply, {"layers_0": pattern}, straight_through=True)
        grad = jax.grad(lambda v: apply(v, x).sum())(variables)  # noqa: B023
        np.testing.assert_allclose(grad["params"]["layers_0"]["bias"], 4.0)


@pytest.mark.slow
def test_linen_keys_that_name_no_layer_are_errors_with_the_nearest(variables):
    apply = sparsity.sparsify_linen(DENSE.apply, {"Conv_0": 0.9, "Conf_1": 0.9})
    with pytest.raises(ValueError, match=r"layers\['Conf_1'\].*mean 'Conv_1'.*Dense_1"):
        apply(variables, IMAGES)


def test_linen_compiled_functions_are_refused_as_they_call_no_layers(variables):
    compiled = jax.jit(DENSE.apply)
    compiled(variables, IMAGES)
    with pytest.raises(ValueError, match=r"compiled by jax\.jit"):
        sparsity.sparsify_linen(compiled, LAYERS)


def test_a_layer_that_returns_no_array_is_an_error():
    model = nn.RNN(nn.LSTMCell(4))
    variables = model.init(jax.random.key(0), helpers.normal(1, 3, 4))
    with pytest.raises(ValueError, match="'cell' returns tuple"):
        sparsity.sparsify_linen(model.apply, {"cell": 0.5})(variables, helpers.normal(1, 3, 4))


@pytest.mark.parametrize("sparsify", [sparsity.sparsify_linen, sparsity.sparsify_nnx])
def test_bad_densities_and_patterns_of_layers_are_errors_at_once(sparsify):
    with pytest.raises(ValueError, match=r"layers\['a'\] .* must be in \(0, 1\]"):
        sparsify(None, {"a": 0.0})
    with pytest.raises(ValueError, match=r"layers\['a'\] = \(5, 4\) is no pattern"):
        sparsify(None, {"a": (5, 4)})


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_without_flax_the_error_names_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, f"flax.{name}", None)
    with pytest.raises(ImportError, match=r"pip install 'jax-sparsity\[flax\]'"):
        getattr(sparsity, f"sparsify_{name}")(None, {})


class Model(nnx.Module):
    """Two layers; their outputs are pruned where the model is edited."""

    def __init__(self, prune1=lambda x: x, prune2=lambda x: x):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 12, rngs=rngs)])
        self.prune1, self.prune2 = prune1, prune2

    def __call__(self, x):
        x = self.prune1(self.first(x))
        return self.prune2(self.blocks[0](nnx.relu(x)))


def edited_and_sparsified():
    edited = Model(lambda x: prune_act_unstruct(x, 0.25), lambda x: prune_act_struct(x, (2, 4)))
    return edited, sparsity.sparsify_nnx(Model(), {"first": 0.25, "blocks/.*": (2, 4)})


@pytest.mark.slow
def test_nnx_layers_are_sparsified_as_if_the_model_was_edited():
    x = helpers.normal(4, 8)
    edited, sparse = edited_and_sparsified()
    for call in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x))):
        np.testing.assert_allclose(call(sparse, x), call(edited, x), rtol=1e-5)
    grads = [nnx.grad(lambda m: (m(x) ** 2).sum())(model) for model in (sparse, edited)]
    pairs = zip(*(jax.tree.leaves(nnx.as_pure(grad)) for grad in grads), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_nnx_models_stay_as_they_were_and_copies_have_the_same_paths_and_types():
    model, x = Model(), helpers.normal(4, 8)
    before, type_before = np.asarray(model(x)), type(model.first)
    sparse = sparsity.sparsify_nnx(model, {"first": 0.25})
    np.testing.assert_array_equal(model(x), before)
    assert not np.allclose(sparse(x), before)
    assert type(model.first) is type_before
    assert isinstance(sparse.first, type_before)
    paths = [jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(m))) for m in (model, sparse)]
    assert [path for path, _ in paths[0]] == [path for path, _ in paths[1]]


@pytest.mark.slow
def test_nnx_layers_report_the_sparsity_of_their_outputs_to_capture():
    _, sparse = edited_and_sparsified()
    run = nnx.jit(lambda model, x: nnx.capture(model, nnx.Intermediate)(x))
    state = nnx.to_pure_dict(run(sparse, helpers.normal(4, 8))[1])
    assert state["first"]["activation_sparsity"] == (0.75,)
    assert state["blocks"][0]["activation_sparsity"] == (0.5,)


def test_nnx_keys_that_name_no_layer_are_errors_with_the_nearest():
    with pytest.raises(ValueError, match=r"layers\['fist'\].*mean 'first'.*blocks/0"):
        sparsity.sparsify_nnx(Model(), {"fist": 0.5})


def test_a_key_matches_no_layer_of_a_model_without_layers():
    with pytest.raises(ValueError, match=r"layers\['first'\] matches no layer\. There are none\."):
        sparsity.sparsify_nnx(nnx.Module(), {"first": 0.5})


@pytest.mark.slow
def test_the_model_of_the_readme_trains_with_both_prunings():
    model, images = CNN(), helpers.normal(2, 28, 28, 1)
    variables = model.init(jax.random.key(0), images)
    grads = jax.jit(jax.grad(lambda v: (model.apply(v, images) ** 2).mean()))(variables)
    assert all(np.isfinite(g).all() and np.any(g) for g in jax.tree.leaves(grads))
