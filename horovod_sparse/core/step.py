"""The type of a step, and what methods share."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

from horovod_sparse.core.collectives import Array, Collective
from horovod_sparse.core.layout import FlatLayout

Result = TypeVar("Result")

# Yields collectives, is sent their results, returns the update; None stands for a skipped step.
Step = Generator[Collective, Array, Result]


class Update(Protocol):
    """What a step returns: how to turn this rank's gradient into the one to apply."""

    def write(self, layout: FlatLayout, gradient: list[Array], out: list[Array] | None = None) -> None:
        """Write the mean update to `out`, by default over the flattened tensors of `gradient`."""


class SettingError(ValueError):
    """A setting has a value that it cannot have."""

    def __init__(self, name: str, given: object, allowed: str) -> None:
        super().__init__(f"{name}={given!r}: {name} must be {allowed}")
