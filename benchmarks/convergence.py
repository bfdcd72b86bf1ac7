"""Does compressed training reach the quality of dense training, and what does it send on the way?

    python benchmarks/convergence.py                    # four ranks on this machine, three seeds
    python benchmarks/convergence.py --reduced          # fewer steps, methods and seeds
    python benchmarks/convergence.py --step-times results/step_times.json
    python benchmarks/convergence.py --help

A language model and a convolutional network (lstm-small and conv of workloads.py) are trained with each compression,
for the same number of steps, with the same hyperparameters. The target is dense training's mean final quality, within
5 % in perplexity or 1 point in accuracy. The time to it on a slow link is the steps to it times the time of a step on
that link, which network.py measures: `--step-times` takes it, as {workload: {method: seconds}}.
"""

from __future__ import annotations

import interrupts

# isort: split
import hashlib
import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from launch import launch
from matplotlib.figure import Figure
from outputs import check_plot, json_option, save_plot, write_json
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn.utils import parameters_to_vector
from workloads import METHODS, make_workload

hvd: Any = import_module("horovod_sparse.torch")  # Any, for mypy does not see what it offers of horovod.torch

RANKS = 4
WARM_UP = 0.05  # the share of the steps in which the learning rate rises
EVALUATIONS = 16  # in a run
TOLERANCE = {"perplexity": 5.0, "accuracy": 1.0}  # of the target: per cent, points


class Plan(NamedTuple):
    """What to train: all combinations, the methods in turn."""

    seeds: Sequence[int]
    steps: dict[str, int]
    """For each workload."""
    methods: Sequence[str]


FULL = Plan([0, 1, 2], {"lstm-small": 4000, "conv": 1000}, list(METHODS))
REDUCED = Plan([0], {"lstm-small": 1200, "conv": 600}, ["none", "micro 0.01", "micro 0.001", "a2sgd"])


@dataclass
class Run:
    """One training, as far as it has got. The lists have an entry for each evaluation."""

    workload: str
    method: str
    seed: int
    metric: str = ""
    bytes_per_step: float = 0.0
    """What a rank has handed to Horovod, on average; with A2SGD's averaging of the parameters."""
    steps: list[int] = field(default_factory=list)
    quality: list[float] = field(default_factory=list)


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Up to the peak along a straight line, then down to nothing along a cosine."""
    top = WARM_UP * steps
    return peak * min((step + 1) / top, (1 + math.cos(math.pi * max(step - top, 0) / (steps - top))) / 2)


def train(run: Run, steps: int) -> Iterator[None]:
    """Train on this rank; yields at each evaluation, where rank 0 has brought `run` up to date.

    Raises:
        RuntimeError: the ranks have not ended with the same parameters.
    """
    workload = make_workload(run.workload, hvd.rank(), hvd.size(), run.seed)
    parameters = list(workload.model.parameters())
    optimizer: Any = hvd.DistributedOptimizer(
        workload.optimizer, workload.model.named_parameters(), compression=METHODS[run.method](hvd)
    )
    dense_bytes = 4 * sum(p.numel() for p in parameters)
    of_horovod = {"none": dense_bytes, "fp16": dense_bytes // 2}
    run.metric = workload.metric
    group = optimizer.param_groups[0]
    peak = group["lr"]
    bytes_sent = 0
    for step in range(steps):
        group["lr"] = learning_rate(peak, step, steps)
        optimizer.zero_grad()
        torch.autograd.backward(workload.loss())
        optimizer.step()
        bytes_sent += of_horovod.get(run.method) or hvd.get_compressor(optimizer).stats.bytes_sent
        if (step + 1) * EVALUATIONS // steps > step * EVALUATIONS // steps:
            if run.method == "a2sgd":
                hvd.get_compressor(optimizer).synchronize_parameters()
            if hvd.rank() == 0:
                run.steps.append(step + 1)
                run.quality.append(workload.evaluate())
                run.bytes_per_step = bytes_sent / (step + 1)
            yield
    digest = hashlib.sha256(parameters_to_vector(parameters).detach().numpy().tobytes()).hexdigest()
    if len(set(hvd.allgather_object(digest, name="digest"))) > 1:
        raise RuntimeError(f"{run.workload}, {run.method}: the ranks have not ended with the same parameters")


def train_all(plan: Plan) -> None:
    """What each rank does. Rank 0 prints a run at each of its evaluations."""
    torch.set_num_threads(1)
    hvd.init()
    for seed, (workload, steps), method in product(plan.seeds, plan.steps.items(), plan.methods):
        run = Run(workload, method, seed)
        for _ in train(run, steps):
            if hvd.rank() == 0:
                print(json.dumps(asdict(run)), flush=True)


def reports_of(plan: Plan) -> Generator[Run, None, None]:
    """Start the ranks; yields what rank 0 reports. The ranks end with the iterator."""
    with closing(launch(RANKS, __file__, environment={"CONVERGENCE_OF": json.dumps(plan)})) as reports:
        for report in reports:
            yield Run(**report)


def gain(quality: float, dense: float, metric: str) -> float:
    """Over dense training's: per cent of its perplexity less, or points of accuracy more."""
    return 100 * (1 - quality / dense) if metric == "perplexity" else 100 * (quality - dense)


def steps_to_target(run: Run, dense: float) -> float:
    """The steps at the first evaluation that meets the target; infinity if none does."""
    least = -TOLERANCE[run.metric]
    met = (s for s, q in zip(run.steps, run.quality, strict=True) if gain(q, dense, run.metric) >= least)
    return next(met, math.inf)


def label(method: str) -> str:
    return "dense" if method == "none" else method


def make_table(workload: str, groups: dict[str, list[Run]], step_times: dict[str, float]) -> Table:
    """A row for each method, over its runs."""
    metric = groups["none"][0].metric
    unit, form = ("%", ".2f") if metric == "perplexity" else ("points", ".2%")
    final = {method: [run.quality[-1] for run in runs] for method, runs in groups.items()}
    dense = fmean(final["none"])
    sent = {method: fmean(run.bytes_per_step for run in runs) for method, runs in groups.items()}
    steps = {method: fmean(steps_to_target(run, dense) for run in runs) for method, runs in groups.items()}

    def with_ratio(value: float, of_dense: float, form: str) -> str:
        if math.isinf(value):
            return "not reached"
        return f"{value:{form}} ({value / of_dense:.3g})"

    def seconds(method: str) -> str:
        if method not in step_times or "none" not in step_times:
            return "n/a"
        return with_ratio(steps[method] * step_times[method], steps["none"] * step_times["none"], ",.0f")

    caption = "in brackets: lowest and highest of the seeds; ratio to dense"
    table = Table("compression", title=f"{workload}, {groups['none'][0].steps[-1]:,} steps", caption=caption)
    for heading in (metric, f"better by, {unit}", "bytes/step", "steps to target", "s to target, 1 Gbit/s"):
        table.add_column(heading, justify="right")
    for method, values in final.items():
        table.add_row(
            label(method),
            f"{fmean(values):{form}} ({min(values):{form}} {max(values):{form}})",
            f"{gain(fmean(values), dense, metric):+.2f}",
            with_ratio(sent[method], sent["none"], ",.0f"),
            with_ratio(steps[method], steps["none"], ",.0f"),
            seconds(method),
        )
    return table


def make_plot(workload: str, groups: dict[str, list[Run]]) -> Figure:
    """The metric over the steps, mean of the seeds."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    dense = groups["none"][0]
    for method, runs in groups.items():
        quality = np.mean([run.quality for run in runs], axis=0)
        axes.plot(dense.steps, quality, "--" if method == "fp16" else "-", label=label(method))  # fp16 covers dense
    axes.set(title=f"{workload}, {RANKS} ranks, mean of {len(groups['none'])} seed(s)", xlabel="step")
    axes.set(ylabel=f"{dense.metric} on held-out data", yscale="log" if dense.metric == "perplexity" else "linear")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def check_names(allowed: Iterable[str], given: list[str] | None) -> list[str]:
    for name in given or []:
        if name not in allowed:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(allowed)}")
    return given or []


def main(
    reduced: Annotated[bool, typer.Option("--reduced", help="One seed, fewer methods and steps.")] = False,
    workload: Annotated[
        list[str] | None, typer.Option(help="Which to train; may be repeated. All, if not given.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="What to compare with dense; may be repeated. All, if not given.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="May be repeated. 0, 1 and 2, if not given.")] = None,
    steps: Annotated[int | None, typer.Option(min=EVALUATIONS, help="Of each run.")] = None,
    step_times: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, help="Seconds a step: {workload: {method: seconds}}.")
    ] = None,
    results: Annotated[Path | None, json_option()] = None,
    plot_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where to plot.")] = Path("results"),
) -> None:
    """Does compressed training reach the quality of dense training, and what does it send on the way?"""
    preset = REDUCED if reduced else FULL
    plan = Plan(
        seed or preset.seeds,
        {name: steps or preset.steps[name] for name in check_names(preset.steps, workload) or preset.steps},
        list(dict.fromkeys(["none", *check_names(METHODS, method)])) if method else preset.methods,
    )
    times: Any = json.loads(step_times.read_text()) if step_times else {}
    if not isinstance(times, dict):
        raise typer.BadParameter(f"{step_times} is not what network.py --step-times writes")
    plots = {name: plot_dir / f"convergence-{name}.png" for name in plan.steps}
    for path in plots.values():
        check_plot(path)
    runs: dict[tuple[str, str, int], Run] = {}
    with Progress() as progress, closing(reports_of(plan)) as reports:
        total = len(plan.seeds) * len(plan.steps) * len(plan.methods) * EVALUATIONS
        task = progress.add_task("starting", total=total)
        for run in reports:
            runs[run.workload, run.method, run.seed] = run
            title = f"{run.workload}, {label(run.method)}, seed {run.seed}: {run.metric} {run.quality[-1]:.4g}"
            progress.update(task, advance=1, description=title)
            # At once, for the run may be interrupted.
            write_json(results, {"ranks": RANKS, "runs": [asdict(run) for run in runs.values()]})
    console = Console()
    for name, path in plots.items():
        groups = {m: [runs[name, m, s] for s in plan.seeds] for m in plan.methods}
        console.print(make_table(name, groups, times.get(name, {})))
        save_plot(path, make_plot(name, groups))
        console.print(f"plot: {path}")


if __name__ == "__main__":
    if "CONVERGENCE_OF" in os.environ:  # one of the ranks
        train_all(Plan(*json.loads(os.environ["CONVERGENCE_OF"])))
    else:
        interrupts.start(main)
