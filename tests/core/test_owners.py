"""Owners of the leaves of optimizer states, and the reset of chosen entries."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparsity.core import owners


class Inner(NamedTuple):
    w: Any


class Outer(NamedTuple):
    w: Any
    mu: Any


def _filled(value, shape=(2, 3)):
    return jnp.full(shape, value, jnp.float32)


def _find_owners(params, state):
    """For each leaf of the state the value of its owner, by the place of the leaf."""
    mean = lambda owner, _: "none" if owner is None else float(jnp.mean(owner))  # noqa: E731
    named = owners.map_owned(mean, params, state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(named)}


def test_a_parameter_called_mu_is_not_taken_for_the_moments():
    params = Outer(_filled(1), Inner(_filled(2)))
    assert _find_owners(params, optax.adam(0.1).init(params)) == {
        "[0].count": "none",
        "[0].mu.w": 1,
        "[0].mu.mu.w": 2,
        "[0].nu.w": 1,
        "[0].nu.mu.w": 2,
    }


def test_a_tuple_of_moments_is_not_taken_for_a_list_of_parameters():
    params = [_filled(1), [_filled(2), _filled(3)]]
    moments = jax.tree.map(jnp.zeros_like, params)
    once = {"[0]": 1, "[1][0]": 2, "[1][1]": 3}
    assert _find_owners(params, (moments, moments)) == {
        f"[{at}]{path}": value for at in (0, 1) for path, value in once.items()
    }


def test_a_list_of_two_parameters_in_a_pair_of_moments():
    params = [_filled(1), _filled(2)]
    assert _find_owners(params, (params, params)) == {
        "[0][0]": 1,
        "[0][1]": 2,
        "[1][0]": 1,
        "[1][1]": 2,
    }


def test_placeholders_of_masked_stand_for_parameters_without_state():
    params = {"w": _filled(1), "b": _filled(2), "c": {"d": _filled(3)}}
    tx = optax.masked(optax.trace(0.9), {"w": True, "b": False, "c": True})
    assert _find_owners(params, tx.init(params)) == {
        ".inner_state.trace['c']['d']": 3,
        ".inner_state.trace['w']": 1,
    }


def test_a_placeholder_of_masked_may_stand_for_a_whole_subtree():
    params = {"w": _filled(1), "c": {"d": _filled(3), "e": _filled(4)}}
    state = {"w": _filled(0), "c": optax.MaskedNode()}
    assert _find_owners(params, [state]) == {"[0]['w']": 1}


def test_each_state_of_multi_transform_finds_its_owners():
    params = {"w": _filled(1), "b": _filled(2)}
    labels = {"w": "adam", "b": "momentum"}
    tx = optax.multi_transform({"adam": optax.adam(0.1), "momentum": optax.trace(0.9)}, labels)
    actual = _find_owners(params, tx.init(params))
    assert {path.rpartition("inner_state")[2]: owner for path, owner in actual.items()} == {
        "[0].count": "none",
        "[0].mu['w']": 1,
        "[0].nu['w']": 1,
        ".trace['b']": 2,
    }


def test_a_bare_array_owns_its_moments():
    actual = _find_owners(_filled(7), optax.adam(0.1).init(_filled(7)))
    assert actual["[0].mu"] == actual["[0].nu"] == 7


class Model(nnx.Module):
    def __init__(self):
        self.first = nnx.Param(_filled(1))
        self.second = nnx.Param(_filled(2))


@pytest.mark.parametrize("variables", [True, False], ids=["variables", "plain"])
def test_variables_at_init_own_the_state_of_plain_arrays_and_the_other_way_round(variables):
    model = nnx.state(Model(), nnx.Param)
    plain = {"first": _filled(1), "second": _filled(2)}
    state = optax.trace(0.9).init(model)
    params = model if variables else plain
    assert list(_find_owners(params, state).values()) == [1, 2]
    assert list(_find_owners(params, optax.trace(0.9).init(plain)).values()) == [1, 2]


def test_factored_moments_have_an_owner_of_another_shape():
    params = {"w": _filled(1, (4, 6)), "b": _filled(2, (6,))}
    state = optax.scale_by_factored_rms(min_dim_size_to_factor=2).init(params)
    shapes = owners.map_owned(
        lambda owner, leaf: (None if owner is None else owner.shape, leaf.shape), params, state
    )
    assert shapes.count == (None, ())
    assert shapes.v_row["w"] == ((4, 6), (4,))
    assert shapes.v_col["w"] == ((4, 6), (6,))
    assert shapes.v["b"] == ((6,), (6,))


def test_histories_have_an_owner():
    params = {"w": _filled(1), "b": _filled(2)}
    state = optax.scale_by_lbfgs(memory_size=3).init(params)
    actual = owners.map_owned(lambda owner, leaf: owner is not None, params, state)
    assert actual.diff_params_memory == {"w": True, "b": True}
    assert jnp.shape(state.diff_params_memory["w"]) == (3, 2, 3)


def test_scalars_and_trees_of_other_paths_have_no_owner():
    params = {"w": _filled(1)}
    state = {"count": jnp.zeros([]), "noise": {"v": _filled(0)}, "rng": jax.random.key(0)}
    assert set(_find_owners(params, state).values()) == {"none"}


def test_parameters_without_leaves_own_nothing():
    assert _find_owners({}, {"count": 1.0}) == {"['count']": "none"}


def _state(w, b, n=5):
    return ({"w": jnp.asarray(w), "b": jnp.asarray(b)}, jnp.int32(n), jnp.float32(0.5))


def test_only_chosen_entries_are_replaced():
    old = _state([1.0, 2.0, 3.0], [4.0, 5.0])
    fresh = _state([-1.0, -1.0, -1.0], [-1.0, -1.0], 0)
    chosen = {"w": jnp.array([False, True, False]), "b": None}
    (moments, count, rate) = owners.replace_where(old, fresh, chosen)
    np.testing.assert_array_equal(moments["w"], [1, -1, 3])
    np.testing.assert_array_equal(moments["b"], [4, 5])
    assert (int(count), float(rate)) == (5, 0.5)


def test_integers_and_leaves_of_another_shape_stay_as_they_are():
    chosen = {"w": jnp.ones((2, 3), bool)}
    old = [{"w": jnp.ones((2, 3), jnp.int32)}, {"w": jnp.ones(3)}, {"w": jnp.ones((4, 2, 3))}]
    fresh = jax.tree.map(jnp.zeros_like, old)
    jax.tree.map(np.testing.assert_array_equal, owners.replace_where(old, fresh, chosen), old)
    # The control: the same place with the parameter's shape is replaced.
    old = [{"w": jnp.ones((2, 3))}]
    (replaced,) = owners.replace_where(old, jax.tree.map(jnp.zeros_like, old), chosen)
    assert not np.any(replaced["w"])


def test_a_parameter_called_mu_is_reset_in_its_own_moments_only():
    params = Outer(_filled(1), Inner(_filled(2)))
    state = jax.tree.map(lambda leaf: leaf + 9, optax.adam(0.1).init(params))
    chosen = Outer(None, Inner(jnp.arange(6).reshape(2, 3) == 4))
    actual = owners.replace_where(state, optax.adam(0.1).init(params), chosen)
    for moments in (actual[0].mu, actual[0].nu):
        assert np.all(moments.w == 9)
        np.testing.assert_array_equal(moments.mu.w, [[9, 9, 9], [9, 0, 9]])
    assert int(actual[0].count) == 9


def test_axes_of_a_leaf_follow_from_shapes_or_from_the_fields_of_optax():
    assert owners.list_axes((4, 6), (4, 6)) == [(0, 1)]
    assert owners.list_axes((4, 6), (6,)) == [(1,)]
    assert owners.list_axes((6, 6), (6,)) == [(1,), (0,)]
    assert owners.list_axes((4, 6), (3, 4, 6)) == owners.list_axes((4, 6), (1,)) == []
    params = {"w": _filled(1, (6, 6))}
    state = optax.scale_by_factored_rms(min_dim_size_to_factor=2).init(params)
    paths = {x: ("0", x, "w") for x in ("v_row", "v_col", "v")}
    axes = {x: owners.find_axes((6, 6), getattr(state, x)["w"].shape, paths[x]) for x in paths}
    assert axes == {"v_row": (0,), "v_col": (1,), "v": None}
    assert owners.find_axes((6, 6), (6,), ("mean", "w")) is None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: optax.adam(0.1), None),
        (lambda: optax.flatten(optax.adam(0.1)), "optax.flatten"),
        (lambda: optax.contrib.muon(0.1), None),
    ],
)
def test_states_that_hide_entries_are_named(make, name):
    params = {"w": _filled(1), "b": _filled(2, (3,))}
    assert owners.name_hiding_state(params, make().init(params)) == name


def test_an_array_like_a_parameter_outside_of_trees_of_parameters_hides_entries():
    params = {"w": _filled(1), "b": _filled(2, (3,))}
    name = owners.name_hiding_state(params, {"mu": params, "cache": [_filled(0)]})
    assert name == "arrays such as 'cache/0' outside of trees of parameters"
    assert owners.name_hiding_state(params, {"mu": params, "cache": [_filled(0, (3,))]}) is None


def test_moments_that_do_not_start_at_0_are_named():
    params = {"w": _filled(1)}
    assert owners.name_start_above_zero(optax.adagrad(0.1).init(params)) == "ScaleByRssState"
    assert owners.name_start_above_zero(optax.adam(0.1).init(params)) is None


def test_arrays_without_an_owner_must_not_belong_to_a_parameter_that_changes():
    params = {"w": _filled(1), "b": _filled(2, (3,))}
    ((path, _), *_) = jax.tree.leaves_with_path({"w": 0})
    for stray in ([_filled(0)], {"w": {"rows": _filled(0, (2,))}}):
        state = {"mu": params, "cache": stray}
        owners.check_state(params, state, "stop")
        with pytest.raises(ValueError, match=r"'cache/.* for 'w' of shape \(2, 3\).*or stop"):
            owners.check_state(params, state, "stop", {path: (2, 3)})
