"""Commands and one-shot runs that are killed lose nothing; see kill_writes.py."""

import random

import pytest

from tests import kill_writes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kill", [kill_writes.kill_commands, kill_writes.kill_one_shot])
def test_a_kill_at_any_moment_loses_nothing(tmp_path, kill):
    kill(tmp_path, 2, random.Random())
