"""run.sh: its commands and how it makes, keeps and rebuilds the environment.

A copy of the script runs in an empty folder with stand-ins for Python that only write down what
they are asked to do, so that nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.slow


# Answers `-c` (version checks) like a good Python; `-m venv FOLDER` makes a folder with a copy of
# itself; everything is noted in $LOG. A file `$LOG.fail` makes pip fail.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$LOG"
case "$1 ${2-}" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") [[ ! -e $LOG.fail ]] || { echo "pip: no network" >&2; exit 1; } ;;
  "--version ") echo "Python 3.99" ;;
esac
"""


class Checkout:
    def __init__(self, folder):
        self.root = folder / "a check out"
        self.root.mkdir()
        for name in ("run.sh", "setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        for name in ("first", "second"):
            self.requirements(name).parent.mkdir(parents=True)
            self.requirements(name).write_text("a-trainer==1.0\n")
        compilers = self.root / "benchmarks" / "accelerators" / "requirements.txt"
        compilers.parent.mkdir(parents=True)
        compilers.write_text("a-compiler==1.0\n")
        self.log = folder / "log"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.add_python("python3", FAKE_PYTHON)

    def requirements(self, example):
        return self.root / "examples" / example / "requirements.txt"

    def add_python(self, name, text):
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *arguments, **environment):
        """Runs run.sh from another folder; returns the result and what Python was asked to do."""
        self.log.write_text("")
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "LOG": str(self.log)} | environment
        result = subprocess.run(
            ["bash", str(self.root / "run.sh"), *arguments],
            cwd="/",
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return result, [line for line in self.log.read_text().splitlines() if line[:2] == "-m"]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def is_made(calls):
    return any(call.startswith("-m venv") for call in calls)


def is_installed(calls):
    return any(call.startswith("-m pip install") for call in calls)


def test_help_lists_the_commands(checkout):
    result, calls = checkout.run("help")
    assert result.returncode == 0
    assert "bash run.sh quick" in result.stdout
    assert "bash run.sh docs" in result.stdout
    assert "bash run.sh train [flags]" in result.stdout
    assert "bash run.sh example NAME" in result.stdout
    assert calls == []


def test_an_unknown_command_is_one_line_and_a_failure(checkout):
    result, calls = checkout.run("trian")
    assert result.returncode == 1
    assert result.stderr == "run.sh: there is no command 'trian'; see 'bash run.sh help'.\n"
    assert calls == []


CHECKS = ["-m ruff check .", "-m ruff format --check .", "-m mypy"]


def test_the_checks_run_one_after_the_other(checkout):
    result, calls = checkout.run("quick")
    assert result.returncode == 0, result.stderr
    assert calls[-4:] == [*CHECKS, "-m pytest -n 2 -m not slow"]
    assert result.stdout.split() == ["==", "ruff", "==", "mypy", "==", "pytest"]


def test_all_checks_end_with_limits_of_compiled_steps_in_an_environment_of_their_own(checkout):
    checkout.add_python("uname", "#!/bin/sh\necho Linux x86_64\n")
    result, calls = checkout.run()
    assert result.returncode == 0, result.stderr
    start = calls.index(CHECKS[0])
    assert calls[start : start + 4] == [*CHECKS, "-m pytest -n 2"]
    assert calls[-2] == f"-m venv {checkout.root}/benchmarks/accelerators/.venv"
    assert "benchmarks/accelerators/requirements.txt" in calls[-1]
    last = checkout.log.read_text().splitlines()[-1]
    assert last == "-P -m benchmarks.accelerators --limits"
    checkout.add_python("uname", "#!/bin/sh\necho Darwin arm64\n")
    result, calls = checkout.run()
    assert result.returncode == 0, result.stderr
    assert calls[-1] == "-m pytest -n 2"


@pytest.mark.parametrize("tool", ["ruff", "mypy", "pytest"])
def test_a_check_that_fails_ends_quick_with_a_failure(checkout, tool):
    checkout.add_python("python3", FAKE_PYTHON + f'[[ "$2" != {tool} ]]\n')
    result, calls = checkout.run("quick")
    assert result.returncode == 1
    assert calls[-1].startswith(f"-m {tool}")


def test_docs_builds_the_site_and_takes_warnings_for_errors(checkout):
    result, _ = checkout.run("docs")
    assert result.returncode == 0, result.stderr
    assert "docs/_build/html" in result.stdout
    last, folder = checkout.log.read_text().splitlines()[-1], checkout.root / "docs"
    assert last == (
        f"-P -m sphinx -W --keep-going -q -d {folder}/_build/doctrees {folder} {folder}/_build/html"
    )


def test_a_page_with_a_fault_is_a_failure(checkout):
    checkout.add_python("python3", FAKE_PYTHON + '[[ "$3" != sphinx ]]\n')
    result, _ = checkout.run("docs")
    assert result.returncode == 1
    assert "The site" not in result.stdout


def test_quick_takes_no_arguments(checkout):
    result, calls = checkout.run("quick", "tests")
    assert result.returncode == 1
    assert result.stderr == "run.sh: quick takes no arguments; see 'bash run.sh help'.\n"
    assert calls == []


# Builds, as `python -m build --outdir FOLDER` does; reads programs; says where the tests run.
INSTALLER = f"""{FAKE_PYTHON}
[[ $0 == */sparsity ]] || cp "$0" "$(dirname "$0")/sparsity"
case "$*" in
  "-m build"*) mkdir -p "$4" && touch "$4/jax_sparsity.tar.gz" "$4/jax_sparsity.whl" ;;
  "- "*) exec {sys.executable} "$@" ;;
  *pytest*) echo "tests in $PWD: $(ls | xargs)" >>"$LOG" ;;
esac
"""


def test_package_tests_what_was_built_away_from_the_checkout(checkout):
    checkout.add_python("python3", INSTALLER)
    (checkout.root / "tests").mkdir()
    result, calls = checkout.run("package")
    assert result.returncode == 0, result.stderr
    built = calls.index(next(call for call in calls if call.startswith("-m build")))
    source, removed, wheel = calls[built + 2 :]
    assert source.endswith("/dist/jax_sparsity.tar.gz")
    assert "uninstall" in removed
    assert wheel.endswith(
        "/dist/jax_sparsity.whl[cli,config,flax,progress,summary,tensorboard,test]"
    )
    *_, tests, where = checkout.log.read_text().splitlines()
    assert tests.startswith("-P -m pytest")
    assert tests.endswith("tests --pyargs sparsity")
    assert where.startswith("tests in /tmp/")
    assert where.endswith(": pyproject.toml tests")


def test_lowest_installs_the_oldest_versions_that_are_allowed(checkout):
    checkout.add_python("python3", INSTALLER)
    (checkout.root / "tests").mkdir()
    result, calls = checkout.run("lowest")
    assert result.returncode == 0, result.stderr
    constraints = checkout.root / ".venv-lowest" / "constraints.txt"
    assert f"--constraint {constraints}" in calls[-1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = constraints.read_text().split("\n")
    assert {need.replace(">=", "==") for need in project["dependencies"]} <= {*lowest}
    assert all("==" in line for line in lowest if line)
    assert "-P -m pytest" in checkout.log.read_text()


# Arguments, and the folder of the environment that they need.
COMMANDS = pytest.mark.parametrize(
    ("command", "folder"),
    [(["quick"], "."), (["train"], "."), (["example", "first"], "examples/first")],
)


@COMMANDS
def test_the_second_call_installs_nothing(checkout, command, folder):
    result, calls = checkout.run(*command)
    assert result.returncode == 0, result.stderr
    assert is_made(calls)
    assert is_installed(calls)
    assert (checkout.root / folder / ".venv").is_dir()
    result, calls = checkout.run(*command)
    assert result.returncode == 0
    assert result.stderr == ""
    assert not is_made(calls)
    assert not is_installed(calls)


@COMMANDS
def test_an_interrupted_installation_is_rebuilt(checkout, command, folder):
    fail = Path(f"{checkout.log}.fail")
    fail.touch()
    result, _ = checkout.run(*command)
    assert result.returncode == 1
    assert "pip: no network" in result.stderr
    fail.unlink()
    leftover = checkout.root / folder / ".venv" / "left over"
    leftover.touch()
    result, calls = checkout.run(*command)
    assert result.returncode == 0
    assert is_made(calls)
    assert is_installed(calls)
    assert not leftover.exists()


def test_a_changed_setup_is_installed_into_the_same_environment(checkout):
    checkout.run("train")
    with (checkout.root / "setup.py").open("a") as setup:
        setup.write("# changed\n")
    _, calls = checkout.run("train")
    assert not is_made(calls)
    assert is_installed(calls)


def test_an_environment_that_was_moved_is_rebuilt(checkout):
    checkout.run("train")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    _, calls = checkout.run("train")
    assert is_made(calls)


def test_flags_reach_the_trainer(checkout):
    checkout.run("train")
    checkout.run("train", "--config.sparsity.sparsity_type=nm_2,4", "two words")
    last = checkout.log.read_text().splitlines()[-1]
    assert last == ("-P -m examples.mnist.train --config.sparsity.sparsity_type=nm_2,4 two words")


def test_an_example_runs_in_an_environment_of_its_own(checkout):
    result, calls = checkout.run("example", "first", "--steps=3", "two words")
    assert result.returncode == 0, result.stderr
    folder = checkout.root / "examples" / "first"
    assert f"-m venv {folder}/.venv" in calls
    assert f"--requirement {folder}/requirements.txt --editable {checkout.root}" in calls[-1]
    assert not (checkout.root / ".venv").exists()
    last = checkout.log.read_text().splitlines()[-1]
    assert last == f"{folder}/train.py --steps=3 two words"


def test_changed_requirements_are_installed_for_their_example_only(checkout):
    for command in (["example", "first"], ["example", "second"], ["train"]):
        checkout.run(*command)
    checkout.requirements("first").write_text("a-trainer==1.1\n")
    assert is_installed(checkout.run("example", "first")[1])
    assert not is_installed(checkout.run("example", "second")[1])
    assert not is_installed(checkout.run("train")[1])


@pytest.mark.parametrize("arguments", [[], ["third"], ["first second"], ["../examples/first"]])
def test_without_the_name_of_an_example_the_names_are_listed(checkout, arguments):
    result, calls = checkout.run("example", *arguments)
    assert result.returncode == 1
    assert result.stderr == (
        f"run.sh: there is no example '{''.join(arguments)}'. The examples are: first second\n"
    )
    assert calls == []


def test_an_old_python_is_passed_over(checkout):
    checkout.add_python("python3", "#!/usr/bin/env bash\nexit 1\n")
    checkout.add_python("python3.12", FAKE_PYTHON)
    result, calls = checkout.run("train")
    assert result.returncode == 0
    assert is_made(calls)


def test_python_names_the_interpreter(checkout):
    checkout.add_python("python3", "#!/usr/bin/env bash\nexit 1\n")
    chosen = checkout.add_python("my python", FAKE_PYTHON)
    result, calls = checkout.run("train", PYTHON=str(chosen))
    assert result.returncode == 0, result.stderr
    assert is_made(calls)


def test_without_a_python_the_message_says_what_is_needed(checkout):
    missing = checkout.root / "missing"
    result, _ = checkout.run("train", PYTHON=str(missing))
    assert result.returncode == 1
    assert "no Python 3.11 or newer" in result.stderr
    assert str(missing) in result.stderr
    assert not (checkout.root / ".venv").exists()


def test_the_scripts_are_valid_bash():
    for script in ("run.sh", ".ci/run"):
        subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=600)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
