"""Random programs: no group may be offered whose removal differs from masking."""

import jax
import numpy as np
import pytest

from sparsity.graph import coupling
from sparsity.graph.removal import Removal
from tests.graph import every_primitive, fuzz
from tests.properties.strategies import EXAMPLES, FIRST

PROGRAMS = EXAMPLES or 200
SIZE = min(PROGRAMS, 100)  # programs of a test
BATCH = 25  # programs that are compiled together


@pytest.mark.slow
@pytest.mark.drawn(2_000)
@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS, SIZE))
def test_removing_groups_of_random_programs_leaves_what_masking_gives(first):
    wrong, groups = {}, 0
    for start in range(first, first + SIZE, BATCH):
        actual, count = fuzz.wrong(range(start, min(start + BATCH, first + SIZE)))
        wrong, groups = wrong | actual, groups + count
    assert wrong == {}
    assert groups > SIZE // 2  # or else the check is empty


@pytest.mark.slow
def test_residual_streams_of_random_programs_leave_what_masking_gives(monkeypatch):
    wrong, groups = fuzz.wrong(range(BATCH), steps=fuzz.STREAM)
    assert wrong == {}
    assert groups > 40
    monkeypatch.setattr(Removal, "shared_entries", {})  # norms lack what removed channels add
    assert fuzz.wrong(range(BATCH), steps=fuzz.STREAM)[0]


# Steps after a primitive, between which its channels may go or not.
AROUND = ("dense", "dense_and_bias", "product", "residual", "rms_norm", "scale", "shift")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(every_primitive.FUNCTIONS), BATCH))
def test_removing_groups_around_any_primitive_leaves_what_masking_gives(first):
    names = sorted(every_primitive.FUNCTIONS)[first : first + BATCH]
    rounds, wrong, groups = 1 + PROGRAMS // 200, {}, 0
    for round_index in range(rounds):
        seeds = range(1000 * round_index + first, 1000 * round_index + first + len(names))
        second = dict(zip(seeds, names, strict=True))
        actual, count = fuzz.wrong(seeds, steps=AROUND, second=second)
        wrong, groups = wrong | actual, groups + count
    assert wrong == {}
    assert groups > 10


def test_each_primitive_of_the_tables_is_drawn():
    tables = set().union(*coupling.ANALYSED_PRIMITIVES)
    assert tables == every_primitive.FUNCTIONS.keys() | every_primitive.NOT_DRAWN
    x, weight = np.linspace(-1.2, 2, 12).reshape(2, 6), np.ones((6, 6))
    with jax.enable_x64(True):
        for functions in (every_primitive.FUNCTIONS, every_primitive.ALONG_ROWS):
            for name, fn in functions.items():
                args = (x, weight) if name in every_primitive.WITH_WEIGHT else (x,)
                drawn = every_primitive.names_in(fn, *args)
                assert name in drawn | every_primitive.IN_SOME_VERSIONS, name


@pytest.mark.slow
def test_the_same_programs_show_it_if_removal_is_not_proven(monkeypatch):
    monkeypatch.setattr(Removal, "find_unproven", lambda self, masked: {})
    wrong, _ = fuzz.wrong(range(BATCH))
    assert wrong
