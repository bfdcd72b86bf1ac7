"""A step inside TensorFlow's graphs: Python between Horovod's own, asynchronous operations.

    begin -> while there is a request: one of Horovod's operations -> go on -> ... -> finish

`begin`, `go on` and `finish` are Python, called by the graph; the step, its arrays and all state live there. A request
comes into the graph as bytes, with the number of the operation that it wants. No Python waits for another rank, so a
graph may run on a single thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.core.collectives import Allgather, Allreduce, Alltoall, Array
from horovod_sparse.core.step import Step
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.graphs import weakly

# All operations that a step may ask for. What comes first in a step has a name of its own: its size seldom changes,
# and Horovod negotiates that faster. Ranks that do not ask for the same first get an error from Horovod, for one name
# stands for both operations; under several names they would wait for one another.
FIRST, LATER = "first", "later"
OPERATIONS = [
    *((FIRST, Allreduce, np.dtype(name)) for name in ("float32", "float64")),
    (FIRST, Allgather, np.dtype("int64")),
    *((LATER, Allreduce, np.dtype(name)) for name in ("float16", "float32", "float64")),
    *((LATER, Allgather, np.dtype(name)) for name in ("uint8", "int64")),
    (LATER, Alltoall, np.dtype("uint8")),
]
NONE = -1


class InGraph:
    """Runs steps inside a graph; a step at a time.

    Args:
        start: called with the arrays of the tensors when the graph runs; returns the step to run.
        finish: called with what the step returned; returns the arrays of the results.
        name: the prefix of the names by which Horovod matches the ranks' calls.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        start: Callable[..., Step[Any]],
        finish: Callable[[Any], list[Array]],
        name: str,
        process_set: Any,
    ) -> None:
        self._start = start
        self._finish = finish
        self._name = name
        self._process_set = process_set
        self._step: Step[Any] | None = None
        self.bytes_sent = 0
        """Payload in bytes that the last step has handed to Horovod."""
        self.error: Exception | None = None
        """What the last step raised: TensorFlow raises it as an error of its own, with the text alone."""

    def __call__(self, inputs: Sequence[Any], dtypes: Sequence[tf.DType]) -> list[Any]:
        """Tensors with the results of a step that is started with `inputs`; `dtypes` are those of the results."""
        shapes = [tf.TensorShape([]), tf.TensorShape([None])]  # a number, and some bytes

        def call(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
            state = tf.numpy_function(weakly(function), inputs, [tf.int32, tf.uint8])
            return [tf.ensure_shape(tensor, shape) for tensor, shape in zip(state, shapes, strict=True)]

        def go_on(number: Any, payload: Any) -> Any:
            answer = tf.switch_case(number, [partial(self._collective, *op, payload) for op in OPERATIONS])
            return call(self._go_on, [number, answer])

        number, _ = tf.while_loop(
            lambda number, _: tf.not_equal(number, NONE),
            go_on,
            call(self._begin, inputs),
            shape_invariants=shapes,
            parallel_iterations=1,
        )
        with tf.control_dependencies([number]):
            return tf.numpy_function(weakly(self._end), [], list(dtypes))  # type: ignore[no-any-return]

    def _collective(self, when: str, kind: type, dtype: np.dtype[Any], payload: Any) -> Any:
        """The answer to a request, as bytes."""
        array = tf.bitcast(tf.reshape(payload, [-1, dtype.itemsize] if dtype.itemsize > 1 else [-1]), dtype)
        names = {"name": f"{self._name}.{when}", "ignore_name_scope": True, "process_set": self._process_set}
        if kind is Allreduce:
            answer = hvd.allreduce(array, op=hvd.Sum, **names)
        else:
            answer = hvd.allgather(array, **names) if kind is Allgather else hvd.alltoall(array, **names)
        return tf.reshape(tf.bitcast(answer, tf.uint8), [-1])

    # What the graph calls

    def _begin(self, *arrays: Array) -> tuple[np.int32, Array]:
        self.bytes_sent = 0
        self.error = None
        try:
            self._step = self._start(*arrays)
        except Exception as error:
            self.error = error
            raise
        return self._advance(FIRST, None)

    def _go_on(self, number: int, answer: Array) -> tuple[np.int32, Array]:
        return self._advance(LATER, answer.view(OPERATIONS[number][2]))

    def _advance(self, when: str, answer: Array | None) -> tuple[np.int32, Array]:
        assert self._step
        try:
            request = self._step.send(answer)
        except StopIteration as stop:
            self._result = stop.value
            return np.int32(NONE), np.zeros(0, np.uint8)
        except Exception as error:
            self.error = error
            raise
        self.bytes_sent += request.array.nbytes
        number = OPERATIONS.index((when, type(request), request.array.dtype))
        return np.int32(number), np.ascontiguousarray(request.array).view(np.uint8)

    def _end(self) -> list[Array]:
        result, self._step, self._result = self._result, None, None
        return self._finish(result)
