"""Random trees on eight virtual devices, in processes of their own."""

import pytest

from tests.eight_devices import run

pytestmark = [pytest.mark.slow, pytest.mark.drawn(2_000)]


def test_random_trees_on_a_mesh_have_the_bits_of_one_device():
    run("properties", "Auto")
