"""The collectives that a step asks for, over `horovod.torch`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from horovod_sparse.core.collectives import Allgather, Array, Collective
from horovod_sparse.core.step import Step
from horovod_sparse.torch._horovod import hvd

NAP_S = 50e-6


def _wait(handle: int) -> torch.Tensor:
    """The result of an operation. Horovod's own wait spins, which takes the core away from the threads that it waits
    for where there are no more cores than ranks; ours naps."""
    while not hvd.poll(handle):
        time.sleep(NAP_S)
    result: torch.Tensor = hvd.synchronize(handle)
    return result


class Collectives:
    """Horovod's collectives among the ranks of a process set, with a count of the payload handed over.

    Args:
        name: prefix of the names by which Horovod matches the ranks' calls.
        process_set: the ranks that take part.
    """

    def __init__(self, name: str, process_set: Any) -> None:
        self.name = name
        self.process_set = process_set
        self._bytes_sent = 0

    @property
    def rank(self) -> int:
        return int(self.process_set.rank())

    @property
    def world_size(self) -> int:
        return int(self.process_set.size())

    def count(self, nbytes: int) -> None:
        """Add to the payload that this rank has handed to Horovod."""
        self._bytes_sent += nbytes

    def take_count(self) -> int:
        """The payload in bytes since the last call."""
        nbytes, self._bytes_sent = self._bytes_sent, 0
        return nbytes

    def _start(self, request: Collective, name: str) -> int:
        tensor = torch.from_numpy(request.array) if isinstance(request.array, np.ndarray) else request.array
        self.count(tensor.nbytes)
        name = f"{self.name}.{name}"
        if isinstance(request, Allgather):
            return int(hvd.allgather_async(tensor, name=name, process_set=self.process_set))
        return int(hvd.allreduce_async(tensor, name=name, op=hvd.Sum, process_set=self.process_set))

    def begin(self, step: Step[Any], name: str) -> int:
        """Start the first collective of a step, and wait for nothing; return Horovod's handle."""
        return self._start(next(step), name)

    def finish(self, step: Step[Any], handle: int) -> Any:
        """Run a step that was begun to its end; return its result."""
        while True:
            result = _wait(handle)
            answer: Array = result.numpy() if result.device.type == "cpu" else result
            try:
                request = step.send(answer)
            except StopIteration as stop:
                return stop.value
            handle = self._start(request, type(request).__name__.lower())

    def discard(self, handle: int) -> None:
        """Wait for a collective whose result nobody wants any more."""
        _wait(handle)

    def average_(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite each tensor with its mean over the ranks, which is then bitwise the same on all of them."""
        # Horovod's PyTorch operations take contiguous tensors and know no bfloat16; 16 bits are few for a sum anyway.
        wide = [(t.float() if t.element_size() < 4 else t).contiguous() for t in tensors]
        handles = [
            hvd.allreduce_async_(t, name=f"{self.name}.average.{i}", op=hvd.Average, process_set=self.process_set)
            for i, t in enumerate(wide)
        ]
        for tensor, mean, handle in zip(tensors, wide, handles, strict=True):
            _wait(handle)
            self.count(mean.nbytes)
            if mean is not tensor:
                tensor.copy_(mean)
