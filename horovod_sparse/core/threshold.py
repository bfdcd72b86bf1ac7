"""Threshold estimators: from what magnitude on are elements selected?

Both move one threshold, shared by all ranks, so that the number of selected elements meets k = density * d.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, sqrt
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core.collectives import Allreduce, Array
from horovod_sparse.core.step import Step

Magnitudes = NDArray[np.float64]
# Given magnitudes, an array to be reduced: how many of the elements this rank owns are at least as large as each.
Count = Callable[[Magnitudes], Array]


class ThresholdEstimator(Protocol):
    """Sees the counts of this step (`estimate`) or of the one before (`observe`)."""

    threshold: float | None
    """The last step's threshold; None before the first."""

    def magnitudes(self, k: float) -> Magnitudes:
        """Magnitudes, ascending, to be counted in the round that every step begins with; the same number each step."""

    def estimate(self, magnitudes: Magnitudes, counts: Array, k: float, count: Count) -> Step[float]:
        """This step's threshold, given how many elements, of all ranks, are at least as large as each magnitude.

        It may ask for further rounds: `count` counts this rank's elements at other magnitudes.
        """

    def observe(self, selected: int, k: float) -> None:
        """Learn how many elements the threshold selected, of all ranks."""

    def state(self) -> dict[str, float]:
        """Plain numbers, from which `load` continues."""

    def load(self, state: dict[str, float]) -> None:
        """Continue from `state`; raise ValueError if it has anything but numbers that are finite and >= 0."""


def _number(state: dict[str, float], name: str) -> float | None:
    number = dict(state).get(name)
    if number is None:
        return None
    if not 0 <= float(number) < inf:
        raise ValueError(f"its {name} is {number}")
    return float(number)


class PaperThreshold:
    """The published rule (MiCRO, section IV-B, in the constants of the authors' code).

    threshold_0 = 1 / (2 sqrt(k)); with e = selected / k of the step before, the threshold is multiplied by 1.005 if
    e > 1.1, by 1.00125 if 0.909 < e <= 1.1, and by 0.995 otherwise.
    """

    def __init__(self) -> None:
        self.threshold: float | None = None
        self._e: float | None = None

    def magnitudes(self, k: float) -> Magnitudes:
        return np.empty(0)

    def estimate(self, magnitudes: Magnitudes, counts: Array, k: float, count: Count) -> Step[float]:
        if self.threshold is None:
            self.threshold = 1 / (2 * sqrt(k))
        elif self._e is not None:
            self.threshold *= 1.005 if self._e > 1.1 else 1.00125 if self._e > 0.909 else 0.995
        return self.threshold
        yield  # a step that asks for nothing

    def observe(self, selected: int, k: float) -> None:
        self._e = selected / k

    def state(self) -> dict[str, float]:
        return {} if self.threshold is None or self._e is None else {"threshold": self.threshold, "e": self._e}

    def load(self, state: dict[str, float]) -> None:
        self.threshold, self._e = _number(state, "threshold"), _number(state, "e")


class Bracket(NamedTuple):
    """Where the threshold lies: `above_low` >= k elements are >= low, `above_high` < k are >= high."""

    low: float
    above_low: float
    high: float
    above_high: float

    def narrowed(self, magnitudes: Magnitudes, counts: Array, k: float) -> Bracket:
        """The tightest bracket that `counts`, the elements >= each magnitude, allow."""
        low, above_low, high, above_high = self
        for magnitude, above in zip(magnitudes.tolist(), counts.tolist(), strict=True):
            if above >= k and magnitude > low:
                low, above_low = magnitude, above
            elif above < k and magnitude < high:
                high, above_high = magnitude, above
        return Bracket(low, above_low, high, above_high)

    def slope(self) -> float:
        """-d log(count) / d log(magnitude) inside the bracket."""
        return log(self.above_low / max(self.above_high, 0.5)) / log(self.high / self.low)

    def interpolated(self, k: float) -> float:
        """The magnitude that k elements reach, if log(count) is linear in log(magnitude) between the two ends."""
        return float(self.low * (self.above_low / k) ** (1 / self.slope()))


class AdaptiveThreshold:
    """A threshold that is right at every step, from the first on, at any scale of the gradients.

    The ranks count, each over the elements that it owns in this very step, how many reach each of a few magnitudes
    around the last threshold, chosen so that the counts should be `RATIOS` times k. The sums bracket the magnitude
    that k elements reach; between the two ends it is interpolated. Should the magnitudes miss it, or leave too wide a
    bracket (the first step, a sudden change of scale), the ranks count again, at `SEARCH` finer magnitudes a round.
    """

    RATIOS = np.array([3.4, 2.4, 1.7, 1.3, 1.1, 1.0, 0.9, 0.75, 0.6, 0.42, 0.3])
    SEARCH = 64
    # A bracket is narrow enough if it holds at most this share of k: interpolation then errs by 1 % or so.
    WIDEST = 0.5
    # ... and the search ends at the latest when its ends are as close as two float32: elements in between are equal.
    CLOSEST = 1 + 2.0**-23

    def __init__(self, dtype: str = "float32") -> None:
        self.threshold: float | None = None
        self._slope = 1.0
        self._dtype = dtype
        # Subnormal numbers wait in the residual: a thread may treat them as 0 (TensorFlow's do), and all are >= 0.
        self._smallest = float(np.finfo(dtype).tiny)
        self._largest = float(np.finfo(dtype).max)

    def magnitudes(self, k: float) -> Magnitudes:
        if self.threshold is None:
            return self._between(self._smallest, self._largest, self.RATIOS.size)
        with np.errstate(over="ignore"):  # what is too large becomes the largest number there is
            return self._representable(self.threshold * self.RATIOS ** (-1 / self._slope))

    def estimate(self, magnitudes: Magnitudes, counts: Array, k: float, count: Count) -> Step[float]:
        bracket = Bracket(0.0, np.inf, np.inf, 0.0).narrowed(magnitudes, counts, k)
        while True:
            if bracket.high <= self._smallest:  # fewer than k elements are not zero: select all that are not
                self.threshold = None
                return self._smallest
            low, high = max(bracket.low, self._smallest), min(bracket.high, self._largest)
            narrow = bracket.above_low - bracket.above_high <= max(self.WIDEST * k, 1)
            if narrow and bracket.low > 0 and bracket.high < np.inf:
                self._slope = min(max(bracket.slope(), 0.05), 1000.0)
                self.threshold = float(self._representable(np.array(bracket.interpolated(k))))
                return self.threshold
            if bracket.low > 0 and high <= self.CLOSEST * low:  # select all the equal elements
                self.threshold = low
                return low
            magnitudes = self._between(low, high, self.SEARCH)
            counts = yield Allreduce(count(magnitudes))
            bracket = bracket.narrowed(magnitudes, counts, k)

    def observe(self, selected: int, k: float) -> None:
        """Nothing to learn: `estimate` saw the counts of this very step."""

    def state(self) -> dict[str, float]:
        return {"slope": self._slope} | ({} if self.threshold is None else {"threshold": self.threshold})

    def load(self, state: dict[str, float]) -> None:
        self.threshold, self._slope = _number(state, "threshold"), _number(state, "slope") or 1.0

    def _between(self, low: float, high: float, number: int) -> Magnitudes:
        """Magnitudes from `low` to `high`, about evenly spaced in their logarithms: evenly in their bit patterns."""
        ends = np.array([low, high], self._dtype)
        first, last = ends.view(f"int{8 * ends.itemsize}").tolist()
        patterns = [first + (last - first) * i // (number - 1) for i in range(number)]
        return np.array(patterns, f"int{8 * ends.itemsize}").view(self._dtype).astype(np.float64)

    def _representable(self, magnitudes: Magnitudes) -> Magnitudes:
        """Rounded to the accumulator's dtype, in which counting and selecting compare; positive and finite."""
        return magnitudes.clip(self._smallest, self._largest).astype(self._dtype).astype(np.float64)
