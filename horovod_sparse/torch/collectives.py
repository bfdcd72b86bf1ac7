"""The collectives that a step asks for, over `horovod.torch`."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import torch

from horovod_sparse.core.collectives import Allgather, Allreduce, Alltoall, Array, Collective
from horovod_sparse.core.step import Step
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.gradient import as_array

NAP_S = 50e-6


class Running:
    """A step under way: what it waits for, and in the end its result."""

    def __init__(self, collectives: Collectives, step: Step[Any], name: str) -> None:
        self._collectives = collectives
        self._step = step
        self._handle = collectives.start(next(step), name)
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self._at_work = threading.Lock()
        _running.append(self)

    def result(self) -> Any:
        """Wait for the step's end; return its result, or raise its error.

        All other steps under way are run too: ranks may wait for several steps, each rank for another one first.
        """
        while not self._ended:
            for running in tuple(_running):
                if running._at_work.acquire(blocking=False):  # else another thread runs it
                    try:
                        running._go_on()
                    finally:
                        running._at_work.release()
            if not self._ended:
                # Horovod's own wait spins, which takes the core from the threads that it waits for where there are no
                # more cores than ranks.
                time.sleep(NAP_S)
        if self._error:
            raise self._error
        return self._result

    def forget(self) -> None:
        """Horovod has shut down: no collective under way will end."""
        if not self._ended:
            self._end(None, None)

    def give_up(self, seconds: float) -> None:
        """Wait for the collective under way, whose result nobody wants any more.

        Raises:
            RuntimeError: it did not end in time.
        """
        with self._at_work:
            if self._ended:
                return
            self._end(None, None)  # for other threads to leave it alone
        deadline = time.monotonic() + seconds
        while not hvd.poll(self._handle):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "this rank gave up a step after its backward pass, which other ranks have not finished: all ranks "
                    "must give up the same steps"
                )
            time.sleep(NAP_S)
        hvd.synchronize(self._handle)

    def _go_on(self) -> None:
        """Run the step as far as it goes without waiting."""
        try:
            while not self._ended and hvd.poll(self._handle):
                request = self._step.send(self._collectives.answer(self._handle))
                self._handle = self._collectives.start(request, type(request).__name__.lower())
        except StopIteration as stop:
            self._end(stop.value, None)
        except Exception as error:  # for the one to see who waits for this step
            self._end(None, error)
        except BaseException as interruption:
            self._end(None, interruption)
            raise

    def _end(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error, self._ended = result, error, True
        _running.remove(self)


_running: list[Running] = []


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

    def start(self, request: Collective, name: str) -> int:
        """Start a collective; return Horovod's handle."""
        tensor = torch.from_numpy(request.array) if isinstance(request.array, np.ndarray) else request.array
        self.count(tensor.nbytes)
        name = f"{self.name}.{name}"
        if isinstance(request, Allgather):
            return int(hvd.allgather_async(tensor, name=name, process_set=self.process_set))
        if isinstance(request, Alltoall):
            return int(hvd.alltoall_async(tensor, name=name, process_set=self.process_set))
        return int(hvd.allreduce_async(tensor, name=name, op=hvd.Sum, process_set=self.process_set))

    def answer(self, handle: int) -> Array:
        """The result of a collective, as a numpy array if it lies in host memory."""
        result = hvd.synchronize(handle)
        return as_array(result[0] if isinstance(result, tuple) else result)  # alltoall's comes with the sizes received

    def present(self) -> int:
        """How many ranks have not called `hvd.join()`; to be called on all of them."""
        return round(float(self.answer(self.start(Allreduce(np.ones(1, np.float32)), "present"))[0]))

    def average_(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite each tensor with its mean over the ranks, which is then bitwise the same on all of them."""
        # Horovod's PyTorch operations take contiguous tensors and know no bfloat16; 16 bits are few for a sum anyway.
        wide = [(t.float() if t.element_size() < 4 else t).contiguous() for t in tensors]
        handles = [
            hvd.allreduce_async_(t, name=f"{self.name}.average.{i}", op=hvd.Average, process_set=self.process_set)
            for i, t in enumerate(wide)
        ]
        for tensor, mean, handle in zip(tensors, wide, handles, strict=True):
            hvd.synchronize(handle)
            self.count(mean.nbytes)
            if mean is not tensor:
                tensor.copy_(mean)
