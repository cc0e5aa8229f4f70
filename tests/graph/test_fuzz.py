"""Random programs: no group may be offered whose removal differs from masking."""

import os

import pytest

from sparsity.graph import Graph
from tests.graph import fuzz

# The long profile: SPARSITY_FUZZ=2000 python -m pytest tests/graph/test_fuzz.py
PROGRAMS = int(os.environ.get("SPARSITY_FUZZ", 300))
BATCH = 25  # programs that are compiled together


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PROGRAMS, 100))
def test_removing_groups_of_random_programs_leaves_what_masking_gives(first):
    wrong, groups = {}, 0
    for start in range(first, min(first + 100, PROGRAMS), BATCH):
        found, count = fuzz.wrong(range(start, min(start + BATCH, PROGRAMS)))
        wrong, groups = wrong | found, groups + count
    assert wrong == {}
    assert groups > 50  # or else the check is empty


@pytest.mark.slow
def test_residual_streams_of_random_programs_leave_what_masking_gives(monkeypatch):
    wrong, groups = fuzz.wrong(range(BATCH), steps=fuzz.STREAM)
    assert wrong == {}
    assert groups > 40
    monkeypatch.setattr(Graph, "alike", {})  # norms without what the removed channels add
    assert fuzz.wrong(range(BATCH), steps=fuzz.STREAM)[0]


@pytest.mark.slow
def test_the_same_programs_show_it_if_removal_is_not_proven(monkeypatch):
    monkeypatch.setattr(Graph, "find_unproven", lambda self, masked: {})
    wrong, _ = fuzz.wrong(range(BATCH))
    assert wrong
