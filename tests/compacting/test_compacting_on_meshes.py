"""Compact models on eight virtual devices, in processes of their own."""

import pytest

from tests.eight_devices import KINDS, run

pytestmark = pytest.mark.slow


@KINDS
def test_compact_models_on_a_mesh_compute_as_on_one_device(kind):
    run("compacting", kind)
