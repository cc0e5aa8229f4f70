"""The README and the pages of the site: every program and command runs, nothing is left out."""

import inspect
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

import sparsity
from sparsity.cli import main
from tests.documents import PAGES, blocks
from tests.helpers import ROOT

README = PAGES["README.md"]
PROGRAMS = blocks("python")
SHELL = [line for text in blocks("").values() for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("registry")
@pytest.mark.filterwarnings("ignore:.*flax.*:DeprecationWarning")
@pytest.mark.parametrize("place", PROGRAMS)
def test_a_program_runs(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[place], place, "exec"), {"__name__": "document"})
