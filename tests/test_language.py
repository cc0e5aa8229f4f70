"""Names of the package that tell what they name, and examples of its classes."""

import ast
import collections
import inspect

import pytest

import sparsity
from tests.helpers import ROOT

PACKAGE = ROOT / "sparsity"
SYNTAX = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}

# A value is named for what it is, a function for what it does.
FILLERS = {"found", "given", "how", "known", "left", "own", "rest", "wanted", "whole"}


def bound_names(tree):
    """Yields the bound names of a program: variables, attributes, arguments, functions, imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def is_filler(name):
    words = name.lower().strip("_").split("_")
    is_named_by_relation = "of" in (words[0], words[-1])  # `of_leaf`, `shape_of`
    return name != "shift_left" and (is_named_by_relation or bool(FILLERS.intersection(words)))


def test_values_are_named_for_what_they_are_and_functions_for_what_they_do():
    assert [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in SYNTAX.items()
        for name in filter(is_filler, bound_names(tree))
    ] == []


def test_the_check_of_names_notices_fillers():
    program = "import a as found\ndef of_leaf(given, *, kept): self.whole = left_mask = kept"
    names = [name for name in bound_names(ast.parse(program)) if is_filler(name)]
    assert sorted(names) == ["found", "given", "left_mask", "of_leaf", "whole"]


CLASSES = [name for name in sparsity.__all__ if inspect.isclass(getattr(sparsity, name))]


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_class_has_an_example(name):
    assert "\nExample:\n" in inspect.getdoc(getattr(sparsity, name))


def test_no_two_classes_have_one_name():
    names = collections.Counter(
        node.name
        for tree in SYNTAX.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == set()
