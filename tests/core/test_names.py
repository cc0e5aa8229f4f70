"""Keys that name leaves, and registries whose errors help."""

import re

import numpy as np
import pytest

import sparsity
from sparsity.core import names

NAMES = ["conv1/kernel", "conv2/kernel", "dense/bias"]


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("conv1/kernel", ["conv1/kernel"]),
        (("conv1", "kernel"), ["conv1/kernel"]),
        ("conv.*", ["conv1/kernel", "conv2/kernel"]),
        ("kernel", []),  # a text has to match the whole path
        (re.compile("kernel"), ["conv1/kernel", "conv2/kernel"]),
        (re.compile("^dense"), ["dense/bias"]),
        (("conv.*", "kernel"), []),  # a tuple is a path, never a pattern
        ("conv1/(", []),  # not a regular expression
        ("conv1{99999999999999}", []),  # neither is this
        ("(" * 2000, []),  # nor this
        (re.compile(b"conv1"), []),  # paths are text
    ],
)
def test_a_key_names_these_leaves(key, named):
    assert [name for name in NAMES if names.matches(key, name)] == named


@pytest.mark.parametrize(
    ("key", "explained"),
    [
        ("*/kernel", "It is no regular expression: nothing to repeat at position 0. "),
        (".*/kernel", ""),
        (("*", "kernel"), ""),  # a path, never a pattern
        (re.compile("a"), ""),
    ],
)
def test_a_key_that_is_no_regular_expression_is_explained(key, explained):
    assert names.explain_syntax(key) == explained


def test_an_override_by_a_shell_pattern_says_that_it_is_no_regular_expression():
    uniform = sparsity.Uniform(0.5, custom_sparsity_map={"*/kernel": 0.1})
    with pytest.raises(ValueError, match=r"no regular expression: nothing to repeat.*'a/kernel'"):
        uniform({"a": {"kernel": np.ones((2, 2))}})


def test_a_path_of_numbers_and_the_path_of_the_root():
    assert names.matches((0, "w"), "0/w")
    assert names.matches((), "params")


def test_a_text_is_a_path_and_a_regular_expression_and_a_tuple_a_path_alone():
    assert [name for name in ("a.b", "aXb") if names.matches("a.b", name)] == ["a.b", "aXb"]
    assert [name for name in ("a.b", "aXb") if names.matches(("a.b",), name)] == ["a.b"]


def test_a_path_with_signs_of_regular_expressions_names_itself():
    assert names.matches("blocks[0]/w+", "blocks[0]/w+")
    assert not names.matches("blocks[0]/w+", "blocks0")


def test_the_exact_key_wins_and_then_the_first():
    keys = ["conv.*", re.compile("kernel"), "conv1/kernel"]
    assert names.best_key(keys, "conv1/kernel") == "conv1/kernel"
    assert names.best_key(keys, "conv2/kernel") == "conv.*"
    assert names.best_key(keys[::-1], "conv2/kernel") == re.compile("kernel")
    assert names.best_key(keys, "dense/bias") is None


def test_a_compiled_pattern_is_never_the_exact_key():
    keys = [re.compile(".*"), re.compile("conv1/kernel"), ("conv1", "kernel")]
    assert names.best_key(keys, "conv1/kernel") == ("conv1", "kernel")


@pytest.mark.parametrize("key", ["conv1/kernal", ("conv1", "kernal"), re.compile("conv1/kernal")])
def test_a_key_that_names_nothing_is_answered_with_the_nearest(key):
    text = names.suggest(key, NAMES)
    assert text == f"Did you mean 'conv1/kernel'? Known: {', '.join(NAMES)}."


def test_a_key_unlike_all_names_is_answered_with_the_nearest_without_a_cutoff():
    assert names.suggest("C", ["conv", "dense"]) == "Known: conv, dense."
    assert names.suggest("C", ["conv", "dense"], cutoff=0).startswith("Did you mean 'conv'? ")


def test_where_there_are_no_names_that_is_said():
    assert names.suggest("a", []) == "There are none."


def _shapes():
    return names.Registry("shape", {"circle": 1, "square": 2})


def test_what_is_registered_is_found_in_order():
    shapes = _shapes()
    shapes.add("line", 3)
    assert [shapes.find(name) for name in shapes] == [1, 2, 3]
    assert list(shapes) == ["circle", "square", "line"]


@pytest.mark.parametrize("name", ["circel", "Circle"])
def test_an_unknown_name_is_an_error_with_the_nearest_and_all(name):
    with pytest.raises(ValueError, match=r"shape: '\w+' is not known") as error:
        _shapes().find(name)
    assert "Did you mean 'circle'? Known: circle, square." in str(error.value)


@pytest.mark.parametrize("name", ["xyz", None, 3, ["x"]])
def test_what_is_like_no_name_is_answered_with_all(name):
    with pytest.raises(ValueError, match="is not known") as error:
        _shapes().find(name)
    assert str(error.value) == f"shape: {name!r} is not known. Known: circle, square."


def test_a_name_may_be_given_twice_to_the_same_thing_only():
    shapes = _shapes()
    shapes.add("circle", 1)
    with pytest.raises(ValueError, match="The name 'circle' is taken by 1"):
        shapes.add("circle", 5)
    assert shapes["circle"] == 1
