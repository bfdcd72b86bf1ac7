"""What an exchange costs in a training step, in PyTorch and in TensorFlow, where the network costs nearly nothing.

    python benchmarks/overhead.py               # two ranks on this machine, both front ends in turn
    python benchmarks/overhead.py --help

An MLP of 5.6 million parameters is trained with no exchange at all, with Horovod's dense one, and with ours. What a
step takes longer than without an exchange is the exchange's cost: Python, copies, selection, and the rounds on one
machine. Take the ratios, not the times.
"""

from __future__ import annotations

import interrupts

# isort: split
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from launch import launch
from outputs import json_option, write_json
from rich.console import Console
from rich.progress import track
from rich.table import Table

SIZES = (784, 2048, 1930, 10)
BATCH_SIZE = 16
FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
LABELS = {"no exchange": "no exchange", "none": "dense", "micro": "MiCRO", "a2sgd": "A2SGD"}
WARM_UP = 3

Step = Callable[[], Any]


def torch_steps() -> Iterator[tuple[str, Step]]:
    """For each compression, a training step."""
    import torch
    from torch import nn

    import horovod_sparse.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    x, y = map(torch.from_numpy, make_batch(hvd.rank()))
    for compression in LABELS:
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(SIZES)]
        model = nn.Sequential(*layers)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.001)
        if compression != "no exchange":
            given = getattr(hvd.Compression, compression)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=given)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        yield compression, step


def tensorflow_steps() -> Iterator[tuple[str, Step]]:
    """For each compression, a training step."""
    import keras
    import tensorflow as tf

    import horovod_sparse.tensorflow as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    batch = tuple(map(tf.constant, make_batch(hvd.rank())))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for compression in LABELS:
        model = keras.Sequential([keras.layers.Input((SIZES[0],)), *(keras.layers.Dense(n, "relu") for n in SIZES[1:])])
        optimizer: Any = keras.optimizers.SGD(0.001)
        if compression != "no exchange":
            optimizer = hvd.DistributedOptimizer(optimizer, compression=getattr(hvd.Compression, compression))
        optimizer.build(model.trainable_variables)

        @tf.function
        def train(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        yield compression, lambda train=train: float(train(*batch))


def make_batch(rank: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rank)
    return rng.standard_normal((BATCH_SIZE, SIZES[0])).astype(np.float32), rng.integers(0, 10, BATCH_SIZE)


def measure(framework: str, steps: int) -> dict[str, float]:
    """The median seconds of a step with each compression, which take turns."""
    every = dict(torch_steps() if framework == "torch" else tensorflow_steps())
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for i in range(WARM_UP + steps):
        for name, step in every.items():
            start = time.perf_counter()
            step()
            if i >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def run(framework: str, steps: int) -> dict[str, float]:
    """`measure`, on two ranks; what rank 0 has measured."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "OVERHEAD_OF": framework}
    results: dict[str, float]
    (results,) = launch(2, __file__, "--steps", str(steps), environment=environment)
    return results


def compare(steps: int, repeats: int, results: Path | None) -> None:
    seconds: dict[str, dict[str, list[float]]] = {f: {name: [] for name in LABELS} for f in FRAMEWORKS}
    for _ in track(range(repeats), "measuring"):
        for framework in FRAMEWORKS:
            for name, value in run(framework, steps).items():
                seconds[framework][name].append(value)
            write_json(results, seconds, indent=1)
    table = Table("ms a step")
    for heading in (*FRAMEWORKS.values(), "cost in PyTorch", "cost in TensorFlow", "ratio of the costs"):
        table.add_column(heading, justify="right")
    for name, label in LABELS.items():
        ms = {framework: 1000 * median(seconds[framework][name]) for framework in FRAMEWORKS}
        costs = {
            framework: ms[framework] - 1000 * median(seconds[framework]["no exchange"]) for framework in FRAMEWORKS
        }
        row = [label, *(f"{value:.1f}" for value in ms.values())]
        if name != "no exchange":
            row += [*(f"{value:.1f}" for value in costs.values()), f"{costs['tensorflow'] / costs['torch']:.2f}"]
        table.add_row(*row)
    Console().print(table)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure in a run.")] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each front end, in turn.")] = 5,
    results: Annotated[Path | None, json_option()] = None,
) -> None:
    """What an exchange costs in a training step, in PyTorch and in TensorFlow."""
    framework = os.environ.get("OVERHEAD_OF")  # one of the ranks
    if framework:
        seconds = measure(framework, steps)
        if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            print(json.dumps(seconds))
    else:
        compare(steps, repeats, results)


if __name__ == "__main__":
    interrupts.start(main)
