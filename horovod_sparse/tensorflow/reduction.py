"""Tensors that are reduced together, inside a graph."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from horovod_sparse.core import FlatLayout, TensorSpec
from horovod_sparse.core.collectives import Array
from horovod_sparse.core.exchange import A2SGDExchange, Exchange
from horovod_sparse.core.step import Step, Update
from horovod_sparse.tensorflow._horovod import PREFIX, hvd
from horovod_sparse.tensorflow.averaging import average
from horovod_sparse.tensorflow.collectives import InGraph
from horovod_sparse.tensorflow.graphs import in_program_order, is_for_session, keep_while_traced_graphs_live, weakly
from horovod_sparse.tensorflow.memory import ResultMemory

if TYPE_CHECKING:
    from horovod_sparse.tensorflow.compressor import SparseCompressor

NO_RATE = -1.0

# How many slots with these specs, in a process set, have taken a step: the same on all ranks, even after errors.
_slots: Counter[Any] = Counter()


class Slot:
    """The state of one set of tensors.

    Attributes:
        exchange: its state.
    """

    def __init__(self, exchange: Exchange, specs: Sequence[TensorSpec], process_set: Any) -> None:
        self.exchange = exchange
        self._kind = (process_set.process_set_id, tuple(sorted(specs)))
        self._order: int | None = None  # among the slots of this kind, once it has taken a step

    def rejoin(self) -> None:
        """Horovod was shut down, and has begun anew, maybe with other ranks."""
        self._order = None
        _slots.clear()
        self.exchange.rejoin()

    def step(
        self,
        gradient: dict[TensorSpec, Array],
        out: dict[TensorSpec, Array],
        units: Mapping[str, Any],
        how: dict[str, Any],
        meet: bool,
        rank: int,
        world_size: int,
    ) -> Step[Any]:
        """One step. In its first round it finds out whether all ranks step the same tensors.

        Args:
            gradient, out, rank, world_size: as for `Exchange.step`; `units` are its other arguments.
            how: what else has to be the same on all ranks.
            meet: compare notes with the other ranks before anything else.
        """
        self.exchange.circumstances = how
        self.exchange.order = _slots[self._kind] if self._order is None else self._order
        try:
            if meet:
                yield from self.exchange.meet(sorted(gradient))
            update = yield from self.exchange.step(gradient, rank, world_size, out, **units)
        except BaseException:  # this step cannot be finished; should there be another one, it begins with a talk
            self.exchange.something_to_say = True
            raise
        if self._order is None:
            self._order = self.exchange.order
            _slots[self._kind] += 1
        return update


class Reduction:
    """Tensors that are reduced together, each time a graph runs.

    Args:
        compressor: whose state they have.
        specs: names, shapes and dtypes of the tensors, each name different.
        process_set: the ranks that take part.
        op: `hvd.Average` or `hvd.Sum`.
        factor: what to multiply the result by.
    """

    def __init__(
        self, compressor: SparseCompressor, specs: Sequence[TensorSpec], process_set: Any, op: Any, factor: float
    ) -> None:
        self._compressor = compressor
        self._specs = tuple(specs)
        self._layout = FlatLayout(specs)
        self.process_set = process_set
        self._op = op
        self._factor = factor
        self._name = PREFIX
        # A session may run the exchanges of several tensors at once, threads those of several models.
        if is_for_session() or threading.current_thread() is not threading.main_thread():
            self._name += "".join(c if c.isalnum() else "_" for c in self._layout.tensors[0].name)
        self._in_graph = InGraph(self._start, self._finish, self._name, process_set)
        self._memory = [ResultMemory(spec.shape, self._layout.dtype) for spec in self._specs]
        self._graph = tf.function(self._build, autograph=False)
        self.slot: Slot | None = None
        """That of the last run."""

    def __call__(
        self, key: Any, tensors: Sequence[Any], learning_rate: Any = None, loss_scale: Any = None
    ) -> list[Any]:
        """The reduced tensors.

        Args:
            key: a string tensor that tells these tensors from others of the same specs.
            tensors: in the order of `specs`.
            learning_rate: a scalar, if what is held back is to follow it.
            loss_scale: a scalar, if the loss was multiplied by it.
        """
        keep_while_traced_graphs_live(self)
        try:
            rate = tf.constant(NO_RATE) if learning_rate is None else tf.cast(learning_rate, tf.float32)
            scale = tf.constant(1.0) if loss_scale is None else tf.cast(loss_scale, tf.float32)
            return self._graph(key, rate, scale, list(tensors))  # type: ignore[no-any-return]
        except tf.errors.OpError:
            if self._in_graph.error:
                raise self._in_graph.error from None
            raise

    def release(self) -> None:
        """Free the memory, of which this holds as much as the variables had: TensorFlow keeps some graphs for ever."""
        self._memory = [ResultMemory(spec.shape, self._layout.dtype) for spec in self._specs]
        if self.slot:  # whose figures may be asked for yet
            self.slot.exchange.algorithm = None

    def average_if_due(self, key: Any, variables: Sequence[tf.Variable]) -> Any:
        """Average these tensors' variables over the ranks, if the last step was one after which to do it.

        Returns:
            A tensor that is there once it has been done; None eagerly, where it was not due.
        """
        keep_while_traced_graphs_live(self)

        def now() -> Any:
            return average(variables, self.process_set, weakly(self._averaged), [key], self._name)

        if tf.executing_eagerly():
            return now() if self._averaging_due(key.numpy()) else None
        due = tf.numpy_function(weakly(self._averaging_due), [key], tf.bool)
        return tf.cond(tf.ensure_shape(due, []), now, lambda: tf.constant(0.0))

    # While a graph is traced

    def _build(self, key: Any, rate: Any, scale: Any, tensors: list[Any]) -> list[Any]:
        in_program_order()
        accumulated = [tf.cast(tensor, self._layout.dtype) for tensor in tensors]
        with tf.device("/cpu:0"):
            results = self._in_graph([key, rate, scale, *accumulated], [self._layout.dtype] * len(tensors))
        for result, spec in zip(results, self._specs, strict=True):
            result.set_shape(spec.shape)
        return [tf.cast(result, spec.dtype) for result, spec in zip(results, self._specs, strict=True)]

    # When it runs

    def _start(self, key: bytes, rate: float, scale: float, *arrays: Array) -> Step[Any]:
        self.slot = None
        self._out = dict(zip(self._specs, (memory.take() for memory in self._memory), strict=True))
        gradient = {spec: array.reshape(-1) for spec, array in zip(self._specs, arrays, strict=True)}
        if not self.process_set.included():
            return _alone(gradient, self._out)
        slot = self._compressor.slot(as_bytes(key), self._specs, self.process_set)
        if self.process_set.size() == 1:
            return _alone(gradient, self._out, slot.exchange, self._units(rate, scale))
        self.slot = slot
        how = {"op": "Sum" if self._op == hvd.Sum else "Average", "factor": self._factor}
        return self._compressor.step(slot, gradient, self._out, self._units(rate, scale), how, self.process_set)

    def _units(self, rate: float, scale: float) -> dict[str, Any]:
        """Those of the gradients, as `Exchange.step` takes them."""
        rates = None if rate == NO_RATE else dict.fromkeys(self._specs, float(rate))
        return {"rates": rates, "loss_scale": float(scale)}

    def _finish(self, update: Update | None) -> list[Array]:
        """The gradients to apply."""
        slot, out = self.slot, self._out
        self._out = {}
        self._compressor.last = self
        if update:
            out = dict(zip(self._layout.tensors, update.gradient, strict=True))
        else:  # as Horovod would have it: a gradient that is not finite on one rank is so on all
            for array in out.values():
                array.fill(np.nan)
        if slot:
            count(slot.exchange, self._in_graph.bytes_sent)
        factor = self._factor * (self.process_set.size() if slot and self._op == hvd.Sum else 1)
        for spec, array in out.items():
            if factor != 1:
                array *= factor
            if spec.dtype in ("float16", "bfloat16"):  # what they cannot hold becomes the largest that they can
                np.clip(array, tf.as_dtype(spec.dtype).min, tf.as_dtype(spec.dtype).max, out=array)
        return [memory.give(out[spec]) for memory, spec in zip(self._memory, self._specs, strict=True)]

    def _averaging_due(self, key: bytes) -> Any:
        exchange = self._exchange_of(key)
        return np.bool_(exchange is not None and exchange.averaging_due)

    def _averaged(self, key: bytes, nbytes: int) -> None:
        exchange = self._exchange_of(key)
        if exchange:
            exchange.averaging_due = False
            count(exchange, nbytes)

    def _exchange_of(self, key: bytes) -> A2SGDExchange | None:
        slot = self._compressor.slots.get((as_bytes(key), self._specs))
        return slot.exchange if slot and isinstance(slot.exchange, A2SGDExchange) else None


def count(exchange: Exchange, nbytes: int) -> None:
    """Add what was sent to the figures of the last step."""
    if exchange.stats:
        exchange.stats = exchange.stats._replace(bytes_sent=exchange.stats.bytes_sent + nbytes)


def as_bytes(key: Any) -> bytes:
    """A key, in whatever form TensorFlow hands it to Python."""
    return key if isinstance(key, bytes) else bytes(np.asarray(key).item())


def _alone(
    gradient: dict[TensorSpec, Array],
    out: dict[TensorSpec, Array],
    exchange: Exchange | None = None,
    units: Mapping[str, Any] | None = None,
) -> Step[Update | None]:
    """A step that needs no other rank: the gradient, and what was held back while there were others."""
    if exchange and exchange.holds_back:
        return exchange.alone(gradient, out, **(units or {}))
    for spec, array in gradient.items():
        np.copyto(out[spec], array)
    return Update([out[spec] for spec in sorted(out)])
    yield
