"""Memory that goes back and forth between TensorFlow and a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod

import tensorflow as tf

from horovod_sparse.core.collectives import Array
from horovod_sparse.core.kernels import host


def _thread_count() -> int:
    return tf.config.threading.get_intra_op_parallelism_threads() or host.default_thread_count()


host.thread_count = _thread_count


class ResultMemory:
    """Memory for a result that TensorFlow takes over without a copy, run after run the same where that is possible.

    New memory costs as much time as writing to it.
    """

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self._shape = tuple(shape)
        self._dtype = dtype
        self._result: Array | None = None

    def take(self) -> Array:
        """A one-dimensional array of any values, which nobody else has."""
        # Ours, and the argument of getrefcount: TensorFlow holds another as long as there is a tensor with this memory.
        result, self._result = self._result, None
        if result is None or sys.getrefcount(result) > 2:
            return host.empty(prod(self._shape), self._dtype)
        return result.reshape(-1)

    def give(self, array: Array) -> Array:
        """A result that is in `array`, to be handed to TensorFlow; its memory may be taken again once that is done."""
        self._result = array.reshape(self._shape)
        return self._result
