"""Train one of the benchmarks' models, as a user's script would: for `horovod-sparse advise`.

horovodrun -np 2 python benchmarks/train.py mlp
horovodrun -np 2 horovod-sparse advise benchmarks/train.py mlp
"""

from __future__ import annotations

import interrupts

# isort: split
from typing import Annotated

import horovod.torch as hvd
import typer
from workloads import make_workload


def main(
    workload: Annotated[str, typer.Argument(help="mlp, conv, lstm or lstm-small")],
    steps: Annotated[int, typer.Option(min=1)] = 100,
) -> None:
    """Train one of the benchmarks' models."""
    hvd.init()
    training = make_workload(workload, hvd.rank(), hvd.size(), seed=0)
    optimizer = hvd.DistributedOptimizer(training.optimizer, training.model.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        training.loss().backward()
        optimizer.step()


if __name__ == "__main__":
    interrupts.start(main)
