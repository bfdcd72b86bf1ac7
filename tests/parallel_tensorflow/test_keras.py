"""The drop-in Keras optimizer and callbacks, with Keras 3, and with the legacy Keras; and stock Horovod's with the
latter, which is all that it works with."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import horovod.tensorflow
import horovod.tensorflow.keras as stock
import numpy as np
import pytest
import tensorflow as tf
from training import (
    LEGACY,
    assert_close,
    batch,
    keras_model,
    known_gradient,
    mean_over_ranks,
    same_on_all_ranks,
)

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.monitor import JSONLines
from horovod_sparse.tensorflow import DistributedGradientTape

keras = tf.keras
pytestmark = pytest.mark.keras
STEPS = 8
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, **options)


def data(rank: int, steps: int = STEPS) -> tuple[Any, Any]:
    pairs = [batch(rank, step) for step in range(steps)]
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


def fit(model: Any, optimizer: Any, rank: int, **options: Any) -> Any:
    names = ("metrics", "run_eagerly", "jit_compile", "steps_per_execution")
    model.compile(optimizer, loss_function, **{name: options.pop(name) for name in names if name in options})
    x, y = data(rank)
    return model.fit(x, y, **{"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": 1, **options})


class WithTrainStep(keras.Model):
    """A train_step of its own, with a tape and apply_gradients."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = loss_function(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def by_fit(model: Any, optimizer: Any, rank: int) -> None:
    fit(model, optimizer, rank)


def by_fit_eagerly(model: Any, optimizer: Any, rank: int) -> None:
    fit(model, optimizer, rank, run_eagerly=True)


def by_fit_with_several_steps_an_execution(model: Any, optimizer: Any, rank: int) -> None:
    fit(model, optimizer, rank, steps_per_execution=4)


def by_train_step(model: Any, optimizer: Any, rank: int) -> None:
    fit(WithTrainStep(model), optimizer, rank)


def by_loop(model: Any, optimizer: Any, rank: int, function: Callable[..., Any] = tf.function) -> None:
    @function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if function is tf.function:
        optimizer.build(model.trainable_variables)
    for i in range(STEPS):
        step(*map(tf.constant, batch(rank, i)))


def by_eager_loop(model: Any, optimizer: Any, rank: int) -> None:
    by_loop(model, optimizer, rank, function=lambda step: step)


LOOPS = [by_fit, by_fit_eagerly, by_fit_with_several_steps_an_execution, by_train_step, by_loop, by_eager_loop]


def mean_gradients(model: Any, steps: Sequence[int]) -> list[Any]:
    """The sum over some steps of the mean over the ranks of the model's gradients, computed in one process."""
    every = []
    for rank in range(hvd.size()):
        for step in steps:
            x, y = batch(rank, step)
            with tf.GradientTape() as tape:
                loss = loss_function(y, model(x))
            every.append(tape.gradient(loss, model.trainable_variables))
    return [sum(gradients) / hvd.size() for gradients in zip(*every, strict=True)]


def plain_average(optimizer_of: Callable[[], Any] = sgd) -> list[Any]:
    """The weights after training in one process, with the mean of all ranks' gradients."""
    model = keras_model()
    optimizer = optimizer_of()
    for step in range(STEPS):
        optimizer.apply_gradients(zip(mean_gradients(model, [step]), model.trainable_variables, strict=True))
    if hasattr(optimizer, "finalize_variable_values"):  # as fit does, with ema
        optimizer.finalize_variable_values(model.trainable_variables)
    return model.get_weights()


@pytest.mark.parametrize("train", LOOPS)
@pytest.mark.parametrize(
    "compression", [hvd.Compression.none, hvd.MiCROCompressor(density=1.0)], ids=["dense", "micro, density 1"]
)
def test_training_is_that_with_the_mean_gradient(compression: Any, train: Callable[..., None]) -> None:
    model = keras_model()
    train(model, hvd.DistributedOptimizer(sgd(), compression=compression), hvd.rank())
    assert_close(model.get_weights(), plain_average())
    assert same_on_all_ranks(model.get_weights())


@pytest.mark.parametrize("train", LOOPS)
def test_micro_keeps_replicas_equal(train: Callable[..., None]) -> None:
    model = keras_model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression=hvd.MiCROCompressor(density=0.05))
    train(model, optimizer, hvd.rank())
    assert same_on_all_ranks(model.get_weights())
    stats = hvd.get_compressor(optimizer).stats
    assert stats.step == STEPS
    assert stats.numel == model.count_params()
    assert stats.density == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("train", LOOPS)
def test_a2sgd_averages_the_parameters_by_itself(train: Callable[..., None]) -> None:
    model = keras_model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression=hvd.A2SGDCompressor(sync_every=STEPS))
    train(model, optimizer, hvd.rank())
    assert same_on_all_ranks(model.get_weights())
    assert not hvd.get_compressor(optimizer).averaging_due


@pytest.mark.parametrize("train", LOOPS)
def test_a2sgd_on_equal_data_trains_like_one_rank(train: Callable[..., None]) -> None:
    model, alone = keras_model(), keras_model()
    train(model, hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.a2sgd), 0)
    train(alone, sgd(), 0)
    assert_close(model.get_weights(), alone.get_weights())


def test_fp16_trains_nearly_like_dense() -> None:
    model = keras_model()
    by_fit(model, hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16), hvd.rank())
    assert_close(model.get_weights(), plain_average(), rtol=0.01, atol=0.01)
    assert same_on_all_ranks(model.get_weights())


OPTIMIZERS = {
    "momentum": lambda: sgd(momentum=0.9),
    "nesterov, clipped by norm": lambda: sgd(momentum=0.9, nesterov=True, global_clipnorm=0.1),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "adamw with ema": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, use_ema=True),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)),
}
if LEGACY:
    OPTIMIZERS["legacy"] = lambda: keras.optimizers.legacy.SGD(0.1, momentum=0.9)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(make: Callable[[], Any]) -> None:
    model = keras_model()
    optimizer = hvd.DistributedOptimizer(make(), compression=hvd.MiCROCompressor(density=1.0))
    by_fit(model, optimizer, hvd.rank())
    assert_close(model.get_weights(), plain_average(make))
    assert type(optimizer).__name__ == type(make()).__name__
    assert int(optimizer.iterations) == STEPS


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.MiCROCompressor], ids=["dense", "micro"])
@pytest.mark.parametrize("train", [by_fit, by_eager_loop])
def test_backward_passes_per_step(train: Callable[..., None], compression: Any, average: bool) -> None:
    """Two passes are one step on both batches: the sum of their mean gradients, or the mean."""
    if compression is hvd.MiCROCompressor:
        compression = hvd.MiCROCompressor(density=1.0)
    model = keras_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(), compression=compression, backward_passes_per_step=2, average_aggregated_gradients=average
    )
    train(model, optimizer, hvd.rank())

    reference = keras_model()
    plain = sgd()
    for step in range(0, STEPS, 2):
        sums = [g / (2 if average else 1) for g in mean_gradients(reference, [step, step + 1])]
        plain.apply_gradients(zip(sums, reference.trainable_variables, strict=True))
    assert_close(model.get_weights(), reference.get_weights())
    assert same_on_all_ranks(model.get_weights())
    assert int(optimizer.iterations) == STEPS


def test_op_sum_and_gradient_predivide_factor() -> None:
    model = keras_model()
    lr = 0.1 / hvd.size()
    options = {"op": hvd.Sum, "compression": hvd.MiCROCompressor(density=1.0)}
    by_fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(lr), **options), hvd.rank())
    assert_close(model.get_weights(), plain_average())
    for compression in (hvd.Compression.none, hvd.MiCROCompressor(density=1.0)):
        model = keras_model()
        optimizer = hvd.DistributedOptimizer(sgd(), compression=compression, gradient_predivide_factor=1.7, groups=2)
        by_fit(model, optimizer, hvd.rank())
        assert_close(model.get_weights(), plain_average())


def embedding_model() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((4,), dtype="int32"), layers.Embedding(30, 8), layers.Flatten(), layers.Dense(10)]
    )


def fit_embedding(optimizer: Any, rank: int) -> Any:
    model = embedding_model()
    model.compile(optimizer, loss_function)
    words = np.random.default_rng(rank).integers(0, 30, (64, 4))
    model.fit(words, words[:, 0] % 10, batch_size=16, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_embeddings(sparse_as_dense: bool) -> None:
    options = {"sparse_as_dense": sparse_as_dense}
    reference = fit_embedding(hvd.DistributedOptimizer(sgd()), hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(), compression=hvd.MiCROCompressor(density=1.0), **options)
    model = fit_embedding(optimizer, hvd.rank())
    assert_close(model.get_weights(), reference.get_weights())
    embedding = 30 * 8
    numel = hvd.get_compressor(optimizer).stats.numel
    assert numel == model.count_params() - (0 if sparse_as_dense else embedding)
    model = fit_embedding(hvd.DistributedOptimizer(sgd(), compression=hvd.MiCROCompressor, **options), hvd.rank())
    assert same_on_all_ranks(model.get_weights())


def test_sparse_gradients_cannot_be_added_up() -> None:
    optimizer = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        fit_embedding(optimizer, hvd.rank())


# Mixed precision


def loss_scale(optimizer: Any, **options: Any) -> Any:
    cls = keras.mixed_precision.LossScaleOptimizer if LEGACY else keras.optimizers.LossScaleOptimizer
    return cls(optimizer, **options)


def scale_of(optimizer: Any) -> float:
    return float(optimizer.loss_scale if LEGACY else optimizer.dynamic_scale)


@pytest.mark.parametrize("outside", ["loss scale", "distributed"])
@pytest.mark.parametrize(
    "compression",
    [hvd.Compression.none, hvd.MiCROCompressor, hvd.A2SGDCompressor],
    ids=["dense", "micro", "a2sgd"],
)
@pytest.mark.parametrize("eager", [False, True])
def test_overflow_on_one_rank_skips_the_step_on_all(eager: bool, compression: Any, outside: str) -> None:
    """A batch of one rank makes its gradients infinite."""

    def wrap(optimizer: Any) -> Any:
        options = {"initial_scale": 8.0}
        if outside == "distributed":
            return hvd.DistributedOptimizer(loss_scale(optimizer, **options), compression=compression)
        return loss_scale(hvd.DistributedOptimizer(optimizer, compression=compression), **options)

    model, optimizer = keras_model(), wrap(sgd())
    model.compile(optimizer, loss_function, run_eagerly=eager)
    for step in range(4):
        x, y = batch(hvd.rank(), step)
        if step == 2 and hvd.rank() == hvd.size() - 1:
            x[0] = np.inf
        before = model.get_weights()
        model.train_on_batch(x, y)
        unchanged = all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
        assert unchanged == (step == 2)
        assert scale_of(optimizer) == (8.0 if step < 2 else 4.0)
    if compression is not hvd.A2SGDCompressor:
        assert same_on_all_ranks(model.get_weights())
    if compression is not hvd.Compression.none:
        assert hvd.get_compressor(optimizer).stats.step == 3


def test_mixed_float16_policy() -> None:
    """`compile` puts the loss scaling around our optimizer; the residual is in true units, whatever the scale."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = keras_model()
        optimizer = hvd.DistributedOptimizer(sgd(), compression=hvd.MiCROCompressor(density=0.05))
        fit(model, optimizer, hvd.rank())
        assert same_on_all_ranks(model.get_weights())
        residual = hvd.get_compressor(optimizer).state_dict()["residual"]
        assert 0 < max(np.abs(part).max() for part in residual.values()) < 10
        assert type(model.optimizer).__name__.startswith("LossScaleOptimizer")
        assert hvd.get_compressor(model.optimizer) is hvd.get_compressor(optimizer)
    finally:
        keras.mixed_precision.set_global_policy("float32")


# Callbacks


def test_broadcast() -> None:
    model = keras_model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(momentum=0.9), compression=hvd.MiCROCompressor)
    assert not same_on_all_ranks(model.get_weights())
    fit(model, optimizer, hvd.rank(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert same_on_all_ranks(model.get_weights())
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    assert same_on_all_ranks(variables)
    model = keras_model(seed=hvd.rank())
    hvd.broadcast_variables(model.variables, root_rank=0)
    assert same_on_all_ranks(model.get_weights())
    assert_close(model.get_weights(), keras_model(seed=0).get_weights(), 0, 0)


def test_metrics_are_averaged() -> None:
    seen: dict[str, dict[str, float]] = {}

    class Note(keras.callbacks.Callback):
        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen[self.key] = dict(logs)

    callbacks = [Note("before"), hvd.callbacks.MetricAverageCallback(), Note("after")]
    model = keras_model()
    history = fit(
        model,
        hvd.DistributedOptimizer(sgd()),
        hvd.rank(),
        callbacks=callbacks,
        metrics=["accuracy"],
        validation_data=batch(hvd.rank(), 99),
    )
    assert set(seen["after"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, value in seen["before"].items():
        mean = float(horovod.tensorflow.allreduce(tf.constant(value, tf.float64), name=f"test.{name}"))
        assert seen["after"][name] == pytest.approx(mean, rel=1e-5)
        assert history.history[name][0] == pytest.approx(mean, rel=1e-5)


def test_metrics_that_differ_between_ranks() -> None:
    validation = {"validation_data": batch(0, 99)} if hvd.rank() == 0 else {}
    with pytest.raises(RuntimeError, match="val_loss"):
        fit(
            keras_model(),
            hvd.DistributedOptimizer(sgd()),
            hvd.rank(),
            callbacks=[hvd.callbacks.MetricAverageCallback()],
            **validation,
        )


class Rates(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(np.asarray(self.model.optimizer.learning_rate)))


def test_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    rates = Rates()
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    fit(keras_model(), hvd.DistributedOptimizer(sgd()), hvd.rank(), epochs=3, callbacks=[warm_up, rates])
    n = hvd.size()
    expected = [0.4 / n * (1 + (i + 1) / (2 * STEPS) * (n - 1)) for i in range(2 * STEPS)]
    np.testing.assert_allclose(rates.rates, expected + [0.4] * STEPS, rtol=1e-5)
    assert ("warmup to 0.4" in capsys.readouterr().out) == (hvd.rank() == 0)


def test_schedule_and_its_momentum_correction() -> None:
    """The first step of an epoch with another learning rate uses momentum * new / old, as stock Horovod's would."""
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5**epoch, start_epoch=1)
    rates = Rates()
    model = keras_model()
    optimizer = hvd.DistributedOptimizer(sgd(momentum=0.9))
    history = fit(model, optimizer, hvd.rank(), epochs=3, callbacks=[schedule, rates])
    np.testing.assert_allclose(rates.rates, np.repeat([0.1, 0.05, 0.025], STEPS), rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"], [0.1, 0.05, 0.025], rtol=1e-5)

    reference = keras_model()
    velocity = [np.zeros(v.shape) for v in reference.trainable_variables]
    for step in range(3 * STEPS):
        epoch, i = divmod(step, STEPS)
        rate = 0.1 * 0.5**epoch
        momentum = 0.45 if i == 0 and epoch > 0 else 0.9
        for j, gradient in enumerate(mean_gradients(reference, [i])):
            velocity[j] = momentum * velocity[j] - rate * np.asarray(gradient)
            reference.trainable_variables[j].assign_add(velocity[j].astype(np.float32))
    assert_close(model.get_weights(), reference.get_weights(), rtol=1e-3, atol=1e-4)


def test_callbacks_that_cannot_work_say_so() -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=1)
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        fit(keras_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), hvd.rank(), callbacks=[warm_up])
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)
    synchronize = hvd.callbacks.SynchronizeParametersCallback()
    with pytest.raises(TypeError, match="compression=MiCROCompressor"):
        fit(keras_model(), hvd.DistributedOptimizer(sgd()), hvd.rank(), callbacks=[synchronize])
    micro = hvd.DistributedOptimizer(sgd(), compression=hvd.MiCROCompressor)
    with pytest.raises(TypeError, match=r"not for MiCROCompressor, .+ leave the callback out"):
        fit(keras_model(), micro, hvd.rank(), callbacks=[synchronize])


def test_synchronize_parameters_callback() -> None:
    equal: list[bool] = []

    class AtEpochEnd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            equal.append(same_on_all_ranks(self.model.get_weights()))

    callbacks = [hvd.callbacks.SynchronizeParametersCallback(), AtEpochEnd()]
    optimizer = hvd.DistributedOptimizer(sgd(), compression=hvd.A2SGDCompressor)
    fit(keras_model(), optimizer, hvd.rank(), epochs=2, callbacks=callbacks)
    assert equal == [True, True]


@pytest.mark.parametrize("make", [hvd.DistributedOptimizer, *([stock.DistributedOptimizer] if LEGACY else [])])
def test_synchronize_parameters_callback_takes_over_the_averaging(make: Callable[..., Any]) -> None:
    """Of all trainable variables, but for those that a rank keeps to itself, and with those that are not reduced."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([layers.Input((4,), dtype="int32"), layers.Embedding(30, 8), layers.Flatten()])
    model.add(layers.Dense(200))
    model.add(layers.Dense(10))
    compressor = hvd.A2SGDCompressor(sync_every=2)
    optimizer = make(sgd(), compression=compressor)
    own = model.layers[-1].bias
    optimizer.register_local_var(own)
    model.compile(optimizer, loss_function)
    words = np.random.default_rng(hvd.rank()).integers(0, 30, (64, 4))
    callback = hvd.callbacks.SynchronizeParametersCallback()
    model.fit(words, words[:, 0] % 10, batch_size=16, shuffle=False, verbose=0, callbacks=[callback])
    assert not compressor.averaging_due
    assert not same_on_all_ranks([own])
    assert same_on_all_ranks(v for v in model.trainable_variables if v is not own)
    averaged = sum(int(np.prod(v.shape)) for v in model.trainable_variables if v is not own)
    assert compressor.stats.bytes_sent >= 4 * averaged


def test_functions_run_eagerly() -> None:
    tf.config.run_functions_eagerly(True)
    try:
        for compression in (hvd.MiCROCompressor(density=1.0), hvd.A2SGDCompressor(sync_every=STEPS)):
            model = keras_model()
            by_fit(model, hvd.DistributedOptimizer(sgd(), compression=compression), hvd.rank())
            assert same_on_all_ranks(model.get_weights())
    finally:
        tf.config.run_functions_eagerly(False)


def test_memory_of_models_that_are_gone() -> None:
    """Keras keeps some graphs for ever; what they call must not hold what is as large as the model."""
    model = keras_model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression=hvd.MiCROCompressor)
    by_fit(model, optimizer, hvd.rank())
    (slot,) = hvd.get_compressor(optimizer).slots.values()
    residual = weakref.ref(slot.exchange.algorithm.residual)
    assert residual() is not None
    del model, optimizer, slot
    gc.collect()
    assert residual() is None


@pytest.mark.skipif(LEGACY, reason="tf.keras is the legacy Keras itself")
def test_legacy_keras_beside_keras_3() -> None:
    """`tf_keras` by its own name: optimizers and callbacks go by what they are given."""
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.Input((20,)), tf_keras.layers.Dense(10)])
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), compression=hvd.MiCROCompressor)
    model.compile(optimizer, tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    names = ("BroadcastGlobalVariables", "MetricAverage", "LearningRateWarmup")
    given = ([0], [], [0.4, 1])
    callbacks = [getattr(hvd.callbacks, f"{name}Callback")(*args) for name, args in zip(names, given, strict=True)]
    x, y = data(hvd.rank())
    history = model.fit(x, y, batch_size=16, verbose=0, callbacks=callbacks)
    assert same_on_all_ranks(model.get_weights())
    assert history.history["lr"] == [pytest.approx(0.4)]


# Models on disk


# In Keras 3, a model from an .h5 file cannot be trained at all, unless it is compiled again.
@pytest.mark.parametrize("suffix", ["keras", "h5"] if LEGACY else ["keras"])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.MiCROCompressor], ids=["dense", "micro"])
def test_saved_model_goes_on_where_it_was(compression: Any, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    model = keras_model()
    fit(model, hvd.DistributedOptimizer(sgd(momentum=0.9), compression=compression), hvd.rank())
    model.save(path)

    plain = keras.models.load_model(path)
    assert type(plain.optimizer).__module__.split(".")[0] == ("tf_keras" if LEGACY else "keras")
    assert not hasattr(plain.optimizer, "register_local_var")

    loaded = hvd.load_model(path, compression=compression)
    assert int(loaded.optimizer.iterations) == STEPS
    x, y = batch(hvd.rank(), 50)
    loaded.train_on_batch(x, y)
    assert same_on_all_ranks(loaded.get_weights())
    if compression is hvd.Compression.none:
        model.train_on_batch(x, y)
        assert_close(loaded.get_weights(), model.get_weights())


def test_training_is_resumed_with_the_compressors_state(tmp_path: Path) -> None:
    """Keras 3 gives the variables of a loaded Sequential model other names."""
    first = hvd.MiCROCompressor(density=0.05)
    model = keras_model()
    fit(model, hvd.DistributedOptimizer(sgd(momentum=0.9), compression=first), hvd.rank())
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", compression=hvd.MiCROCompressor(density=0.05))
    hvd.get_compressor(loaded.optimizer).load_state_dict(first.state_dict())
    for each in (model, loaded):
        for step in (50, 51):
            each.train_on_batch(*batch(hvd.rank(), step))
    assert_close(loaded.get_weights(), model.get_weights(), 0, 0)
    assert hvd.get_compressor(loaded.optimizer).stats.step == STEPS + 2


@keras.utils.register_keras_serializable("test")
class MySGD(keras.optimizers.SGD):
    pass


def test_saved_model_with_an_optimizer_of_the_users(tmp_path: Path) -> None:
    model = keras_model()
    fit(model, hvd.DistributedOptimizer(MySGD(0.1), compression=hvd.MiCROCompressor), hvd.rank())
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", custom_optimizers=[MySGD], compression=hvd.Compression.micro)
    assert isinstance(loaded.optimizer, MySGD)
    loaded.train_on_batch(*batch(hvd.rank(), 50))
    assert hvd.get_compressor(loaded.optimizer).stats.step == 1


# What cannot work


def test_function_that_xla_compiles() -> None:
    optimizer = hvd.DistributedOptimizer(sgd(), compression=hvd.MiCROCompressor)
    with pytest.raises(ValueError, match="jit_compile=False"):
        fit(keras_model(), optimizer, hvd.rank(), jit_compile=True)


@pytest.mark.skipif(LEGACY, reason="Keras 3 alone compiles with XLA unasked")
def test_xla_is_turned_off_where_keras_would_use_it_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is where it sees a GPU."""
    devices = tf.config.list_physical_devices()
    gpu = SimpleNamespace(device_type="GPU", name="/physical_device:GPU:0")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [*devices, gpu])
    for compression in (hvd.Compression.none, hvd.MiCROCompressor):
        monkeypatch.setattr("horovod_sparse._compressor._warned_of", set())
        model = keras_model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, hvd.DistributedOptimizer(sgd(), compression=compression), hvd.rank())
        assert ["jit_compile=False" in str(warning.message) for warning in caught].count(True) == (hvd.rank() == 0)
        assert same_on_all_ranks(model.get_weights())
    plain = keras_model()
    plain.compile(sgd(), loss_function)
    assert plain.jit_compile


def test_optimizer_made_from_the_config_of_ours_is_distributed() -> None:
    optimizer = hvd.DistributedOptimizer(sgd(momentum=0.9), compression=hvd.MiCROCompressor)
    again = type(optimizer).from_config(optimizer.get_config())
    model = keras_model()
    by_fit(model, again, hvd.rank())
    assert same_on_all_ranks(model.get_weights())
    assert hvd.get_compressor(again).stats.step == STEPS


def test_optimizer_wrapped_twice() -> None:
    optimizer = hvd.DistributedOptimizer(sgd())
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "micro"}, "compression='micro'"),
        ({"compression": hvd.MiCROCompressor, "op": 2}, "MiCROCompressor does not work with op=hvd.Adasum"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"groups": (1,)}, r"groups=\(1,\): it must"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0: it must"),
        ({"backward_passes_per_step": 1.5}, "backward_passes_per_step=1.5: it must"),
        ({"backward_passes_per_step": "2"}, "backward_passes_per_step='2': it must"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        hvd.DistributedOptimizer(sgd(), **options)


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="optimizer of Keras"):
        hvd.DistributedOptimizer(keras_model())
    with pytest.raises(TypeError, match="optimizer of Keras"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(TypeError, match="get_compressor"):
        hvd.get_compressor(sgd())


@pytest.mark.skipif(LEGACY, reason="`apply` is a method of Keras 3's optimizers")
def test_gradients_that_are_not_those_of_the_variables() -> None:
    optimizer, variables = hvd.DistributedOptimizer(sgd()), keras_model().trainable_variables
    gradients = [tf.zeros(v.shape) for v in variables]
    with pytest.raises(ValueError, match="must already be built"):
        optimizer.apply(gradients)
    optimizer.build(variables)
    with pytest.raises(ValueError, match="3 gradients of 4 variables"):
        optimizer.apply(gradients[:3], variables)
    with pytest.raises(ValueError, match="3 gradients of 4 variables"):
        optimizer.apply(gradients[:3])
    optimizer.apply([])
    optimizer.apply(gradients)
    assert int(optimizer.iterations) == 1


def test_namespace_is_horovods_with_ours() -> None:
    for name, thing in vars(stock).items():
        assert hasattr(hvd, name) or name[0] == "_" or isinstance(thing, ModuleType)
    assert hvd.Compression.none is stock.Compression.none
    assert hvd.Compression.micro is hvd.MiCROCompressor


# Stock Horovod

stock_works = pytest.mark.skipif(not LEGACY, reason="stock Horovod does not work with Keras 3")


@stock_works
@pytest.mark.parametrize("groups", [None, 1])
def test_stock_optimizer(groups: int | None) -> None:
    def train(compression: Any) -> tuple[Any, Any]:
        model = keras_model()
        optimizer = stock.DistributedOptimizer(sgd(), compression=compression, groups=groups)
        fit(model, optimizer, hvd.rank())
        return model, optimizer

    model, optimizer = train(hvd.MiCROCompressor(density=1.0))
    assert_close(model.get_weights(), plain_average())
    model, optimizer = train(hvd.MiCROCompressor)
    assert same_on_all_ranks(model.get_weights())
    stats = hvd.get_compressor(optimizer).stats
    assert stats.numel == model.count_params()
    model, _ = train(hvd.A2SGDCompressor(sync_every=5))
    assert not same_on_all_ranks(model.get_weights())


@stock_works
def test_stock_optimizer_with_our_callback() -> None:
    model = keras_model()
    optimizer = stock.DistributedOptimizer(sgd(), compression=hvd.A2SGDCompressor(sync_every=3))
    fit(model, optimizer, hvd.rank(), callbacks=[hvd.callbacks.SynchronizeParametersCallback()])
    assert same_on_all_ranks(model.get_weights())


@stock_works
def test_stock_backward_passes_per_step() -> None:
    def train(compression: Any) -> Any:
        model = keras_model()
        optimizer = stock.DistributedOptimizer(sgd(), compression=compression, backward_passes_per_step=2)
        fit(model, optimizer, hvd.rank())
        return model.get_weights()

    assert_close(train(hvd.MiCROCompressor(density=1.0)), train(hvd.Compression.none))
    assert same_on_all_ranks(train(hvd.MiCROCompressor(density=0.05)))


@pytest.mark.parametrize("schedule", [False, True])
def test_each_gradient_has_its_effect_at_the_learning_rate_of_its_own_step(schedule: bool) -> None:
    """With SGD: what is held back is counted at the learning rate of the day."""
    rates = [0.5, 0.25, 0.125, 0.0625]
    rate = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5) if schedule else rates[0]
    compression = hvd.MiCROCompressor(0.05)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), compression=compression)
    variable = tf.Variable(np.zeros((40, 50)), dtype="float64", name="w")
    optimizer.build([variable])
    apply = tf.function(lambda g: optimizer.apply_gradients([(g, variable)]))
    total = np.zeros(variable.shape)
    for step, of_step in enumerate(rates):
        if not schedule:
            optimizer.learning_rate.assign(of_step)
        apply(tf.constant(known_gradient(variable.shape, hvd.rank(), step)))
        total += of_step * mean_over_ranks(lambda rank, step=step: known_gradient(variable.shape, rank, step))
        (residual,) = compression.state_dict()["residual"].values()
        held_back = of_step * horovod.tensorflow.allreduce(tf.constant(residual), name="test.held_back").numpy()
        assert abs(held_back).max() > 0
        np.testing.assert_allclose(held_back - variable.numpy(), total, rtol=0, atol=1e-6)


def test_the_residual_does_not_follow_the_learning_rate_of_adam_and_a_tape_has_none() -> None:
    compression = hvd.MiCROCompressor(0.05)
    fit(keras_model(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), compression=compression), hvd.rank())
    assert set(compression.state_dict()["rates"].values()) == {0.0}
    tape = DistributedGradientTape(tf.GradientTape(), compression=hvd.MiCROCompressor(follow_learning_rate=True))
    variable = tf.Variable(np.zeros(2000, np.float32))
    with tape:
        loss = tf.reduce_sum(variable)
    with pytest.raises(ValueError, match="follow_learning_rate=True"):
        tape.gradient(loss, [variable])


@pytest.mark.parametrize("compression", [hvd.MiCROCompressor, hvd.A2SGDCompressor])
def test_monitor_callback(compression: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    optimizer = hvd.DistributedOptimizer(sgd(), compression=compression)
    model = keras_model()
    fit(model, optimizer, hvd.rank(), epochs=2, callbacks=[hvd.callbacks.MonitorCallback(JSONLines(path), every=5)])
    if hvd.rank() > 0:
        assert not path.exists()
        return
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 2 * STEPS + 1, 5))
    compressor = hvd.get_compressor(optimizer)
    last = records[-1]
    assert last["bytes_sent"] == compressor.stats.bytes_sent
    assert last["dense_bytes"] == sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
    assert (last["method"], last["world_size"]) == (compressor.method, hvd.size())
    assert last["selection_s"] > 0 < last["exchange_s"]
    residual = compressor.state_dict().get("residual", {})
    norm = np.sqrt(sum(np.square(part, dtype="f8").sum() for part in residual.values()))
    assert last["residual_norm"] == (pytest.approx(norm, rel=1e-5) if residual else None)


def test_monitor_callback_without_a_compressor() -> None:
    with pytest.raises(TypeError, match="compression=MiCROCompressor"):
        fit(keras_model(), sgd(), hvd.rank(), callbacks=[hvd.callbacks.MonitorCallback()])
    with pytest.raises(ValueError, match="every=0"):
        hvd.callbacks.MonitorCallback(every=0)
