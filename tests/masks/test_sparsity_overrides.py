"""Sparsities of single parameters: by path, pattern or compiled pattern."""

import re

import numpy as np
import pytest

from sparsity.sparsity_distributions import erk, uniform

both = pytest.mark.parametrize("distribution", [uniform, erk])

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
        ({re.compile("layers"): None}, net(first=None, second=None)),
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
    assert f"Did you mean {nearest!r}" in str(error.value)
    for name in ("dense/kernel", "dense/bias", "layers/0/kernel", "layers/1/kernel"):
        assert name in str(error.value)


def test_the_name_that_messages_give_a_bare_array_is_a_key_for_it():
    with pytest.raises(ValueError, match="Known: params"):
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
