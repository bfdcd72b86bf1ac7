"""Tensors that are reduced together, inside a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from horovod_sparse.core import FlatLayout, TensorSpec
from horovod_sparse.core.collectives import Allreduce, Array
from horovod_sparse.core.exchange import A2SGDExchange, Exchange, check_present, continued
from horovod_sparse.core.step import Step
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.collectives import InGraph, aligned_empty
from horovod_sparse.tensorflow.order import in_program_order, is_for_session

if TYPE_CHECKING:
    from horovod_sparse.tensorflow.compressor import SparseCompressor

# How many sets of tensors this process has reduced so far, by process set.
_numbers: Counter[int] = Counter()


class Slot:
    """The state of one set of tensors.

    Attributes:
        exchange: its state.
        number: in which order this process came to its sets; the same on all ranks, if they run the same program.
        first: whether the ranks should meet before the first step: Horovod would call it a mismatch if only some did.
    """

    def __init__(self, exchange: Exchange, process_set: Any, first: bool) -> None:
        self.exchange = exchange
        self.number = _numbers[process_set.process_set_id]
        self.first = first
        _numbers[process_set.process_set_id] += 1

    def step(self, gradient: dict[TensorSpec, Array], rank: int, world_size: int) -> Step[Any]:
        """One step, which finds out in its first round whether all ranks step the same tensors."""
        specs = sorted(gradient)
        try:
            if self.first:
                yield from self.exchange.meet(specs)
                self.first = False
            step = self.exchange.step(gradient, rank, world_size)
            request = next(step).array
            head = np.array([self.number, self.number**2], request.dtype)
            answer = yield Allreduce(np.concatenate([head, request]))
            total, squares, present = answer[:3].tolist()
            if abs(present * squares - total**2) > 0.5:  # the numbers vary
                yield from self.exchange.meet(specs)
                raise RuntimeError(
                    "the ranks disagree: they reduce their models in another order. Run the same program on all ranks"
                )
            update = yield from continued(step, answer[2:])
        except BaseException:  # this step cannot be finished; should there be another one, it begins with a talk
            self.exchange.something_to_say = True
            raise
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
        self._process_set = process_set
        self._op = op
        self._factor = factor
        self._name = "horovod_sparse"
        if is_for_session():  # which may run the exchanges of several tensors at once
            self._name += "".join(c if c.isalnum() else "_" for c in self._layout.tensors[0].name)
        self._in_graph = InGraph(self._start, self._finish, self._name, process_set)
        self._graph = tf.function(self._build, autograph=False)
        self.slot: Slot | None = None
        """That of the last run."""

    def __call__(self, key: Any, tensors: Sequence[Any]) -> list[Any]:
        """The reduced tensors.

        Args:
            key: a string tensor that tells these tensors from others of the same specs.
            tensors: in the order of `specs`.
        """
        try:
            return self._graph(key, list(tensors))  # type: ignore[no-any-return]
        except tf.errors.OpError:
            if self._in_graph.error:
                raise self._in_graph.error from None
            raise

    def average(self, key: Any, variables: Sequence[tf.Variable], if_due: bool) -> Any:
        """Average variables over the ranks: bitwise the same on all of them afterwards.

        Returns:
            None; or, while a graph is traced, the operation that does it.
        """
        if not tf.executing_eagerly():
            return self._build_averaging(key, variables, if_due)
        if not if_due or self._averaging_due(key.numpy()):
            self._average_now(key, variables)
        return None

    def _average_now(self, key: Any, variables: Sequence[tf.Variable]) -> None:
        def average() -> None:
            self._build_averaging(key, variables, if_due=False)

        tf.function(average, autograph=False)()

    # While a graph is traced

    def _build(self, key: Any, tensors: list[Any]) -> list[Any]:
        in_program_order()
        accumulated = [tf.cast(tensor, self._layout.dtype) for tensor in tensors]
        results = self._in_graph([key, *accumulated], [self._layout.dtype] * len(tensors))
        for result, spec in zip(results, self._specs, strict=True):
            result.set_shape(spec.shape)
        return [tf.cast(result, spec.dtype) for result, spec in zip(results, self._specs, strict=True)]

    def _build_averaging(self, key: Any, variables: Sequence[tf.Variable], if_due: bool) -> Any:
        def average() -> Any:
            in_program_order()
            options = {"ignore_name_scope": True, "process_set": self._process_set}
            present = hvd.allreduce(tf.ones([1]), op=hvd.Sum, name=f"{self._name}.present", **options)
            assignments = []
            with tf.control_dependencies([tf.numpy_function(self._averaged, [key, present], tf.int32)]):
                for i, variable in enumerate(variables):
                    # 16 bits are few for a sum.
                    wide = tf.float32 if variable.dtype.size < 4 else variable.dtype
                    value = tf.cast(variable.read_value(), wide)
                    mean = hvd.allreduce(value, op=hvd.Average, name=f"{self._name}.average.{i}", **options)
                    assignments.append(variable.assign(tf.cast(mean, variable.dtype)))
            return tf.group(*assignments)

        if not if_due:
            return average()
        due = tf.numpy_function(lambda key: np.bool_(self._averaging_due(key)), [key], tf.bool)
        return tf.cond(tf.ensure_shape(due, []), average, tf.no_op)

    # When it runs

    def _start(self, key: bytes, *arrays: Array) -> Step[Any]:
        self._arrays = arrays
        self.slot = None
        if not self._process_set.included() or self._process_set.size() == 1:
            return _nothing()
        self.slot = self._compressor.slot((key, self._specs), self._process_set)
        gradient = {spec: array.reshape(-1) for spec, array in zip(self._specs, arrays, strict=True)}
        return self.slot.step(gradient, self._process_set.rank(), self._process_set.size())

    def _finish(self, update: Any) -> list[Array]:
        """The gradients to apply."""
        slot, arrays = self.slot, self._arrays
        self._arrays = ()
        self._compressor.last = self
        results = {spec: aligned_empty(spec.shape, self._layout.dtype) for spec in self._specs}
        if slot and update is None:  # as Horovod would have it: a gradient that is not finite on one rank is so on all
            for result in results.values():
                result.fill(np.nan)
        else:
            for spec, array in zip(self._specs, arrays, strict=True):
                np.copyto(results[spec], array)
        if slot:
            self._count(slot.exchange, self._in_graph.bytes_sent)
            if update:
                update.write(self._layout, [results[spec].reshape(-1) for spec in self._layout.tensors])
        factor = self._factor * (self._process_set.size() if slot and self._op == hvd.Sum else 1)
        for spec, result in results.items():
            if factor != 1:
                result *= factor
            if spec.dtype in ("float16", "bfloat16"):  # what they cannot hold becomes the largest that they can
                np.clip(result, tf.as_dtype(spec.dtype).min, tf.as_dtype(spec.dtype).max, out=result)
        return list(results.values())

    def _averaging_due(self, key: bytes) -> bool:
        slot = self._compressor.slots.get((key, self._specs))
        return slot is not None and isinstance(slot.exchange, A2SGDExchange) and slot.exchange.averaging_due

    def _averaged(self, key: bytes, present: Array) -> Any:
        check_present(float(present[0]), self._process_set.size())
        slot = self._compressor.slots.get((key, self._specs))
        if slot and isinstance(slot.exchange, A2SGDExchange):
            slot.exchange.averaging_due = False
            nbytes = sum(spec.numel * max(tf.as_dtype(spec.dtype).size, 4) for spec in self._specs)
            self._count(slot.exchange, present.nbytes + nbytes)
        return np.int32(0)

    @staticmethod
    def _count(exchange: Exchange, nbytes: int) -> None:
        """Add what was sent to the last step's figures."""
        if exchange.stats:
            exchange.stats = exchange.stats._replace(bytes_sent=exchange.stats.bytes_sent + nbytes)


def _nothing() -> Step[None]:
    """A step that needs no other rank."""
    return None
    yield
