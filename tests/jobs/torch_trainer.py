"""Trains a small model in PyTorch, elastically or not; see worker.py for what the tests make of it."""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import torch
import worker

import horovod_sparse.torch as hvd

COMPRESSIONS: dict[str, Any] = {
    "none": lambda: hvd.Compression.none,
    "micro": lambda: hvd.MiCROCompressor(density=0.05),
    "a2sgd": lambda: hvd.A2SGDCompressor(sync_every=5),
}

torch.set_num_threads(1)
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=COMPRESSIONS[worker.settings["compression"]](),
)
compressor = None if worker.settings["compression"] == "none" else hvd.get_compressor(optimizer)


def log(event: str, state: Any) -> None:
    arrays = [p.detach().numpy() for p in model.parameters()]
    place = {"world": state.world, "rank": hvd.rank(), "size": hvd.size(), "batch": state.batch}
    worker.log(event, **place, digest=worker.digest(arrays), **worker.figures(compressor))


def train(state: Any) -> None:
    state.world += 1
    log("start", state)
    for trained in count():
        worker.harm("anywhere", state.world, hvd.rank(), trained)
        inputs, outputs = map(torch.from_numpy, worker.batch_for(hvd.rank(), state.batch))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), outputs).backward()
        worker.harm("before step", state.world, hvd.rank(), trained)
        optimizer.step()
        log("step", state)
        state.batch += 1
        if worker.finished(state.world, state.batch, trained):
            return
        if state.batch % worker.COMMIT_EVERY == 0:
            if isinstance(compressor, hvd.A2SGDCompressor):
                compressor.synchronize_parameters()
            log("commit", state)
            state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, world=0)
if worker.settings["elastic"]:
    hvd.elastic.run(train)(state)
else:
    state.sync()
    state.commit = state.save
    try:
        train(state)
    except Exception as error:
        kind = type(error)
        worker.log("error", rank=hvd.rank(), kind=f"{kind.__module__}.{kind.__name__}", text=str(error))
        sys.exit(3)
