"""What the rehearsals say: does compression pay, and which is it to be?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from horovod_sparse.advisor.ranks import Ranks
from horovod_sparse.advisor.rehearsal import DENSE, HALF, Link, Rehearsed, measure_link, rehearse
from horovod_sparse.advisor.script import Profile

TOLERANCE = 0.04
"""What is slower than the fastest by no more than this share is as good."""

NOISY = 0.15
"""A standard error of more than this share of a step is too much for a setting that may be the fastest."""


class Advice(NamedTuple):
    """What was measured, and what is recommended."""

    ranks: int
    numel: int
    compute_s: float
    """Of a step without an exchange, in seconds."""
    link: Link
    rehearsed: list[Rehearsed]
    """In the order of CANDIDATES."""

    @property
    def fastest(self) -> Rehearsed:
        return min(self.rehearsed, key=lambda r: r.step_s)

    @property
    def recommended(self) -> Rehearsed:
        """Of those that are as good as the fastest, and better than dense training, the one that changes it least.

        Dense training, if that is as good.
        """
        as_good = [r for r in self.rehearsed if r.step_s <= (1 + TOLERANCE) * self.fastest.step_s]
        return next(r for r in as_good if r is self.dense or (1 + TOLERANCE) * r.step_s < self.dense.step_s)

    @property
    def dense(self) -> Rehearsed:
        return next(r for r in self.rehearsed if r.candidate is DENSE)

    @property
    def noisy(self) -> list[Rehearsed]:
        """Those whose times vary too much to tell whether they are the fastest."""
        limit = self.fastest.step_s
        return [r for r in self.rehearsed if r.error_s > NOISY * r.step_s and r.step_s - 2 * r.error_s <= limit]

    @property
    def speed_up(self) -> float:
        """How many times as fast as dense training the recommended setting is."""
        return self.dense.step_s / self.recommended.step_s

    def lines(self) -> list[str]:
        """The recommendation, in words."""
        setting, best = self.recommended.candidate.setting, self.dense.step_s / self.fastest.step_s
        if self.noisy:
            vague = self.noisy[0]
            return [
                f"The times vary too much to tell: those of {vague.candidate.setting} by "
                f"{vague.error_s / vague.step_s:.0%}. Ask again on an idle machine, or with a larger --seconds."
            ]
        argument = f"hvd.DistributedOptimizer(..., compression={setting})"
        if self.recommended.candidate is DENSE:
            lines = ["Compression does not pay here: train without it."]
            if best >= 1.01:
                lines.append(f"The fastest setting was {best:.2f} times as fast, which is too little.")
            return lines
        gain = f"{self.speed_up:.2f} times as fast as dense training"
        if self.dense.step_s - self.recommended.step_s < 2 * math.hypot(self.dense.error_s, self.recommended.error_s):
            gain += ", which may be noise: ask again with a larger --seconds"
        if self.recommended.candidate is HALF:
            return [f"Half precision is enough here: {argument}", f"Expected: {gain}."]
        lines = [f"Compression pays here: {argument}", f"Expected: {gain}."]
        if self.recommended.step_s > 2 * self.compute_s > 0:
            lines.append("Even so, ranks spend more than half of a step on the exchange.")
        return lines

    def as_json(self) -> dict[str, Any]:
        """All of it, as plain numbers and strings; seconds and bytes."""
        return {
            "ranks": self.ranks,
            "numel": self.numel,
            "compute_s": self.compute_s,
            "latency_s": self.link.latency_s,
            "link": self.link._asdict(),
            "candidates": [
                {"setting": r.candidate.setting, **{k: v for k, v in r._asdict().items() if k != "candidate"}}
                for r in self.rehearsed
            ],
            "recommended": None if self.noisy else self.recommended.candidate.setting,
            "speed_up": None if self.noisy else self.speed_up,
            "noisy": [r.candidate.setting for r in self.noisy],
        }


def make_table(advice: Advice) -> Table:
    """A row for each candidate."""
    table = Table(caption=None if all(r.steps for r in advice.rehearsed) else "*: worked out from the link's speed")
    table.add_column("compression=", no_wrap=True)
    for heading in ("ms a step", "of it selection", "speed", "kB sent"):
        table.add_column(heading, justify="right")
    for r in advice.rehearsed:
        table.add_row(
            r.candidate.setting + ("" if r.steps else " *"),
            f"{1000 * r.step_s:,.1f}",
            f"{1000 * r.selection_s:,.1f}" if r.selection_s else "",
            f"{advice.dense.step_s / r.step_s:.2f}",
            f"{r.bytes_sent / 1000:,.1f}",
            style="bold" if r is advice.recommended and not advice.noisy else None,
        )
    return table


def link_lines(link: Link, ranks: int) -> Sequence[str]:
    """What was measured of the link."""
    largest = f"{link.nbytes[-1] / 1e6:,.1f} MB"
    return [
        f"link: latency {1000 * link.latency_s:.2f} ms; a rank sends {link.bits_per_s(ranks) / 1e9:.3g} Gbit/s",
        f"allreduce of {largest}: {1000 * link.allreduce_s[-1]:,.1f} ms; allgather of as much from each rank: "
        f"{1000 * link.allgather_s[-1]:,.1f} ms",
    ]


def advise(ranks: Ranks, profile: Profile, seconds: float) -> Iterator[Advice]:
    """Measure the link, then rehearse for about so many seconds; yields better and better advice. For all ranks."""
    numel = sum(spec.numel for spec in profile.tensors)
    link = measure_link(ranks, 4 * numel)
    for rehearsed in rehearse(ranks, profile.tensors, profile.compute_s, profile.on_gpu, link, seconds):
        yield Advice(ranks.size, numel, profile.compute_s, link, rehearsed)
