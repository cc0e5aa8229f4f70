"""Whole updates on eight virtual devices, in processes of their own."""

import pytest

from tests.eight_devices import KINDS, run

pytestmark = pytest.mark.slow


@KINDS
def test_runs_and_placement_on_a_mesh_are_those_of_one_device(kind):
    run("updates", kind)


@KINDS
def test_masks_of_every_algorithm_on_a_mesh_are_those_of_one_device(kind):
    run("masks", kind)
