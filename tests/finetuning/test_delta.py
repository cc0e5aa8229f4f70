"""Sparse deltas: exact to the bit, small, checked against their base, or refused."""

import bisect
import os
import types
import typing
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import sparsity
from sparsity import Delta
from sparsity.finetuning import gaps
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
    assert {name: part.count for name, part in delta.terms[0].entries.items()} == {
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
    assert delta.terms[0].entries["w"].count == np.sum(masks["w"])
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
    with pytest.raises(ValueError, match=r"'rate' is 0.1 in base and 0.2 in params"):
        Delta.between(base, base | {"rate": 0.2})


def test_text_has_no_part_in_a_delta_and_stays(tmp_path):
    base = {"w": draw((4,)), "name": np.array("relu"), "day": np.array("2026-01-01", "M8[D]")}
    params = base | {"w": base["w"] + 1, "name": np.array("gelu")}
    delta = write_and_read(Delta.between(base, params), tmp_path)
    assert [*delta.base] == ["w"]
    assert delta.apply(base)["name"] is base["name"]


def test_numbers_that_are_nan_in_both_models_do_not_differ():
    base = {"w": draw((4,)), "limit": float("nan")}
    assert not Delta.between(base, base | {"limit": float("nan")}).nbytes
    with pytest.raises(ValueError, match="'limit' is nan in base and 1"):
        Delta.between(base, base | {"limit": 1})


def test_a_number_is_the_mask_of_a_scalar():
    delta = Delta.between({"w": np.float32(1)}, {"w": np.float32(2)}, {"w": 1})
    assert delta.apply({"w": np.float32(1)})["w"] == 2


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
    place = np.argwhere(params["layer"]["kernel"] != base["layer"]["kernel"])[0].tolist()
    with pytest.raises(ValueError, match="outside the masks, first at 'layer/kernel'") as error:
        Delta.between(base, params, masks)
    assert f"'layer/kernel'{place}" in str(error.value)
    params["layer"]["kernel"] = base["layer"]["kernel"]
    params["norm"] = -params["norm"]
    with pytest.raises(ValueError, match=r"'norm'\[0\]: -1.0, not 1.0; 4 entries"):
        Delta.between(base, params, masks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"v": w}, "params has no leaf at 'w'|base has no leaf at 'v'"),
        (lambda w: {"w": w[:4]}, r"'w' has shape \(16, 32\) and dtype float32 in base, but \(4"),
        (lambda w: {"w": w.astype(jnp.bfloat16)}, "Cast params to the dtypes of base"),
        (lambda w: {"w": "text"}, "is an array in only one"),
        (lambda w: {"w": w.astype(np.longdouble)}, "has no bytes that a delta could hold"),
    ],
)
def test_models_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Delta.between({"w": draw()}, change(draw()))


def test_numbers_of_python_must_have_equal_bits():
    for number in (0.0, np.nan, 3, True, 1 - 2j):
        Delta.between({"w": draw(), "n": number}, {"w": draw(), "n": number})
    with pytest.raises(ValueError, match=r"'n' is 0.0 in base and -0.0 in params, and no array"):
        Delta.between({"w": draw(), "n": 0.0}, {"w": draw(), "n": -0.0})


def test_masks_that_do_not_fit_are_refused(model):
    base, params, masks = model
    with pytest.raises(ValueError, match="layer/bias"):
        Delta.between(base, params, masks | {"layer": {"kernel": None, "bias": np.ones(3)}})
    with pytest.raises(ValueError, match="unpack_masks"):
        Delta.between(base, params, sparsity.masks.pack_masks(masks, params))


def test_tracers_are_refused(model):
    base, params, masks = model
    delta = Delta.between(base, params)
    with pytest.raises(ValueError, match=r"'layer/bias' is traced. .* outside jit"):
        jax.jit(delta.apply)(base)
    with pytest.raises(ValueError, match=r"'layer/bias' is traced. .* outside jit"):
        jax.jit(lambda masks: Delta.between(base, params, masks).nbytes)(masks)


def test_arrays_of_several_processes_are_refused():
    elsewhere = types.SimpleNamespace(
        shape=(3,), dtype=np.dtype("float32"), is_fully_addressable=False
    )
    with pytest.raises(ValueError, match=r"'w' lies on devices of several processes. Gather it"):
        Delta.between({"w": elsewhere}, {"w": elsewhere})


OTHER_BASES = {
    "missing": lambda w: {"v": w},
    "has the shape (32, 16), not (16, 32)": lambda w: {"w": w.T},
    "has the dtype bfloat16, not float32": lambda w: {"w": w.astype(jnp.bfloat16)},
    "has other values": lambda w: {"w": np.where(np.arange(32) == 31, -w, w)},
}


@pytest.mark.parametrize("reason", OTHER_BASES)
def test_another_base_is_named_with_its_difference(reason):
    base, other = {"a": draw((3,)), "w": draw()}, {"a": draw((3,))} | OTHER_BASES[reason](draw())
    delta = Delta.between(base, base | {"w": draw(seed=5)})
    with pytest.raises(ValueError, match="not the one that the delta was made from: 'w'") as error:
        delta.apply(other)
    assert reason in str(error.value)
    if "w" in other:
        with pytest.raises(ValueError, match=r"deltas\[1\] has another base .*: 'w'") as error:
            Delta.merge([delta, Delta.between(other, other)])
        assert reason in str(error.value)


def test_a_sign_of_zero_makes_another_base():
    base = {"w": np.zeros(4, np.float32)}
    with pytest.raises(ValueError, match="'w' has other values"):
        Delta.between(base, {"w": np.ones(4, np.float32)}).apply({"w": -base["w"]})


# Size.


def test_gaps_are_positions_in_few_bytes():
    rng = np.random.default_rng(0)
    for density in (1.0, 0.5, 0.01, 0.001, 1e-5):
        positions = np.flatnonzero(rng.random(2_000_000) < density)
        codes = gaps.encode(positions)
        np.testing.assert_array_equal(gaps.decode(codes), positions)
        assert codes.nbytes <= {1.0: 1, 0.5: 1, 0.01: 1.1, 0.001: 2, 1e-5: 4}[density] * len(
            positions
        )
    for positions in ([], [0], [254], [255], [256], [0, 255, 510, 766], [65534, 65536, 2**40]):
        np.testing.assert_array_equal(gaps.decode(gaps.encode(np.array(positions, int))), positions)


@pytest.mark.parametrize(
    "gap", [0, 254, 255, 509, 510, 600, 765, 66_000, 131_069, 131_070, 200_000]
)
def test_gaps_take_the_fewest_bytes_that_a_dtype_of_codes_allows(gap):
    positions = np.arange(10) * (gap + 1) + gap
    numbers = {dtype: gap // np.iinfo(dtype).max + 1 for dtype in gaps.DTYPES}
    fewest = min(10 * number * np.dtype(dtype).itemsize for dtype, number in numbers.items())
    assert gaps.encode(positions).nbytes == fewest


@pytest.mark.parametrize("size", [1_000_000, 10_000_000])
def test_a_million_float32_values_take_less_than_eight_megabytes(tmp_path, size):
    base = np.zeros(size, np.float32)
    params = base.copy()
    params[np.random.default_rng(0).permutation(size)[:1_000_000]] = 1.0
    Delta.between({"w": base}, {"w": params}).save(tmp_path / "d")
    assert (tmp_path / "d").stat().st_size < {1_000_000: 5.01e6, 10_000_000: 5.02e6}[size]


def test_the_bytes_are_those_of_values_and_positions():
    base = np.zeros(1000, np.float32)
    params = base.copy()
    params[[3, 500, 999]] = 1  # gaps 3, 496 and 498: 1, 2 and 2 codes of uint8
    delta = Delta.between({"w": base, "v": base}, {"w": params, "v": base})
    assert delta.nbytes == 3 * 4 + 5
    assert repr(delta) == "Delta(3 entries in 1 of 2 parameters, 17 bytes)"
    merged = repr(Delta.merge([delta, delta], [1, 0.5]))
    assert merged == "Delta(6 entries in 1 of 2 parameters, 34 bytes, weights [1.0, 0.5])"


# Differences of a chosen dtype.


def round_to_nearest(exact, dtype):
    """The nearest numbers of a narrow dtype, ties to even bits, found among all of its numbers."""
    word = f"u{np.dtype(dtype).itemsize}"
    numbers = np.arange(2 ** (8 * np.dtype(dtype).itemsize)).astype(word).view(dtype)
    with np.errstate(invalid="ignore"):  # NaN that signals
        numbers = numbers[np.isfinite(numbers)]
    numbers = numbers[np.argsort(numbers.astype(float), kind="stable")]
    wide = [Fraction(x) for x in numbers.astype(float).tolist()]
    nearest = []
    for number in exact:
        place = bisect.bisect_left(wide, number)
        around = range(max(place - 1, 0), min(place + 1, len(wide)))
        nearest.append(
            min(around, key=lambda i: (abs(wide[i] - number), int(numbers[i].view(word)) % 2))
        )
    return numbers[nearest]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_differences_and_sums_of_narrow_dtypes_are_rounded_once(dtype):
    rng, steps = np.random.default_rng(0), np.finfo(np.float32).eps * np.array([0.25, -0.25])
    # Halfway between two numbers of the dtype, and a bit that float32 does not hold with the half.
    low = rng.normal(size=300).astype(dtype).astype(float)
    word = f"u{np.dtype(dtype).itemsize}"
    high = (low.astype(dtype).view(word) + 1).view(dtype).astype(float)
    wide = ((low + high) / 2)[:, None] * (1 + steps / 64)
    base = {"w": np.zeros(wide.size)}
    delta = Delta.between(base, {"w": wide.reshape(-1)}, dtype=dtype)
    exact = [Fraction(x) for x in wide.reshape(-1).tolist()]
    expected = round_to_nearest(exact, dtype)
    np.testing.assert_array_equal(delta.apply(base)["w"], expected.astype(float))

    base = {"w": low.astype(dtype)}
    delta = Delta.between(base, {"w": high.astype(dtype)})
    for weight in (0.5 + 2.0**-30, 0.5 - 2.0**-30):
        exact = [
            Fraction(x) + Fraction(weight) * (Fraction(y) - Fraction(x))
            for x, y in zip(low.tolist(), high.tolist(), strict=True)
        ]
        merged = Delta.merge([delta], [weight]).apply(base)["w"]
        expected = round_to_nearest(exact, dtype)
        np.testing.assert_array_equal(merged.view(word), expected.view(word))


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
        with pytest.raises(ValueError, match=r"'w'\[1\] is not finite in dtype = float16"):
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
    with pytest.raises(ValueError, match=r"'i' of dtype int64 .* weights \[1.0, 1.0\]"):
        Delta.merge([one, one])
    with pytest.raises(ValueError, match=r"'w'\[0\] is not finite in float16"):
        Delta.merge([two, two]).apply(base)
    with pytest.raises(ValueError, match="at least one"):
        Delta.merge([])
    with pytest.raises(ValueError, match="weights must be a list or an iterator, got"):
        Delta.merge([one], np.float32(2))
    with pytest.raises(ValueError, match="weights must have 2 numbers"):
        Delta.merge([one, two], [1.0])
    with pytest.raises(ValueError, match=r"weights\[1\] must be a finite number"):
        Delta.merge([one, two], [1.0, np.nan])
    with pytest.raises(ValueError, match=r"product of a weight .* must be a finite number"):
        Delta.merge([Delta.merge([two], [1e300])], [1e300])


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
        f"0/{kind}/layer/{name}" for kind in ("gaps", "differences") for name in ("kernel", "bias")
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


def test_every_flipped_or_missing_byte_is_an_error_that_names_the_file(model, tmp_path):
    base, params, masks = model
    path = tmp_path / "d.safetensors"
    Delta.between(base, params, masks).save(path)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for place in [*range(0, len(data), 97), *rng.integers(len(data), size=50)]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path} cannot be read"):
            Delta.load(path)
    for length in [0, 7, 8, 100, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=f"{path} cannot be read"):
            Delta.load(path)


def test_files_of_others_are_no_deltas(tmp_path):
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="it holds no delta"):
        Delta.load(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is a folder"):
        Delta.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        Delta.load(tmp_path / "nothing.safetensors")


def test_a_delta_equals_itself_alone_and_can_be_a_key(model):
    base, tuned, masks = model
    one, other = (Delta.between(base, tuned, masks) for _ in range(2))
    assert one == one
    assert one != other
    assert {one: 1, other: 2}[one] == 1
