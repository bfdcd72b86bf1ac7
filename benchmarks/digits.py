"""Train a small network on real handwritten digits with each compression, and compare.

    horovodrun -np 2 python benchmarks/digits.py                    # all compressions, three seeds each
    horovodrun -np 2 python benchmarks/digits.py --framework tensorflow
    horovodrun -np 2 python benchmarks/digits.py --compression micro --density 0.001 --json results/digits.json
    python benchmarks/digits.py --help

The data are scikit-learn's 1797 digits of 8x8 pixels. All compressions share the hyperparameters below. On one or two
ranks, the accuracies are the same in each run; on more, Horovod adds in an order that varies, and rounding with it.
What depends on the framework is in digits_torch.py and digits_tensorflow.py.

horovodrun --gloo hides the terminal from the ranks: TTY_COMPATIBLE=1 in the environment brings the progress bar back.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
import typer
from matplotlib.figure import Figure
from numpy.typing import NDArray
from outputs import json_option, plot_option, save_plot, write_json
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from horovod_sparse.core.step import check_density

FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
LABELS = {"none": "dense", "fp16": "fp16", "topk": "top-k", "qsgd": "QSGD", "micro": "MiCRO", "a2sgd": "A2SGD"}
BATCH_SIZE = 64  # over all ranks
LEARNING_RATE = 0.1  # the peak of its schedule
MOMENTUM = 0.9


class Choice(NamedTuple):
    """What the command line asks for."""

    framework: str
    compressions: Sequence[str]
    seeds: Sequence[int]
    density: float
    epochs: int
    results: Path | None
    plot: Path


@dataclass
class Digits:
    """Images of shape (N, 1, 8, 8), with values in [0, 1], and the digits that they show."""

    images: NDArray[np.float32]
    digits: NDArray[np.int64]


class Trainer(Protocol):
    """A network, and what trains it. Making one is up to all ranks; it has the same parameters on all of them.

    Args:
        seed: for all that is random on this rank.
        momentum: of stochastic gradient descent.
        compression: Horovod's, or ours.
    """

    optimizer: Any
    """What Horovod's `DistributedOptimizer` made."""

    def __init__(self, seed: int, momentum: float, compression: Any) -> None: ...

    def shuffled(self, n: int) -> NDArray[np.int64]:
        """The numbers from 0 to n - 1, in random order."""

    def step(self, images: NDArray[np.float32], digits: NDArray[np.int64], learning_rate: float) -> float:
        """Train on this rank's batch. Returns its loss."""

    def parameters(self) -> NDArray[np.float32]:
        """All parameters, in one vector."""

    def predict(self, images: NDArray[np.float32]) -> NDArray[np.int64]:
        """The digits that the trained network sees."""


class Framework(Protocol):
    """What digits_torch and digits_tensorflow offer."""

    hvd: Any
    """Our drop-in for Horovod."""
    Trainer: type[Trainer]


@dataclass
class Run:
    """One training. The lists have an entry for each step; None where nothing was exchanged, or selected."""

    compression: str
    seed: int
    accuracy: float = 0.0
    loss: list[float] = field(default_factory=list)
    density: list[float | None] = field(default_factory=list)
    bytes_sent: list[int | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def load_data(rank: int, size: int) -> tuple[Digits, Digits]:
    """This rank's shard of the training set, of the same size on all ranks, and the whole test set."""
    images, digits = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype(np.float32) / 16
    train_images, test_images, train_digits, test_digits = train_test_split(
        images, digits, test_size=0.25, random_state=0, stratify=digits
    )
    n = len(train_digits) // size
    shard = slice(rank * n, (rank + 1) * n)
    return Digits(train_images[shard], train_digits[shard]), Digits(test_images, test_digits)


def learning_rate(step: int, steps: int) -> float:
    """One cycle, of cosines: from 1/25 of the peak up to it in a tenth of the steps, then down to almost nothing."""
    start, end = LEARNING_RATE / 25, LEARNING_RATE / 25e4
    top = 0.1 * steps - 1
    if step <= top:
        return LEARNING_RATE + (start - LEARNING_RATE) / 2 * (1 + math.cos(math.pi * step / top))
    return end + (LEARNING_RATE - end) / 2 * (1 + math.cos(math.pi * (step - top) / (steps - 1 - top)))


def train(
    run: Run, choice: Choice, framework: Framework, training: Digits, test: Digits, advance: Callable[[], None]
) -> None:
    """Train a network and fill in `run`, the same on all ranks but for its times; call `advance` after each epoch.

    Raises:
        RuntimeError: the ranks have not ended with the same parameters.
    """
    hvd = framework.hvd
    compression = getattr(hvd.Compression, run.compression)
    if run.compression in ("micro", "topk"):
        compression = compression(choice.density)
    trainer = framework.Trainer(hvd.size() * run.seed + hvd.rank(), MOMENTUM, compression)
    dense_bytes = trainer.parameters().nbytes

    def sent() -> tuple[float | None, int | None]:
        """In the last step: the share of the gradient's elements, and the bytes that this rank handed to Horovod."""
        if hvd.size() == 1:
            return None, None
        if run.compression in ("none", "fp16"):
            return 1.0, dense_bytes // (2 if run.compression == "fp16" else 1)
        stats = hvd.get_compressor(trainer.optimizer).stats
        return stats.density, stats.bytes_sent

    batch_size = max(BATCH_SIZE // hvd.size(), 1)
    steps_per_epoch = len(training.digits) // batch_size
    for _ in range(choice.epochs):
        order = trainer.shuffled(len(training.digits))
        for batch in order[: steps_per_epoch * batch_size].reshape(-1, batch_size):
            rate = learning_rate(len(run.loss), choice.epochs * steps_per_epoch)
            start = time.perf_counter()
            loss = trainer.step(training.images[batch], training.digits[batch], rate)
            run.seconds.append(time.perf_counter() - start)
            step_density, bytes_sent = sent()
            run.loss.append(loss)
            run.density.append(step_density)
            run.bytes_sent.append(bytes_sent)
        advance()
    run.loss = np.mean(hvd.allgather_object(run.loss, name="loss"), axis=0).tolist()

    if run.compression == "a2sgd":
        hvd.get_compressor(trainer.optimizer).synchronize_parameters()
        run.bytes_sent[-1] = sent()[1]
    of_ranks = hvd.allgather_object(trainer.parameters().tobytes(), name="parameters")
    if any(of_rank != of_ranks[0] for of_rank in of_ranks):
        raise RuntimeError(f"{LABELS[run.compression]}: the ranks have not ended with the same parameters")
    run.accuracy = float(np.mean(trainer.predict(test.images) == test.digits))


def make_table(runs: dict[str, list[Run]]) -> Table:
    """A row for each compression, over its runs."""

    def mean(runs: list[Run], name: str) -> float | None:
        values = [value for run in runs for value in getattr(run, name)]
        return None if None in values else fmean(values)

    def text(value: float | None, form: str) -> str:
        return "n/a" if value is None else format(value, form)

    accuracy = {name: fmean(run.accuracy for run in group) for name, group in runs.items()}
    seconds = {name: median(s for run in group for s in run.seconds) for name, group in runs.items()}
    table = Table("compression", caption="bytes: handed to Horovod by a rank; A2SGD's, with its parameter averaging")
    for heading in ("accuracy", "vs dense", "density", "bytes/step", "ms/step", "speed"):
        table.add_column(heading, justify="right")
    for name, group in runs.items():
        table.add_row(
            LABELS[name],
            f"{accuracy[name]:.2%}",
            text(100 * (accuracy[name] - accuracy["none"]) if "none" in runs else None, "+.2f"),
            text(mean(group, "density"), ".2%"),
            text(mean(group, "bytes_sent"), ",.0f"),
            f"{1000 * seconds[name]:.2f}",
            text(seconds["none"] / seconds[name] if "none" in runs else None, ".2f"),
        )
    return table


def make_plot(runs: dict[str, list[Run]], choice: Choice, ranks: int) -> Figure:
    """Loss and density over the steps: means over the seeds, the loss smoothed over an epoch."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    title = f"Handwritten digits in {FRAMEWORKS[choice.framework]}"
    figure.suptitle(f"{title}, on {ranks} rank(s), mean of {len(choice.seeds)} seed(s)")
    losses, densities = figure.subplots(1, 2, sharex=True)
    for name, group in runs.items():
        loss = np.mean([run.loss for run in group], axis=0)
        epoch = len(loss) // choice.epochs
        smooth = np.convolve(loss, np.full(epoch, 1 / epoch), "valid")
        style = {"label": LABELS[name], "linestyle": "--" if name == "fp16" else "-"}  # fp16 covers dense
        losses.plot(np.arange(epoch, len(loss) + 1), smooth, **style)
        if None not in group[0].density:
            density = np.array([run.density for run in group], float).mean(axis=0)
            densities.plot(np.arange(1, len(density) + 1), density, **style)
    if "micro" in runs:
        densities.axhline(choice.density, color="black", linestyle=":", label=f"MiCRO's target: {choice.density:g}")
    losses.set(title="Loss", xlabel="step", ylabel="training loss, mean over an epoch", yscale="log")
    densities.set(
        title="Density (A2SGD and QSGD select no elements)",
        xlabel="step",
        ylabel="share of the gradient's elements sent",
        yscale="log",
    )
    for axes in (losses, densities):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    return figure


def checked_density(density: float) -> float:
    try:
        check_density(density)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return density


app = typer.Typer(add_completion=False)


@app.command(help=(__doc__ or "").split("\n")[0])
def choose(
    framework: Annotated[Literal["torch", "tensorflow"], typer.Option(help="What to train in.")] = "torch",
    compression: Annotated[
        Literal["none", "fp16", "topk", "qsgd", "micro", "a2sgd", "all"], typer.Option(help="What to train with.")
    ] = "all",
    density: Annotated[float, typer.Option(callback=checked_density, help="MiCRO's and top-k's.")] = 0.01,
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32, help="A single seed, instead of 0, 1 and 2.")] = None,
    results: Annotated[Path | None, json_option()] = None,
    plot: Annotated[Path, plot_option("Where to plot loss and density.")] = Path("results/digits.png"),
) -> Choice:
    compressions = list(LABELS) if compression == "all" else [compression]
    return Choice(framework, compressions, [0, 1, 2] if seed is None else [seed], density, epochs, results, plot)


def read_command_line() -> Choice | int:
    """What to do, or with which status to exit."""
    try:
        choice: Choice | int = app(standalone_mode=False)
    except typer.TyperException as error:
        print(f"Error: {error.format_message()}", file=sys.stderr, flush=True)
        return 2
    return choice


def load_framework() -> Framework:
    """The one that the command line asks for: needed before all else, for Horovod comes with it."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--framework", nargs="?")
    asked_for = parser.parse_known_args()[0].framework
    # Any one will do for telling the others that there is no such framework.
    module: Any = import_module(f"digits_{asked_for if asked_for in FRAMEWORKS else 'torch'}")
    return module


def write(path: Path | None, choice: Choice, ranks: int, runs: dict[str, list[Run]]) -> None:
    """Write what there is so far."""
    settings = {"framework": choice.framework, "ranks": ranks, "density": choice.density, "epochs": choice.epochs}
    write_json(path, {**settings, "runs": [asdict(run) for of_compression in runs.values() for run in of_compression]})


def compare(choice: Choice, framework: Framework) -> None:
    """Train with each compression and seed, and show the results."""
    hvd = framework.hvd
    training, test = load_data(hvd.rank(), hvd.size())
    runs: dict[str, list[Run]] = {compression: [] for compression in choice.compressions}
    console = Console(highlight=False, quiet=hvd.rank() > 0)
    with Progress(console=console, refresh_per_second=4) as progress:
        task = progress.add_task("", total=len(choice.compressions) * len(choice.seeds) * choice.epochs)
        # The compressions take turns, so that a slow spell of the machine does not hit one alone.
        for seed, compression in product(choice.seeds, choice.compressions):
            run = Run(compression, seed)
            title = f"{LABELS[compression]}, seed {seed}"
            progress.update(task, description=title)
            train(run, choice, framework, training, test, advance=lambda: progress.advance(task))
            runs[compression].append(run)
            if hvd.rank() == 0:
                write(choice.results, choice, hvd.size(), runs)
            console.print(f"{title}: test accuracy {run.accuracy:.2%}")
    if hvd.rank() > 0:
        return
    console.print(make_table(runs))
    save_plot(choice.plot, make_plot(runs, choice, hvd.size()))
    console.print(f"plot: {choice.plot}")
    if choice.results:
        console.print(f"figures: {choice.results}")


def main() -> int:
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):  # on Ctrl-C, launchers send the ranks SIGTERM
        signal.signal(number, interrupt)
    try:
        framework = load_framework()
        hvd = framework.hvd
        hvd.init()
        choice = hvd.broadcast_object(read_command_line() if hvd.rank() == 0 else None, name="choice")
        if isinstance(choice, int):
            return choice
        compare(choice, framework)
    except (KeyboardInterrupt, Exception):  # where another rank has left already, Horovod fails: no news after Ctrl-C
        if not interrupted:
            raise
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
