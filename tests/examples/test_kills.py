"""A training run that is killed ends with the bits of one that is not; see `kill_resume`."""

import random

import pytest

from tests import kill_resume

pytestmark = pytest.mark.slow


def is_writing(run_dir):
    return bool(kill_resume.last_step(run_dir) and kill_resume.unfinished_writes(run_dir))


def check_end(run_dir, kind, folder):
    """The run ends with the bits of one that is not killed."""
    end = kill_resume.run_here(run_dir, kind)
    assert kill_resume.unfinished_writes(run_dir) == []
    assert kill_resume.differences(end, kill_resume.run_here(folder / "unbroken", kind)) == []


def test_a_run_killed_in_a_write_and_at_any_moment_ends_with_the_same_bits(tmp_path):
    killed = tmp_path / "killed"
    assert kill_resume.kill(killed, lambda: is_writing(killed))
    goal = min(kill_resume.last_step(killed) + random.randrange(4, 16), 36)
    assert kill_resume.kill(killed, lambda: kill_resume.last_step(killed) >= goal)
    check_end(killed, "masked", tmp_path)


@pytest.mark.parametrize("kind", ["shrunken", "compact"])
def test_a_smaller_run_killed_in_a_write_at_any_step_ends_with_the_same_bits(tmp_path, kind):
    killed, goal = tmp_path / "killed", random.randrange(4, 24)

    def is_time():
        return kill_resume.last_step(killed) >= goal and is_writing(killed)

    assert kill_resume.kill(killed, is_time, kind)
    check_end(killed, kind, tmp_path)
