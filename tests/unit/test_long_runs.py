"""Twenty thousand steps of MiCRO on three ranks: nothing drifts, nothing grows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray

from horovod_sparse.core import FlatLayout, MiCRO, virtual

RANKS, NUMEL, DENSITY = 3, 200, 0.02
STEPS, START = 20_000, 2_000
MARKS = (200, START, STEPS)
WINDOWS = (START, STEPS - 100)
EPS = float(np.finfo(np.float32).eps)

Gradients = NDArray[np.float32]
"""Of all ranks: one a row."""


def drifting(rng: np.random.Generator) -> Iterator[Gradients]:
    """Random, about a mean of their own for each element; their scale drifts up and down, by a factor of ten."""
    mean = rng.standard_normal(NUMEL)
    for t in range(STEPS):
        scale = 10 ** np.sin(2 * np.pi * t / 7_000)
        yield (scale * (mean + rng.standard_normal((RANKS, NUMEL)))).astype(np.float32)


def constant(rng: np.random.Generator) -> Iterator[Gradients]:
    """The same in each step: the worst case, for the same sums are rounded in the same way, again and again."""
    gradients = rng.standard_normal((RANKS, NUMEL)).astype(np.float32)
    for _ in range(STEPS):
        yield gradients


class Books:
    """What came in, what went out, and what is held back, in float64: as sums over the ranks.

    Attributes:
        bound: how much arithmetic in float32 may have lost by now. Each step rounds acc = residual + g once on each
            rank, by at most eps / 2 of |acc|. Where elements are sent, the sum over n ranks is rounded n - 1 times, and
            the mean once, each by at most eps / 2 of the sum of |acc|.
    """

    def __init__(self) -> None:
        self.came, self.magnitude, self.went, self.bound = np.zeros((4, NUMEL))
        self.residuals = np.zeros((RANKS, NUMEL))

    def enter(self, gradients: Gradients, update: NDArray[np.float32], residuals: NDArray[np.float64]) -> None:
        self.came += gradients.sum(axis=0, dtype=np.float64)
        self.magnitude += abs(gradients).sum(axis=0, dtype=np.float64)
        self.went += RANKS * update.astype(np.float64)
        # |acc| before it was rounded, and in the sum as it was rounded, which is larger by eps / 2 at most.
        acc = abs(self.residuals + gradients).sum(axis=0)
        self.bound += EPS / 2 * acc * (1 + np.where(update != 0, RANKS * (1 + EPS), 0))
        self.residuals = residuals

    def lost(self) -> NDArray[np.float64]:
        return self.went + self.residuals.sum(axis=0) - self.came


class Figures(NamedTuple):
    """What a run has told.

    Attributes:
        relative: at each of `MARKS`, how much was lost, of what had come in: of the worst element.
        selected: how many elements each step selected.
        left: bytes that were allocated in a hundred steps, and not freed: after the start, and at the end.
    """

    relative: list[float]
    selected: NDArray[np.int64]
    left: list[int]


def run(gradients: Iterator[Gradients]) -> Figures:
    """Take all steps; check, all along, what has to hold after each of them."""
    ranks = [MiCRO(FlatLayout.flat(NUMEL), DENSITY) for _ in range(RANKS)]
    books = Books()
    digests = [0] * RANKS
    figures = Figures([], np.empty(STEPS, np.int64), [])
    for t, given in enumerate(gradients):
        if t in WINDOWS:  # not all the time: it takes longer than the steps
            tracemalloc.start()
        steps = [rank.step([row.copy()], i, RANKS) for i, (rank, row) in enumerate(zip(ranks, given, strict=True))]
        updates, _ = virtual.run(steps)
        digests = [crc32(u.indices, crc32(u.gradient[0], digest)) for u, digest in zip(updates, digests, strict=True)]
        residuals = np.array([rank.residual.vector.arrays[0] for rank in ranks], np.float64)
        books.enter(given, updates[0].gradient[0], residuals)
        figures.selected[t] = len(updates[0].indices)
        if (t + 1) % 100 == 0:
            assert len(set(digests)) == 1, "the ranks' updates differ"
            assert (abs(books.lost()) <= books.bound).all(), "more was lost than float32 rounds off"
            if tracemalloc.is_tracing():
                figures.left.append(tracemalloc.get_traced_memory()[0])
                tracemalloc.stop()
        if t + 1 in MARKS:
            figures.relative.append(float((abs(books.lost()) / books.magnitude).max()))
    return figures


@pytest.mark.parametrize("kind", [drifting, constant])
def test_nothing_drifts_in_many_steps(kind: Callable[[np.random.Generator], Iterator[Gradients]]) -> None:
    figures = run(kind(np.random.default_rng(0)))
    k = DENSITY * NUMEL
    assert figures.selected[START:].mean() == pytest.approx(k, rel=0.02)
    assert abs(figures.selected[START:] - k).max() <= 2
    print(kind.__name__, *(f"{lost:.1e} after {steps}" for steps, lost in zip(MARKS, figures.relative, strict=True)))
    _, early, late = figures.relative
    assert late <= 1.1 * early
    # What the last step holds is a few vectors of each rank; a list that each step appends to would be as much more.
    assert max(figures.left) <= 30 * RANKS * NUMEL * 4
    assert figures.left[1] <= figures.left[0] + 10_000  # or it keeps a hundred bytes a step
