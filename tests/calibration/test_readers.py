"""Channels are chosen by what reads them alike on one device and on a mesh."""

import pytest

from tests.eight_devices import KINDS, run


@pytest.mark.slow
@KINDS
def test_a_mesh_gives_what_one_device_gives(kind):
    run("channels", kind)
