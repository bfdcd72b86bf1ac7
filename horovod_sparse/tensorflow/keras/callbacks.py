"""Horovod's callbacks, for Keras 3 and the legacy Keras alike, and one that averages A2SGD's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.tensorflow.keras.callbacks as _horovod
import numpy as np
import tensorflow as tf

from horovod_sparse.monitor import Monitor, Sink, check_every
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compressor import A2SGDCompressor, get_compressor, tf_variable

BestModelCheckpoint = _horovod.BestModelCheckpoint

Logs = dict[str, Any] | None


class Callback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback for the `fit` of any Keras, also of the one that is not `tf.keras`."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastGlobalVariablesCallback(Callback):
    """After the first batch: give the model and its optimizer, on all ranks, the values of one rank.

    Args:
        root_rank: that rank.
        device: where to do it; by default, where Horovod would.
        local_variables: variables that each rank keeps to itself.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        local = local_variables if isinstance(local_variables, Iterable) else [local_variables]
        self._local = {id(variable) for variable in local}

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep its own value of this variable."""
        self._local.add(id(var))

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.broadcast_done:
            return
        optimizer = self.model.optimizer
        of_optimizer = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        with tf.device(self.device):
            for variables in (self.model.weights, of_optimizer):
                chosen = [tf_variable(v) for v in variables if id(v) not in self._local]
                hvd.broadcast_variables(chosen, self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(Callback):
    """At the end of an epoch: average its metrics over the ranks, for the callbacks that come after this one.

    Args:
        device: where to do it; by default, where Horovod would.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average.

        Raises:
            RuntimeError: the ranks do not have the same metrics.
        """
        if not logs:
            logs = {}
        every = hvd.allgather_object(sorted(logs), name="horovod_sparse.metrics")
        if any(names != every[0] for names in every):
            raise RuntimeError(
                f"MetricAverageCallback: the ranks do not have the same metrics: {every}. Give fit() the same metrics "
                "and, on all ranks or on none, validation data"
            )
        with tf.device(self.device):
            values = tf.constant([float(logs[name]) for name in every[0]], tf.float64)
            means = hvd.allreduce(values, name="horovod_sparse.metric_average", op=hvd.Average).numpy()
        logs.update(zip(every[0], means.tolist(), strict=True))


class LearningRateScheduleCallback(Callback):
    """Multiply the learning rate.

    Args:
        initial_lr: what to multiply.
        multiplier: a function of the epoch; or a base, to the power of the epochs since `start_epoch`.
        start_epoch, end_epoch: the epochs from which, and before which, to do it; None: to the end.
        staircase: change it at the beginning of an epoch only; otherwise with every batch, where the epoch is a
            fraction.
        momentum_correction: when the learning rate changes, scale the velocity by as much, as Horovod does by way of
            the momentum (arXiv 1706.02677, section 2.1).
        steps_per_epoch: batches in an epoch; by default, what Keras says.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr=None: pass the learning rate of the first epoch, before any multiplier")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find out the steps of an epoch.

        Raises:
            ValueError: they are needed, and Keras does not know them.
        """
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: steps_per_epoch={self.steps_per_epoch}, and Keras does not know it here: "
                    "pass the number of batches"
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._adjust(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self._epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = learning_rate_of(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = learning_rate_of(optimizer)
        new = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and old and new != old:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if getattr(inner, "momentum", 0):
                for velocity in getattr(inner, "momentums", None) or getattr(inner, "_momentums", []):
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate with every batch, from `initial_lr` divided by the ranks to `initial_lr`.

    Args:
        initial_lr: the learning rate to reach (arXiv 1706.02677: that of one rank, times the ranks).
        warmup_epochs: the epochs that it takes.
        momentum_correction, steps_per_epoch: as for LearningRateScheduleCallback.
        verbose: 1 prints a line on rank 0 at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            epoch += 1 / self.steps_per_epoch  # for a round number at the end of an epoch
            return float(1 / hvd.size() * (epoch * (hvd.size() - 1) / warmup_epochs + 1))

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and hvd.rank() == 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = learning_rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class MonitorCallback(Callback):
    """Sends the compressor's figures to sinks, on rank 0: see `horovod_sparse.monitor`.

    Args:
        sinks, every: as for `Monitor`.

    Raises:
        SettingError: `every` is not a whole number >= 1.
    """

    def __init__(self, *sinks: Sink, every: int = 1) -> None:
        super().__init__()
        self._sinks = sinks
        self._every = check_every(every)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find the compressor.

        Raises:
            TypeError: the optimizer has none.
        """
        self._monitor = Monitor(get_compressor(self.model.optimizer), *self._sinks, every=self._every)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._monitor.step()

    def on_train_end(self, logs: Logs = None) -> None:
        self._monitor.close()


class SynchronizeParametersCallback(Callback):
    """Average the parameters that A2SGD lets drift apart: when it is time to, and at the end of each epoch.

    So what runs after an epoch's end, say a checkpoint on rank 0, has the parameters of all ranks, if it comes after
    this in the list of callbacks. All ranks must use it.
    """

    def on_train_begin(self, logs: Logs = None) -> None:
        """Check the optimizer.

        Raises:
            TypeError: it does not use A2SGD.
        """
        compressor = get_compressor(self.model.optimizer)
        if not isinstance(compressor, A2SGDCompressor):
            raise TypeError(
                f"SynchronizeParametersCallback is for A2SGDCompressor, not for {type(compressor).__name__}, whose "
                "parameters never differ between ranks: leave the callback out"
            )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if get_compressor(self.model.optimizer).averaging_due:
            self._synchronize()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._synchronize()

    def _synchronize(self) -> None:
        variables = [v for v in self.model.trainable_variables if not is_local(v, self.model.optimizer)]
        get_compressor(self.model.optimizer).synchronize_parameters(variables)


def is_local(variable: Any, optimizer: Any) -> bool:
    """Whether the optimizer was told to leave this variable to each rank."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(optimizer, "_distribution"):
        return id(variable) in optimizer._distribution.local_variables
    return variable.ref() in optimizer._local_vars  # stock Horovod's


def learning_rate_of(optimizer: Any) -> float:
    """The optimizer's learning rate.

    Raises:
        TypeError: it has a schedule of its own.
    """
    rate = optimizer.learning_rate
    if isinstance(getattr(optimizer, "_learning_rate", rate), tf.keras.optimizers.schedules.LearningRateSchedule):
        raise TypeError(
            "the optimizer has a LearningRateSchedule, so no callback can set its learning rate: give it a number, or "
            "leave the callback out"
        )
    return float(np.asarray(rate))
