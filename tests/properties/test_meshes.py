"""Random trees on eight virtual devices, in processes of their own."""

import pytest

from tests.eight_devices import KINDS, run

pytestmark = [pytest.mark.slow, pytest.mark.drawn(2_000)]


@KINDS
def test_random_trees_on_a_mesh_have_the_bits_of_one_device(kind):
    run("properties", kind)
