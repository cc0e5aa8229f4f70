"""Optional packages: what is missing is named with its extra, other errors stay as they are."""

import json
import sys
import types

import pytest

from sparsity.core import extras


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes the files of a package `parcel`, which can be imported in the test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**files):
        (tmp_path / "parcel").mkdir()
        for name, text in ({"__init__": ""} | files).items():
            (tmp_path / "parcel" / f"{name}.py").write_text(text)

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "parcel"]:
        del sys.modules[name]


def test_a_module_that_is_there_is_returned():
    assert extras.load("json", "config") is json
    assert extras.load("json.decoder", "config") is json.decoder


def test_a_module_within_a_package_is_imported(write):
    write(inner="content = 3")
    module = extras.load("parcel.inner", "summary")
    assert isinstance(module, types.ModuleType)
    assert module.content == 3


@pytest.mark.parametrize("module", ["parcel", "parcel.inner", "parcel.inner.most"])
@pytest.mark.parametrize("extra", ["flax", "summary"])
def test_a_missing_package_is_an_error_that_names_it_and_its_extra(module, extra):
    with pytest.raises(ImportError) as caught:
        extras.load(module, extra)
    command = f"pip install 'jax-sparsity[{extra}]' (in a checkout: '.[{extra}]')"
    assert str(caught.value) == f"This needs parcel: {command}"
    assert caught.value.name == "parcel"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_package_without_the_module_is_too_old_which_the_extra_mends(write):
    write()
    with pytest.raises(ImportError, match=r"needs parcel: pip install 'jax-sparsity\[flax\]'"):
        extras.load("parcel.inner", "flax")


def test_a_blocked_module_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "json.decoder", None)
    with pytest.raises(ImportError, match=r"This needs json: pip install 'jax-sparsity\[flax\]'"):
        extras.load("json.decoder", "flax")


# What the file of an installed package holds, and the error that importing it raises.
BROKEN = {
    "another package is missing": ("import letter", "No module named 'letter'"),
    "another of a like name is missing": ("import parcels", "No module named 'parcels'"),
    "another file of it is missing": ("import parcel.out", "No module named 'parcel.out'"),
    "a name of another is missing": ("from json import no_name", "cannot import name 'no_name'"),
    "a name of it is missing": ("from parcel import no_name", "cannot import name 'no_name'"),
    "an error without a name": ("raise ImportError('no GPU')", "no GPU"),
    "a missing one without a name": ("raise ModuleNotFoundError('no GPU')", "no GPU"),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("file", ["__init__", "inner"])
def test_an_error_within_an_installed_package_is_not_masked(write, file, source, message):
    write(**{"inner": "", file: source})
    with pytest.raises(ImportError, match=message) as caught:
        extras.load("parcel.inner", "flax")
    assert "jax-sparsity" not in str(caught.value)


def test_other_errors_of_a_package_are_not_touched(write):
    write(__init__="1 / 0")
    with pytest.raises(ZeroDivisionError):
        extras.load("parcel", "flax")
