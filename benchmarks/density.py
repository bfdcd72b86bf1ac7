"""How well do MiCRO's threshold estimators meet the target density, and does the selection keep the largest elements?

Virtual ranks in one process, on random gradients; both estimators see the same ones. `docs/density.md` explains the
columns. Takes about 3 minutes of one core and 3 GB. Exit status 1 if the adaptive threshold misses the bar, which
`Row.meets_bar` states.

    python benchmarks/density.py
    python benchmarks/density.py --steps 100 --seed 1 --json results/density.json --markdown results/density.md
"""

from __future__ import annotations

import interrupts

# isort: split
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import sqrt
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray
from outputs import check_output, json_option, whole, write_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from horovod_sparse.core import FlatLayout, MiCRO, owned_partition
from horovod_sparse.core.virtual import run

Vector: TypeAlias = NDArray[np.float32]

DENSITIES = (0.1, 0.01, 0.001)
# Below this many selected elements, a density says little.
SMALLEST_K = 1000
# Steps that the adaptive threshold may take to settle: at the start, and after a jump.
SETTLE_AT_START, SETTLE_AFTER_JUMP = 2, 3


@dataclass(frozen=True)
class Scenario:
    """How the gradients are distributed: independent normal numbers of standard deviation 1, except as stated."""

    name: str
    ranks: int = 4
    scale: float = 1.0
    layers: float = 1.0
    """Ratio of the scales of the last and the first of ten layers."""
    freedom: float | None = None
    """Student's t distribution with so many degrees of freedom."""
    correlation: float = 0.0
    """Correlation of an element with itself one step before: AR(1), as momentum makes it."""
    jump: float = 1.0
    """Factor by which the scale changes in mid-run."""

    def gradients(self, numel: int, steps: int, seed: int) -> Iterator[list[Vector]]:
        """For each step, the gradients of all ranks."""
        rng = np.random.default_rng(seed)
        layer = np.arange(numel) * 10 // numel
        scales = self.scale * self.layers ** (layer / 9 - 0.5)
        gradients = [self._noise(rng, numel) for _ in range(self.ranks)]
        for t in range(steps):
            factors = (scales * (self.jump if t >= jump_step(steps) else 1.0)).astype(np.float32)
            yield [g * factors for g in gradients]
            fresh = sqrt(1 - self.correlation**2)
            gradients = [self.correlation * g + fresh * self._noise(rng, numel) for g in gradients]

    def _noise(self, rng: np.random.Generator, numel: int) -> Vector:
        noise = rng.standard_normal(numel, np.float32)
        if self.freedom:
            noise /= np.sqrt(rng.chisquare(self.freedom, numel) / self.freedom).astype(np.float32)
        return noise


SCENARIOS = (
    Scenario("normal"),
    Scenario("scale 1e-8", scale=1e-8),
    Scenario("scale 1e4", scale=1e4),
    Scenario("layers 1:100", layers=100),
    Scenario("Student t, 3 d.f.", freedom=3),
    Scenario("Student t, 2 d.f.", freedom=2),
    Scenario("jump x 10", jump=10),
    Scenario("jump / 10", jump=0.1),
    Scenario("AR(1), 0.9", correlation=0.9),
    Scenario("2 ranks", ranks=2),
    Scenario("64 ranks", ranks=64),
    Scenario("all, 16 ranks", ranks=16, layers=100, freedom=2, correlation=0.9, jump=10),
)


def jump_step(steps: int) -> int:
    """The step, counted from 0, in which the scale jumps."""
    return steps // 2


@dataclass
class Row:
    """One scenario at one target density; ratios are density / target, one a step."""

    scenario: Scenario
    target: float
    adaptive: list[float] = field(default_factory=list)
    paper: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    """Collectives of each step, of the adaptive threshold."""
    energy: list[float] = field(default_factory=list)
    """Squared norm of the mean accumulator at the selected indices, relative to that at the largest elements."""

    @property
    def worst(self) -> float:
        """The largest |density / target - 1| of the steps in which the adaptive threshold should be settled."""
        return max(abs(ratio - 1) for ratio in self._settled())

    @property
    def mean(self) -> float:
        return float(np.mean(self._settled()))

    @property
    def recovery(self) -> int | None:
        """Steps after the jump until the density is within 10 % for good; None without a jump."""
        if self.scenario.jump == 1:
            return None
        after = self.adaptive[jump_step(len(self.adaptive)) :]
        return max((t for t, ratio in enumerate(after, start=1) if abs(ratio - 1) > 0.1), default=0)

    @property
    def meets_bar(self) -> bool:
        """Within 10 % of the target at every settled step, and 4 % in the mean, with 95 % of the energy."""
        return self.worst <= 0.1 and abs(self.mean - 1) <= 0.04 and min(self.energy) >= 0.95

    def _settled(self) -> list[float]:
        jump = jump_step(len(self.adaptive))
        settling = range(jump, jump + SETTLE_AFTER_JUMP) if self.scenario.jump != 1 else ()
        return [r for t, r in enumerate(self.adaptive) if t >= SETTLE_AT_START and t not in settling]

    def cells(self) -> dict[str, str]:
        """The row as it is printed, by column."""
        return {
            "scenario": self.scenario.name,
            "target": f"{self.target:g}",
            "worst": f"{self.worst:.1%}",
            "mean": f"{self.mean:.3f}",
            "after jump": "" if self.recovery is None else str(self.recovery),
            "energy": f"{min(self.energy):.3f}",
            "rounds": f"{np.mean(self.rounds):.2f}",
            "paper 1st": f"{self.paper[0]:.1f}",
            "10th": f"{self.paper[9]:.1f}",
            "last": f"{self.paper[-1]:.1f}",
        }


def measure(scenario: Scenario, densities: list[float], numel: int, steps: int, seed: int) -> list[Row]:
    """Run both estimators at all densities over the scenario's gradients."""

    def ranks(density: float, threshold: str) -> list[MiCRO]:
        return [MiCRO(FlatLayout.flat(numel), density, threshold) for _ in range(scenario.ranks)]

    runs = [(Row(scenario, density), ranks(density, "adaptive"), ranks(density, "paper")) for density in densities]
    for gradients in scenario.gradients(numel, steps, seed):
        for row, adaptive, paper in runs:
            owned, mean = accumulators(adaptive, gradients)
            selected, rounds = step(adaptive, gradients)
            largest = np.argpartition(owned, -selected.size)[-selected.size :]
            row.energy.append(squared_norm(mean[selected]) / squared_norm(mean[largest]))
            row.adaptive.append(selected.size / numel / row.target)
            row.rounds.append(rounds)
            row.paper.append(step(paper, gradients)[0].size / numel / row.target)
    return [row for row, _, _ in runs]


def accumulators(ranks: list[MiCRO], gradients: list[Vector]) -> tuple[Vector, Vector]:
    """Before a step: |acc_i| where rank i owns the element, and the mean of acc_i over the ranks."""
    owned, total = np.empty_like(gradients[0]), np.zeros_like(gradients[0])
    for i, (rank, gradient) in enumerate(zip(ranks, gradients, strict=True)):
        accumulator = gradient if rank.residual.vector is None else rank.residual.vector.arrays[0] + gradient
        own = slice(*owned_partition(gradient.size, len(ranks), i, rank.t))
        owned[own] = np.abs(accumulator[own])
        total += accumulator
    total /= len(ranks)
    return owned, total


def step(ranks: list[MiCRO], gradients: list[Vector]) -> tuple[NDArray[np.integer], int]:
    """One step of all ranks: the indices selected, and the number of collectives."""
    steps = [rank.step([g], i, len(ranks)) for i, (rank, g) in enumerate(zip(ranks, gradients, strict=True))]
    updates, rounds = run(steps)
    update = updates[0]
    assert update is not None
    assert update.indices is not None
    return update.indices, len(rounds)


def squared_norm(x: Vector) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def rich_table(rows: list[Row]) -> Table:
    table = Table(title="density / target", box=SIMPLE_HEAD, padding=0)
    scenario, *figures = rows[0].cells()
    table.add_column(scenario, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right")
    for row in rows:
        table.add_row(*row.cells().values(), style=None if row.meets_bar else "red")
    return table


def markdown_table(rows: list[Row]) -> str:
    cells = [row.cells() for row in rows]
    lines = [list(cells[0]), ["---"] * len(cells[0]), *(list(c.values()) for c in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(
    steps: Annotated[int, typer.Option(min=10, help="Steps of each scenario.")] = 20,
    numel: Annotated[int, typer.Option(min=10_000, help="Gradient elements.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Seed of the gradients.")] = 0,
    json_out: Annotated[Path | None, json_option()] = None,
    markdown_out: Annotated[
        Path | None, typer.Option("--markdown", metavar="OUT", callback=check_output, help="Where to write the table.")
    ] = None,
) -> None:
    """Measure how well MiCRO's threshold estimators meet the target density."""
    console = Console()
    densities = [density for density in DENSITIES if density * numel >= SMALLEST_K]
    rows: list[Row] = []
    for scenario in track(SCENARIOS, "Scenarios", console=console, transient=True):
        rows += measure(scenario, densities, numel, steps, seed)
        write_json(json_out, [asdict(row) for row in rows], indent=1)
    console.print(rich_table(rows))
    if markdown_out:
        with whole(markdown_out) as part:
            part.write_text(markdown_table(rows))
    if missed := sum(not row.meets_bar for row in rows):
        console.print(f"[red]The adaptive threshold misses the bar in {missed} of {len(rows)} rows.")
        raise typer.Exit(1)
    console.print(f"The adaptive threshold meets the bar in all {len(rows)} rows.")


if __name__ == "__main__":
    interrupts.start(main)
