"""How fast each compression trains over slow links, and what it really sends.

    python benchmarks/network.py            # 2 and 4 hosts, four links, two models; as root: about 25 minutes
    python benchmarks/network.py --reduced  # in two minutes
    python benchmarks/network.py --help

The hosts are network namespaces on this machine, with one rank, of one thread, on each (see namespaces.py). In each
cell of the comparison, that is hosts, link and model, the compressions take turns, in blocks of steps; and so do steps
without any exchange, in the same processes. Take the ratios, not the times. On the fastest links, the processor is the
limit: it also does the work of the network.

What a rank sends is counted at its interface, less what an idle Horovod sends in the same time. The payload is what the
rank hands to Horovod. Expected of it is what rings send: 2 (n - 1) / n times what is allreduced, n - 1 times what is
allgathered. A2SGD's figures include their share of averaging the parameters, once in 100 steps.
"""

from __future__ import annotations

import interrupts

# isort: split
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryFile
from typing import Annotated, Any, NamedTuple

import horovod.torch as hvd
import torch
import typer
from launch import objects
from matplotlib.figure import Figure
from namespaces import Hosts, bytes_sent, make_hosts
from outputs import check_output, json_option, plot_option, save_plot, write_json
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from workloads import METHODS, make_workload

import horovod_sparse.torch as ours

LINKS = {"100M": 100e6, "1G": 1e9, "10G": 10e9, "unlimited": None}  # bits per second
WORKLOADS = ["mlp", "lstm", "lstm-small", "conv"]
ALONE = "no exchange"
LABELS = {ALONE: ALONE, **{method: "dense" if method == "none" else method for method in METHODS}}

ROUNDS = 3
BUDGET_S, REDUCED_BUDGET_S = 4.0, 2.0  # for a method in a cell
MIN_STEPS, MAX_STEPS = 5, 20  # of a block
SLOW_S, SLOW_STEPS = 3.0, 2  # where a step takes so long, a block has so few
SYNC_EVERY = 100  # A2SGD's default, and more than the steps taken here: what averaging costs is measured by itself


class Cell(NamedTuple):
    hosts: int
    link: str
    workload: str


@dataclass
class Record:
    """A method in a cell, as far as it has been measured. All bytes are those of a step, means over the ranks."""

    hosts: int
    link: str
    workload: str
    method: str
    steps: int
    seconds: float
    """Of a step: the median over steps and ranks."""
    interface_bytes: float
    idle_bytes: float
    """Of `interface_bytes`, what an idle Horovod sends in the time of a step."""
    payload_bytes: float
    expected_bytes: float


Results = dict[Cell, dict[str, Record]]  # by cell and method


class Block(NamedTuple):
    """Steps in a row on one rank."""

    seconds: list[float]
    duration: float
    interface_bytes: int


class Training:
    """A method at work on this rank. All ranks call all functions, in the same order.

    Attributes:
        spent: about how many seconds have been measured, the same on all ranks.
    """

    def __init__(self, method: str, workload: str) -> None:
        self.method = method
        self.spent = 0.0
        self._workload = make_workload(workload, hvd.rank(), hvd.size(), seed=0)
        self._dense_bytes = sum(p.nbytes for p in self._workload.model.parameters())
        self._optimizer: Any = self._workload.optimizer
        if method != ALONE:
            named = [(f"{method}.{name}", p) for name, p in self._workload.model.named_parameters()]
            self._optimizer = hvd.DistributedOptimizer(self._optimizer, named, compression=METHODS[method](ours))
        compressed = method not in (ALONE, "none", "fp16")
        self._compressor: Any = ours.get_compressor(self._optimizer) if compressed else None
        self._blocks: list[Block] = []  # of all ranks
        self._payloads: list[tuple[float, float]] = []  # of each step on this rank: allreduced, allgathered
        self._step()  # the ranks meet, numba compiles
        self._averaging: list[Block] = []
        if method == "a2sgd":
            self._averaging = run_block(ours.get_compressor(self._optimizer).synchronize_parameters, 1)

    def measure(self, budget: float) -> None:
        """Take some steps to warm up, then a block that lasts about `budget` seconds."""
        seconds = self._step_seconds()
        steps = SLOW_STEPS
        if seconds < SLOW_S:
            self._step()
            seconds = self._step_seconds()
            steps = min(max(int(budget / seconds), MIN_STEPS), MAX_STEPS)
        self._blocks += run_block(self._step_and_note, steps)
        self._optimizer.zero_grad()  # the gradients of all methods need not be in memory at once
        self.spent += seconds * (steps + 1)

    def bytes_per_s(self) -> float:
        """What a rank has sent."""
        return sum(b.interface_bytes for b in self._blocks) / sum(b.duration for b in self._blocks)

    def record(self, cell: Cell, idle_bytes_per_s: float) -> Record:
        """What all ranks have measured so far."""
        seconds = [s for block in self._blocks for s in block.seconds]
        step_s = median(seconds)
        mean_s = sum(b.duration for b in self._blocks) / len(seconds)
        interface_bytes = self.bytes_per_s() * mean_s
        allreduced, allgathered = map(fmean, zip(*hvd.allgather_object(self._mean_payload()), strict=True))
        if self._averaging:
            step_s += fmean(b.duration for b in self._averaging) / SYNC_EVERY
            interface_bytes += fmean(b.interface_bytes for b in self._averaging) / SYNC_EVERY
            allreduced += self._dense_bytes / SYNC_EVERY
        n = cell.hosts
        return Record(
            *cell,
            method=self.method,
            steps=len(seconds) // n,
            seconds=step_s,
            interface_bytes=interface_bytes,
            idle_bytes=idle_bytes_per_s * mean_s,
            payload_bytes=allreduced + allgathered,
            expected_bytes=2 * (n - 1) / n * allreduced + (n - 1) * allgathered,
        )

    def _mean_payload(self) -> tuple[float, float]:
        allreduced, allgathered = map(fmean, zip(*self._payloads, strict=True))
        return allreduced, allgathered

    def _step(self) -> None:
        self._optimizer.zero_grad()
        torch.autograd.backward(self._workload.loss())
        self._optimizer.step()

    def _step_seconds(self) -> float:
        """How long a step takes on rank 0."""
        start = time.perf_counter()
        self._step()
        seconds: float = hvd.broadcast_object(time.perf_counter() - start, name="seconds")
        return seconds

    def _step_and_note(self) -> None:
        """Take a step, and note its payload.

        Raises:
            RuntimeError: the gradients were not finite, so that nothing was sent.
        """
        self._step()
        if self._compressor is None:
            factor = {ALONE: 0.0, "none": 1.0, "fp16": 0.5}[self.method]
            self._payloads.append((factor * self._dense_bytes, 0.0))
            return
        stats = self._compressor.stats
        if stats.skipped:
            raise RuntimeError(f"{self.method}: the gradients are not finite")
        allreduced = float(stats.bytes_sent)
        if self.method != "a2sgd":  # a token for each tensor, and the numbers of the first round; MiCRO's values
            micro = self.method.startswith("micro")
            allreduced = 4 * (len(list(self._workload.model.parameters())) + (14 if micro else 3))
            allreduced += (2 if "fp16" in self.method else 4) * stats.selected if micro else 0
        self._payloads.append((allreduced, stats.bytes_sent - allreduced))


def run_block(step: Callable[[], None], steps: int) -> list[Block]:
    """Take steps on all ranks at once; returns the blocks of all ranks."""
    hvd.barrier()
    sent_before, start = bytes_sent(), time.perf_counter()
    seconds = []
    for _ in range(steps):
        before = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - before)
    duration = time.perf_counter() - start
    hvd.barrier()  # until then, what was sent may still be on its way
    blocks: list[Block] = hvd.allgather_object(Block(seconds, duration, bytes_sent() - sent_before), name="block")
    return blocks


def measure(cell: Cell, budget: float) -> Iterator[Record]:
    """On each rank: yields the record of a method each time after its turn."""
    torch.set_num_threads(1)
    hvd.init()
    trainings = [Training(method, cell.workload) for method in LABELS]
    alone = trainings[0]
    for _ in range(ROUNDS):
        for training in trainings:
            if training.spent < budget:
                training.measure(budget / ROUNDS)
            yield training.record(cell, alone.bytes_per_s())


def run_cell(hosts: Hosts, cell: Cell, budget: float) -> Iterator[Record]:
    """`measure` on all hosts; what rank 0 yields.

    Raises:
        RuntimeError: it failed.
    """
    ranks = f"NETWORK_OF={json.dumps([cell, budget])}"
    command = [*hosts.mpirun(), "-x", ranks, sys.executable, __file__]
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout
        try:
            for record in objects(process.stdout):
                yield Record(**record)
        except BaseException:
            process.terminate()
            raise
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"{cell}: {errors.read()}")


def make_table(cell: Cell, records: dict[str, Record]) -> Table:
    """A row for each method."""
    table = Table(
        title=f"{cell.workload}, {cell.hosts} hosts, {cell.link}",
        caption="share: of the speed without exchange; kB: of a step, from a rank, at its interface, and handed to "
        "Horovod; ratio: of what was sent to what is expected",
    )
    table.add_column("compression", no_wrap=True)
    for heading in ("ms/step", "vs dense", "share", "kB sent", "payload", "ratio"):
        table.add_column(heading, justify="right")
    for method, r in records.items():
        sent = r.interface_bytes - r.idle_bytes
        table.add_row(
            LABELS[method],
            f"{1000 * r.seconds:,.1f}",
            f"{records['none'].seconds / r.seconds:.2f}",
            f"{records[ALONE].seconds / r.seconds:.0%}",
            f"{sent / 1000:,.1f}",
            f"{r.payload_bytes / 1000:,.1f}",
            f"{sent / r.expected_bytes:.2f}" if r.expected_bytes else "",
        )
    return table


def make_plot(results: Results) -> Figure:
    """Speed against dense over the links: one diagram for each number of hosts and model."""
    rows = sorted({cell.hosts for cell in results})
    columns = sorted({cell.workload for cell in results})
    links = [link for link in LINKS if any(cell.link == link for cell in results)]
    figure = Figure(figsize=(5.5 * len(columns), 4 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for (i, hosts), (j, workload) in product(enumerate(rows), enumerate(columns)):
        for method, label in LABELS.items():
            cells = {link: results[c] for link in links if (c := Cell(hosts, link, workload)) in results}
            speeds = [records["none"].seconds / records[method].seconds for records in cells.values()]
            style = "k--" if method == ALONE else "o-"
            axes[i, j].plot(list(cells), speeds, style, label=label)
        axes[i, j].set(
            title=f"{workload}, {hosts} hosts", xlabel="link, bit/s", ylabel="speed, dense = 1", yscale="log"
        )
        axes[i, j].grid(alpha=0.3)
        for axis_format in (axes[i, j].yaxis.set_major_formatter, axes[i, j].yaxis.set_minor_formatter):
            axis_format("{x:g}")
    axes[0, 0].legend()
    return figure


def compare(cells: Sequence[Cell], budget: float, save: Callable[[Results], None]) -> Results:
    """Measure and show all cells. `save` is called with what there is after each, and after an interruption."""
    results: Results = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(highlight=False)) as progress:
        task = progress.add_task("", total=len(cells) * ROUNDS * len(LABELS))
        for n in sorted({cell.hosts for cell in cells}):
            with make_hosts(n) as hosts:
                for cell in (cell for cell in cells if cell.hosts == n):
                    progress.update(task, description=f"{cell.workload}, {n} hosts, {cell.link}")
                    hosts.set_rate(LINKS[cell.link])
                    results[cell] = {}
                    try:
                        for record in run_cell(hosts, cell, budget):
                            results[cell][record.method] = record
                            progress.advance(task)
                    finally:
                        save(results)
                    progress.console.print(make_table(cell, results[cell]))
    return results


def choice(allowed: Iterable[str], default: str) -> Any:
    """A repeatable option."""

    def check(chosen: list[str] | None) -> list[str] | None:
        for name in chosen or []:
            if name not in allowed:
                raise typer.BadParameter(f"{name!r} is none of {', '.join(allowed)}")
        return chosen

    return typer.Option(callback=check, help=f"Any of {', '.join(allowed)}; repeatable. Default: {default}.")


def main(
    hosts: Annotated[list[int] | None, typer.Option(min=2, max=250, help="Repeatable. Default: 2 and 4.")] = None,
    link: Annotated[list[str] | None, choice(LINKS, "all")] = None,
    workload: Annotated[list[str] | None, choice(WORKLOADS, "mlp and lstm")] = None,
    reduced: Annotated[bool, typer.Option("--reduced", help="Fewer steps; by default 2 hosts, 100M, 1G, mlp.")] = False,
    figures: Annotated[Path | None, json_option()] = None,
    step_times: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            callback=check_output,
            help="Where to write the times that convergence.py takes; measures them, too.",
        ),
    ] = None,
    plot: Annotated[Path | None, plot_option("Where to plot the speeds.")] = None,
) -> None:
    """How fast each compression trains over slow links, and what it really sends."""
    choices = (
        hosts or ([2] if reduced else [2, 4]),
        link or (["100M", "1G"] if reduced else list(LINKS)),
        workload or (["mlp"] if reduced else ["mlp", "lstm"]),
    )
    chosen = [Cell(*cell) for cell in product(*choices)]
    small = [Cell(4, "1G", name) for name in ("lstm-small", "conv")] if step_times else []

    def save(results: Results) -> None:
        write_json(figures, [asdict(r) for of_cell in results.values() for r in of_cell.values()], indent=1)
        measured = {cell.workload: of_cell for cell, of_cell in results.items() if cell[:2] == (4, "1G")}
        times = {name: {m: r.seconds for m, r in of_cell.items()} for name, of_cell in measured.items()}
        write_json(step_times, times, indent=1)

    try:
        results = compare(list(dict.fromkeys(chosen + small)), REDUCED_BUDGET_S if reduced else BUDGET_S, save)
    except RuntimeError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if plot:
        save_plot(plot, make_plot({cell: results[cell] for cell in chosen}))


if __name__ == "__main__":
    if "NETWORK_OF" in os.environ:  # one of the ranks
        of_cell, of_budget = json.loads(os.environ["NETWORK_OF"])
        for record in measure(Cell(*of_cell), of_budget):
            if hvd.rank() == 0:
                print(json.dumps(asdict(record)), flush=True)
    else:
        interrupts.start(main)
