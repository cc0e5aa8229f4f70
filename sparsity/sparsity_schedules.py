"""Schedules: the steps that update masks, and the sparsities at these steps.

A schedule is any object with the two methods of `Schedule`. Steps count calls of the optimizer's
`update`, from 0; all methods take Python ints as well as traced int32 scalars.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from sparsity.core.checks import check_fraction, check_int, check_number, find_missing_method
from sparsity.core.names import Registry
from sparsity.core.sharding import evaluate_now
from sparsity.core.trees import Sparsities

_LAST_STEP = 2**31 - 1  # the count of steps is an int32


class Schedule(Protocol):
    """Interface of `scheduler`.

    A class defines `update_range()`, too, if the steps are known: it returns the first and the last
    update step, (first, `None`) without a last one, `None` for a schedule that never updates.

    Example:
      >>> class EvenSteps:
      ...     def get_sparsity_at_step(self, target_sparsities, step):
      ...         return target_sparsities
      ...
      ...     def is_mask_update_iter(self, step):
      ...         return step % 2 == 0
      >>> schedule: Schedule = EvenSteps()
      >>> [step for step in range(5) if schedule.is_mask_update_iter(step)]
      [0, 2, 4]
    """

    def get_sparsity_at_step(
        self, target_sparsities: Sparsities, step: int | jax.Array, /
    ) -> Sparsities:
        """Returns the tree of sparsities of masks that are made at `step`."""

    def is_mask_update_iter(self, step: int | jax.Array, /) -> chex.Numeric:
        """Returns whether masks are updated at `step`: a bool, or a traced bool scalar."""


class BaseSchedule:
    """Holds the defaults of schedules: no updates, and masks of the target sparsities."""

    def get_sparsity_at_step(self, target_sparsities: Sparsities, step: chex.Numeric) -> Sparsities:
        """Returns the sparsities of masks that are made at `step`.

        Args:
          target_sparsities: tree of sparsities in [0, 1]; `None` marks dense leaves.
          step: int scalar.

        Returns:
          A tree of the same structure.
        """
        del step
        return target_sparsities

    def is_mask_update_iter(self, step: chex.Numeric | None) -> chex.Numeric:
        """Returns whether masks are updated at `step`: a bool, or a traced bool scalar."""
        del step
        return False

    def update_range(self) -> tuple[int, int | None] | None:
        """Returns the first and the last update step, `None` for no last one; `None` for never."""
        return None


@dataclasses.dataclass(frozen=True)
class NoUpdateSchedule(BaseSchedule):
    """Never updates masks.

    Example:
      >>> NoUpdateSchedule().is_mask_update_iter(0)
      False
    """


@dataclasses.dataclass(frozen=True)
class OneShotSchedule(BaseSchedule):
    """Updates masks once, at `target_step`.

    Example:
      >>> schedule = OneShotSchedule(target_step=3)
      >>> [step for step in range(9) if schedule.is_mask_update_iter(step)]
      [3]
    """

    target_step: int

    # Keys of a configuration, and the fields that they set; by default the fields are the keys.
    config_keys: ClassVar[Mapping[str, str]] = {"update_end_step": "target_step"}

    def __post_init__(self) -> None:
        check_int("target_step", self.target_step, 0, _LAST_STEP)

    def is_mask_update_iter(self, step: chex.Numeric | None) -> chex.Numeric:
        return False if step is None else step == int(self.target_step)

    def update_range(self) -> tuple[int, int | None] | None:
        return self.target_step, self.target_step


@dataclasses.dataclass(frozen=True)
class PeriodicSchedule(BaseSchedule):
    """Updates masks at the start step, every `update_freq` steps from there, and at the end step.

    Attributes:
      update_freq: steps from one update to the next, at least 1.
      update_start_step: first update step.
      update_end_step: last update step, whether or not `update_freq` divides the range; `None` for
        no end.

    Example:
      >>> schedule = PeriodicSchedule(update_freq=4, update_start_step=2, update_end_step=9)
      >>> [step for step in range(20) if schedule.is_mask_update_iter(step)]
      [2, 6, 9]
    """

    update_freq: int
    update_start_step: int = 0
    update_end_step: int | None = None

    def __post_init__(self) -> None:
        check_int("update_freq", self.update_freq, 1, _LAST_STEP)
        check_int("update_start_step", self.update_start_step, 0, _LAST_STEP)
        if self.update_end_step is not None:
            check_int("update_end_step", self.update_end_step, 0, _LAST_STEP)
            if self.update_end_step < self.update_start_step:
                raise ValueError(
                    "update_end_step must not come before update_start_step, got update_end_step = "
                    f"{self.update_end_step}, update_start_step = {self.update_start_step}."
                )

    def is_mask_update_iter(self, step: chex.Numeric | None) -> chex.Numeric:
        if step is None:
            return False
        start = int(self.update_start_step)  # a uint8 of numpy would wrap around
        is_periodic_step = (step - start) % int(self.update_freq) == 0
        if self.update_end_step is None:
            return is_periodic_step & (step >= start)
        is_in_range = (step >= start) & (step <= int(self.update_end_step))
        return is_in_range & (is_periodic_step | (step == int(self.update_end_step)))

    def update_range(self) -> tuple[int, int | None] | None:
        return self.update_start_step, self.update_end_step


@dataclasses.dataclass(frozen=True)
class PolynomialSchedule(PeriodicSchedule):
    """Raises the sparsity from `initial_sparsity` to the target along a polynomial.

    With `progress` going from 0 at the start step to 1 at the end step,

      sparsity = target + (initial_sparsity - target) * (1 - progress) ** power

    On CPUs the bits are the same in every program, compiled or not, and so are numbers of entries.

    Attributes:
      update_end_step: the step that reaches the target exactly; required here.
      power: exponent; 3 in the source, 1 gives a linear ramp.
      initial_sparsity: sparsity at the start step; a parameter whose target is lower starts at
        its target.

    Source: Zhu & Gupta 2017, "To prune, or not to prune", equation 1.

    Example:
      >>> schedule = PolynomialSchedule(10, update_start_step=0, update_end_step=100)
      >>> [round(float(schedule.get_sparsity_at_step(0.8, step)), 3) for step in (0, 50, 100)]
      [0.0, 0.7, 0.8]
    """

    power: float = 3
    initial_sparsity: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_end_step is None:
            raise ValueError("PolynomialSchedule needs an update_end_step, got None.")
        check_number("power", self.power)
        if self.power <= 0:
            raise ValueError(f"power must be positive, got power = {self.power}.")
        check_fraction("initial_sparsity", self.initial_sparsity)

    def get_sparsity_at_step(self, target_sparsities: Sparsities, step: chex.Numeric) -> Sparsities:
        assert self.update_end_step is not None
        start, end = int(self.update_start_step), int(self.update_end_step)
        step = jnp.asarray(step)
        length = max(end - start, 1)
        steps = jnp.clip(end - step, 0, length).astype(jnp.float32)
        # XLA would divide by a constant as it multiplies by the rounded reciprocal.
        remaining = _raise_to_power(steps / jnp.maximum(steps, length), float(self.power))

        def ramp(target: chex.Numeric) -> jax.Array:
            target = jnp.asarray(target, jnp.float32)
            low = jnp.minimum(self.initial_sparsity, target)
            height = target - low
            # A product within a difference would be rounded or not, as programs are fused.
            rising = jnp.maximum(low, target - jnp.minimum(height * remaining, height))
            # Rounding may miss both ends by a bit, and they must be exact.
            return jnp.where(step >= end, target, jnp.where(step <= start, low, rising))

        return jax.tree.map(ramp, target_sparsities)


def _raise_to_power(x: jax.Array, power: float) -> jax.Array:
    """Returns x**power, by the operations that XLA puts in the place of a constant power."""
    if power == 0.5:
        return jnp.sqrt(x)
    return x ** (int(power) if power.is_integer() else power)


SCHEDULES: Registry[Callable[..., Schedule]] = Registry(
    "schedule_type",
    {
        "none": NoUpdateSchedule,
        "one_shot": OneShotSchedule,
        "periodic": PeriodicSchedule,
        "polynomial": PolynomialSchedule,
    },
)


def check_schedule(schedule: object) -> None:
    """Raises a ValueError unless an object has the methods of a schedule."""
    is_class = isinstance(schedule, type)
    method = find_missing_schedule_method(schedule) or ("is_mask_update_iter" if is_class else None)
    if method is not None:
        raise ValueError(
            f"scheduler must have a method {method}, got scheduler = {schedule!r}. Give a schedule "
            "in steps, such as PolynomialSchedule(update_freq=100, update_start_step=1_000, "
            "update_end_step=10_000)."
        )


def find_missing_schedule_method(schedule: object) -> str | None:
    """Returns the first method of a `Schedule` that a value lacks, `None` if it has both."""
    return find_missing_method(schedule, ("is_mask_update_iter", "get_sparsity_at_step"))


def update_range(schedule: Schedule) -> tuple[int, int | None] | None:
    """Returns the first and the last update step; (0, None) without a method `update_range`."""
    method = getattr(schedule, "update_range", None)
    return method() if method else (0, None)


def has_updates(schedule: Schedule) -> bool:
    """Returns whether a schedule updates masks at all; True without a method `update_range`."""
    return update_range(schedule) is not None


def find_first_update(schedule: Schedule) -> int:
    """Returns the first update step; 0 if the schedule never updates, or does not tell."""
    start, _ = update_range(schedule) or (0, None)
    return start


def find_last_update(schedule: Schedule) -> int | None:
    """Returns the last update step; `None` if there is none, or the schedule does not tell."""
    _, end = update_range(schedule) or (0, None)
    return end


def boundary_values(fn: optax.Schedule, schedule: Schedule) -> dict[int, ArrayLike]:
    """Returns the values of a function at step 0 and at the first and last update step."""
    start, end = find_first_update(schedule), find_last_update(schedule)
    # A schedule of optax sends its numbers to the device implicitly.
    with evaluate_now(), jax.transfer_guard("allow"):
        return {step: fn(step) for step in {0, start, start if end is None else end}}
