"""The language of the package, as far as it can be counted: names, docstrings, types, examples."""

import ast
import collections
import functools
import inspect
import re

import pytest

import sparsity
from tests.documents import PAGES
from tests.helpers import ROOT

PACKAGE = ROOT / "sparsity"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Stored results of baselines/ belong to the text of its files, which keep their names.
OTHERS = {
    folder: [x for x in sorted((ROOT / folder).rglob("*.py")) if ".venv" not in x.parts]
    for folder in ("tests", "benchmarks", "examples")
}

# A value is named for what it is, a function for what it does.
FILLERS = {"found", "given", "how", "known", "left", "own", "rest", "wanted", "whole"}
# A docstring begins with a verb, that of a class or a property also with a noun.
OPENINGS = {"as", "how", "of", "that", "those", "what", "whether", "which"}
ARTICLES = {"a", "an", "the", "its"}
# A native reader stops at these.
ODD_WORDS = re.compile(r"\b(anew|dearer|goes on|mend|mended|shrunken)\b", re.IGNORECASE)


def top_module(path):
    """Returns the folder or file directly below the package that holds a source file."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


@functools.cache
def syntax(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def bound_names(tree):
    """Yields the bound names of a program: variables, attributes, arguments, functions, imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(asname=str(name)) | ast.MatchAs(name=str(name)):
                yield name
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name


def is_filler(name):
    words = name.lower().strip("_").split("_")
    is_named_by_relation = "of" in (words[0], words[-1])  # `of_leaf`, `shape_of`
    return name != "shift_left" and (is_named_by_relation or bool(FILLERS.intersection(words)))


def is_sentence(name):
    """Returns whether a name tells what a test or a check promises, in words of every day."""
    return name.startswith("test_") or name.count("_") > 5


def is_property(node):
    names = {getattr(part, "attr", getattr(part, "id", "")) for part in node.decorator_list}
    return any(name.endswith("property") for name in names)


def odd_openings(tree):
    """Yields the docstrings that should begin with a verb or, where allowed, a noun, and do not."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        first = re.match(r"\w*", ast.get_docstring(node) or "")[0]
        is_noun = not isinstance(node, ast.FunctionDef) or is_property(node)
        if first.lower() in (OPENINGS if is_noun else OPENINGS | ARTICLES):
            yield f"{getattr(node, 'name', 'module')}: {first}"


def odd_words(tree):
    """Yields the words in docstrings that a native reader stops at."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from ODD_WORDS.findall(ast.get_docstring(node) or "")


def lines_with_any(tree):
    """Returns the numbers of the lines with `Any`, except imports."""
    return {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and getattr(node, "id", getattr(node, "attr", "")) == "Any"
    }


# Limits by top module, which may only fall; 0 for all other modules.
MOST_LINES_WITH_ANY = {
    "activations": 2, "algorithms": 2, "api": 1, "cli": 6,
    "core": 3, "epochs": 1, "masks": 1, "programs": 6,
    "training": 1,
}  # fmt: skip


def cases(find):
    """Returns what a function finds in the sources, as `file: case`."""
    return [
        f"{path.relative_to(PACKAGE)}: {case}" for path in SOURCES for case in find(syntax(path))
    ]


def test_values_are_named_for_what_they_are_and_functions_for_what_they_do():
    assert cases(lambda tree: filter(is_filler, bound_names(tree))) == []


@pytest.mark.parametrize("folder", OTHERS)
def test_programs_outside_the_package_name_values_for_what_they_are(folder):
    names = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in OTHERS[folder]
        for name in bound_names(syntax(path))
        if is_filler(name) and not is_sentence(name)
    }
    assert sorted(names) == []


def test_docstrings_begin_with_a_verb():
    assert cases(odd_openings) == []


def test_docstrings_use_no_word_that_a_native_reader_stops_at():
    assert cases(odd_words) == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_no_word_that_a_native_reader_stops_at(page):
    assert ODD_WORDS.findall(PAGES[page]) == []


def test_any_is_said_on_few_lines():
    counts = collections.Counter()
    for path in SOURCES:
        counts[top_module(path)] += len(lines_with_any(syntax(path)))
    assert {name: n for name, n in counts.items() if n > MOST_LINES_WITH_ANY.get(name, 0)} == {}


CLASSES = [name for name in sparsity.__all__ if inspect.isclass(getattr(sparsity, name))]


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_class_has_an_example(name):
    assert "\nExample:\n" in inspect.getdoc(getattr(sparsity, name))


PROGRAM = """
import a as found
def of_leaf(given, *, kept): "What it is."; self.whole = left_mask = shape_of = kept
class Mask:
    "What it keeps."
    @functools.cached_property
    def size(self): "The number of entries."
    def grow(self) -> Any: "The mask, anew."
"""


def test_the_counts_find_names_openings_words_and_any():
    tree = ast.parse(PROGRAM)
    fillers = [name for name in bound_names(tree) if is_filler(name)]
    assert sorted(fillers) == ["found", "given", "left_mask", "of_leaf", "shape_of", "whole"]
    assert sorted(odd_openings(tree)) == ["Mask: What", "grow: The", "of_leaf: What"]
    assert list(odd_words(tree)) == ["anew"]
    assert len(lines_with_any(tree)) == 1


def test_no_two_classes_have_one_name():
    names = collections.Counter(
        node.name
        for path in SOURCES
        for node in syntax(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == set()
