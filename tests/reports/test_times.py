"""Times of programs that run in turn, on a clock that the programs themselves set."""

import time

import pytest

import sparsity


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the start, in a list."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_programs_run_in_turn_and_medians_leave_the_first_two_calls_out(clock):
    called = []

    def program(name, *seconds):
        lasts = iter(seconds)

        def run():
            called.append(name)
            clock[0] += next(lasts)

        return run

    slow, fast = program("slow", 90, 80, 4, 9, 5), program("fast", 70, 60, 1, 1, 30)
    assert sparsity.reports.time_in_turn(slow, fast, rounds=3) == [5, 1]
    assert called == ["slow", "fast"] * 5


def test_what_a_program_returns_is_waited_for(clock):
    class Pending:
        def block_until_ready(self):
            clock[0] += 2

    assert sparsity.reports.time_in_turn(lambda: {"loss": Pending()}, rounds=1) == [2]


def test_there_must_be_a_round():
    for rounds in (0, 2.5, True):
        with pytest.raises(ValueError, match=rf"rounds must be .*{rounds}"):
            sparsity.reports.time_in_turn(rounds=rounds)
