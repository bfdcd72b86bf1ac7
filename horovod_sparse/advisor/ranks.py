"""The ranks, by whatever Horovod was built with: collectives of numpy arrays that start at once and are waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from horovod_sparse.core.collectives import Allgather, Array, Collective

PREFIX = "horovod_sparse.advisor"
FRAMEWORKS = ("torch", "tensorflow")


class Ranks(Protocol):
    """What a rehearsal needs."""

    rank: int
    size: int

    def start(self, request: Collective, name: str) -> Callable[[], Array]:
        """Start a collective; what is returned waits for its answer."""

    def start_dense(self, array: Array, name: str, half: bool) -> Callable[[], None]:
        """Start what Horovod does without us: average a float32 array in place, as 16 bits if `half`."""

    def gather(self, item: Any) -> list[Any]:
        """Everybody's item."""

    def join(self) -> None:
        """Wait until all ranks do; the allreduces that others still ask for go on."""


class TorchRanks:
    """Over `horovod.torch`."""

    def __init__(self) -> None:
        import torch

        from horovod_sparse.torch._horovod import hvd
        from horovod_sparse.torch.collectives import NAP_S, Collectives

        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self._torch, self._hvd, self._nap_s = torch, hvd, NAP_S
        self._collectives = Collectives(PREFIX, hvd.global_process_set)

    def start(self, request: Collective, name: str) -> Callable[[], Array]:
        handle = self._collectives.start(request, name)

        def wait() -> Array:
            while not self._hvd.poll(handle):  # as a compressor waits: Horovod's own wait keeps a core busy
                time.sleep(self._nap_s)
            return self._collectives.answer(handle)

        return wait

    def start_dense(self, array: Array, name: str, half: bool) -> Callable[[], None]:
        tensor = self._torch.from_numpy(array)
        sent = tensor.half() if half else tensor
        handle = self._hvd.allreduce_async_(sent, name=f"{PREFIX}.{name}")

        def wait() -> None:
            self._hvd.synchronize(handle)
            if half:
                tensor.copy_(sent)

        return wait

    def gather(self, item: Any) -> list[Any]:
        return self._hvd.allgather_object(item, name=PREFIX)  # type: ignore[no-any-return]

    def join(self) -> None:
        self._hvd.join()


class TensorFlowRanks:
    """Over `horovod.tensorflow`, whose eager operations block: so a thread does them, one after the other."""

    def __init__(self) -> None:
        # Else it prints, as a warning, the traceback with which a script is stopped.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow as tf

        from horovod_sparse.tensorflow._horovod import hvd

        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self._tf, self._hvd = tf, hvd
        self._thread = ThreadPoolExecutor(1)

    def start(self, request: Collective, name: str) -> Callable[[], Array]:
        def run() -> Array:
            array = self._tf.constant(request.array)
            if isinstance(request, Allgather):
                return self._hvd.allgather(array, name=f"{PREFIX}.{name}").numpy()
            return self._hvd.allreduce(array, op=self._hvd.Sum, name=f"{PREFIX}.{name}").numpy()

        return self._thread.submit(run).result

    def start_dense(self, array: Array, name: str, half: bool) -> Callable[[], None]:
        def run() -> None:
            compression = self._hvd.Compression.fp16 if half else self._hvd.Compression.none
            reduced = self._hvd.allreduce(self._tf.constant(array), name=f"{PREFIX}.{name}", compression=compression)
            np.copyto(array, reduced.numpy())

        return self._thread.submit(run).result

    def gather(self, item: Any) -> list[Any]:
        return self._hvd.allgather_object(item, name=PREFIX)  # type: ignore[no-any-return]

    def join(self) -> None:
        self._hvd.join()
