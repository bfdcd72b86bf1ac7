"""Is the advice of `horovod-sparse advise` good? What it recommends, against what is then measured.

    python benchmarks/advice.py            # 2 hosts, links of three speeds, two models; as root: about 8 minutes
    python benchmarks/advice.py --reduced  # one model, in five minutes
    python benchmarks/advice.py --help

On hosts as in network.py, the advisor is given train.py, and rehearses; then the same model is trained on the same link
with each compression, in turns. "Of the best": the measured speed of what was recommended, as a share of the speed of
the fastest that was measured.
"""

from __future__ import annotations

import interrupts

# isort: split
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import horovod.torch as hvd
import torch
import typer
from namespaces import Hosts, make_hosts
from network import LINKS, Cell, Training, choice
from outputs import json_option, write_json
from rich.console import Console
from rich.table import Table
from workloads import METHODS

SETTINGS = {
    "none": "Compression.none",
    "fp16": "Compression.fp16",
    "micro 0.1": "MiCROCompressor(density=0.1)",
    "micro 0.01": "MiCROCompressor(density=0.01)",
    "micro 0.001": "MiCROCompressor(density=0.001)",
    "a2sgd": "A2SGDCompressor",
}
"""What the advisor calls the methods that it knows."""

METHODS["micro 0.1"] = lambda hvd: hvd.MiCROCompressor(density=0.1)
ROUNDS = 4
HERE = Path(__file__).parent


def measure(workload: str, budget: float, out: str) -> None:
    """On each rank: take steps with each method; rank 0 writes the seconds of a step."""
    torch.set_num_threads(1)
    hvd.init()
    trainings = {method: Training(method, workload) for method in METHODS}
    for _ in range(ROUNDS):
        for training in trainings.values():
            if training.spent < budget:
                training.measure(budget / ROUNDS)
    cell = Cell(hvd.size(), "", workload)
    seconds = {method: training.record(cell, 0.0).seconds for method, training in trainings.items()}
    if hvd.rank() == 0:
        Path(out).write_text(json.dumps(seconds))


def run_on(hosts: Hosts, *command: str, **environment: str) -> None:
    """Run a program on all hosts.

    Raises:
        RuntimeError: it failed.
    """
    settings = [word for name, value in environment.items() for word in ("-x", f"{name}={value}")]
    done = subprocess.run([*hosts.mpirun(), *settings, sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def compare(hosts: Hosts, link: str, workload: str, seconds: float, budget: float) -> dict[str, Any]:
    """The advisor's figures, with `measured`: the seconds of a step by method."""
    hosts.set_rate(LINKS[link])
    with TemporaryDirectory() as folder:
        out = str(Path(folder, "advice.json"))
        options = ["--seconds", f"{seconds:g}", "--json", out, str(HERE / "train.py"), workload]
        run_on(hosts, "-m", "horovod_sparse.cli", "advise", *options)
        advice: dict[str, Any] = json.loads(Path(out).read_text())
        run_on(hosts, __file__, ADVICE_OF=json.dumps([workload, budget, out]))
        measured: dict[str, float] = json.loads(Path(out).read_text())
    return {**advice, "link": link, "workload": workload, "measured": measured}


def make_table(result: dict[str, Any]) -> Table:
    """A row for each method."""
    measured: dict[str, float] = result["measured"]
    rehearsed = {candidate["setting"]: candidate["step_s"] for candidate in result["candidates"]}
    best = min(measured.values())
    table = Table(title=f"{result['workload']}, {result['link']}", caption=f"recommended: {result['recommended']}")
    table.add_column("compression", no_wrap=True)
    for heading in ("rehearsed, ms", "measured, ms", "of the best"):
        table.add_column(heading, justify="right")
    for method, seconds in measured.items():
        setting = SETTINGS.get(method, "")
        table.add_row(
            "dense" if method == "none" else method,
            f"{1000 * rehearsed[setting]:,.1f}" if setting in rehearsed else "",
            f"{1000 * seconds:,.1f}",
            f"{best / seconds:.0%}",
            style="bold" if setting == result["recommended"] else None,
        )
    return table


def main(
    link: Annotated[list[str] | None, choice(LINKS, "100M, 1G and 10G")] = None,
    workload: Annotated[list[str] | None, choice(["mlp", "lstm", "lstm-small", "conv"], "mlp and conv")] = None,
    hosts: Annotated[int, typer.Option(min=2, max=250)] = 2,
    reduced: Annotated[bool, typer.Option("--reduced", help="Fewer steps; by default mlp alone.")] = False,
    figures: Annotated[Path | None, json_option()] = None,
) -> None:
    """Is the advice of `horovod-sparse advise` good?"""
    cells = product(workload or (["mlp"] if reduced else ["mlp", "conv"]), link or ["100M", "1G", "10G"])
    seconds, budget = (20.0, 3.0) if reduced else (40.0, 6.0)
    console = Console(highlight=False)
    results: list[dict[str, Any]] = []
    try:
        with make_hosts(hosts) as made:
            for of_workload, of_link in cells:
                with console.status(f"{of_workload}, {of_link}"):
                    results.append(compare(made, of_link, of_workload, seconds, budget))
                write_json(figures, results, indent=1)
                console.print(make_table(results[-1]))
    except RuntimeError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    of_best = []
    for result in results:
        method = next((m for m, setting in SETTINGS.items() if setting == result["recommended"]), None)
        measured = result["measured"]
        of_best.append(f"{min(measured.values()) / measured[method]:.0%}" if method else "too noisy to tell")
    console.print("what was recommended, of the best: " + ", ".join(of_best))


if __name__ == "__main__":
    if "ADVICE_OF" in os.environ:  # one of the ranks
        measure(*json.loads(os.environ["ADVICE_OF"]))
    else:
        interrupts.start(main)
