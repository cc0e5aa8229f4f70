"""The examples with environments of their own: what can be said without their packages."""

import ast
import re

import pytest

from tests import helpers

EXAMPLES = helpers.ROOT / "examples"
NAMES = sorted(file.parent.name for file in EXAMPLES.glob("*/requirements.txt"))
UNTRAINED = ["language_model", "oneshot", "pretrained"]


def read(name, file):
    return (EXAMPLES / name / file).read_text(encoding="utf-8")


def test_every_trainer_has_its_example():
    trainers = ["dopamine_dqn", "easydel_lm", "fedjax_mnist", "kauldron_vit", "tunix_lm"]
    assert sorted([*trainers, *UNTRAINED, "tunix_finetune"]) == NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tunix_finetune"])
def test_every_package_is_pinned(name):
    lines = [
        line for line in read(name, "requirements.txt").splitlines() if line and line[0] != "#"
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    packages = [line.partition("==")[0].lower().replace("_", "-") for line in lines]
    assert len(set(packages)) == len(packages)
    assert {"jax", "jaxlib", "optax", "chex", "numpy"} <= set(packages)  # what the project needs


def test_fine_tuning_needs_what_the_other_example_of_its_trainer_needs():
    lines = read("tunix_finetune", "requirements.txt").splitlines()
    assert [line for line in lines if line[0] != "#"] == ["-r ../tunix_lm/requirements.txt"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tunix_finetune"])
def test_the_program_prunes_in_one_line(name):
    tree = ast.parse(read(name, "train.py"))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [call.attr for call in calls if isinstance(call, ast.Attribute)]
    keywords = [node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    trained = names.count("wrap_optax") + keywords.count("pruning_module")
    assert (trained, names.count("oneshot")) == ((0, 1) if name in UNTRAINED else (1, 0))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_trainers_lists_it(name):
    assert f"| `{name}` |" in (helpers.ROOT / "docs/trainers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_names_the_command(name):
    assert f"`bash run.sh example {name}`" in read(name, "README.md")
