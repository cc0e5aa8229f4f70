"""The README and the pages of the site: every program and command runs, nothing is left out."""

import ast
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import tomllib

import jax
import pytest
import setuptools

import sparsity
from examples.mnist import config
from sparsity import patterns
from sparsity.cli import main
from sparsity.cli.checkpoints import FORMATS
from sparsity.compacting.compact import FORMAT_LAYOUTS
from sparsity.masks import SCOPES
from sparsity.masks.distributions import DISTRIBUTIONS
from sparsity.sparsity_schedules import SCHEDULES
from tests.documents import PAGES, blocks
from tests.helpers import ROOT

README = PAGES["README.md"]
PROGRAMS = blocks("python")
COMMANDS = [line for text in blocks("").values() for line in text.splitlines()]
LINKS = [
    (page, target)
    for page, text in PAGES.items()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    if not target.startswith("https://")
]


# Text.


def test_no_page_has_two_sections_of_one_name():
    paths = [*ROOT.glob("*.md"), *ROOT.glob("[bd]*/**/*.md"), *ROOT.glob("tests/**/*.md")]
    assert len(paths) > 40
    for path in paths:
        headings = re.findall(r"^## .*", path.read_text(encoding="utf-8"), re.MULTILINE)
        twice = {heading for heading in headings if headings.count(heading) > 1}
        assert not twice, f"{path}: {twice}"


# Code and commands.


@pytest.fixture
def programs_are_kept_as_before():
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("registry", "programs_are_kept_as_before")
@pytest.mark.parametrize("place", PROGRAMS)
def test_a_program_runs(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[place], place, "exec"), {"__name__": "document"})
    makes_files = place.startswith("docs/howto/command_line.md")  # for the commands on the page
    assert makes_files or not any(tmp_path.iterdir())


def test_the_commands_on_checkpoints_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = "docs/howto/command_line.md"
    (setup,) = (code for place, code in PROGRAMS.items() if place.startswith(page))
    exec(setup, {})
    (text,) = blocks("console").values()
    commands = [shlex.split(line)[2:] for line in text.splitlines()]  # without `$ sparsity`
    assert [main(command) for command in commands] == [0, 0, 0, 1, 1, 0]  # diff finds a difference
    assert '"nm_2,4' in capsys.readouterr().out


@pytest.mark.parametrize("line", sorted({x for x in COMMANDS if x.startswith("bash run.sh")}))
def test_a_command_of_run_sh_exists_with_its_flags(line, monkeypatch):
    name, *flags = shlex.split(line, comments=True)[2:] or ["check"]
    script = (ROOT / "run.sh").read_text(encoding="utf-8")
    assert f"\n  {name})\n" in script or f"\n  {name} |" in script
    if name == "train" and "--config=mine.py" not in flags:
        monkeypatch.setattr(sys, "argv", ["train", *flags])
        assert config.from_command_line()


def test_what_pip_is_told_to_install_are_extras_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"pip install '\.\[(\w+)\]'", "".join(PAGES.values()))
    assert set(named) <= project["optional-dependencies"].keys()
    assert {"summary", "dev", "cli", "flax"} <= set(named)


def test_the_recipes_of_the_readme_make_updaters():
    recipes = re.findall(r"`(\{.*?\})`", README)
    made = [sparsity.create_updater_from_config(ast.literal_eval(text)) for text in recipes]
    kinds = [sparsity.MagnitudePruning, sparsity.RigL, sparsity.MagnitudePruning]
    assert [type(updater) for updater in made] == kinds
    assert made[2].sparsity_type == sparsity.NByM(2, 4, axis=-2)


# What pages must hold.


def test_the_readme_has_at_most_160_lines():
    assert len(README.splitlines()) <= 160


@pytest.mark.parametrize(("page", "target"), sorted(set(LINKS)))
def test_a_link_leads_to_a_file(page, target):
    # Pages of notebooks are made from those in colabs.
    path = (ROOT / page).parent / target
    assert path.exists() or (ROOT / "colabs" / path.name).exists()


@pytest.mark.parametrize("page", ["docs/choosing.md", "docs/algorithms.md"])
def test_a_page_of_algorithms_names_every_algorithm_and_no_other(page):
    named = re.findall(r"^(?:\||###) `(\w+)`(?: \||,) `(\w+)`", PAGES[page], re.MULTILINE)
    registry = {name: algorithm.__name__ for name, algorithm in sparsity.ALGORITHM_REGISTRY.items()}
    assert dict(named) == registry


def parts_on_pages():
    """Yields a page and what it calls a part that the user chooses by name."""
    for registry in (DISTRIBUTIONS, SCHEDULES, SCOPES):
        for kind in registry.values():
            yield "docs/choosing.md", f"`{kind.__name__}("
    for name in sorted(patterns.parse._FORMS.keys() - {"unstructured"}):
        yield "docs/choosing.md", f'`"{name}_'
    for name in FORMAT_LAYOUTS:
        yield "docs/howto/compact.md", f"| `{name}` |"
    for name in FORMATS:
        yield "docs/howto/command_line.md", f" {name.removeprefix('.')}"


@pytest.mark.parametrize(("page", "part"), list(parts_on_pages()))
def test_a_page_names_every_part_that_a_name_chooses(page, part):
    assert part in PAGES[page]


def test_the_page_of_the_design_names_every_module_of_the_package():
    layers = PAGES["docs/design.md"].split("```")[1]
    modules = {path.stem for path in (ROOT / "sparsity").iterdir() if path.suffix != ".typed"}
    missing = {name for name in modules if not re.search(rf"\b{name}\b", layers)}
    assert missing <= {"__init__", "__pycache__"}


def test_each_of_the_fifteen_questions_has_a_link():
    questions = re.split(r"^\d+\. ", PAGES["docs/questions.md"], flags=re.MULTILINE)[1:]
    assert len(questions) == 15
    assert all(re.search(r"\?\*\*.*→\s+\[.*\]\(.*\.md", text, re.DOTALL) for text in questions)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["choosing", "benchmarks"])
def test_a_drawing_is_what_its_script_draws(name, theme):
    folder = ROOT / "docs" / "pictures"
    drawn = runpy.run_path(str(folder / "draw.py"))[name](theme)
    assert (folder / f"{name}_{theme}.svg").read_text(encoding="utf-8") == drawn


def test_the_long_description_has_nothing_that_an_index_cannot_show(monkeypatch):
    passed = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: passed.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    text = passed["long_description"]
    assert text.startswith("# sparsity\n")
    assert "## Quick start" in text
    assert "<picture>" not in text
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]+)\)", text))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    assert importlib.util.find_spec("sphinx"), "pip install 'jax-sparsity[docs]'"
    folders = [tmp_path / "doctrees", ROOT / "docs", tmp_path / "site" / "html"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sphinx", "-W", "--keep-going", "-q", "-d", *folders],
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/html/howto/shrink.html").is_file()
    pages = {path.stem for path in (tmp_path / "site/html/notebooks").glob("*.html")}
    assert pages == {path.stem for path in (ROOT / "colabs").glob("*.ipynb")}
