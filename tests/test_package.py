"""The package as a whole: what importing it costs, its layout, its documentation."""

import ast
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest

import sparsity
from tests.conftest import LONGEST
from tests.documents import PAGES
from tests.helpers import ROOT

PACKAGE = ROOT / "sparsity"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SUBMODULES = pkgutil.walk_packages(sparsity.__path__, prefix="sparsity.")
MODULES = ["sparsity", *sorted(info.name for info in SUBMODULES)]

# Run in a process of its own, without a platform for a backend: whatever starts one fails. Prints a
# line of JSON: the modules that are loaded after each group of imports, and how a backend failed.
PROGRAM = """
import json, sys

import jax, optax, chex, numpy
allowed = sorted(sys.modules)

import sparsity
imported = sorted(sys.modules)

import functools
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

failure = ""
try:
    jax.numpy.zeros(1)
except RuntimeError as error:
    failure = str(error)
print(json.dumps({"allowed": allowed, "imported": imported, "failure": failure}))
"""


@pytest.fixture(scope="module")
def process():
    """The finished process that runs the program."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "none_of_all"},
    )


@pytest.fixture(scope="module")
def modules(process):
    """Names of loaded modules: without this package, and with it."""
    report = json.loads(process.stdout)
    return report["allowed"], report["imported"]


def test_imports_updaters_and_wrapped_optimizers_print_nothing_and_start_no_backend(process):
    assert process.stdout.count("\n") == 1
    assert process.stderr == ""
    assert "none_of_all" in json.loads(process.stdout)["failure"]  # a backend would have failed


# fmt: off
HEAVY = [
    "flax", "haiku", "equinox", "orbax", "ml_collections", "matplotlib", "rich", "tqdm",
    "mlxtend", "sklearn", "pandas", "tensorflow", "torch",
]
# fmt: on


@pytest.mark.parametrize("heavy", HEAVY)
def test_importing_loads_nothing_heavy(modules, heavy):
    allowed, imported = modules
    if heavy in allowed:
        pytest.skip(f"jax, optax or chex import {heavy} themselves")
    assert heavy not in imported


def test_importing_loads_no_package_that_jax_optax_and_chex_do_not(modules):
    allowed, imported = ({name.partition(".")[0] for name in names} for names in modules)
    new = imported - allowed - set(sys.stdlib_module_names)
    assert {name for name in new if not name.startswith("_")} == {"sparsity"}


# Layout.


def test_the_algorithms_are_linked_at_the_top():
    link = ROOT / "algorithms"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("sparsity", "algorithms")
    assert (link / "pruners.py").is_file()


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


# The layers of the package, the lowest first: a module imports from lower layers, and from itself.
LAYERS = [
    ["core", "version"],
    ["selection", "sparsity_schedules", "programs"],
    ["patterns"],
    ["masks"],
    ["sparsity_types", "sparsity_distributions", "training", "graph", "activations", "lora"],
    ["algorithms", "epochs", "api", "reports", "calibration", "finetuning"],
    ["base_updater", "shrinking", "compacting", "compat", "cli", "ranking"],
    ["__init__"],
]
LAYER_BY_MODULE = {name: layer for layer, names in enumerate(LAYERS) for name in names}


# The layers of `graph`, likewise.
GRAPH_LAYERS = [
    ["traced_model"],
    ["uses", "coupling", "groups"],
    ["affine", "kinds", "readers"],
    ["depth", "removal"],
    ["graph"],
    ["coupled"],
    ["budgets"],
]


def top_modules_imported_by(path):
    """Top folders and files of the package that a source file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "sparsity":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparsity."):
            yield node.module.split(".")[1]


def test_every_top_module_is_in_one_of_at_most_eight_layers():
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    assert names == LAYER_BY_MODULE.keys()
    assert len(LAYERS) <= 8


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_module_knows_jax_extend_and_none_its_private_parts(path):
    text = path.read_text(encoding="utf-8")
    assert "._src" not in text
    assert ("jax.extend" in text) == (path == PACKAGE / "programs" / "program.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_top_modules_import_only_from_lower_layers(path):
    home = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    above = [
        name
        for name in top_modules_imported_by(path)
        if name != home and LAYER_BY_MODULE[name] >= LAYER_BY_MODULE[home]
    ]
    assert above == []


def test_parts_of_graph_import_only_from_lower_layers():
    layer_by_part = {part: layer for layer, parts in enumerate(GRAPH_LAYERS) for part in parts}
    graph = PACKAGE / "graph"
    climbs = {}
    for path in graph.rglob("*.py"):
        part = path.relative_to(graph).parts[0].removesuffix(".py")
        if part != "__init__":
            text = path.read_text(encoding="utf-8")
            imported = set(
                re.findall(r"^from sparsity\.graph(?:\.| import )(\w+)", text, re.MULTILINE)
            )
            climbs[path.name] = [
                x
                for x in imported - {part}
                if layer_by_part.get(x, len(GRAPH_LAYERS)) >= layer_by_part[part]
            ]
    assert [name for name, parts in climbs.items() if parts] == []


def test_every_folder_of_the_package_has_a_folder_of_tests():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders - {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} == set()


def test_test_modules_import_no_test_module():
    pattern = re.compile(r"^ *(from|import) tests.*\btest_", re.MULTILINE)
    files = (ROOT / "tests").rglob("*.py")
    assert not [str(path) for path in files if pattern.search(path.read_text(encoding="utf-8"))]


def test_the_test_files_that_start_first_exist():
    assert set(LONGEST) <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}


def modules_imported_by(path, names):
    """Modules of the package that a source file imports anywhere, also for types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparsity"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in names else node.module


def test_no_imports_run_in_a_circle():
    dotted = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
    names = {path: name.removesuffix(".__init__") for path, name in dotted.items()}
    imports = {name: set(modules_imported_by(path, names.values())) for path, name in names.items()}
    while leaves := {name for name, modules in imports.items() if not modules - {name}}:
        imports = {name: x - leaves for name, x in imports.items() if name not in leaves}
    assert imports == {}


def exported_by_folders():
    """Names that the `__init__` of each folder of the package imports, by dotted path."""
    for path in PACKAGE.rglob("*/__init__.py"):
        folder = ".".join(path.parent.relative_to(ROOT).parts)
        body = ast.parse(path.read_text(encoding="utf-8")).body
        imports = [node for node in body if isinstance(node, ast.ImportFrom)]
        yield folder, {alias.name for node in imports for alias in node.names}


def test_names_of_other_folders_are_imported_from_the_folder_that_exports_them():
    exported = dict(exported_by_folders())
    past_the_folder = [
        f"{path.relative_to(PACKAGE)}: {alias.name} of {node.module}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").count(".") > 1
        for alias in node.names
        if node.module.split(".")[1] != path.relative_to(PACKAGE).parts[0]
        and alias.name in exported.get(".".join(node.module.split(".")[:2]), ())
    ]
    assert past_the_folder == []


MOST_LINES = 60  # of a function, its docstring included


def test_functions_are_short_enough_to_be_read_at_once():
    longer = {
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MOST_LINES
    }
    assert longer == set()


# Public names and their documentation.


def public_members(module):
    for name, member in vars(module).items():
        home = getattr(member, "__module__", None) == module.__name__
        if home and not name.startswith("_") and (inspect.isclass(member) or callable(member)):
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


PUBLIC = set(sparsity.__all__)
# fmt: off
# Names that programs of users rely on: they stay. A new name needs no entry here.
KEPT_NAMES = {
    "BaseUpdater", "SparseState",
    "NoPruning", "MagnitudePruning", "RandomPruning", "SaliencyPruning", "SteMagnitudePruning",
    "SteRandomPruning", "GlobalMagnitudePruning", "GlobalSaliencyPruning", "StaticRandomSparse",
    "SET", "RigL", "LampPruning", "MovementPruning", "SnipPruning", "ADMMPruning", "ACDC",
    "SRSTE", "TopKast", "SRigL", "GlobalRigL",
    "NoUpdateSchedule", "OneShotSchedule", "PeriodicSchedule", "PolynomialSchedule",
    "SparsityType", "Unstructured", "NByM", "Block", "Channel", "FanIn",
    "Uniform", "ERK", "Layerwise", "Global", "ALGORITHM_REGISTRY",
    "create_updater_from_config", "elementwise", "all_algorithm_names", "register_algorithm",
    "get_sparse_state", "set_sparse_state", "sharding_like", "summarize_sparsity", "sparsity_table",
    "check", "pruning", "pruning_apply", "EpochStrategy", "prune_act_unstruct", "prune_act_struct",
    "Graph", "trace", "budget", "Plan", "shrink", "compact", "Coupled", "calibrate", "oneshot",
    "Statistic", "WandaPruning", "RIAPruning", "SparseGPTPruning", "FLAPPruning", "LeastSquares",
    "ADMM", "owl", "sparsify_linen", "merge_lora", "train_only", "Delta", "snip_scores",
    "prune_at_init", "lottery_ticket",
}
# fmt: on
# Names of jaxpruner and jax_pruning, reachable for the programs that were written for them.
EARLIER = {
    "apply_mask",
    "pruning_act_struct",
    "pruning_act_unstruct",
    "summarize_intersection",
}
EARLIER_MODULES = ["mask_calculator", "utils"]


def test_the_names_at_the_top_are_the_public_ones_and_those_of_earlier_libraries():
    names = {name for name, member in vars(sparsity).items() if not inspect.ismodule(member)}
    assert {name for name in names if not name.startswith("_")} == PUBLIC | EARLIER
    assert len(sparsity.__all__) == len(PUBLIC) <= 88


def test_names_that_programs_rely_on_stay_public():
    assert KEPT_NAMES <= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_used_by_a_page(name):
    code = re.findall(r"^```.*?^```|`[^`]+`", "\n".join(PAGES.values()), re.DOTALL | re.MULTILINE)
    assert re.search(rf"\b{name}\b", "\n".join(code))


def test_documented_modules_are_listed_and_reachable():
    listed = (ROOT / "docs" / "api" / "modules.rst").read_text(encoding="utf-8")
    names = re.findall(r"^``sparsity\.(\w+)``", listed, re.MULTILINE)
    pages = (ROOT / "docs" / "api").glob("*.rst")
    documented = re.findall(
        r"sparsity\.(\w+)\.\w", "".join(page.read_text("utf-8") for page in pages)
    )
    assert {"algorithms", "graph", *documented} <= {*names, "compat"}
    assert all(inspect.ismodule(getattr(sparsity, name)) for name in names + EARLIER_MODULES)


def test_the_random_scores_are_where_documents_say():
    assert callable(sparsity.algorithms.pruners.generate_random_scores)


def test_public_names_at_the_top_are_modules_or_documented():
    for name, member in vars(sparsity).items():
        if not name.startswith("_") and callable(member):
            assert member.__doc__, name


def test_the_version_is_said_once_as_a_literal_that_the_metadata_reads():
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in metadata["project"]
    assert metadata["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "sparsity.version.__version__"
    }
    source = (PACKAGE / "version.py").read_text(encoding="utf-8")
    assert f'\n__version__ = "{sparsity.__version__}"\n' in source
    assert "version" not in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_no_private_method_is_overridden_in_another_file():
    classes = {
        node.name: (path, node)
        for path in SOURCES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }

    def ancestors(name):
        _, node = classes[name]
        for base in node.bases:
            root = base.value if isinstance(base, ast.Subscript) else base
            if getattr(root, "id", None) in classes:
                yield root.id
                yield from ancestors(root.id)

    def private_methods(name):
        methods = [x.name for x in classes[name][1].body if isinstance(x, ast.FunctionDef)]
        return {x for x in methods if x.startswith("_") and not x.endswith("__")}

    assert [
        f"{name} overrides {sorted(overridden)} of {base}"
        for name in classes
        for base in ancestors(name)
        if classes[name][0] != classes[base][0]
        and (overridden := private_methods(name) & private_methods(base))
    ] == []


def test_the_order_of_reading_names_each_file_of_a_step():
    folder = PACKAGE / "training"
    order = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files <= {*re.findall(r"`(\w+)`", order)}
