"""The type of a step, and what methods share."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from horovod_sparse.core.collectives import Array, Collective

Result = TypeVar("Result")

# Yields collectives, is sent their results, returns the update; None stands for a skipped step.
Step = Generator[Collective, Array, Result]


@dataclass(frozen=True)
class Update:
    """What a step returns."""

    gradient: list[Array]
    """The flattened tensors of the gradient to apply."""
    indices: Array | None = None
    """Where it is not 0, ascending, in the flat vector; None: everywhere."""
    threshold: float | None = None
    """From what magnitude on elements were selected; 0.0 where all were; None for a method that has no threshold."""


class SettingError(ValueError):
    """A setting has a value that it cannot have."""

    def __init__(self, name: str, given: object, allowed: str) -> None:
        super().__init__(f"{name}={given!r}: {name} must be {allowed}")


def check_density(density: float) -> None:
    """Raise SettingError unless it is a share of the gradient to send in a step."""
    number = isinstance(density, int | float | np.integer | np.floating) and not isinstance(density, bool)
    if not number or not 0 < density <= 1:
        raise SettingError("density", density, "a number in (0, 1], the share of the gradient to send in a step")
