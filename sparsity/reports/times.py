"""Measures the times of programs side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax

from sparsity.core.checks import check_int

_WARM_UP = 2  # calls: the first compiles, the second fills caches


def time_in_turn(*programs: Callable[[], object], rounds: int = 20) -> list[float]:
    """Returns the median seconds of each program, all measured in turn in one process.

    Other work of the machine slows programs that take turns alike, so that the ratio of their times
    is steadier than the times. Each program first runs twice, to compile and to fill caches.

    Args:
      programs: functions without arguments. The measurement waits for their results, asynchronous
        arrays included. A training step that donates its state keeps the new one itself.
      rounds: number of measurements of each program.

    Returns:
      Seconds, in the order of the programs.

    Raises:
      ValueError: `rounds` is no integer, or below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> square = jax.jit(lambda x: x @ x)
      >>> large, small = jnp.ones((512, 512)), jnp.ones((64, 64))
      >>> before, after = time_in_turn(lambda: square(large), lambda: square(small))
      >>> print(f"{after / before:.2f}x of the time")  # doctest: +SKIP
      0.04x of the time
    """
    return [statistics.median(seconds) for seconds in rounds_in_turn(*programs, rounds=rounds)]


def rounds_in_turn(*programs: Callable[[], object], rounds: int) -> list[list[float]]:
    """Returns the seconds of each program in each round; see `time_in_turn`."""
    check_int("rounds", rounds, 1)
    seconds: list[list[float]] = [[] for _ in programs]
    for round_index in range(-_WARM_UP, rounds):
        for program, program_seconds in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program())
            if round_index >= 0:
                program_seconds.append(time.perf_counter() - start)
    return seconds
