"""The table of a compact model: every number, the operations that make parameters dense, times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity import compact, trace
from sparsity.compacting import grouped as grouping
from sparsity.compacting.formats import MaskedParameter, Values
from sparsity.compacting.table import choose

W = jnp.arange(1.0, 33.0).reshape(4, 8)
MASK = np.repeat(np.array([[1], [0], [1], [1]], np.uint8), 8, axis=1)
X = jnp.ones((3, 4))


def rows(text):
    """Words of each line of a table."""
    return [line.split() for line in text.splitlines() if line.strip("- ")]


def test_a_report_counts_values_positions_and_frozen_entries_and_adds_them_up():
    params = {"b": jnp.ones(8), "w": W}
    graph = trace(lambda p, x: x @ p["w"] + p["b"], params, X)
    model = compact(graph, params, {"b": None, "w": MASK}, formats={"w": "values"})
    report = model.report()
    assert rows(report)[-4:-1] == [
        ["b", "8", "no", "mask", "8", "0", "32", "32", "0"],
        ["w", "4x8", "values", "24", "0", "128", "96", "96"],
        ["all", "32", "0", "160", "128", "96"],
    ]
    assert report.splitlines()[-1] == "Columns dense, values and positions are bytes."
    frozen = compact(graph, params, {"b": None, "w": MASK}, outside="frozen")
    report = frozen.report({("w",): {"values": 2.0, "dense": 0.0012345}})
    assert rows(report)[-4:-1] == [
        ["b", "8", "no", "mask", "8", "0", "32", "32", "0", "0"],
        ["w", "4x8", "values", "24", "0", "128", "96", "96", "128", "2e+03", "1.23"],
        ["all", "32", "0", "160", "128", "96", "128"],
    ]
    assert report.splitlines()[-1] == "Columns dense, values, positions and frozen are bytes."


def test_a_report_names_what_makes_a_parameter_dense_outside_of_products():
    def notes(fn, name):
        model = compact(trace(fn, W, X), W, MASK, formats={(): name})
        return [line for line in model.report().splitlines() if "is made dense by" in line]

    assert notes(lambda w, x: x @ jnp.abs(w), "values") == []
    assert notes(lambda w, x: x @ w, "grouped") == []
    (note,) = notes(lambda w, x: x @ jnp.abs(w), "grouped")
    assert note.startswith("params is made dense by dot_general")
    (note,) = notes(lambda w, x: (x @ w) * w[0], "values")
    assert note.startswith("params is made dense by mul ")


def test_products_of_groups_take_casts():
    def fn(w, x):
        return x @ w.astype(jnp.bfloat16).astype(jnp.float32)

    model = compact(trace(fn, W, X), W, MASK, formats={(): "grouped"})
    assert "is made dense" not in model.report()
    np.testing.assert_array_equal(model.apply(model.params, X), fn(W * MASK, X))


def test_values_win_and_then_groups_within_a_fiftieth_of_the_fastest_format():
    seconds = {("w",): {"dense": 1.0, "grouped": 1.02, "values": 1.02}}
    assert choose(seconds) == {("w",): "values"}
    seconds[("w",)]["values"] = 1.021
    assert choose(seconds) == {("w",): "grouped"}
    seconds[("w",)]["grouped"] = 1.021
    assert choose(seconds) == {("w",): "dense"}


def test_padding_of_groups_is_at_most_five_quarters_of_the_kept_entries():
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])  # 9 entries for 4
    assert grouping.find_groups(mask, is_single=True)[0] == 1
    assert grouping.find_groups(np.concatenate([mask, mask[2:]]), is_single=True) is None


@pytest.mark.parametrize(("inputs", "dtype"), [(65_535, np.uint16), (65_536, np.int32)])
def test_positions_of_groups_and_their_padding_fit_their_integers(inputs, dtype):
    mask = np.zeros((8, inputs), bool)
    mask[:4, -2:] = mask[4:, -1:] = True
    _, indices = grouping.find_groups(mask)
    assert indices.dtype == dtype
    assert indices.tolist() == [[inputs - 2, inputs - 1], [inputs - 1, inputs]]


def test_a_mesh_may_divide_values_along_the_stack_alone():
    mesh = jax.sharding.AbstractMesh((2, 2), ("i", "j"))

    def place(*spec):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        like = jax.ShapeDtypeStruct((2, 4, 6), jnp.float32, sharding=sharding)
        mask = np.ones(like.shape, np.uint8)
        layout, indices = Values.make(MaskedParameter(mask, (0,), (1,), False))
        return layout.place(indices, like, "layer/w")

    for spec, axis in (((None, "i", "j"), 1), (("i", None, "j"), 2)):
        with pytest.raises(
            ValueError, match=rf"'layer/w' of shape \(2, 4, 6\) is sharded along axis {axis} "
        ):
            place(*spec)


def test_values_of_layers_lie_where_a_mesh_of_one_device_puts_the_layers():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i", None, None))
    w = jax.device_put(jnp.ones((2, 4, 4)), sharding)
    graph = trace(lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0], w, X)
    model = compact(graph, w, np.ones((2, 4, 4), np.uint8), formats={(): "values"})
    for array in (model.params, model.indices):
        assert array.shape == (2, 16)
        assert array.sharding.spec == jax.sharding.PartitionSpec("i")
