"""A rank that trains for a few steps: timeline_trainer.py FOLDER."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from horovod_sparse.torch import MiCROCompressor

hvd.init()
model = torch.nn.Linear(30, 30)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=MiCROCompressor)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 30)).square().mean().backward()
    optimizer.step()
hvd.shutdown()  # which writes the rest of the timeline
