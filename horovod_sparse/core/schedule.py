"""The density of each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from horovod_sparse.core.step import SettingError


@dataclass(frozen=True)
class WarmUp:
    """From dense to the target density, evenly in its logarithm (as in arXiv 1712.01887, section 3.3).

    Step t, of those from 0 to `steps`, has the density target ** (t / steps); those after it have the target.

    Attributes:
        steps: after how many steps the target is met.

    Raises:
        SettingError: it is no number of steps.
    """

    steps: int

    def __post_init__(self) -> None:
        whole = isinstance(self.steps, int | np.integer) and not isinstance(self.steps, bool)
        if not whole or self.steps < 1:
            raise SettingError("WarmUp(steps)", self.steps, "a number of steps >= 1")

    def density(self, step: int, target: float) -> float:
        return float(target ** min(step / self.steps, 1.0))


# A function takes the number of steps taken so far, and returns the density of the next.
DensitySchedule = Callable[[int], float] | WarmUp | None


def check_schedule(schedule: DensitySchedule) -> None:
    """Raise SettingError unless `density_of` can take it."""
    if not (schedule is None or isinstance(schedule, WarmUp) or callable(schedule)):
        allowed = "WarmUp(steps), a function from the number of steps taken so far to a density, or None"
        raise SettingError("density_schedule", schedule, allowed)


def density_of(schedule: DensitySchedule, step: int, target: float) -> float:
    """The density of a step, before which `step` steps were taken."""
    if schedule is None:
        return target
    return schedule.density(step, target) if isinstance(schedule, WarmUp) else schedule(step)
