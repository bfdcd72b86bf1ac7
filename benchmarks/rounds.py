"""What one of Horovod's collectives takes, and whether it would pay to pad what is exchanged to a size that stays.

    python benchmarks/rounds.py

Two ranks on this machine. Horovod negotiates faster what has the name, type and shape of the step before: it has those
in a cache. MiCRO's indices and values vary in number from step to step. `HOROVOD_CYCLE_TIME` is how often, in
milliseconds, Horovod looks for what there is to do; `HOROVOD_CACHE_CAPACITY=0` turns the cache off.
"""

from __future__ import annotations

import interrupts

# isort: split
import json
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import horovod.torch as hvd
import torch
import typer
from launch import launch
from outputs import json_option, write_json
from rich.console import Console
from rich.progress import track
from rich.table import Table

ENVIRONMENTS: list[dict[str, str]] = [{}, {"HOROVOD_CACHE_CAPACITY": "0"}, {"HOROVOD_CYCLE_TIME": "0.2"}]
VALUES = 56_000  # what MiCRO sends of 5.6 million elements at a density of 0.01
INDEX_BYTES = 31_000
NAP_S = 50e-6  # as in horovod_sparse


def measure(repeats: int) -> dict[str, float]:
    """On each rank: the median seconds of each collective, with a size that stays and with one that varies."""
    torch.set_num_threads(1)
    hvd.init()
    values, indices = torch.ones(VALUES + 8), torch.ones(INDEX_BYTES + 8, dtype=torch.uint8)

    kinds: dict[str, Callable[[str, int], Any]] = {
        "allreduce": lambda name, more: hvd.allreduce_async(values[: VALUES + more], name=name, op=hvd.Sum),
        "allgather": lambda name, more: hvd.allgather_async(indices[: INDEX_BYTES + more], name=name),
    }
    seconds: dict[str, list[float]] = {f"{kind}, {size}": [] for kind, size in product(kinds, ("stays", "varies"))}
    for i in range(repeats):
        for (kind, start), size in product(kinds.items(), ("stays", "varies")):
            hvd.barrier()
            begin = time.perf_counter()
            handle = start(f"{kind}.{size}", i % 7 if size == "varies" else 0)
            while not hvd.poll(handle):
                time.sleep(NAP_S)
            hvd.synchronize(handle)
            seconds[f"{kind}, {size}"].append(time.perf_counter() - begin)
    return {name: median(of_name[repeats // 10 :]) for name, of_name in seconds.items()}


def run(environment: dict[str, str], repeats: int) -> dict[str, float]:
    """`measure` on two ranks; what rank 0 has measured."""
    results: dict[str, float]
    (results,) = launch(2, __file__, environment={**environment, "ROUNDS_OF": str(repeats)})
    return results


def main(
    repeats: Annotated[int, typer.Option(min=10, help="Of each collective, in a run.")] = 200,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each setting, in turn.")] = 3,
    results: Annotated[Path | None, json_option()] = None,
) -> None:
    """What one of Horovod's collectives takes, and whether it would pay to pad what is exchanged."""
    figures: list[list[dict[str, float]]] = [[] for _ in ENVIRONMENTS]
    console = Console()
    for i in track(list(range(len(ENVIRONMENTS))) * runs, "measuring", console=console, transient=True):
        figures[i].append(run(ENVIRONMENTS[i], repeats))
        write_json(results, [{"settings": s, "runs": f} for s, f in zip(ENVIRONMENTS, figures, strict=True)], indent=1)
    table = Table("settings of Horovod", caption="ms; in brackets: ratio to the size that stays")
    for kind, size in product(("allreduce", "allgather"), ("stays", "varies")):
        table.add_column(f"{kind}, size {size}", justify="right")
    for environment, of_environment in zip(ENVIRONMENTS, figures, strict=True):
        ms = {name: 1000 * median(f[name] for f in of_environment) for name in of_environment[0]}
        cells = []
        for kind in ("allreduce", "allgather"):
            stays, varies = ms[f"{kind}, stays"], ms[f"{kind}, varies"]
            cells += [f"{stays:.2f}", f"{varies:.2f} ({varies / stays:.2f})"]
        table.add_row(" ".join(f"{k}={v}" for k, v in environment.items()) or "default", *cells)
    console.print(table)


if __name__ == "__main__":
    if "ROUNDS_OF" in os.environ:  # one of the ranks
        measured = measure(int(os.environ["ROUNDS_OF"]))
        if hvd.rank() == 0:
            print(json.dumps(measured))
    else:
        interrupts.start(main)
