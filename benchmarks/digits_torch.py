"""What digits.py does in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import horovod_sparse.torch as hvd

__all__ = ["Trainer", "hvd"]

torch.set_num_threads(1)


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


class Trainer:
    def __init__(self, seed: int, momentum: float, compression: Any) -> None:
        torch.manual_seed(seed)
        self._model = make_model()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._model.parameters(), momentum=momentum),
            named_parameters=self._model.named_parameters(),
            compression=compression,
        )
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)

    def shuffled(self, n: int) -> NDArray[np.int64]:
        return torch.randperm(n).numpy()

    def step(self, images: NDArray[np.float32], digits: NDArray[np.int64], learning_rate: float) -> float:
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss = cross_entropy(self._model(torch.from_numpy(images)), torch.from_numpy(digits))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def parameters(self) -> NDArray[np.float32]:
        return parameters_to_vector(self._model.parameters()).detach().numpy()

    def predict(self, images: NDArray[np.float32]) -> NDArray[np.int64]:
        self._model.eval()
        with torch.no_grad():
            return self._model(torch.from_numpy(images)).argmax(1).numpy()
