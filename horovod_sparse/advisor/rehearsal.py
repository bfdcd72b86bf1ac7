"""Steps of training without a model: computing for as long as it does, and real exchanges of gradients of its size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from horovod_sparse.advisor.ranks import Ranks
from horovod_sparse.core.collectives import Allgather, Allreduce
from horovod_sparse.core.exchange import A2SGDExchange, Exchange, MiCROExchange
from horovod_sparse.core.kernels import host
from horovod_sparse.core.layout import FlatLayout, TensorSpec

FORWARD = 1 / 3
"""The share of computing before the first gradient is there: a backward pass takes about twice as long as a forward."""

# A model with more parameters is rehearsed with so many, and takes as much longer as it is larger: for its memory.
MOST_NUMEL = 50_000_000

SYNC_EVERY = 100
"""A2SGD's default."""

MOST_TURNS = 60

LINK_BYTES = (4, 1024, 32 * 1024, 1024**2, 8 * 1024**2, 64 * 1024**2)
SLOW_S = 1.0
"""Larger messages than one that takes so long are not tried."""


class Candidate(NamedTuple):
    """A setting to rehearse; those that change training less come first."""

    setting: str
    """As a user would write it."""
    make: Callable[[], Exchange] | None = None
    """None: Horovod's own."""


ALONE = Candidate("no exchange")
DENSE = Candidate("Compression.none")
HALF = Candidate("Compression.fp16")
A2SGD = Candidate("A2SGDCompressor", lambda: A2SGDExchange("model", None))
CANDIDATES = (
    DENSE,
    HALF,
    Candidate("MiCROCompressor(density=0.1)", lambda: MiCROExchange(0.1, "adaptive", None)),
    Candidate("MiCROCompressor(density=0.01)", lambda: MiCROExchange(0.01, "adaptive", None)),
    Candidate("MiCROCompressor(density=0.001)", lambda: MiCROExchange(0.001, "adaptive", None)),
    A2SGD,
)


class Link(NamedTuple):
    """How long collectives take here: seconds, for messages of so many bytes from each rank."""

    nbytes: tuple[int, ...]
    allreduce_s: tuple[float, ...]
    allgather_s: tuple[float, ...]

    @property
    def latency_s(self) -> float:
        """What the smallest allreduce takes."""
        return self.allreduce_s[0]

    def bits_per_s(self, size: int) -> float:
        """What a rank sends in an allreduce among `size` ranks, by its largest message: 2 (n - 1) / n of the data."""
        return 8 * 2 * (size - 1) / size * self.nbytes[-1] / self.allreduce_s[-1]

    def allreduce_of(self, nbytes: float) -> float:
        """Seconds that an allreduce takes, from those that were measured."""
        if nbytes <= self.nbytes[-1]:
            return float(np.interp(nbytes, self.nbytes, self.allreduce_s))
        return self.allreduce_s[-1] * nbytes / self.nbytes[-1]


def measure_link(ranks: Ranks, most_bytes: int) -> Link:
    """Take the time of collectives of up to `most_bytes`, and at least 1 MiB; medians, of the slowest rank."""
    nbytes: list[int] = []
    seconds: dict[type, list[float]] = {Allreduce: [], Allgather: []}
    for size in LINK_BYTES:
        if size > max(most_bytes, 1024**2) or (nbytes and max(seconds[Allreduce][-1], seconds[Allgather][-1]) > SLOW_S):
            break
        nbytes.append(size)
        for kind, times in seconds.items():
            array = np.zeros(size // 4, np.float32)
            taken: list[float] = []
            while len(taken) < 3 or (len(taken) < 20 and sum(taken) < SLOW_S / 5):
                begin = time.perf_counter()
                ranks.start(kind(array), f"{kind.__name__.lower()}.{size}")()
                # Of the slowest rank, so that all ranks stop at the same time.
                taken.append(max(ranks.gather(time.perf_counter() - begin)))
            times.append(median(taken[1:]))
    return Link(tuple(nbytes), tuple(seconds[Allreduce]), tuple(seconds[Allgather]))


class Computing:
    """Something to do for a rank: an amount of it, not a time, for it takes longer beside an exchange.

    Args:
        seconds: how long all of it takes while all ranks are at it, and nothing else.
        idle: sleep, as a processor does whose GPU computes.
    """

    def __init__(self, ranks: Ranks, seconds: float, idle: bool) -> None:
        self._seconds = seconds
        self._idle = idle
        self._matrix = np.random.default_rng(0).normal(size=(192, 192)).astype(np.float32)
        ranks.gather(None)
        done, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < 0.3:
            self._matrix @ self._matrix
            done += 1
        self._products = seconds * done / elapsed

    def do(self, share: float) -> None:
        """Do a share of it."""
        if self._idle:
            time.sleep(share * self._seconds)
            return
        for _ in range(round(share * self._products)):
            self._matrix @ self._matrix


class Taken(NamedTuple):
    """What a step took."""

    seconds: float
    selection_s: float
    bytes_sent: float


class Rehearsal:
    """Takes steps of candidates, which all ranks call in the same order.

    Args:
        tensors: the model's.
        compute_s: what a step takes without an exchange, in seconds.
        idle: as of `Computing`.

    Attributes:
        scale: how many times larger the model is than what is rehearsed.
    """

    def __init__(self, ranks: Ranks, tensors: Sequence[TensorSpec], compute_s: float, idle: bool) -> None:
        numel = sum(spec.numel for spec in tensors)
        self.scale = max(numel / MOST_NUMEL, 1.0)
        self._ranks = ranks
        self._computing = Computing(ranks, compute_s, idle)
        sizes = [max(round(spec.numel / self.scale), 1) for spec in tensors]
        self._layout = FlatLayout(TensorSpec(f"{i:06}", (size,), "float32") for i, size in enumerate(sizes))
        self._gradients = {spec: host.empty(spec.numel, "float32") for spec in self._layout.tensors}
        self._random = np.random.default_rng(ranks.rank)
        noise = self._random.normal(size=(2, max(2**20, max(sizes) // 16)))
        # With a heavy tail, as gradients have: a threshold then moves as slowly from step to step as it does for them.
        self._noise = (noise[0] * np.exp(noise[1])).astype(np.float32)
        self._scales = np.random.default_rng(1).lognormal(sigma=1.0, size=len(sizes)).astype(np.float32)
        self._exchanges: dict[Candidate, Exchange] = {}

    def step(self, candidate: Candidate) -> Taken:
        """Take a step."""
        self._fill()
        self._ranks.gather(None)
        begin = time.perf_counter()
        if candidate is ALONE:
            self._computing.do(1)
            return Taken(time.perf_counter() - begin, 0.0, 0.0)
        if candidate.make is None:
            self._dense_step(candidate is HALF)
            nbytes = self._layout.numel * (2 if candidate is HALF else 4)
            return Taken(time.perf_counter() - begin, 0.0, nbytes)
        if candidate not in self._exchanges:
            self._exchanges[candidate] = candidate.make()
        exchange = self._exchanges[candidate]
        nbytes = self._sparse_step(exchange)
        assert exchange.stats
        return Taken(time.perf_counter() - begin, exchange.stats.selection_s, nbytes)

    def _fill(self) -> None:
        """New gradients: each part of them is another part of the noise in each step."""
        most = len(self._noise) // 2
        for (spec, array), scale in zip(self._gradients.items(), self._scales, strict=True):
            for start in range(0, spec.numel, most):
                part = array[start : start + most]
                offset = int(self._random.integers(len(self._noise) - len(part) + 1))
                np.multiply(self._noise[offset : offset + len(part)], scale, out=part)

    def _dense_step(self, half: bool) -> None:
        """Gradients are sent as they become ready, beside the rest of the backward pass."""
        self._computing.do(FORWARD)
        waits = []
        for spec in reversed(self._layout.tensors):
            self._computing.do((1 - FORWARD) * spec.numel / self._layout.numel)
            waits.append(self._ranks.start_dense(self._gradients[spec], spec.name, half))
        for wait in waits:
            wait()

    def _sparse_step(self, exchange: Exchange) -> int:
        """The exchange begins when all gradients are there, with a token for each, as in Horovod's optimizer."""
        self._computing.do(1)
        tokens = np.zeros(len(self._layout.tensors), np.float32)
        wait_for_tokens = self._ranks.start(Allreduce(tokens), "tokens")
        step = exchange.step(self._gradients, self._ranks.rank, self._ranks.size, self._gradients)
        nbytes, answer, name = tokens.nbytes, None, "first_round"
        while True:
            try:
                request = step.send(answer)
            except StopIteration as stop:
                wait_for_tokens()
                # As a framework does, take the update's memory for the gradients of the next step.
                self._gradients = dict(zip(self._layout.tensors, stop.value.gradient, strict=True))
                return nbytes
            nbytes += request.array.nbytes
            answer = self._ranks.start(request, name)()
            name = type(request).__name__.lower()


class Rehearsed(NamedTuple):
    """A candidate's steps: medians over steps of means over ranks, for the whole model."""

    candidate: Candidate
    step_s: float
    error_s: float
    """Of `step_s`: the standard error of the median."""
    selection_s: float
    bytes_sent: float
    steps: int
    """How many were taken; 0 if that would have taken too long, and `step_s` is worked out from the link's speed."""


def rehearse(
    ranks: Ranks, tensors: Sequence[TensorSpec], compute_s: float, idle: bool, link: Link, seconds: float
) -> Iterator[list[Rehearsed]]:
    """Let the candidates take turns, for about so many seconds, and at least four times; yields what is known so far.

    The first turn, in which numba compiles and thresholds are found, does not count. An exchange costs what a step with
    it takes longer than the one without of the same turn: the machine may be faster at times.
    """
    numel = sum(spec.numel for spec in tensors)
    rehearsal = Rehearsal(ranks, tensors, compute_s, idle)

    def summary(candidate: Candidate) -> Rehearsed:
        steps, alone = (np.mean(ranks.gather(taken[of]), axis=0) for of in (candidate, ALONE))
        costs = steps[:, 0] - alone[:, 0]
        low, high = np.quantile(costs, [0.25, 0.75])
        error_s = 0.93 * (high - low) / math.sqrt(len(costs))  # as of a normal distribution
        step_s = compute_s + rehearsal.scale * max(float(np.median(costs)), link.latency_s)
        _, selection_s, bytes_sent = np.median(steps, axis=0).tolist()
        if candidate is A2SGD:  # which averages the parameters now and then
            step_s += link.allreduce_of(4 * numel) / SYNC_EVERY
            bytes_sent += 4 * numel / SYNC_EVERY / rehearsal.scale
        error_s, selection_s, bytes_sent = (rehearsal.scale * f for f in (error_s, selection_s, bytes_sent))
        return Rehearsed(candidate, step_s, error_s, selection_s, bytes_sent, len(steps))

    # What takes too long to be tried is worked out.
    known: dict[Candidate, Rehearsed] = {}
    for candidate, nbytes in ((DENSE, 4 * numel), (HALF, 2 * numel)):
        step_s = compute_s + link.allreduce_of(nbytes)
        if link.allreduce_of(nbytes / rehearsal.scale) > seconds / 8:
            known[candidate] = Rehearsed(candidate, step_s, 0.0, 0.0, nbytes, 0)
    taken: dict[Candidate, list[Taken]] = {c: [] for c in (ALONE, *CANDIDATES) if c not in known}
    begin, turns = time.monotonic(), 0
    while turns < MOST_TURNS and any(ranks.gather(turns < 4 or time.monotonic() - begin < seconds)):
        for candidate in taken:
            one = rehearsal.step(candidate)
            if turns:
                taken[candidate].append(one)
        turns += 1
        if turns > 1:
            known |= {candidate: summary(candidate) for candidate in taken if candidate is not ALONE}
            yield [known[candidate] for candidate in CANDIDATES]
