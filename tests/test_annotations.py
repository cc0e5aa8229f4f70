"""What the public API says of its types: `Any` nowhere, but by an alias for what has no type."""

import ast
import functools
import importlib
import inspect
import sys
from pathlib import Path
from pkgutil import iter_modules
from typing import get_origin

import pytest

import sparsity

# A tree of arrays, and an argument of `update` that an override may give a type of its own.
ALIASES = {"sparsity.core.trees.PyTree", "sparsity.training.hooks.ExtraArg"}
TOP_MODULES = [value.__name__ for value in vars(sparsity).values() if inspect.ismodule(value)]
FAMILIES = [
    f"sparsity.algorithms.{item.name}" for item in iter_modules(sparsity.algorithms.__path__)
]
MODULES = sorted({"sparsity", "sparsity.api", *TOP_MODULES, *FAMILIES})


@functools.cache
def parse_module(module):
    """The syntax tree of an imported module, by its name."""
    return ast.parse(Path(sys.modules[module].__file__).read_text(encoding="utf-8"))


def says_any(module, annotation):
    """Whether an annotation holds `Any`, itself or by an alias that is none of `ALIASES`."""
    match annotation:
        case ast.Constant(value=str(text)):
            return says_any(module, ast.parse(text, mode="eval").body)
        case ast.Call(args=parts, keywords=named):  # a type variable, whose first string is a name
            parts = [*(part for part in parts if not isinstance(part, ast.Constant)), *named]
            return any(says_any(module, part) for part in parts)
        case ast.Name(id=name):
            return names_any(module, name)
        case ast.Subscript(value=ast.Name(id="Literal")):  # whose strings are values
            return False
        case ast.Attribute(value=ast.Name(id=home), attr=name):
            return names_any(getattr(vars(sys.modules[module]).get(home), "__name__", ""), name)
    return any(says_any(module, part) for part in ast.iter_child_nodes(annotation))


def names_any(module, name):
    """Whether a name stands for `Any` in a module; classes and functions stand for themselves."""
    if name == "Any":
        return True
    if module not in sys.modules or f"{module}.{name}" in ALIASES or not is_ours(module):
        return False
    for node in parse_module(module).body:
        match node:
            case ast.ImportFrom(module=str(source), names=names):
                for item in names:
                    if name == (item.asname or item.name):
                        return names_any(source, item.name)
            case ast.Assign(targets=[ast.Name(id=item)]) | ast.AnnAssign(target=ast.Name(id=item)):
                if name == item:
                    return says_any(module, node.value)
    return False


def is_ours(module):
    return module.partition(".")[0] in ("sparsity", "annotated")


def is_public(name):
    return not name.startswith("_") or name.endswith("__")


def definitions(nodes, qualname):
    """The definitions of that name among syntax nodes, all overloads of a function included."""
    first, _, inner = qualname.partition(".")
    actual = [node for node in nodes if getattr(node, "name", None) == first]
    return definitions(actual[-1].body, inner) if inner else actual


def list_annotations(node):
    """(what is annotated, annotation) in a function, or in the public part of a class."""
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            yield f"{node.name}({item.arg})", item.annotation
        for item in filter(None, (arguments.vararg, arguments.kwarg)):
            yield f"{node.name}({item.arg})", item.annotation
        yield f"{node.name}() ->", node.returns
        return
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and is_public(part.name):
            yield from ((f"{node.name}.{what}", item) for what, item in list_annotations(part))
        elif isinstance(part, ast.AnnAssign) and is_public(part.target.id):
            yield f"{node.name}.{part.target.id}", part.annotation


def public_definitions(module):
    """Classes, with their bases, and functions that a module shows, wherever they are from."""
    everything = [name for name in vars(module) if not name.startswith("_")]
    for name in getattr(module, "__all__", everything):
        value = inspect.unwrap(getattr(module, name))
        for item in inspect.getmro(value) if inspect.isclass(value) else [value]:
            if (inspect.isclass(item) or inspect.isfunction(item)) and is_ours(item.__module__):
                yield item


def list_aliases(module):
    """Names of types that a folder shows, or a module that lists its names."""
    names = getattr(module, "__all__", vars(module) if hasattr(module, "__path__") else [])
    return [name for name in names if get_origin(getattr(module, name)) is not None]


def find_any(modules):
    """Annotations that hold `Any`, named by module, function and parameter."""
    actual = set()
    for module in modules:
        imported = importlib.import_module(module)
        names = list_aliases(imported)
        actual |= {f"{module}: {name}" for name in names if names_any(module, name)}
        for item in public_definitions(imported):
            for node in definitions(parse_module(item.__module__).body, item.__qualname__):
                for what, annotation in list_annotations(node):
                    if annotation is not None and says_any(item.__module__, annotation):
                        actual.add(f"{item.__module__}: {what}")
    return sorted(actual)


@pytest.mark.parametrize("module", MODULES)
def test_no_public_annotation_says_any(module):
    assert find_any([module]) == []


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_says_all_of_its_types(module):
    for item in public_definitions(importlib.import_module(module)):
        for node in definitions(parse_module(item.__module__).body, item.__qualname__):
            bare = {what for what, item in list_annotations(node) if item is None}
            assert not {what for what in bare if not what.endswith(("(self)", "(cls)"))}


ANNOTATED = """
from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparsity.core import trees
from sparsity.core.trees import PyTree
from sparsity.training.hooks import ExtraArg

__all__ = ["Base", "Derived", "Options", "clean", "nested", "plain"]

T = TypeVar("T")
Options = dict[str, Any]
_Inner = Mapping[str, Options]


def clean(params: PyTree, x: T, likes: trees.PyTree = None, **extra: ExtraArg) -> list[PyTree]: ...


def plain(x: Any) -> int: ...


def nested(x: int, *, fn: Callable[..., typing.Any], **kwargs: "dict[str, Any]") -> _Inner: ...


def _private(x: Any) -> Any: ...


@dataclasses.dataclass
class Base:
    field: Any | None
    _own: Any = None

    def method(self, x: Options) -> None: ...

    def _hidden(self, x: Any) -> None: ...


class Derived(Base):
    def __call__(self) -> Any: ...
"""


def test_any_is_found_wherever_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "annotated.py").write_text(ANNOTATED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "annotated", raising=False)
    try:
        assert find_any(["annotated"]) == [
            "annotated: Base.field",
            "annotated: Base.method(x)",
            "annotated: Derived.__call__() ->",
            "annotated: Options",
            "annotated: nested() ->",
            "annotated: nested(fn)",
            "annotated: nested(kwargs)",
            "annotated: plain(x)",
        ]
    finally:
        sys.modules.pop("annotated", None)
        parse_module.cache_clear()


def test_the_aliases_are_there_and_their_users_are_walked():
    assert all(names_any(*alias.rpartition(".")[::2]) is False for alias in ALIASES)
    walked = {
        item.__qualname__ for name in MODULES for item in public_definitions(sys.modules[name])
    }
    assert {"BaseUpdater", "read_masks", "apply_mask_straight_through", "DropAndGrow"} <= walked
