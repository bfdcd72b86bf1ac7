"""Live figures: what a compressor does, step by step, in a file, in TensorBoard, or in the terminal.

    monitor = Monitor(get_compressor(optimizer), JSONLines("run.jsonl"), LiveView())
    for batch in data:
        ...
        optimizer.step()
        monitor.step()

All ranks may call it; rank 0 writes. For Keras there is `hvd.callbacks.MonitorCallback`, for trainers of Hugging Face
`horovod_sparse.torch.huggingface.MonitorCallback`. What `JSONLines` has written, `horovod-sparse report` plots.
"""

from __future__ import annotations

import atexit
import json
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from horovod_sparse.core.stats import StepStats
from horovod_sparse.core.step import SettingError

Record = Mapping[str, Any]
"""Figures of one step: `time`, in seconds since 1970, `method`, `world_size`, those of `StepStats`, `bytes_saved`,
`residual_norm`, and `step_s`, the seconds a step has taken since the record before, or None in the first one."""


NOT_FINITE = (float("inf"), -float("inf"))


def check_every(every: int) -> int:
    """Raise SettingError unless it is a number of steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SettingError("every", every, "a whole number of steps >= 1")
    return every


class Sink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """There are no more."""


class Monitor:
    """Sends the figures of a compressor's steps to sinks, on rank 0.

    With process sets, that is the first rank of the compressor's set: give each set files of its own. A sink that
    raises an OSError gets no more records, and a warning says so: training goes on.

    Args:
        compressor: what `get_compressor` returns.
        sinks: `JSONLines`, `TensorBoard`, `LiveView`, or objects of your own with the methods of `Sink`.
        every: after a record, the next one comes so many steps later, or more. Figures are cheap but for the residual's
            norm, for which the whole residual is read.

    Raises:
        SettingError: `every` is not a whole number >= 1.
        TypeError: `compressor` is none.
    """

    def __init__(self, compressor: Any, *sinks: Sink, every: int = 1) -> None:
        self._every = check_every(every)
        if not hasattr(compressor, "stats"):
            kind = type(compressor).__name__
            raise TypeError(f"a Monitor takes a compressor, not an object of {kind}: pass get_compressor(optimizer)")
        self._compressor = compressor
        self._sinks = list(sinks)
        self._last: tuple[int, float] | None = None  # the last record's step, and when it was written

    def step(self) -> None:
        """Call it after each step of the optimizer, on all ranks or on rank 0.

        On a single rank there are no figures, and nothing is written.
        """
        stats: StepStats | None = self._compressor.stats
        rank, world_size = self._compressor.place
        if stats is None or rank != 0:
            return
        now, step_s = time.time(), None
        if self._last:
            steps = stats.step - self._last[0]
            if 0 <= steps < self._every:
                return
            step_s = (now - self._last[1]) / steps if steps > 0 else None
        self._last = stats.step, now
        record = {
            "time": now,
            "method": self._compressor.method,
            "world_size": world_size,
            **stats._asdict(),
            "bytes_saved": stats.bytes_saved,
            "residual_norm": self._compressor.residual_norm(),
            "step_s": step_s,
        }
        for sink in tuple(self._sinks):
            try:
                sink.write(record)
            except OSError as error:  # say, the disk is full: no reason to end a training
                self._sinks.remove(sink)
                warnings.warn(f"{type(sink).__name__}: {error}: no more figures go there", stacklevel=2)

    def close(self) -> None:
        """Close the sinks."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class JSONLines:
    """A file with one line of JSON for each record, written at once; what the file has already is kept.

    Args:
        path: the file. Its directory is made if need be.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def write(self, record: Record) -> None:
        """Append a line; what JSON does not know, NaN and infinity, is null.

        Raises:
            OSError: the file cannot be written.
        """
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", buffering=1, encoding="utf-8")
        finite = {name: None if value in NOT_FINITE or value != value else value for name, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        """Close the file; another record would open it again."""
        if self._file:
            self._file.close()
            self._file = None


class TensorBoard:
    """Scalars `horovod_sparse/density` and so on, in an event file for TensorBoard.

    Args:
        directory: that of the run.
        prefix: of the scalars' names.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, directory: str | Path, prefix: str = "horovod_sparse/") -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise ImportError("TensorBoard needs tensorboardX: pip install tensorboardX") from error
        self._make_writer: Any = lambda: tensorboardX.SummaryWriter(str(directory))
        self._writer: Any = None  # not before rank 0 writes: it makes a file
        self._prefix = prefix

    def write(self, record: Record) -> None:
        """Add a scalar for each figure."""
        self._writer = self._writer or self._make_writer()
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("time", "step"):
                self._writer.add_scalar(self._prefix + name, float(value), record["step"], record["time"])

    def close(self) -> None:
        """Write what is left."""
        if self._writer:
            self._writer.close()
            self._writer = None


class LiveView:
    """A table in the terminal that always shows the last record; where there is no terminal, a line now and then.

    `horovodrun --gloo` hides the terminal from the ranks: TTY_COMPATIBLE=1 in the environment brings the table back.

    Args:
        line_every: seconds from one line to the next, where there is no terminal.
    """

    def __init__(self, line_every: float = 10.0) -> None:
        self._console = Console(highlight=False)
        self._line_every = line_every
        self._next_line = 0.0
        self._live: Live | None = None

    def write(self, record: Record) -> None:
        """Show a record."""
        rows = describe(record)
        if not self._console.is_terminal:
            if record["time"] >= self._next_line:
                self._next_line = record["time"] + self._line_every
                self._console.print(", ".join(f"{name} {text}" for name, text in rows), soft_wrap=True)
            return
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
            self._console.show_cursor()  # which a rank that is killed could not bring back
            atexit.register(self.close)
        table = Table(show_header=False)
        for row in rows:
            table.add_row(*row)
        self._live.update(table)

    def close(self) -> None:
        """Leave the last table on the screen."""
        if self._live:
            self._live.stop()
            self._live = None
            atexit.unregister(self.close)


def describe(record: Record) -> list[tuple[str, str]]:
    """Names and values of a record's figures, for people; those that the method does not have are left out."""
    step_s = "" if record["step_s"] is None else f", {1000 * record['step_s']:,.1f} ms a step"
    rows = [(record["method"], f"step {record['step']:,} on {record['world_size']} ranks{step_s}")]
    if record["skipped"]:
        rows.append(("skipped", "a gradient is not finite"))
    if record["density"] is not None:
        rows.append(("density", f"{record['density']:.3%} (target {record['target_density']:.3%})"))
    if record["threshold"] is not None:
        rows.append(("threshold", f"{record['threshold']:.3g}"))
    saved = record["bytes_saved"] / max(record["dense_bytes"], 1)
    rows.append(("bytes sent", f"{record['bytes_sent']:,} ({saved:.2%} saved)"))
    if record["residual_norm"] is not None:
        rows.append(("residual norm", f"{record['residual_norm']:.4g}"))
    rows.append(("selection", f"{1000 * record['selection_s']:,.2f} ms"))
    rows.append(("exchange", f"{1000 * record['exchange_s']:,.2f} ms"))
    return rows
