"""What happens with more ranks: selection on 2 to 256 virtual ranks, and a model of a step's cost up to 1,024.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --network results/network.json     # and compare the model with network.py's figures
    python benchmarks/scaling.py --help

The virtual ranks run the core in one process, on gradients whose ten layers differ in scale by a factor of 100.
Captured energy: of the squared norm of the accumulated gradients' mean, the share that lies at the updated indices.

The cost model: a step of a method takes

    compute + local + rounds * round + hops * hop + bytes / bandwidth

`local` is what the method does on a rank apart from communication, measured as in kernels.py; a round is one
negotiation of Horovod; a ring passes n - 1 hops to gather and 2 (n - 1) to reduce. Against the emulated network, the
last term is tested: all others are in what network.py has measured without a limit.
"""

from __future__ import annotations

import interrupts

# isort: split
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

import kernels
import numpy as np
import typer
from density import Scenario
from matplotlib.figure import Figure
from outputs import json_option, plot_option, save_plot, write_json
from rich.console import Console
from rich.progress import track
from rich.table import Table

from horovod_sparse.core import FlatLayout, MiCRO, TopK
from horovod_sparse.core.indices import code_dtype
from horovod_sparse.core.kernels import host
from horovod_sparse.core.partition import partition
from horovod_sparse.core.virtual import run

DENSITY = 0.01
RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
METHODS: dict[str, Callable[[FlatLayout], Any]] = {
    "MiCRO": lambda layout: MiCRO(layout, DENSITY),
    "top-k": lambda layout: TopK(layout, DENSITY),
}
LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 10e9, "25 Gbit/s": 25e9, "100 Gbit/s": 100e9}
SCALES = (2, 4, 16, 64, 256, 1024)
RATES = {"100M": 100e6, "1G": 1e9, "10G": 10e9}  # as network.py names them
FRAMING = 1.05  # bytes on the wire for each of the payload: the headers of Ethernet, IP and TCP


# Virtual ranks


@dataclass
class Selection:
    """Means over the steps, but for the time: the median."""

    method: str
    ranks: int
    density: float
    """Updated elements / d."""
    build_up: float
    """Updated elements / k."""
    energy: float
    seconds: float
    """To select on one rank."""


def select_virtually(ranks: int, numel: int, steps: int, seed: int) -> Iterator[Selection]:
    """Both methods on the same gradients."""
    layout = FlatLayout.flat(numel)
    worlds = {name: [method(layout) for _ in range(ranks)] for name, method in METHODS.items()}
    figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in METHODS}
    for gradients in Scenario("layers 1:100", ranks=ranks, layers=100).gradients(numel, steps, seed):
        for name, world in worlds.items():
            mean = np.zeros(numel, np.float32)
            for algorithm, gradient in zip(world, gradients, strict=True):
                mean += gradient if (held := algorithm.residual.vector) is None else held.arrays[0] + gradient
            mean /= ranks
            seconds = time_selection(name, world[0], gradients[0], ranks)
            updates, _ = run([a.step([g], i, ranks) for i, (a, g) in enumerate(zip(world, gradients, strict=True))])
            assert updates[0]
            indices = updates[0].indices
            energy = float(np.square(mean[indices], dtype=np.float64).sum() / np.square(mean, dtype=np.float64).sum())
            figures[name].append((len(indices) / numel, len(indices) / numel / DENSITY, energy, seconds))
    for name, rows in figures.items():
        density, build_up, energy, seconds = zip(*rows, strict=True)
        yield Selection(name, ranks, fmean(density), fmean(build_up), fmean(energy), median(seconds))


def time_selection(name: str, algorithm: Any, gradient: Any, ranks: int) -> float:
    """The seconds that one rank takes to select, once it knows the threshold or k."""
    acc = host.flat_vector([gradient], "float32")
    threshold = getattr(algorithm, "estimator", None) and algorithm.estimator.threshold
    start = time.perf_counter()
    if name == "MiCRO":
        host.select(acc, partition(gradient.size, ranks, 0), threshold or 1.0, "int32")
    else:
        host.top_k(acc, algorithm.k, "int32")
    return time.perf_counter() - start


def table_of_selections(selections: list[Selection], numel: int) -> Table:
    table = Table("method", title=f"Virtual ranks: {numel:,} elements, density {DENSITY:g}")
    for heading in ("ranks", "density", "build-up", "energy", "selection, ms"):
        table.add_column(heading, justify="right")
    for s in selections:
        cells = (f"{s.density:.4f}", f"{s.build_up:.2f}", f"{s.energy:.1%}", f"{1000 * s.seconds:.3f}")
        table.add_row(s.method, str(s.ranks), *cells)
    return table


# The cost model


class Traffic(NamedTuple):
    """What a method exchanges in a step, for d elements on n ranks."""

    rounds: int
    """Negotiations of Horovod, one after the other."""
    hops: Callable[[int], int]
    """That messages pass, one after the other, in all rounds together."""
    bytes_sent: Callable[[float, int], float]
    """By a rank."""


def allreduce(nbytes: float, n: int) -> float:
    return 2 * (n - 1) / n * nbytes


def index_bytes(density: float) -> float:
    """Of an index, as kernels.py measures them."""
    return {"uint8": 1.1, "uint16": 2.0, "uint32": 4.0}[code_dtype(density)]


def micro(density: float) -> Traffic:
    def bytes_sent(d: float, n: int) -> float:
        return allreduce(4 * density * d, n) + (n - 1) / n * density * d * index_bytes(density)

    return Traffic(3, lambda n: 5 * (n - 1), bytes_sent)


TRAFFIC = {
    "dense": Traffic(1, lambda n: 2 * (n - 1), lambda d, n: allreduce(4 * d, n)),
    "fp16": Traffic(1, lambda n: 2 * (n - 1), lambda d, n: allreduce(2 * d, n)),
    "top-k": Traffic(2, lambda n: 3 * (n - 1), lambda d, n: (n - 1) * DENSITY * d * (4 + index_bytes(DENSITY))),
    "QSGD, 4 bits": Traffic(2, lambda n: 3 * (n - 1), lambda d, n: (n - 1) * d * (0.5 + 4 / 512)),
    "MiCRO": micro(DENSITY),
    "MiCRO 0.001": micro(0.001),
    "A2SGD": Traffic(
        1, lambda n: 2 * (n - 1), lambda d, n: allreduce(8 + 4 * d / 100, n)
    ),  # averages once in 100 steps
}
# Horovod copies into its buffer, adds, and copies back; fp16 converts twice more.
HOROVODS_COPIES = {"dense": 3.0, "fp16": 4.0}


@dataclass(frozen=True)
class Machine:
    """The constants of the model, in seconds."""

    compute: float
    """Of a step without any exchange."""
    copy: float
    """Of a `copy_` of one element."""
    local: dict[str, tuple[float, float]]
    """Copies of the gradient that a method's work on a rank costs: fixed, and for each rank."""
    round: float
    hop: float

    def step(self, method: str, d: float, n: int, bits_per_s: float) -> float:
        """The seconds of a step."""
        traffic = TRAFFIC[method]
        fixed, for_each_rank = self.local[method]
        local = self.copy * d * (fixed + for_each_rank * n)
        latency = traffic.rounds * self.round + traffic.hops(n) * self.hop
        return self.compute + local + latency + FRAMING * 8 * traffic.bytes_sent(d, n) / bits_per_s


def measure_local(numel: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """Seconds of a copy of one element, and each method's local work, by what it takes with 2 and with 16 ranks."""
    few, many = 2, 16
    local = {name: (copies, 0.0) for name, copies in HOROVODS_COPIES.items()}
    copies_s = []
    for name in kernels.METHODS:
        measured = [kernels.measure_step(kernels.Case(name, numel, ranks=n), "cpu") for n in (few, many)]
        copies_s += [m["copy_"] for m in measured]
        at_few, at_many = (m["step"] / m["copy_"] for m in measured)
        slope = max(at_many - at_few, 0.0) / (many - few)
        local[name] = at_few - slope * few, slope
    local["MiCRO 0.001"] = local["MiCRO"]
    return median(copies_s) / numel, local


def predict(records: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Records of network.py with a limited link, and what the model says of their seconds."""
    unlimited = {(r["hosts"], r["workload"], r["method"]): r for r in records if r["link"] == "unlimited"}
    for r in records:
        base = unlimited.get((r["hosts"], r["workload"], r["method"]))
        if base and r["link"] in RATES and r["expected_bytes"]:
            yield r, base["seconds"] + FRAMING * 8 * r["expected_bytes"] / RATES[r["link"]]


def table_of_predictions(predictions: list[tuple[dict[str, Any], float]]) -> Table:
    table = Table("workload", title="The model and the emulated network")
    for heading in ("hosts", "link", "compression", "measured, ms", "predicted, ms", "ratio"):
        table.add_column(heading, justify="right")
    for r, predicted in predictions:
        ratio = predicted / r["seconds"]
        cells = (f"{1000 * r['seconds']:,.1f}", f"{1000 * predicted:,.1f}", f"{ratio:.2f}")
        style = None if 1 / 1.2 <= ratio <= 1.2 else "red"
        table.add_row(r["workload"], str(r["hosts"]), r["link"], r["method"], *cells, style=style)
    return table


def table_of_scales(machine: Machine, d: float) -> Table:
    """The speed against dense, and which method is the fastest."""
    title = f"Speed against dense: {d / 1e6:g} million elements, {1000 * machine.compute:g} ms of compute a step"
    table = Table("link", title=title)
    for heading in ("ranks", *TRAFFIC, "fastest", "share of no exchange"):
        table.add_column(heading, justify="right")
    for (link, rate), n in product(LINKS.items(), SCALES):
        seconds = {method: machine.step(method, d, n, rate) for method in TRAFFIC}
        best = min(seconds, key=seconds.__getitem__)
        speeds = (f"{seconds['dense'] / s:.2f}" for s in seconds.values())
        table.add_row(link, str(n), *speeds, best, f"{machine.compute / seconds[best]:.0%}")
    return table


def make_plot(machine: Machine, d: float) -> Figure:
    figure = Figure(figsize=(11, 8), layout="constrained")
    for axes, (link, rate) in zip(figure.subplots(2, 2).flat, LINKS.items(), strict=True):
        ranks = [2**i for i in range(1, 11)]
        for method in TRAFFIC:
            axes.plot(ranks, [machine.compute / machine.step(method, d, n, rate) for n in ranks], label=method)
        axes.set(title=link, xlabel="ranks", ylabel="share of the speed without exchange", xscale="log", ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    return figure


def main(
    reduced: Annotated[bool, typer.Option("--reduced", help="Up to 32 ranks, fewer elements.")] = False,
    seed: Annotated[int, typer.Option(help="Of the gradients.")] = 0,
    numel: Annotated[float, typer.Option(help="Elements of the model that is drawn out to 1,024 ranks.")] = 25.6e6,
    compute: Annotated[float, typer.Option(help="Its seconds of compute in a step.")] = 0.1,
    round_s: Annotated[float, typer.Option(help="Seconds of a round: one of Horovod's cycles, and its work.")] = 1.2e-3,
    hop: Annotated[float, typer.Option(help="Seconds that a message takes from one rank to the next.")] = 30e-6,
    network: Annotated[Path | None, typer.Option(exists=True, help="Figures of network.py, to predict.")] = None,
    results: Annotated[Path | None, json_option()] = None,
    plot: Annotated[Path | None, plot_option("Where to plot the model.")] = None,
) -> None:
    """What happens with more ranks."""
    console = Console()
    elements, steps = (100_000, 4) if reduced else (300_000, 5)
    figures: dict[str, Any] = {"selections": []}
    for n in track(
        [n for n in RANKS if n <= (32 if reduced else 256)], "virtual ranks", console=console, transient=True
    ):
        figures["selections"] += select_virtually(n, elements, steps, seed)
        write_json(results, figures, default=asdict, indent=1)
    console.print(table_of_selections(figures["selections"], elements))
    copy, local = measure_local(1_000_000 if reduced else 5_000_000)
    machine = Machine(compute, copy, local, round_s, hop)
    figures["machine"] = machine
    if network:
        figures["predictions"] = list(predict(json.loads(network.read_text())))
        console.print(table_of_predictions(figures["predictions"]))
    write_json(results, figures, default=asdict, indent=1)
    console.print(table_of_scales(machine, numel))
    if plot:
        save_plot(plot, make_plot(machine, numel))


if __name__ == "__main__":
    interrupts.start(main)
