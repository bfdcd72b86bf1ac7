"""A reduced set of all benchmarks, in under 15 minutes, and one report of them: results/report.md.

    make bench
    python benchmarks/bench.py

The emulated network needs root; without it, what depends on it is left out, and the report says so.
"""

from __future__ import annotations

import interrupts

# isort: split
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import typer
from outputs import check_output, whole
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

import horovod_sparse

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
WIDTH = 120


class Benchmark(NamedTuple):
    title: str
    script: str
    options: list[str]
    plots: list[str]
    needs_root: bool = False


def benchmarks() -> Iterator[Benchmark]:
    """In the order in which one needs what another has measured; each is made once those before it have run."""
    yield Benchmark("Local cost", "kernels.py", ["--reduced", "--json", "results/kernels.json"], [])
    network = {"--json": "network.json", "--step-times": "step_times.json", "--plot": "network.png"}
    links = [word for link in ("100M", "1G", "unlimited") for word in ("--link", link)]
    outputs = [word for option, name in network.items() for word in (option, f"results/{name}")]
    yield Benchmark("Slow links", "network.py", ["--reduced", *links, *outputs], ["network.png"], needs_root=True)
    measured = ["--network", "results/network.json"] if (RESULTS / "network.json").exists() else []
    outputs = ["--json", "results/scaling.json", "--plot", "results/scaling.png"]
    yield Benchmark("Scale", "scaling.py", ["--reduced", *measured, *outputs], ["scaling.png"])
    step_times = ["--step-times", "results/step_times.json"] if (RESULTS / "step_times.json").exists() else []
    plots = ["convergence-lstm-small.png", "convergence-conv.png"]
    yield Benchmark(
        "Quality", "convergence.py", ["--reduced", *step_times, "--json", "results/convergence.json"], plots
    )


def run(benchmark: Benchmark, console: Console) -> str:
    """What the benchmark prints, and whether it has failed."""
    command = [sys.executable, str(HERE / benchmark.script), *benchmark.options]
    environment = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONUNBUFFERED": "1"}
    lines = []
    with subprocess.Popen(
        command,
        cwd=HERE.parent,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # on Ctrl-C, it is ended once, from here
    ) as process:
        assert process.stdout
        try:
            with Progress(
                TextColumn(benchmark.title), TimeElapsedColumn(), console=console, transient=True
            ) as progress:
                progress.add_task("")
                for line in process.stdout:
                    lines.append(line)
                    console.print(line, end="", markup=False, highlight=False)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        lines.append(f"\nThis benchmark failed with status {process.returncode}.\n")
    return "".join(lines).strip()


def section(benchmark: Benchmark, output: str, minutes: float) -> str:
    command = f"python benchmarks/{benchmark.script} {' '.join(benchmark.options)}"
    plots = "".join(f"\n![{plot}]({plot})\n" for plot in benchmark.plots if (RESULTS / plot).exists())
    return f"\n## {benchmark.title}\n\n    {command}\n\n{minutes:.1f} minutes.\n\n```text\n{output}\n```\n{plots}"


def main() -> None:
    """Run a reduced set of all benchmarks, and write one report."""
    console = Console(width=WIDTH)
    root = os.geteuid() == 0
    report = RESULTS / "report.md"
    check_output(report)
    for name in ("network.json", "step_times.json", "network.png"):  # another run's would tell of other times
        (RESULTS / name).unlink(missing_ok=True)
    text = f"# horovod_sparse {horovod_sparse.__version__}: benchmarks, reduced\n\n"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    text += f"{time.strftime('%Y-%m-%d')}, {machine}.\n"
    failed = False
    for benchmark in benchmarks():
        console.rule(benchmark.title)
        start = time.monotonic()
        if benchmark.needs_root and not root:
            output = "Left out: it needs root, for network namespaces."
            console.print(output)
        else:
            output = run(benchmark, console)
        failed |= "This benchmark failed" in output
        text += section(benchmark, output, (time.monotonic() - start) / 60)
        with whole(report) as part:  # at once, for the run may be interrupted
            part.write_text(text)
    console.print(f"report: {report.relative_to(HERE.parent)}")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    interrupts.start(main)
