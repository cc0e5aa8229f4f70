"""Sparse deltas: exact to the bit, small, checked against their base, or refused."""

import os
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import sparsity
from sparsity import Delta
from tests.eight_devices import KINDS, run
from tests.helpers import bits

DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3fn", "complex64", "int8", "bool"]
ALL_DTYPES = [*DTYPES, "float64", "complex128", "int64", "uint16", "float8_e5m2", "int4"]


def draw(shape=(16, 32), seed=0, dtype="float32"):
    return (4 * np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def tune(weights, density=0.1, seed=1, scale=0.1):
    """Changes some entries; returns the new weights and the mask of these entries."""
    rng = np.random.default_rng(seed)
    mask = rng.random(weights.shape) < density
    step = (scale * rng.normal(size=weights.shape)).astype(weights.dtype)
    return np.where(mask, weights + step, weights), mask.astype(np.uint8)


@pytest.fixture
def model():
    """A base, the model after training, and its masks."""
    base = {"layer": {"kernel": draw(), "bias": draw((32,), 1)}, "norm": np.ones(4, np.float32)}
    kernel, kernel_mask = tune(base["layer"]["kernel"])
    bias, bias_mask = tune(base["layer"]["bias"], 0.5)
    params = {"layer": {"kernel": kernel, "bias": bias}, "norm": base["norm"]}
    masks = {"layer": {"kernel": kernel_mask, "bias": bias_mask}, "norm": None}
    return base, params, masks


def write_and_read(delta, folder):
    delta.save(folder / "delta.safetensors")
    return Delta.load(folder / "delta.safetensors")


# Exactness.


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_apply_gives_back_every_bit_of_every_dtype(tmp_path, dtype):
    base = draw((40,), dtype=dtype)
    tuned = base.copy()
    tuned[[0, 7, 39]] = tuned[[7, 0, 1]]
    delta = write_and_read(Delta.between({"w": base}, {"w": tuned}), tmp_path)
    assert bits(delta.apply({"w": base})) == bits({"w": tuned})
    if dtype in DTYPES:
        applied = delta.apply({"w": jnp.asarray(base)})["w"]
        assert isinstance(applied, jax.Array)
        assert bits(applied) == bits(tuned)


def test_values_that_no_difference_reaches_are_exact(tmp_path):
    patterns = [0x80000000, 0x7F800001, 0xFFC00123, 0x7F800000, 1, 0x00000000]
    base = np.array([0.0, 1.0, np.nan, -1.0, 1e30, np.inf], np.float32)
    tuned = np.array(patterns, np.uint32).view(np.float32)  # -0.0, NaNs, inf, the smallest, 0.0
    delta = write_and_read(Delta.between({"w": base}, {"w": tuned}), tmp_path)
    assert bits(delta.apply({"w": base})) == bits({"w": tuned})
    assert bits(delta.apply({"w": jnp.asarray(base)})["w"]) == bits(tuned)


def test_entries_in_the_masks_are_exact_and_others_stay(model, tmp_path):
    base, params, masks = model
    delta = write_and_read(Delta.between(base, params, masks), tmp_path)
    assert bits(delta.apply(base)) == bits(params)
    assert {name: part.values.size for name, part in delta.terms[0].entries.items()} == {
        f"layer/{name}": np.sum(mask) for name, mask in masks["layer"].items()
    }


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3, 4)])
def test_arrays_of_any_shape_have_deltas(shape, tmp_path):
    base, tuned = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    delta = write_and_read(Delta.between({"w": base}, {"w": tuned}), tmp_path)
    assert bits(delta.apply({"w": base})) == bits({"w": tuned})


def test_scalars_of_numpy_stay_scalars():
    base, tuned = {"s": np.float64(2), "t": np.float32(1)}, {"s": np.float64(3), "t": np.float32(1)}
    applied = Delta.between(base, tuned).apply(base)
    assert applied == tuned
    assert type(applied["s"]) is np.float64


def test_equal_models_have_an_empty_delta(model, tmp_path):
    base = model[0]
    delta = write_and_read(Delta.between(base, base), tmp_path)
    assert delta.nbytes == 0
    assert bits(delta.apply(base)) == bits(base)


def test_masks_of_a_pruner_choose_what_may_change():
    params = {"w": jnp.asarray(draw())}
    pruner = sparsity.create_updater_from_config({"algorithm": "magnitude", "sparsity": 0.9})
    masks = pruner.instant_sparsify(params)[1]
    tuned = {"w": jnp.where(masks["w"] > 0, params["w"] * 1.5, params["w"])}
    delta = Delta.between(params, tuned, masks)
    assert delta.terms[0].entries["w"].values.size == np.sum(masks["w"])
    assert bits(delta.apply(params)) == bits(tuned)


# Trees and arrays.


class Layer(typing.NamedTuple):
    kernel: np.ndarray
    parts: list


def test_any_container_with_the_same_paths_is_the_same_base():
    weights = [draw((3,), seed) for seed in range(3)]
    tuned = [weights[0], weights[1] + 1, weights[2]]
    one, other = (Layer(x[0], [x[1], None, x[2]]) for x in (weights, tuned))
    delta = Delta.between(one, other)
    assert bits(delta.apply(one)) == bits(other)
    assert isinstance(delta.apply(one), Layer)
    flat = {"kernel": weights[0], "parts/0": weights[1], "parts/2": weights[2]}
    assert bits(delta.apply(flat)["parts/0"]) == bits(tuned[1])


def test_states_of_nnx_have_deltas_and_random_keys_stay():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    state = nnx.state((nnx.Linear(3, 2, rngs=nnx.Rngs(0)), dropout))
    tuned = jax.tree.map(lambda leaf: leaf + 1 if leaf.dtype == np.float32 else leaf, state)
    delta = Delta.between(state, tuned)
    assert {"0/kernel", "0/bias"} <= delta.base.keys()
    applied = delta.apply(state)
    assert jax.tree.structure(applied) == jax.tree.structure(state)
    np.testing.assert_array_equal(applied[0]["kernel"][...], state[0]["kernel"][...] + 1)


def test_leaves_that_are_no_arrays_and_leaves_of_no_base_stay():
    base = {"w": draw((4,)), "act": jax.nn.relu, "rate": 0.1}
    delta = Delta.between(base, base | {"w": base["w"] + 1})
    extra = draw((2,))
    applied = delta.apply(base | {"head": extra})
    assert applied["head"] is extra
    assert (applied["act"], applied["rate"]) == (jax.nn.relu, 0.1)


def test_text_has_no_part_in_a_delta_and_stays(tmp_path):
    base = {"w": draw((4,)), "name": np.array("relu"), "day": np.array("2026-01-01", "M8[D]")}
    params = base | {"w": base["w"] + 1, "name": np.array("gelu")}
    delta = write_and_read(Delta.between(base, params), tmp_path)
    assert [*delta.base] == ["w"]
    assert delta.apply(base)["name"] is base["name"]


def test_base_delta_and_result_share_no_memory():
    base = {"w": jnp.asarray(draw()), "b": jnp.ones(4)}
    params = {"w": base["w"].at[0, 0].set(9.0), "b": jnp.ones(4)}
    expected = bits(params)
    delta = Delta.between(base, params)
    donate = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    donate(params)
    first = delta.apply(base)
    donate(first)
    second = delta.apply(base)
    donate(base)
    assert bits(second) == expected
    arrays = {"w": draw(), "b": np.ones(4)}
    applied = Delta.between(arrays, arrays).apply(arrays)
    applied["b"][0] = 5
    assert arrays["b"][0] == 1


def test_arrays_stay_where_they_are():
    leaf = jax.device_put(draw(), jax.devices()[0])
    delta = Delta.between({"w": leaf}, {"w": leaf * 2})
    assert delta.apply({"w": leaf})["w"].committed
    assert not delta.apply({"w": jnp.asarray(draw())})["w"].committed
    assert Delta.between({"w": leaf}, {"w": leaf}).apply({"w": leaf})["w"].committed


@pytest.mark.slow
@KINDS
def test_sharded_models_keep_their_shardings(kind):
    run("deltas", kind)


# What is refused.


def test_a_change_outside_the_masks_names_parameter_and_position(model):
    base, params, masks = model
    masks["layer"]["kernel"] = np.zeros_like(masks["layer"]["kernel"])
    place = np.flatnonzero(params["layer"]["kernel"] != base["layer"]["kernel"])[0]
    with pytest.raises(ValueError, match=f"outside the masks, at index {place} of 'layer/kernel'"):
        Delta.between(base, params, masks)
    params["layer"]["kernel"] = base["layer"]["kernel"]
    params["norm"] = -params["norm"]
    with pytest.raises(ValueError, match="outside the masks, at index 0 of 'norm'"):
        Delta.between(base, params, masks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"v": w}, "'w' is missing, not"),
        (lambda w: {"w": w[:4]}, r"'w' is BaseParameter\(shape=\(4, 32\), dtype='float32'"),
        (lambda w: {"w": w.astype(jnp.bfloat16)}, "dtype='bfloat16', digest=''"),
        (lambda w: {"w": "text"}, "'w' is missing"),
    ],
)
def test_models_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Delta.between({"w": draw()}, change(draw()))


def test_masks_that_do_not_fit_are_refused(model):
    base, params, masks = model
    with pytest.raises(ValueError, match="layer/bias"):
        Delta.between(base, params, masks | {"layer": {"kernel": None, "bias": np.ones(3)}})
    with pytest.raises(ValueError, match="unpack_masks"):
        Delta.between(base, params, sparsity.masks.pack_masks(masks, params))


OTHER_BASES = {
    "missing": lambda w: {"v": w},
    "shape=(32, 16)": lambda w: {"w": w.T},
    "dtype='bfloat16'": lambda w: {"w": w.astype(jnp.bfloat16)},
    "shape=(16, 32), dtype='float32'": lambda w: {"w": np.where(np.arange(32) == 31, -w, w)},
}


@pytest.mark.parametrize("reason", OTHER_BASES)
def test_another_base_is_named_with_its_difference(reason):
    base, other = {"a": draw((3,)), "w": draw()}, {"a": draw((3,))} | OTHER_BASES[reason](draw())
    delta = Delta.between(base, base | {"w": draw(seed=5)})
    with pytest.raises(ValueError, match="not the one that the delta was made from: 'w'") as error:
        delta.apply(other)
    assert reason in str(error.value)
    if "w" in other:
        with pytest.raises(ValueError, match=r"deltas\[1\] has another base: 'w'") as error:
            Delta.merge([delta, Delta.between(other, other)])
        assert reason in str(error.value)


def test_a_sign_of_zero_makes_another_base():
    base = {"w": np.zeros(4, np.float32)}
    with pytest.raises(ValueError, match="the delta was made from: 'w' is Base"):
        Delta.between(base, {"w": np.ones(4, np.float32)}).apply({"w": -base["w"]})


# Size.


def test_a_value_takes_four_bytes_of_index(tmp_path):
    base = np.zeros(1_000_000, np.float32)
    params = base.copy()
    params[np.random.default_rng(0).permutation(1_000_000)[:100_000]] = 1.0
    delta = Delta.between({"w": base}, {"w": params})
    assert delta.terms[0].entries["w"].indices.dtype == np.uint32
    delta.save(tmp_path / "d")
    assert delta.nbytes == 800_000 <= (tmp_path / "d").stat().st_size < 801_000


def test_the_bytes_are_those_of_values_and_positions():
    base = np.zeros(1000, np.float32)
    params = base.copy()
    params[[3, 500, 999]] = 1
    delta = Delta.between({"w": base, "v": base}, {"w": params, "v": base})
    assert delta.nbytes == 3 * 8
    assert repr(delta) == "Delta(3 entries in 1 of 2 parameters, 24 bytes)"
    merged = repr(Delta.merge([delta, delta], [1, 0.5]))
    assert merged == "Delta(6 entries in 1 of 2 parameters, 48 bytes)"


# Differences of a chosen dtype.


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 2**-8), ("float16", 2**-11)])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_differences_are_rounded_to_their_dtype(tmp_path, dtype, unit, param_dtype):
    base = draw(dtype=param_dtype)
    params, mask = tune(base)
    made = Delta.between({"w": base}, {"w": params}, {"w": mask}, dtype=dtype)
    delta = write_and_read(made, tmp_path)
    assert delta.terms[0].entries["w"].values.dtype == dtype
    applied = delta.apply({"w": base})["w"]
    assert applied.dtype == base.dtype
    change = params.astype(float) - base.astype(float)
    bound = unit * np.abs(change) + np.abs(params.astype(float)) * jnp.finfo(param_dtype).eps
    assert np.all(np.abs(applied.astype(float) - params.astype(float)) <= bound)
    assert bits(applied[mask == 0]) == bits(base[mask == 0])


def test_integers_and_complex_numbers_are_exact_beside_differences():
    base = {"w": draw((4,)), "i": np.arange(4), "c": draw((4,)).astype(np.complex64)}
    params = {name: 3 * array for name, array in base.items()}
    delta = Delta.between(base, params, dtype="bfloat16")
    applied = delta.apply(base)
    assert bits([applied["i"], applied["c"]]) == bits([params["i"], params["c"]])


def test_differences_that_have_no_number_are_refused():
    base = {"w": np.array([1.0, 2.0], np.float32)}
    for value in (1e6, np.nan, np.inf):
        params = {"w": np.array([1.0, value], np.float32)}
        with pytest.raises(ValueError, match=r"'w' is not finite in float16"):
            Delta.between(base, params, dtype="float16")
    for dtype in ("int8", "complex64", np.longdouble):
        with pytest.raises(ValueError, match="dtype must be None"):
            Delta.between(base, base, dtype=dtype)


# Merging.


def test_a_merged_delta_adds_weighted_changes(tmp_path):
    base = draw()
    tuned = [tune(base, 0.4, seed)[0] for seed in (1, 2, 3)]
    deltas = [Delta.between({"w": base}, {"w": w}) for w in tuned]
    weights = [1.0, -0.5, 0.25]
    merged = write_and_read(Delta.merge(deltas, weights), tmp_path)
    wide = base.astype(float)
    changes = [weight * (w.astype(float) - wide) for weight, w in zip(weights, tuned, strict=True)]
    expected = (wide + sum(changes)).astype(np.float32)
    np.testing.assert_allclose(merged.apply({"w": base})["w"], expected, rtol=1e-6)
    touched = np.any([w != base for w in tuned], axis=0)
    assert bits(merged.apply({"w": base})["w"][~touched]) == bits(base[~touched])
    assert merged.nbytes == sum(delta.nbytes for delta in deltas)


def test_disjoint_deltas_merge_to_the_bit():
    base = np.array([1.0, 0.0, 1.0, 5.0], np.float32)
    one, two = base.copy(), base.copy()
    one[:2], two[2] = [1e-30, -0.0], np.nan
    deltas = [Delta.between({"w": base}, {"w": w}) for w in (one, two)]
    expected = np.array([1e-30, -0.0, np.nan, 5.0], np.float32)
    assert bits(Delta.merge(deltas).apply({"w": base})["w"]) == bits(expected)


def test_merging_is_linear():
    base = {"w": draw((64,)).astype(jnp.bfloat16)}
    deltas = [Delta.between(base, {"w": tune(base["w"], 0.5, seed)[0]}) for seed in (1, 2)]
    nested = Delta.merge([Delta.merge(deltas, [0.5, 2]), deltas[0]], [0.5, 0.25])
    assert bits(nested.apply(base)) == bits(Delta.merge(deltas, [0.5, 1]).apply(base))
    nothing = Delta.merge(deltas, [0, 0])
    assert bits(nothing.apply(base)) == bits(base)
    assert nothing.nbytes == 0


def test_values_and_differences_merge():
    base, tuned = {"w": np.array([1.0, 2.0])}, {"w": np.array([1.5, 4.0])}
    deltas = [Delta.between(base, tuned), Delta.between(base, tuned, dtype="bfloat16")]
    np.testing.assert_array_equal(Delta.merge(deltas, [2, 1]).apply(base)["w"], [2.5, 8.0])


def test_merges_without_a_result_are_refused():
    base = {"i": np.arange(4), "w": np.ones(4, np.float16)}
    one = Delta.between(base, base | {"i": np.arange(4) * 2})
    two = Delta.between(base, base | {"w": np.full(4, 60_000, np.float16)})
    assert bits(Delta.merge([one, two]).apply(base)["i"]) == bits(np.arange(4) * 2)
    with pytest.raises(ValueError, match="'i' of int64 has no weighted sum"):
        Delta.merge([one, one]).apply(base)
    with pytest.raises(ValueError, match="a weight a delta, got 0"):
        Delta.merge([])
    with pytest.raises(ValueError, match="a weight a delta, got 2"):
        Delta.merge([one, two], [1.0])
    with pytest.raises(ValueError, match=r"weights\[1\] must be a finite number"):
        Delta.merge([one, two], [1.0, np.nan])


def test_iterators_of_deltas_and_weights_merge():
    base = {"w": np.zeros(2)}
    delta = Delta.between(base, {"w": np.ones(2)})
    merged = Delta.merge(iter([delta, delta]), iter([1, 2]))
    np.testing.assert_array_equal(merged.apply(base)["w"], [3, 3])


# Files.


def test_a_file_holds_the_dtypes_of_its_values(model, tmp_path):
    base, params, masks = model
    Delta.between(base, params, masks, dtype="bfloat16").save(tmp_path / "d.safetensors")
    arrays = safetensors.numpy.load_file(tmp_path / "d.safetensors")
    assert set(arrays) == {
        f"0/{kind}/layer/{name}"
        for kind in ("indices", "differences")
        for name in ("kernel", "bias")
    }


def test_a_file_is_replaced_completely_or_not_at_all(model, tmp_path, monkeypatch):
    base, params, _ = model
    path = tmp_path / "d.safetensors"
    delta = Delta.between(base, params)
    delta.save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            Delta.between(base, base).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["d.safetensors"]
    Delta.between(base, base).save(str(path))
    assert Delta.load(str(path)).nbytes == 0


def test_a_file_that_is_cut_off_is_an_error_that_names_it(model, tmp_path):
    base, params, masks = model
    path = tmp_path / "d.safetensors"
    Delta.between(base, params, masks).save(path)
    data = path.read_bytes()
    for length in [0, 7, 8, 100, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=f"{path} cannot be read"):
            Delta.load(path)


def test_files_of_others_are_no_deltas(tmp_path):
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="it holds no delta"):
        Delta.load(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError):
        Delta.load(tmp_path / "nothing.safetensors")


def test_a_delta_equals_itself_alone_and_can_be_a_key(model):
    base, tuned, masks = model
    one, other = (Delta.between(base, tuned, masks) for _ in range(2))
    assert one == one
    assert one != other
    assert {one: 1, other: 2}[one] == 1
