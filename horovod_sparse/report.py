"""What the logs of `monitor.JSONLines` say: a table, and plots."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.table import Table
from rich.text import Text

from horovod_sparse.core.stats import StepStats

MAY_BE_NONE = ("target_density", "density", "selected", "threshold")


class Log(NamedTuple):
    """The records of a run."""

    name: str
    records: list[dict[str, Any]]

    def values(self, figure: str) -> list[float]:
        """Those of a figure that are there."""
        return [record[figure] for record in self.records if record.get(figure) is not None]


class LogError(ValueError):
    """A file is not a log of `JSONLines`."""


def is_figure(name: str, value: object) -> bool:
    """Whether a record may have this value: a number, or none where a method has none, or it was not taken."""
    if isinstance(value, int | float):
        return not abs(value) > sys.float_info.max or abs(value) == math.inf  # some integers are beyond all floats
    return value is None and (name in MAY_BE_NONE or name not in StepStats._fields)


def read(path: Path) -> Log:
    """The records of a file. A last line that is cut off, by a run that was killed or still goes on, is left out.

    Raises:
        LogError: the file cannot be read, holds no record, or has a line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path}: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not {"time", "method", "world_size", *StepStats._fields} <= record.keys():
                raise ValueError("figures are missing")
            figures = {*StepStats._fields, *(name for plot in PLOTS for name in plot.figures)}
            wrong = [name for name in sorted(figures) if not is_figure(name, record.get(name))]
            if wrong:
                raise ValueError(f"{wrong[0]} is {record[wrong[0]]!r}")
        except (ValueError, AttributeError, RecursionError) as error:
            if number == len(lines):  # no end of a line comes after it
                break
            raise LogError(
                f"{path}, line {number}: {error}: not a record that horovod_sparse.monitor.JSONLines has written. "
                "Give a file that it has written, or take the line out"
            ) from error
        records.append(record)
    if not records:
        raise LogError(
            f"{path} has no records: on a single rank, or before the first step, there are none. Train "
            "on 2 ranks or more"
        )
    return Log(str(path), records)


def make_table(logs: Sequence[Log]) -> Table:
    """A column for each log."""
    table = Table()
    table.add_column("")
    for log in logs:
        table.add_column(Text(log.name), justify="right", overflow="fold")
    summaries = [summary(log) for log in logs]
    for name in summaries[0]:
        table.add_row(name, *(Text(of_log[name]) for of_log in summaries))
    return table


def summary(log: Log) -> dict[str, str]:
    """A run's figures, by name; empty where it has none."""
    last = log.records[-1]
    skipped = sum(record["skipped"] for record in log.records)
    log = log._replace(records=[r for r in log.records if not r["skipped"]] or log.records)
    sent, dense = fmean(log.values("bytes_sent")), fmean(log.values("dense_bytes"))
    return {
        "method": str(last["method"]),
        "ranks": str(last["world_size"]),
        "last step": f"{last['step']:,}",
        "skipped steps": str(skipped),
        "density": percent(log.values("density")),
        "target density": percent(log.values("target_density")),
        "bytes a step": f"{sent:,.0f}",
        "saved": f"{1 - sent / max(dense, 1):.2%}",
        "step": milliseconds(log.values("step_s")),
        "selection": milliseconds(log.values("selection_s")),
        "exchange": milliseconds(log.values("exchange_s")),
    }


def percent(values: Sequence[float]) -> str:
    """Their mean."""
    return f"{fmean(values):.3%}" if values else ""


def milliseconds(seconds: Sequence[float]) -> str:
    """Their median."""
    return f"{1000 * median(seconds):,.2f} ms" if seconds else ""


class Plot(NamedTuple):
    title: str
    figures: Mapping[str, str]
    """What is drawn, and in which style."""


PLOTS = (
    Plot("density, dotted: target", {"density": "-", "target_density": ":"}),
    Plot("threshold", {"threshold": "-"}),
    Plot("bytes sent by a rank in a step", {"bytes_sent": "-"}),
    Plot("norm of rank 0's residual", {"residual_norm": "-"}),
    Plot("seconds: selection", {"selection_s": "-"}),
    Plot("seconds: exchange; dotted: whole step", {"exchange_s": "-", "step_s": ":"}),
)


def curve(log: Log, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a figure; broken where the steps begin again, as another run's do that was appended."""
    steps: list[float] = []
    values: list[float] = []
    for record in log.records:
        if record.get(name) is None:
            continue
        if steps and record["step"] <= steps[-1]:
            steps.append(math.nan)
            values.append(math.nan)
        steps.append(record["step"])
        values.append(record[name])
    return steps, values


def make_plots(logs: Sequence[Log]) -> Figure:
    """A diagram for each figure, over the steps, with a colour for each log."""
    figure = Figure(figsize=(14, 7), layout="constrained")
    for axes, plot in zip(figure.subplots(2, 3).flat, PLOTS, strict=True):
        for i, log in enumerate(logs):
            for name, style in plot.figures.items():
                axes.plot(*curve(log, name), style, color=f"C{i}", lw=1)
        axes.set(title=plot.title, xlabel="step")
        values = [value for log in logs for name in plot.figures for value in log.values(name)]
        if values and 0 < 10 * min(values) < max(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        if not values:
            axes.text(0.5, 0.5, "no such figure in these logs", ha="center", transform=axes.transAxes)
    handles = [Line2D([], [], color=f"C{i}") for i in range(len(logs))]
    figure.legend(handles, [log.name for log in logs], loc="outside lower center", ncols=4)
    return figure
