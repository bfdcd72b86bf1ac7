"""The drop-in optimizer, for Keras 3 and for the legacy Keras (`tf_keras`).

Both Keras come to one method of the optimizer with all gradients, whoever computed them: `fit`, a `train_step` of your
own, a loop with a tape. There we reduce them. The optimizer keeps its class's name, so that models saved with it can be
loaded without Horovod.

A `LossScaleOptimizer` hands gradients on only if they are finite. It must come to the same decision on all ranks, or
some would wait for ever for the others' gradients; so where the optimizer inside is ours, one rank's non-finite
gradient is shown to all ranks first. Keras wraps optimizers by itself, in `compile`, so that is arranged in its class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse._compressor import warn
from horovod_sparse.tensorflow._horovod import PREFIX, hvd
from horovod_sparse.tensorflow.compressor import SparseCompressor, tf_variable
from horovod_sparse.tensorflow.gradients import Reducer
from horovod_sparse.tensorflow.graphs import in_program_order

# Applies reduced gradients; returns what the optimizer returns.
Apply = Callable[[list[Any]], Any]


class Distribution:
    """What makes an optimizer a distributed one.

    Args:
        reducer: reduces the gradients.
        backward_passes_per_step: how many calls to add up before their gradients are reduced and applied.
        average_aggregated_gradients: divide the sum by their number.
    """

    def __init__(self, reducer: Reducer, backward_passes_per_step: int, average_aggregated_gradients: bool) -> None:
        if not (isinstance(backward_passes_per_step, int | np.integer) and backward_passes_per_step >= 1):
            raise ValueError(f"backward_passes_per_step={backward_passes_per_step!r}: it must be a whole number >= 1")
        self.reducer = reducer
        self.local_variables: dict[int, Any] = {}
        self._passes = backward_passes_per_step
        self._average = average_aggregated_gradients
        self._sums: dict[int, tf.Variable] = {}
        self._counter: tf.Variable | None = None

    def copied(self) -> Distribution:
        """One for another optimizer."""
        return Distribution(self.reducer, self._passes, self._average)

    def __call__(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply) -> Any:
        """Reduce gradients and have them applied; or keep them, until there are enough."""
        if self._passes > 1:
            return self._aggregate(optimizer, gradients, variables, apply)
        return self._reduce_and_apply(optimizer, gradients, variables, apply)

    def _reduce_and_apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply
    ) -> Any:
        rate = learning_rate_of(optimizer) if self.reducer.follows_learning_rate(_is_plain_sgd(optimizer)) else None
        reduced = self.reducer(gradients, variables, self.local_variables, learning_rate=rate)
        result = apply(reduced)
        self.reducer.applied(reduced, variables, self.local_variables)
        return result

    def _aggregate(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply) -> Any:
        dense = [self.reducer.densified(gradient) for gradient in gradients]
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in dense):
            raise ValueError(
                f"backward_passes_per_step={self._passes}: sparse gradients (tf.IndexedSlices) cannot be added up: "
                "pass sparse_as_dense=True"
            )
        with tf.init_scope():
            _build(optimizer, variables)
            if self._counter is None:
                self._counter = tf.Variable(0, trainable=False)
            for gradient, variable in zip(dense, variables, strict=True):
                if gradient is not None and id(variable) not in self._sums:
                    zeros = tf.zeros(gradient.shape, gradient.dtype)
                    self._sums[id(variable)] = tf.Variable(zeros, trainable=False)
        counter = self._counter
        sums = [None if g is None else self._sums[id(v)] for g, v in zip(dense, variables, strict=True)]
        for gradient, total in zip(dense, sums, strict=True):
            if total is not None:
                total.assign_add(gradient)

        def apply_sums() -> Any:
            divisor = self._passes if self._average else 1
            totals = [None if total is None else total / divisor for total in sums]
            self._reduce_and_apply(optimizer, totals, variables, apply)
            counter.assign(0)
            return tf.group(*(total.assign(tf.zeros_like(total)) for total in sums if total is not None))

        def wait() -> Any:
            return tf.group(tf_variable(optimizer.iterations).assign_add(1))

        tf.cond(counter.assign_add(1) >= self._passes, apply_sums, wait)
        return optimizer.iterations


def _is_plain_sgd(optimizer: Any) -> bool:
    """Whether it is SGD without momentum."""
    if not any(cls.__name__ == "SGD" for cls in type(optimizer).__mro__):
        return False
    # In tf_keras.optimizers.legacy, `momentum` is a variable.
    return not (optimizer._momentum if hasattr(optimizer, "_momentum") else optimizer.momentum)


def learning_rate_of(optimizer: Any) -> Any:
    """The learning rate of the next step: a scalar tensor."""
    # The public attribute is a step behind where the legacy Keras has a schedule.
    rate = optimizer._learning_rate if hasattr(optimizer, "_learning_rate") else optimizer.learning_rate
    return tf.convert_to_tensor(rate(optimizer.iterations) if callable(rate) else rate)


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create the optimizer's variables, which cannot be created in a branch."""
    if hasattr(optimizer, "_create_all_weights"):  # an optimizer of tf_keras.optimizers.legacy
        optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(variables)
        optimizer.built = True


class _Distributed:
    """What the distributed optimizers of both Keras have; goes before the optimizer's own class."""

    _distribution: Distribution
    _made_for: Distribution

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep its own gradients of this variable."""
        self._distribution.local_variables[id(var)] = var

    @property
    def _compression(self) -> Any:
        return self._distribution.reducer.compression

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """A new optimizer with these settings, and distributed like this one."""
        base: Any = cls.__bases__[1]
        return distribute(base.from_config(config, *args, **kwargs), cls._made_for.copied())


class _DistributedKeras3(_Distributed):
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        apply = super().apply  # type: ignore[misc]
        gradients = list(grads)
        if not gradients or (trainable_variables is None and not self.built):
            apply(gradients)  # does nothing, or says what is wrong
            return
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(gradients) != len(variables):
            raise ValueError(
                f"apply() was given {len(gradients)} gradients of {len(variables)} variables: give it one for each, "
                "None where there is none"
            )
        self._distribution(self, gradients, variables, lambda reduced: apply(reduced, variables))


class _DistributedLegacy(_Distributed):
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        apply = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        return self._distribution(
            self,
            gradients,
            variables,
            lambda reduced: apply(list(zip(reduced, variables, strict=True)), *args, **kwargs),
        )


def distribute(optimizer: Any, distribution: Distribution) -> Any:
    """Make this very optimizer a distributed one; return it.

    Raises:
        ValueError: it is one already.
        TypeError: it is no optimizer of Keras.
    """
    _check(optimizer)
    if _is_of("keras", optimizer):
        import keras

        mixin: type[_Distributed] = _DistributedKeras3
        _leave_xla_out(keras.Model)
        _agree_on_finite_gradients(keras.optimizers.LossScaleOptimizer, "apply")
    else:
        from tf_keras.src.mixed_precision import loss_scale_optimizer

        mixin = _DistributedLegacy
        _agree_on_finite_gradients(loss_scale_optimizer.LossScaleOptimizer, "apply_gradients")
        _agree_on_finite_gradients(loss_scale_optimizer.LossScaleOptimizerV3, "apply_gradients")
    if hasattr(optimizer, "inner_optimizer"):  # of a LossScaleOptimizer
        distribute(optimizer.inner_optimizer, distribution)
        return optimizer
    base = type(optimizer)
    cls: Any = type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    cls._made_for = distribution
    object.__setattr__(optimizer, "__class__", cls)
    vars(optimizer)["_distribution"] = distribution  # no business of what Keras tracks in its objects
    return optimizer


def _leave_xla_out(model: type) -> None:
    """Have Keras 3's `jit_compile="auto"`, which is XLA where there is a GPU, leave it out for optimizers of ours."""
    original = model._resolve_auto_jit_compile  # type: ignore[attr-defined]
    if hasattr(original, "leaves_xla_out"):
        return

    @wraps(original)
    def resolve(self: Any) -> Any:
        optimizer = getattr(self, "optimizer", None)
        if not isinstance(getattr(optimizer, "inner_optimizer", optimizer), _Distributed):
            return original(self)
        if original(self):
            warn(
                hvd,
                'jit_compile="auto": turned off, for XLA cannot compile the exchange of gradients between ranks. Pass '
                "jit_compile=False to model.compile() to be silent",
                stacklevel=2,
            )
        return False

    resolve.leaves_xla_out = True  # type: ignore[attr-defined]
    model._resolve_auto_jit_compile = resolve  # type: ignore[attr-defined]


def _check(optimizer: Any) -> None:
    if isinstance(optimizer, _Distributed):
        raise ValueError(
            f"this {type(optimizer).__name__} is a DistributedOptimizer already, and its gradients would be reduced "
            "twice: wrap an optimizer once"
        )
    if not _is_of("keras", optimizer) and not _is_of("tf_keras", optimizer):
        raise TypeError(
            f"DistributedOptimizer takes an optimizer of Keras, such as keras.optimizers.SGD(0.1), not {optimizer!r}"
        )


def _is_of(keras: str, optimizer: Any) -> bool:
    """Whether it is an optimizer of this Keras."""
    bases = [cls for cls in type(optimizer).__mro__ if cls.__module__.split(".")[0] == keras]
    return any(cls.__name__ in ("BaseOptimizer", "_BaseOptimizer", "OptimizerV2") for cls in bases)


def _agree_on_finite_gradients(loss_scale_optimizer: type, method: str) -> None:
    """Have a `LossScaleOptimizer` show its gradients to all ranks, before it looks whether they are finite."""
    original = getattr(loss_scale_optimizer, method)
    if hasattr(original, "agrees"):
        return

    @wraps(original)
    def agreeing(self: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner_optimizer
        if isinstance(inner, _Distributed):
            gradients = list(gradients)
            if gradients and isinstance(gradients[0], tuple):  # pairs of gradients and variables
                variables = [variable for _, variable in gradients]
                agreed = _finite_on_all_ranks([g for g, _ in gradients], inner._distribution.reducer.process_set)
                gradients = list(zip(agreed, variables, strict=True))
            else:
                gradients = _finite_on_all_ranks(gradients, inner._distribution.reducer.process_set)
        return original(self, gradients, *args, **kwargs)

    agreeing.agrees = True  # type: ignore[attr-defined]
    setattr(loss_scale_optimizer, method, agreeing)


def _finite_on_all_ranks(gradients: list[Any], process_set: Any) -> list[Any]:
    """The gradients; if some rank's are not finite, then on no rank all are."""
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if not present or not process_set.included():
        return gradients

    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in (gradients[i] for i in present)]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
    finite = _sum_over_ranks(process_set)(tf.cast(~finite, tf.float32)) < 0.5  # where a rank has joined, it adds 0
    first = gradients[present[0]]
    marked = tf.where(finite, values[0], tf.constant(float("nan"), values[0].dtype))
    if isinstance(first, tf.IndexedSlices):
        marked = tf.IndexedSlices(marked, first.indices, first.dense_shape)
    return [marked if i == present[0] else gradient for i, gradient in enumerate(gradients)]


@cache
def _sum_over_ranks(process_set: Any) -> Callable[[Any], Any]:
    def total(value: Any) -> Any:
        in_program_order()
        options = {"ignore_name_scope": True, "process_set": process_set}
        return hvd.allreduce(value, op=hvd.Sum, name=f"{PREFIX}.total", **options)

    return tf.function(total, autograph=False)  # type: ignore[no-any-return]


def copied(optimizer: Any) -> Any:
    """A new optimizer with the same settings."""
    config = optimizer.get_config()
    if not hasattr(optimizer, "inner_optimizer"):
        return type(optimizer).from_config(config)
    return type(optimizer)(**{**config, "inner_optimizer": copied(optimizer.inner_optimizer)})


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Like Horovod's: a new optimizer with the same settings that applies reduced gradients.

    Ours takes optimizers of Keras 3, too, and reduces gradients in `apply_gradients`, whoever computed them. The
    parameters mean what they mean in Horovod; with `compression=` one of ours, the whole model is one exchange, and
    `groups` changes nothing. With A2SGD, it averages the parameters after every `sync_every` steps.

    Raises:
        ValueError, TypeError: a setting is wrong.
    """
    _check(optimizer)
    options = {key: value for key, value in locals().items() if key != "optimizer"}
    return distribute(copied(optimizer), make_distribution(optimizer, **options))


def make_distribution(
    optimizer: Any,
    name: str | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    compression: Any = hvd.Compression.none,
    **options: Any,
) -> Distribution:
    """What `DistributedOptimizer`, with these options, gives the optimizer."""
    if isinstance(compression, type) and issubclass(compression, SparseCompressor):
        compression = compression()  # type: ignore[call-arg]
    name = name or f"Distributed{type(optimizer).__name__}"
    reducer = Reducer(name, compression, groups=num_groups or None if groups is None else groups, **options)
    return Distribution(reducer, backward_passes_per_step, average_aggregated_gradients)
