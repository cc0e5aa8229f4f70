"""A training run that is killed ends with the bits of one that is not; see `kill_resume`."""

import random

import pytest

from tests import kill_resume

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", kill_resume.KINDS)
def test_a_run_killed_in_a_write_and_at_any_moment_ends_with_the_same_bits(tmp_path, kind):
    killed = tmp_path / "killed"

    def is_writing():
        return bool(kill_resume.last_step(killed) and kill_resume.unfinished_writes(killed))

    assert kill_resume.kill(killed, is_writing, kind)
    goal = min(kill_resume.last_step(killed) + random.randrange(4, 16), 36)
    assert kill_resume.kill(killed, lambda: kill_resume.last_step(killed) >= goal, kind)
    end = kill_resume.run_here(killed, kind)
    assert kill_resume.unfinished_writes(killed) == []
    assert kill_resume.differences(end, kill_resume.run_here(tmp_path / "unbroken", kind)) == []
