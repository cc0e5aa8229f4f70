"""Leaves meet by path in whatever containers; optimizer state belongs to parameters by path."""

import collections
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.tree_util import DictKey, SequenceKey

from sparsity.core import owners, trees
from tests.helpers import Layer, Module, Pair


@jax.tree_util.register_pytree_node_class
class Plain(list):
    """A node that is registered without keys."""

    def tree_flatten(self):
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children)


def nnx_state(kernel, bias):
    return nnx.State({"kernel": nnx.Param(kernel), "bias": nnx.Param(bias)})


KERNEL, BIAS = np.ones((2, 3)), np.zeros(3)

# Each makes a container with a kernel and a bias, and says what the user calls them.
CONTAINERS = {
    "dict": (lambda k, b: {"kernel": k, "bias": b}, "kernel", "bias"),
    "ordered dict": (
        lambda k, b: collections.OrderedDict(kernel=k, bias=b),
        "kernel",
        "bias",
    ),
    "integer keys": (lambda k, b: {0: k, 1: b}, "0", "1"),
    "list": (lambda k, b: [k, b], "0", "1"),
    "tuple": (lambda k, b: (k, b), "0", "1"),
    "NamedTuple": (Pair, "kernel", "bias"),
    "dataclass": (Layer, "kernel", "bias"),
    "FrozenDict": (lambda k, b: flax.core.freeze({"kernel": k, "bias": b}), "kernel", "bias"),
    "nnx.State": (nnx_state, "kernel", "bias"),
    "equinox": (Module, "kernel", "bias"),
    "unnamed": (lambda k, b: Plain([k, b]), "0", "1"),
}
containers = pytest.mark.parametrize(
    ("make", "kernel", "bias"), CONTAINERS.values(), ids=list(CONTAINERS)
)


@containers
def test_paths_are_what_users_call_the_leaves(make, kernel, bias):
    actual = {
        trees.path_string(path): leaf
        for path, leaf in trees.leaves_by_path({"net": [make(KERNEL, BIAS)]}).items()
    }
    assert actual.keys() == {f"net/0/{kernel}", f"net/0/{bias}"}
    assert actual[f"net/0/{kernel}"] is KERNEL
    assert actual[f"net/0/{bias}"] is BIAS


def test_a_bare_array_has_the_empty_path():
    assert list(trees.leaves_by_path(KERNEL)) == [()]
    assert trees.path_names(()) == ()
    assert trees.path_string(()) == "params"


@pytest.mark.parametrize(
    "empty", [None, {}, [], (), optax.MaskedNode(), {"a": None, "b": [optax.MaskedNode()]}]
)
def test_empty_nodes_have_no_leaves(empty):
    assert trees.leaves_by_path(empty) == {}


# Maps over several trees.


def test_leaves_meet_by_path_in_different_containers():
    params = {"a": nnx_state(3.0, 4.0), "b": [5.0, 6.0]}
    masks = {"a": nnx_state(1.0, None), "b": [None, 2.0]}
    product = trees.map_matched(lambda _, p, m: p if m is None else p * m, params, masks)
    assert jax.tree.structure(product) == jax.tree.structure(params)
    assert jax.tree.leaves(product) == jax.tree.leaves({"a": nnx_state(3.0, 4.0), "b": [5.0, 12.0]})


def test_nnx_variables_meet_bare_arrays():
    wrapped, bare = nnx.State({"w": nnx.Param(3.0)}), {"w": 2.0}
    assert jax.tree.leaves(trees.map_matched(lambda _, p, m: p * m, wrapped, bare)) == [6.0]
    assert trees.map_matched(lambda _, p, m: p * m, bare, wrapped) == {"w": 6.0}


@pytest.mark.parametrize("nothing", [None, optax.MaskedNode(), {}])
@pytest.mark.parametrize("level", ["root", "subtree", "leaf"])
def test_what_another_tree_lacks_is_none(nothing, level):
    tree = {"a": {"x": 1.0, "y": 2.0}, "b": 3.0}
    other = {
        "root": nothing,
        "subtree": {"a": nothing, "b": 10.0},
        "leaf": {"a": {"x": nothing, "y": 10.0}, "b": nothing},
    }[level]
    met = trees.map_matched(lambda _, ours, theirs: (ours, theirs), tree, other)
    expected = {
        "root": [(1.0, None), (2.0, None), (3.0, None)],
        "subtree": [(1.0, None), (2.0, None), (3.0, 10.0)],
        "leaf": [(1.0, None), (2.0, 10.0), (3.0, None)],
    }[level]
    assert [met["a"]["x"], met["a"]["y"], met["b"]] == expected


def test_the_function_sees_the_path_and_every_tree():
    seen = {}
    trees.map_matched(
        lambda path, *leaves: seen.update({trees.path_string(path): leaves}),
        {"a": 1, "b": 2},
        {"a": 3},
        {"b": 4},
    )
    assert seen == {"a": (1, 3, None), "b": (2, None, 4)}


def test_leaves_that_the_tree_lacks_are_an_error_with_their_paths():
    with pytest.raises(ValueError, match="gradients have no leaf at 'a/y', 'c'") as error:
        trees.map_matched(
            lambda *_: None,
            {"a": {"x": 1}, "b": 2},
            {"a": {"x": 1, "y": 2}, "c": 3},
            role="gradients",
        )
    assert "'a/x', 'b'" in str(error.value)


def test_a_long_list_of_missing_paths_is_cut_short():
    with pytest.raises(ValueError, match="and 92 more"):
        trees.map_matched(lambda *_: None, {"x": 1}, {f"leaf{i:03}": i for i in range(100)})


def test_the_key_of_a_dictionary_is_not_the_field_of_the_same_name():
    with pytest.raises(ValueError, match="kernel"):
        trees.map_matched(lambda *_: None, {"kernel": 1, "bias": 2}, Pair(1, 2))


@pytest.mark.parametrize(
    ("leaf", "prunable"),
    [
        (np.float32(1), True),
        (np.ones(2, np.float64), True),
        (jnp.ones(2, jnp.bfloat16), True),
        (jnp.ones(2, jnp.float16), True),
        (jnp.ones(2, jnp.float8_e4m3fn), True),
        (jnp.ones(2, jnp.complex64), True),
        (jax.ShapeDtypeStruct((2,), jnp.float32), True),
        (jnp.ones(2, jnp.float8_e8m0fnu), False),  # its 0 is NaN
        (jnp.ones(2, jnp.int32), False),
        (np.ones(2, np.uint8), False),
        (np.ones(2, bool), False),
        (jax.random.key(0), False),
        (jax.random.PRNGKey(0), False),
        (1.0, False),
        (3, False),
        ("text", False),
        (None, False),
        (jnp.float32, False),  # a class with a dtype
        (np.float32, False),
        (nn.Dense(3, dtype=jnp.float32), False),  # so is a layer
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_floating_and_complex_arrays_can_have_masks(leaf, prunable):
    assert trees.is_prunable(leaf) is prunable


# Nodes in nested states.


class Mark(NamedTuple):
    inner: object = None
    count: object = 0


def paths_to_marks(tree):
    return [jax.tree_util.keystr(path) for path, _ in trees.find_nodes(tree, Mark)]


def test_nodes_are_found_at_any_depth_with_their_paths():
    tree = {"a": [Mark(count=1), 2], "b": (Mark(count=3), {"c": Mark(count=4)}), "d": None}
    assert paths_to_marks(tree) == ["['a'][0]", "['b'][0]", "['b'][1]['c']"]
    assert [node.count for _, node in trees.find_nodes(tree, Mark)] == [1, 3, 4]


def test_nodes_inside_nodes_are_found():
    assert paths_to_marks([Mark(inner=(Mark(count=7),))]) == ["[0]", "[0].inner[0]"]


def test_the_root_is_a_node_too():
    assert paths_to_marks(Mark()) == [""]


def test_no_node_is_found_where_there_is_none():
    assert trees.find_nodes({"a": [1, None, optax.EmptyState()]}, Mark) == []


# Which optimizer state belongs to which parameter.

PARAMS = {"a": jnp.array([1.0, 2.0, 3.0]), "b": jnp.array([[4.0, 5.0]])}
CHOSEN = {"a": jnp.array([True, False, True]), "b": None}


def stepped(tx, params, steps=2):
    state = tx.init(params)
    for _ in range(steps):
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    return state


@pytest.mark.slow
def test_adam_moments_of_chosen_entries_start_afresh_and_nothing_else_does():
    tx = optax.adam(0.1)
    old = stepped(tx, PARAMS)
    new = owners.replace_where(old, tx.init(PARAMS), CHOSEN)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    # Two steps with gradient one: mu = 1 - 0.9^2 = 0.19, nu = 1 - 0.999^2 = 0.001999.
    np.testing.assert_allclose(new[0].mu["a"], [0.0, 0.19, 0.0], rtol=1e-5)
    np.testing.assert_allclose(new[0].nu["a"], [0.0, 0.001999, 0.0], rtol=1e-3)
    np.testing.assert_array_equal(new[0].mu["b"], old[0].mu["b"])
    np.testing.assert_array_equal(new[0].nu["b"], old[0].nu["b"])
    assert int(new[0].count) == 2


def test_fresh_state_need_not_be_zero():
    state, fresh = {"sum": jnp.array([5.0, 6.0, 7.0])}, {"sum": jnp.full(3, 0.1)}
    new = owners.replace_where({"a": state["sum"]}, {"a": fresh["sum"]}, {"a": CHOSEN["a"]})
    np.testing.assert_allclose(new["a"], [0.1, 6.0, 0.1])


def test_a_parameter_called_mu_is_not_adams_field_mu():
    state = optax.ScaleByAdamState(
        count=0,
        mu={"a": jnp.full(2, 1.0), "mu": {"a": jnp.full(2, 2.0)}},
        nu={"a": jnp.full(2, 3.0), "mu": {"a": jnp.full(2, 4.0)}},
    )
    fresh = jax.tree.map(jnp.zeros_like, state)
    chosen = {"mu": {"a": jnp.array([True, False])}, "a": None}
    new = owners.replace_where(state, fresh, chosen)
    np.testing.assert_array_equal(new.mu["a"], [1.0, 1.0])
    np.testing.assert_array_equal(new.nu["a"], [3.0, 3.0])
    np.testing.assert_array_equal(new.mu["mu"]["a"], [0.0, 2.0])
    np.testing.assert_array_equal(new.nu["mu"]["a"], [0.0, 4.0])


def test_state_belongs_to_the_parameter_at_the_same_place_of_its_subtree():
    params = {"w": jnp.array([True, True]), "net": {"w": jnp.array([True, False])}}
    state = {"ema": {"w": jnp.full(2, 1.0), "net": {"w": jnp.full(2, 2.0)}}}
    new = owners.replace_where(state, jax.tree.map(jnp.zeros_like, state), params)
    np.testing.assert_array_equal(new["ema"]["net"]["w"], [0.0, 2.0])
    np.testing.assert_array_equal(new["ema"]["w"], [0.0, 0.0])


def test_state_of_a_bare_array_is_found():
    tx = optax.chain(optax.clip(1.0), optax.trace(0.5))
    old = stepped(tx, PARAMS["a"])
    new = owners.replace_where(old, tx.init(PARAMS["a"]), CHOSEN["a"])
    np.testing.assert_allclose(jax.tree.leaves(new)[0], [0.0, 1.5, 0.0])


def test_state_of_nnx_parameters_is_found():
    params = nnx_state(PARAMS["a"], PARAMS["b"])
    tx = optax.trace(0.5)
    state = optax.TraceState(jax.tree.map(jnp.ones_like, params))
    chosen = {"kernel": CHOSEN["a"], "bias": None}
    new = owners.replace_where(state, tx.init(params), chosen)
    kernel = trees.leaves_by_path(new.trace)[(DictKey("kernel"),)]
    np.testing.assert_array_equal(kernel, [0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    "leaf",
    [jnp.full(2, 9.0), jnp.full((1, 3), 9.0), jnp.full((), 9.0), jnp.full(3, 9), np.uint8(9)],
    ids=["shorter", "more axes", "scalar", "integers", "integer"],
)
def test_state_of_another_shape_or_kind_stays(leaf):
    new = owners.replace_where({"v": {"a": leaf}}, {"v": {"a": leaf * 0}}, {"a": CHOSEN["a"]})
    np.testing.assert_array_equal(new["v"]["a"], leaf)


def test_state_at_another_path_stays():
    history = {"history": [jnp.ones(3)], "a": [jnp.ones(3)], "other": {"b": jnp.ones(3)}}
    fresh = jax.tree.map(jnp.zeros_like, history)
    new = owners.replace_where(history, fresh, {"a": CHOSEN["a"]})
    for leaf in jax.tree.leaves(new):
        np.testing.assert_array_equal(leaf, np.ones(3))


def test_state_paths_with_sequence_keys_are_compared_as_entries():
    state = ({"m": [jnp.ones(2), jnp.ones(2)]},)
    new = owners.replace_where(
        state, jax.tree.map(jnp.zeros_like, state), [None, jnp.array([True, False])]
    )
    assert jax.tree_util.tree_leaves_with_path(new)[1][0] == (
        SequenceKey(0),
        DictKey("m"),
        SequenceKey(1),
    )
    np.testing.assert_array_equal(new[0]["m"][0], [1.0, 1.0])
    np.testing.assert_array_equal(new[0]["m"][1], [0.0, 1.0])


def test_two_leaves_of_one_path_are_an_error_that_names_it():
    @jax.tree_util.register_pytree_with_keys_class
    class Twins(Plain):
        def tree_flatten_with_keys(self):
            return tuple((DictKey("w"), child) for child in self), None

    with pytest.raises(ValueError, match=r"Two leaves have the path 'a/w'"):
        trees.leaves_by_path({"a": Twins([1.0, 2.0])})
