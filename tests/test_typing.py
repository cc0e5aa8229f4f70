"""Programs of users, as a type checker sees them that knows the package as an installed one.

The programs of `tests/typing` pass mypy and pyright in their strict modes, but for functions of jax
and optax whose types are unknown; those of the pages pass pyright in its mode `standard`. The
checker is basedpyright, which brings all that it needs, so that nothing is downloaded.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import sparsity
from tests.documents import blocks
from tests.helpers import ROOT

SETTINGS = {"typeCheckingMode": "standard", "pythonVersion": "3.11"}

# By names of files.
PROGRAMS = {re.sub(r"\W", "_", place): code for place, code in blocks("python").items()}

# Mistakes of users, each on the last line, and the rules of the checker that they break.
MISTAKES = {
    "no_such_name": ("sparsity.MagnitudePrunning()", "reportAttributeAccessIssue"),
    "no_such_option": ("sparsity.MagnitudePruning(sparsity=0.5)", "reportCallIssue"),
    "a_wrong_option": ("sparsity.MagnitudePruning(skip_gradients='no')", "reportArgumentType"),
    "no_config": ("sparsity.create_updater_from_config()", "reportCallIssue"),
    "no_optimizer": ("sparsity.NoPruning().wrap_optax(0.1)", "reportArgumentType"),
    "no_such_scores": ("sparsity.prune_at_init('snap', 1.0, 0.5)", "reportArgumentType"),
    "no_batch": ("sparsity.calibrate(lambda params: params, 1.0, [1.0])", "reportArgumentType"),
}


STRICT = sorted((ROOT / "tests/typing").glob("*.py"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package, as where packages are installed."""
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sparsity", folder / "sparsity", ignore=ignored)
    return folder


def check_by_pyright(folder, installed):
    """Yields (path, line, text, rule, message) of all errors of the programs in a folder."""
    (folder / "pyrightconfig.json").write_text(json.dumps(SETTINGS))
    checker = [sys.executable, "-m", "basedpyright"]
    done = subprocess.run(
        [*checker, "--project", folder, "--pythonpath", sys.executable, "--outputjson"],
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    for error in json.loads(done.stdout)["generalDiagnostics"]:
        if error["severity"] == "error":
            path, start = Path(error["file"]), error["range"]["start"]
            text = path.read_text(encoding="utf-8").splitlines()[start["line"]]
            text = text[start["character"] :]
            yield path, start["line"] + 1, text, error.get("rule"), error["message"]


@pytest.fixture(scope="module")
def errors(tmp_path_factory, installed):
    """(line, text, rule, message) of all errors of each program, by its name."""
    folder = tmp_path_factory.mktemp("programs")
    mistakes = {name: f"import sparsity\n{line}\n" for name, (line, _) in MISTAKES.items()}
    strict = {path.stem: f"# pyright: strict\n{path.read_text()}" for path in STRICT}
    programs = PROGRAMS | mistakes | strict
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program, encoding="utf-8")
    by_name = {name: [] for name in programs}
    for path, *error in check_by_pyright(folder, installed):
        by_name[path.stem].append(error)
    return by_name


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_runs_has_no_type_errors(errors, name):
    assert not errors[name], "\n".join(
        f"{name}.py:{line}: {message} [{rule}]" for line, _, rule, message in errors[name]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, (_, rule) in MISTAKES.items()])
def test_a_mistake_is_a_type_error(errors, name, rule):
    assert [(line, broken) for line, _, broken, _ in errors[name]] == [(2, rule)]


@pytest.mark.slow
def test_programs_of_users_pass_pyright_in_its_strict_mode(errors):
    texts = [text for path in STRICT for _, text, _, _ in errors[path.stem]]
    assert texts  # or else the mode is not strict
    assert [text for text in texts if not re.match(r"(jax|jnp|optax)\b", text)] == []


@pytest.mark.slow
def test_programs_of_users_pass_mypy_in_its_strict_mode(tmp_path, installed):
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-optax.*]\nignore_missing_imports = true\n")
    checker = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    done = subprocess.run(
        [*checker, "--python-executable", sys.executable, *STRICT],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_examples_name_only_what_the_package_has():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\bsparsity\.([A-Z]\w*)", text)}
    assert {"BaseUpdater", "Plan"} <= named <= vars(sparsity).keys()


@pytest.mark.slow
@pytest.mark.parametrize("path", STRICT, ids=[path.stem for path in STRICT])
def test_a_program_of_a_user_runs(path):
    with mock.patch.dict(sparsity.ALGORITHM_REGISTRY):
        runpy.run_path(str(path))
