"""Counts the changes of the source that no test notices: `python -m benchmarks.mutants selection`.

A mutant differs from the source in one place, by an operator of cosmic-ray. A sample of the places
of a module is drawn, and one mutant of each. Mutants that differ in an annotation, or in `is` for
`==`, are passed over. First the tests of the module run once, and coverage records which test runs
which line. A mutant is then tested in a fork of a process that has imported all but the package: by
the tests that run its line, the quickest first, until one fails or the time is up. Results stay in
`build/mutants`, with the copy of the checkout that the tests run in; delete the folder after a
change. Needs `pip install -e '.[dev,mutants]'`, and a system that forks.
"""

import argparse
import ast
import collections
import difflib
import importlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import tests.environment  # noqa: F401 isort: skip (before jax)

import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
COPY = ROOT if ROOT.parts[-2:] == ("build", "mutants") else ROOT / "build/mutants"
# The tests of a module, besides the doctests of its sources.
MODULES = {
    "selection": ["selection"],
    "patterns": ["patterns", "masks/test_masks_of_groups.py", "activations"],
    "sparsity_schedules.py": ["test_sparsity_schedules.py", "test_api_schedules.py"],
    "masks": ["masks", "algorithms/test_lamp.py", "training", "updaters/test_any_parameters.py"],
    "training": ["training", "updaters"],
    "algorithms": ["algorithms", "updaters"],
    "calibration": ["calibration"],
    "programs": ["programs", "graph"],
    "shrinking": ["shrinking"],
    "graph": ["graph"],
    "compacting": ["compacting"],
    "comparisons": ["comparisons", "shrinking", "compacting"],
    "finetuning": ["finetuning"],
    "cli": ["cli"],
}
# Imported before the forks: none of these starts threads or computes.
PACKAGES = "hypothesis jax.numpy numpy optax chex flax.linen flax.nnx haiku equinox safetensors"
SAME = ("_Is_Eq", "_IsNot_NotEq", "_Eq_Is", "_NotEq_IsNot", "VariableInserter", "VariableReplacer")


class LinesOfTests:
    """Plugin of pytest that tells coverage which test runs, and times each test."""

    def __init__(self, measurement):
        self.measurement, self.seconds, self.start = measurement, {}, 0.0

    def pytest_runtest_logstart(self, nodeid):
        self.measurement.switch_context(nodeid)
        self.start = time.process_time()

    def pytest_runtest_logfinish(self, nodeid):
        self.seconds[nodeid] = time.process_time() - self.start
        self.measurement.switch_context("")


def run_tests(tests, marker, plugins=()):
    """Runs tests until one fails; returns the exit status of pytest."""
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", marker]
    return pytest.main([*options, "-W", "ignore:Module already imported", *tests], plugins)


def measure(module, marker, file):
    """Writes the tests that run each line of each source, and the CPU seconds of each test."""
    sys.dont_write_bytecode = False  # what is parsed here is read by all mutants
    measurement = coverage.Coverage(None, include=[f"sparsity/{module}", f"sparsity/{module}/*"])
    plugin = LinesOfTests(measurement)
    measurement.start()
    tests = [f"tests/{name}" for name in MODULES[module]]
    code = run_tests([*tests, f"sparsity/{module}"], marker, [plugin])
    measurement.stop()
    data = measurement.get_data()
    lines = {
        str(Path(source).relative_to(COPY)): data.contexts_by_lineno(source)
        for source in data.measured_files()
    }
    file.write_text(json.dumps({"lines": lines, "seconds": plugin.seconds}))
    return code


class WithoutAnnotations(ast.NodeTransformer):
    """Removes annotations, which do nothing when a program runs."""

    def visit_arg(self, node):
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node):
        return ast.AnnAssign(node.target, ast.Constant(0), node.value, node.simple)

    def visit_FunctionDef(self, node):
        node.returns = None
        return self.generic_visit(node)


def behaviour(source):
    """Returns the syntax of a program without annotations; `None` for no program or a warning.

    Warnings of the compiler are errors in the tests: no test runs `x is not 1`.
    """
    try:
        with warnings.catch_warnings(action="error"):
            compile(source, "mutant", "exec")
        return ast.dump(WithoutAnnotations().visit(ast.parse(source)))
    except SyntaxError:
        return None


def list_places(module):
    """Returns the mutants, (operator, occurrence), of each place of the sources of a module."""
    operators = {name: get_operator(name)() for name in operator_names() if not name.endswith(SAME)}
    places = collections.defaultdict(list)
    path = Path("sparsity", module)
    for file in [path] if path.is_file() else path.rglob("*.py"):
        nodes = list(ast_nodes(get_ast(file.read_text())))
        for name, operator in operators.items():
            positions = (x for node in nodes for x in operator.mutation_positions(node))
            for occurrence, (start, _) in enumerate(positions):
                places[str(file), *start].append((name, occurrence))
    return places


def draw_mutants(module, number, seed):
    """Yields a mutant of each of `number` places: (file, line, operator, occurrence, source)."""
    places = list_places(module)
    print(f"{module}: {len(places)} places, {sum(map(len, places.values()))} mutants", flush=True)
    generator = random.Random(f"{seed} {module}")
    for file, *start in generator.sample(sorted(places), len(places)):
        source = Path(file).read_text()
        options = places[file, *start]
        for name, occurrence in generator.sample(options, len(options)):
            mutant = mutate_code(source, get_operator(name)(), occurrence)
            if behaviour(mutant) not in (None, behaviour(source)):
                yield file, start[0], name.removeprefix("core/"), occurrence, mutant
                number -= 1
                break
        if not number:
            return


def choose_tests(measured, file, line, budget):
    """Returns the quickest tests that run a line, and the seconds that they take."""
    by_line, seconds = measured["lines"].get(file, {}), measured["seconds"]
    by_line = {key: [test for test in tests if test] for key, tests in by_line.items()}
    # A line that runs at the import: all tests of the file, or of the module.
    tests = by_line.get(str(line)) or {test for tests in by_line.values() for test in tests}
    tests = tests or seconds
    total, chosen = 0.0, []
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        total += seconds[test]
        if chosen and total > budget:
            break
        chosen.append(test)
    return chosen, min(total, budget)


def fork(function, seconds):
    """Returns the exit status of `function` in a child, negative if it ran out of CPU time."""
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_DATA, (2**33, 2**33))
        output = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 3
        try:
            code = int(function())
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def judge(measured, marker, mutant, budget):
    """Returns "killed" and by which test, or "survived" and how many tests."""
    file, line, *_, source = mutant
    tests, seconds = choose_tests(measured, file, line, budget)
    if not tests:
        return "survived", "no test runs the line"
    original = Path(file).read_text()
    Path(file).write_text(source)
    try:
        code = fork(lambda: run_tests(tests, marker), int(20 + 4 * seconds))
        if not has_run(code):  # the mutant renamed parameters: all tests of these functions
            functions = {test.split("[")[0] for test in tests}
            all_seconds = measured["seconds"].items()
            seconds = sum(cost for test, cost in all_seconds if test.split("[")[0] in functions)
            code = fork(lambda: run_tests(sorted(functions), marker), int(20 + 4 * seconds))
    finally:
        Path(file).write_text(original)
    if not code:
        return "survived", f"{len(tests)} tests"
    if not has_run(code):
        return "survived", "pytest finds no test by the names that ran the line"
    failures = [line for line in read_log() if line.startswith(("FAILED ", "ERROR "))]
    return "killed", failures[0] if failures else f"exit status {code}"


def has_run(code):
    """Returns whether pytest ran tests, or failed to import them, by its exit status and log.

    A usage error (4) may be either: a name that no test has, or an import that fails.
    """
    if code not in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        return True
    return any(line.startswith(("ERROR ", "ImportError while loading")) for line in read_log())


def read_log():
    """Returns the lines that the last child wrote."""
    return Path("log").read_text(errors="replace").splitlines()


def check_module(module, args):
    """Tests the mutants that no earlier run has tested, and prints the survivors."""
    marker = "slow or not slow" if args.slow else "not slow"
    lines, results = (Path(f"{kind} {module} {marker}.json") for kind in ("lines", "results"))
    if not lines.exists() and fork(lambda: measure(module, marker, lines), 3600):
        lines.unlink(missing_ok=True)
        sys.exit(f"The tests of {module} fail without a mutant; see {COPY}/log.")
    measured, counts = json.loads(lines.read_text()), collections.Counter()
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    rows = {tuple(row["mutant"]): row for row in rows}
    for mutant in draw_mutants(module, args.number, args.seed):
        name = mutant[:-1]
        if name not in rows:
            verdict, reason = judge(measured, marker, mutant, args.seconds)
            rows[name] = {"mutant": name, "verdict": verdict, "reason": reason}
            with results.open("a") as file:
                print(json.dumps(rows[name]), file=file)
        counts[rows[name]["verdict"]] += 1
        if rows[name]["verdict"] == "survived":
            old = Path(mutant[0]).read_text().splitlines()
            changes = difflib.unified_diff(old, mutant[-1].splitlines(), lineterm="", n=1)
            print(*name, rows[name]["reason"], *list(changes)[2:], sep="\n", flush=True)
    print(module, dict(counts), flush=True)


def copy_checkout():
    """Copies what git tracks or would track, so that no mutant is ever in the checkout."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, files.split("\0")):
        if (ROOT / file).is_file():
            (COPY / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, COPY / file)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants")
    parser.add_argument(
        "modules", nargs="+", choices=MODULES, metavar="module", help=", ".join(MODULES)
    )
    parser.add_argument("--number", type=int, default=40, help="of places in a module; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--seconds", type=float, default=40, help="CPU time of tests for a mutant")
    parser.add_argument("--slow", action="store_true", help="run the slow tests, too")
    args = parser.parse_args()
    if Path.cwd() != COPY:
        copy_checkout()
        command = [sys.executable, "-m", "benchmarks.mutants", *sys.argv[1:]]
        sys.exit(subprocess.call(command, cwd=COPY))
    sys.dont_write_bytecode = True
    for package in PACKAGES.split():
        importlib.import_module(package)
    for module in args.modules:
        check_module(module, args)


if __name__ == "__main__":
    main()
