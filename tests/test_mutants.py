"""Mutants are killed by tests that fail, not by tests that pytest does not find."""

import importlib
import sys
from unittest import mock

import pytest

MISSING = "ERROR: not found: /copy/tests/test_a.py::test_x[1]\n(no match in any of [<Module a>])\n"
FAILURES = "ERROR tests/test_a.py\nERROR: found no collectors for /copy/tests/test_a.py::test_x\n"
STUBS = ("coverage", "cosmic_ray", "cosmic_ray.ast", "cosmic_ray.mutating", "cosmic_ray.plugins")


@pytest.fixture
def mutants(monkeypatch):
    """The module without the extras of its own, which draw mutants."""
    for name in STUBS:
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    monkeypatch.delitem(sys.modules, "benchmarks.mutants", raising=False)
    module = importlib.import_module("benchmarks.mutants")
    monkeypatch.delitem(sys.modules, "benchmarks.mutants")
    return module


@pytest.fixture
def judge(mutants, monkeypatch, tmp_path):
    """A function from the children of `fork`, (status, log), to the verdict and their tests."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source.py").write_text("a = 1")
    seconds = {"t.py::test_x[1]": 1.0, "t.py::test_x[2]": 2.0}
    measured = {"seconds": seconds, "lines": {"source.py": {"1": ["t.py::test_x[1]"]}}}

    def run(*children):
        calls, results = [], iter(children)
        monkeypatch.setattr(mutants, "run_tests", lambda tests, marker: calls.append([*tests]))

        def fork(function, limit):
            function()
            calls[-1].append(limit)
            code, log = next(results)
            (tmp_path / "log").write_text(log)
            return code

        monkeypatch.setattr(mutants, "fork", fork)
        verdict = mutants.judge(measured, "", ("source.py", 1, "operator", 0, "a = 2"), 9)
        assert (tmp_path / "source.py").read_text() == "a = 1"
        return *verdict, calls

    return run


@pytest.mark.parametrize(
    ("code", "log", "reason"),
    [
        (1, "FAILED t.py::test_x[1] - assert", "FAILED t.py::test_x[1] - assert"),
        (2, "ERROR t.py - NameError", "ERROR t.py - NameError"),
        (4, FAILURES, "ERROR tests/test_a.py"),
        (4, "ImportError while loading conftest '/copy/tests/conftest.py'.", "exit status 4"),
        (-24, "", "exit status -24"),
    ],
)
def test_tests_that_fail_or_cannot_be_imported_kill(judge, code, log, reason):
    assert judge((code, log)) == ("killed", reason, [["t.py::test_x[1]", 24]])


@pytest.mark.parametrize(("code", "log"), [(4, MISSING), (5, "2 deselected in 0.4s")])
@pytest.mark.parametrize(("then", "verdict"), [(0, "survived"), (1, "killed")])
def test_renamed_tests_are_asked_for_by_their_function(judge, code, log, then, verdict):
    judged, _, calls = judge((code, log), (then, ""))
    assert (judged, calls) == (verdict, [["t.py::test_x[1]", 24], ["t.py::test_x", 32]])


@pytest.mark.parametrize(("code", "log"), [(4, MISSING), (5, "no tests ran")])
def test_tests_that_pytest_does_not_find_kill_nothing(judge, code, log):
    assert judge((code, log), (code, log))[0] == "survived"


@pytest.mark.parametrize("source", ["a = 1 +", "a = b is not 1", "return 1"])
def test_programs_that_python_refuses_or_warns_of_are_no_mutants(mutants, source):
    assert mutants.behaviour(source) is None


def test_annotations_are_no_part_of_what_a_program_does(mutants):
    assert mutants.behaviour("def f(x: int = 1) -> int: ...") == mutants.behaviour(
        "def f(x=1): ..."
    )
    assert mutants.behaviour("def f(x=1): ...") != mutants.behaviour("def f(x=2): ...")
