"""The package as a whole: what importing it costs, its layout, its documentation."""

import ast
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import tomllib

import pytest

import sparsity
from tests.helpers import ROOT

PACKAGE = ROOT / "sparsity"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SUBMODULES = pkgutil.walk_packages(sparsity.__path__, prefix="sparsity.")
MODULES = ["sparsity", *sorted(info.name for info in SUBMODULES)]

# Run in a process of its own; prints one line of JSON for the last line to be read.
REPORT = """
import json, sys
print(json.dumps({"modules": sorted(sys.modules)}))
"""

CONSTRUCT = """
import functools
import optax
import sparsity
from tests.helpers import ROOT
from sparsity import sparsity_distributions, sparsity_types

for name in sparsity.all_algorithm_names():
    config = {"algorithm": name, "sparsity": 0.5, "update_freq": 10, "update_start_step": 0,
              "update_end_step": 100}
    updater = sparsity.create_updater_from_config(config)
    updater.wrap_optax(optax.adam(0.1))
for kind in ("nm_2,4", "block_4,4", "channel_-1"):
    sparsity.MagnitudePruning(sparsity_type=sparsity_types.parse_sparsity_type(kind))
sparsity.RigL(
    sparsity_distribution_fn=functools.partial(sparsity_distributions.erk, sparsity=0.5),
    scheduler=sparsity.PeriodicSchedule(10, 0, 100),
)
sparsity.OneShotSchedule(3)
"""


def run(code):
    """Runs code in a fresh process; returns what it printed before the report, and the report."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code + REPORT],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        # There is no such platform: whatever starts a backend fails.
        env=os.environ | {"JAX_PLATFORMS": "none_of_all"},
    )
    *printed, report = done.stdout.splitlines()
    return printed, done.stderr, json.loads(report)


@pytest.fixture(scope="module")
def imported():
    return run("import sparsity")


def test_importing_prints_nothing(imported):
    printed, errors, _ = imported
    assert printed == []
    assert errors == ""


@pytest.fixture(scope="module")
def allowed():
    return run("import jax, optax, chex, numpy")[2]["modules"]


# fmt: off
HEAVY = [
    "flax", "haiku", "equinox", "orbax", "ml_collections", "matplotlib", "rich", "tqdm",
    "mlxtend", "sklearn", "pandas", "tensorflow", "torch",
]
# fmt: on


@pytest.mark.parametrize("heavy", HEAVY)
def test_importing_loads_nothing_heavy(imported, allowed, heavy):
    if heavy in allowed:
        pytest.skip(f"jax, optax or chex import {heavy} themselves")
    assert heavy not in imported[2]["modules"]


def test_importing_loads_no_package_that_jax_optax_and_chex_do_not(imported, allowed):
    tops = {name.partition(".")[0] for name in imported[2]["modules"]}
    new = tops - {name.partition(".")[0] for name in allowed} - set(sys.stdlib_module_names)
    assert {name for name in new if not name.startswith("_")} == {"sparsity"}


def test_making_updaters_and_wrapping_optimizers_starts_no_backend():
    printed, errors, _ = run(CONSTRUCT)
    assert (printed, errors) == ([], "")


def test_the_check_for_backends_finds_one_that_starts():
    with pytest.raises(subprocess.CalledProcessError):
        run("import jax.numpy as jnp\njnp.zeros(1)")


# Layout.


def test_the_algorithms_are_linked_at_the_top():
    link = ROOT / "algorithms"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("sparsity", "algorithms")
    assert (link / "pruners.py").is_file()


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


# The floors of the package, from the bottom: a room imports from those below it, and from itself.
FLOORS = [
    ["core"],
    ["selection", "sparsity_schedules"],
    ["patterns", "masks"],
    ["sparsity_types", "sparsity_distributions", "training", "activations"],
    ["base_updater", "reports", "graph", "lora"],
    ["algorithms", "epochs", "api", "shrinking", "calibration"],
    ["cli", "compat"],  # use the package, as baselines and benchmarks do
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def rooms_imported_by(path):
    """Top folders and files of the package that a source file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "sparsity":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparsity."):
            yield node.module.split(".")[1]


def test_every_room_is_on_a_floor_and_they_are_at_most_eight_with_what_uses_the_package():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    assert rooms - {"__init__"} == FLOOR_OF.keys()
    assert len(FLOORS) + len(["sparsity/__init__.py"]) <= 8


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_module_knows_jax_extend_and_none_its_private_parts(path):
    text = path.read_text(encoding="utf-8")
    assert "._src" not in text
    assert ("jax.extend" in text) == (path == PACKAGE / "core" / "jaxprs.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_only_from_those_below_them(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    above = [
        room for room in rooms_imported_by(path) if room != own and FLOOR_OF[room] >= FLOOR_OF[own]
    ]
    assert above == []


MOST_LINES = 60  # of a function, its docstring included
# Functions that are longer still; the list only gets shorter.
LONGER = {
    "calibration/rates.py: owl",
    "calibration/sweep.py: sweep",
    "graph/budgets.py: __call__",
    "graph/trace.py: trace",
    "selection/key_search.py: search",
    "selection/visits.py: above",
    "shrinking/cutting.py: cut_state",
    "shrinking/shrink.py: shrink",
}


def test_functions_are_short_enough_to_be_read_at_once():
    longer = {
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MOST_LINES
    }
    assert longer <= LONGER, sorted(longer - LONGER)


# Public names and their documentation.


def public_members(module):
    for name, member in vars(module).items():
        own = getattr(member, "__module__", None) == module.__name__
        if own and not name.startswith("_") and (inspect.isclass(member) or callable(member)):
            yield name, member


@pytest.mark.parametrize("name", MODULES)
def test_every_module_class_and_function_has_a_docstring(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for member_name, member in public_members(module):
        docstring = member.__doc__ or ""
        # Dataclasses and named tuples write a signature where there is no docstring.
        assert docstring, f"{name}.{member_name}"
        assert not docstring.startswith(f"{member_name}("), f"{name}.{member_name}"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_method_has_a_docstring_of_its_own_or_inherited(name):
    for member_name, member in public_members(importlib.import_module(name)):
        if not inspect.isclass(member):
            continue
        for method_name, method in inspect.getmembers(member, inspect.isfunction):
            is_field = method_name in getattr(member, "__dataclass_fields__", ())
            if not method_name.startswith("_") and not is_field:
                assert inspect.getdoc(method), f"{name}.{member_name}.{method_name}"


# fmt: off
PUBLIC = {
    "BaseUpdater", "SparseState",
    *(algorithm.__name__ for algorithm in sparsity.ALGORITHM_REGISTRY.values()),
    "NoUpdateSchedule", "OneShotSchedule", "PeriodicSchedule", "PolynomialSchedule",
    "SparsityType", "Unstructured", "NByM", "Block", "Channel",
    "Uniform", "ERK", "Layerwise", "Global", "Schedule", "Distribution", "Scope",
    "ALGORITHM_REGISTRY",
    "create_updater_from_config", "elementwise", "all_algorithm_names", "register_algorithm",
    "register_distribution", "register_schedule", "register_scope",
    "get_sparse_state", "set_sparse_state", "sharding_like", "active_masks",
    "summarize_sparsity", "summarize_intersection", "plot_sparsity",
    "layer_summary", "LayerSummary", "sparsity_table", "pack_masks", "unpack_masks",
    "pruning", "pruning_apply", "EpochStrategy",
    "prune_act_unstruct", "prune_act_struct", "pruning_act_struct", "pruning_act_unstruct",
    "apply_mask",
    "Graph", "trace", "budget", "Plan", "Small", "shrink", "Coupled", "calibrate", "oneshot",
    "Statistic", "WandaPruning", "RIAPruning", "SparseGPTPruning", "LeastSquares", "ADMM", "owl",
    "FLAPPruning", "OSSCARPruning",
    "sparsify_linen", "sparsify_nnx", "merge_lora", "time_in_turn",
    "snip_scores", "grasp_scores", "synflow_scores", "prune_at_init", "lottery_ticket",
}
# fmt: on
PUBLIC_MODULES = ["algorithms", "sparsity_distributions", "sparsity_schedules", "sparsity_types"]


def test_the_names_at_the_top_are_the_public_ones_and_no_others():
    found = {name for name, member in vars(sparsity).items() if not inspect.ismodule(member)}
    assert {name for name in found if not name.startswith("_")} == PUBLIC
    exported = {name for name in sparsity.__all__ if not inspect.ismodule(getattr(sparsity, name))}
    assert exported == PUBLIC | {"__version__"}


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_documented_modules_are_public(name):
    assert inspect.ismodule(getattr(sparsity, name))


def test_the_random_scores_are_where_documents_say():
    assert callable(sparsity.algorithms.pruners.generate_random_scores)


def test_public_names_at_the_top_are_modules_or_documented():
    for name, member in vars(sparsity).items():
        if not name.startswith("_") and callable(member):
            assert member.__doc__, name


def test_the_version_is_said_once_as_a_literal_that_the_metadata_reads():
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in metadata["project"]
    assert metadata["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sparsity.__version__"}
    source = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    assert f'\n__version__ = "{sparsity.__version__}"\n' in source
    assert "version" not in (ROOT / "setup.py").read_text(encoding="utf-8")
