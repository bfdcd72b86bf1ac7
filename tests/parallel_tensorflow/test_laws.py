"""The laws of the methods, in the drop-in tape and in stock Horovod's, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf
from training import MLP, assert_close, batch, known_gradient, mean_over_ranks, same_on_all_ranks

import horovod_sparse.tensorflow as hvd
from horovod_sparse.tensorflow import collectives

pytestmark = pytest.mark.laws

SHAPES = {"b/kernel": (20, 64), "b/bias": (64,), "a/kernel": (64, 10), "a/empty": (0, 3), "a/scale": ()}
WRAPPERS = {
    "drop-in": hvd.DistributedGradientTape,
    "stock, one group": lambda tape, **options: stock.DistributedGradientTape(tape, groups=1, **options),
}


def variables(dtype: str = "float32") -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape, dtype), name=name) for name, shape in SHAPES.items()]


def gradients_of(rank: int, step: int, scale: float = 1.0) -> list[Any]:
    return [scale * known_gradient(shape, rank, step, i) for i, shape in enumerate(SHAPES.values())]


def make_step(parameters: Sequence[tf.Variable], wrap: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function that reduces given gradients."""

    @tf.function
    def step(*gradients: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(p * g) for p, g in zip(parameters, gradients, strict=True)])
        return wrap(tape, **options).gradient(loss, list(parameters))

    return lambda gradients: [g.numpy() for g in step(*(tf.constant(g, parameters[0].dtype) for g in gradients))]


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WRAPPERS[request.param]


def in_order_of_names(tensors: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The flat vector."""
    return np.concatenate([np.asarray(t, np.float64).ravel() for _, t in sorted(zip(SHAPES, tensors, strict=True))])


# Sums of up to 4 half-precision values round at 2**-11 of the values, which reach about 4 * sqrt(50 steps).
TOLERANCES = {
    **{
        partial(hvd.MiCROCompressor, 0.02, threshold, value_dtype): 0.4 if value_dtype == "float16" else 1e-12
        for threshold in ("adaptive", "paper")
        for value_dtype in (None, "float16", "bfloat16")
    },
    partial(hvd.TopKCompressor, 0.02): 1e-12,
}


@pytest.mark.parametrize(("make", "tolerance"), TOLERANCES.items())
def test_nothing_is_lost(make: Callable[[], Any], tolerance: float, wrap: Callable[..., Any]) -> None:
    compressor = make()
    reduce = make_step(variables("float64"), wrap, compression=compressor)
    applied = np.zeros(sum(int(np.prod(s)) for s in SHAPES.values()))
    wanted = np.zeros_like(applied)
    for step in range(20):
        updates = reduce(gradients_of(hvd.rank(), step))
        assert same_on_all_ranks(updates)
        applied += in_order_of_names(updates)
        wanted += mean_over_ranks(lambda rank, step=step: in_order_of_names(gradients_of(rank, step)))
        residual = compressor.state_dict()["residual"]
        held_back = in_order_of_names([residual[name] for name in SHAPES])
        mean = stock.allreduce(tf.constant(held_back), name="test.residual").numpy()
        np.testing.assert_allclose(applied + mean, wanted, rtol=0, atol=tolerance)


def test_update_is_the_mean_accumulator_where_an_owner_selects(wrap: Callable[..., Any]) -> None:
    """The first step, computed independently: acc is the gradient, rank i owns partition i of the flat vector."""
    compressor = hvd.MiCROCompressor(density=0.05)
    updates = make_step(variables(), wrap, compression=compressor)(gradients_of(hvd.rank(), 0))
    every = np.stack([in_order_of_names(gradients_of(rank, 0)) for rank in range(hvd.size())]).astype(np.float32)
    d = every.shape[1]
    bounds = [i * d // hvd.size() for i in range(hvd.size() + 1)]
    owner = np.repeat(np.arange(hvd.size()), np.diff(bounds))
    selected = np.abs(every[owner, np.arange(d)]) >= compressor.stats.threshold
    wanted = np.where(selected, every.mean(axis=0, dtype=np.float64), 0)
    np.testing.assert_allclose(in_order_of_names(updates), wanted, rtol=1e-6, atol=1e-7)
    assert compressor.stats.selected == selected.sum()
    assert compressor.stats.density == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize("compression", [hvd.MiCROCompressor, hvd.TopKCompressor])
def test_density_one_is_horovods_dense_average(compression: Any, wrap: Callable[..., Any]) -> None:
    compressor = compression(density=1.0)
    ours = make_step(variables(), wrap, compression=compressor)
    dense = make_step(variables(), stock.DistributedGradientTape)
    for step in range(3):
        gradients = gradients_of(hvd.rank(), step)
        assert_close(ours(gradients), dense(gradients), rtol=1e-6, atol=1e-7)
    stats = compressor.stats
    assert (stats.density, stats.selected) == (1.0, stats.numel)


def test_qsgd_is_the_mean_to_within_a_level(wrap: Callable[..., Any]) -> None:
    reduce = make_step(variables(), wrap, compression=hvd.QSGDCompressor(bits=8))
    for step in range(3):
        updates = reduce(gradients_of(hvd.rank(), step))
        assert same_on_all_ranks(updates)
        mean = mean_over_ranks(lambda rank, step=step: in_order_of_names(gradients_of(rank, step)))
        # 512 normally distributed elements have a norm of about sqrt(512).
        np.testing.assert_allclose(in_order_of_names(updates), mean, rtol=0, atol=1.2 * 512**0.5 / 127)


@pytest.mark.parametrize(
    "make",
    [lambda: hvd.MiCROCompressor(threshold="paper"), hvd.MiCROCompressor, hvd.TopKCompressor, hvd.QSGDCompressor],
)
def test_replicas_are_bitwise_equal_over_200_steps(make: Callable[[], Any], wrap: Callable[..., Any]) -> None:
    model = MLP()
    compressor = make()

    @tf.function
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients = wrap(tape, compression=compressor).gradient(loss, model.parameters)
        for p, gradient in zip(model.parameters, gradients, strict=True):
            p.assign_sub(0.3 * gradient)
        return loss

    losses = [float(train(*map(tf.constant, batch(hvd.rank(), step)))) for step in range(200)]
    assert same_on_all_ranks(model.parameters)
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    assert compressor.stats.step == 200


def test_a2sgd_shifts_the_gradient_by_the_means(wrap: Callable[..., Any]) -> None:
    """An independent computation, over the whole model."""
    updates = make_step(variables(), wrap, compression=hvd.A2SGDCompressor)(gradients_of(hvd.rank(), 0))
    flat = [in_order_of_names(gradients_of(rank, 0)) for rank in range(hvd.size())]
    positive = [np.mean(g[g >= 0]) for g in flat]
    negative = [np.mean(-g[g < 0]) for g in flat]
    own = flat[hvd.rank()]
    up, down = np.mean(positive) - positive[hvd.rank()], np.mean(negative) - negative[hvd.rank()]
    wanted = own + np.where(own >= 0, up, -down)
    np.testing.assert_allclose(in_order_of_names(updates), wanted, rtol=1e-5, atol=1e-6)


def test_a2sgd_with_equal_gradients_changes_nothing(wrap: Callable[..., Any]) -> None:
    gradients = gradients_of(0, 0)
    for granularity in ("model", "tensor"):
        updates = make_step(variables(), wrap, compression=hvd.A2SGDCompressor(granularity))(gradients)
        assert_close(updates, gradients, rtol=1e-6, atol=1e-7)


def test_synchronized_parameters_are_bitwise_the_mean() -> None:
    model = MLP()
    compressor = hvd.A2SGDCompressor(sync_every=None)

    def train(step: int) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(*batch(hvd.rank(), step))
        gradients = hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, model.parameters)
        for p, gradient in zip(model.parameters, gradients, strict=True):
            p.assign_sub(gradient)

    for step in range(3):
        train(step)
    assert not same_on_all_ranks(model.parameters)
    means = [stock.allreduce(tf.cast(p, tf.float64), name=f"test.{i}") for i, p in enumerate(model.parameters)]
    compressor.synchronize_parameters()
    assert same_on_all_ranks(model.parameters)
    assert_close(model.parameters, means, rtol=1e-6, atol=1e-7)


def test_tape_averages_the_parameters_when_it_is_time_to() -> None:
    """With the gradients of the step after, for those of the step itself are applied by others."""
    model = MLP()

    @tf.function
    def train(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        tape = hvd.DistributedGradientTape(tape, compression=hvd.A2SGDCompressor(sync_every=3))
        gradients = tape.gradient(loss, model.parameters)
        for p, gradient in zip(model.parameters, gradients, strict=True):
            p.assign_sub(0 * gradient)

    for p in model.parameters:
        p.assign_add(tf.fill(p.shape, float(hvd.rank())))
    for step in range(4):
        train(*map(tf.constant, batch(hvd.rank(), step)))
        assert same_on_all_ranks(model.parameters) == (step == 3)


@pytest.mark.parametrize(
    "compression", [hvd.MiCROCompressor, hvd.A2SGDCompressor, hvd.TopKCompressor, hvd.QSGDCompressor]
)
def test_bytes_sent_is_what_horovod_was_given(compression: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, **options: Any) -> Any:
            def count(array: Any) -> Any:
                given.append(array.nbytes)
                return array

            counted = tf.numpy_function(count, [tensor], tensor.dtype)
            counted.set_shape(tensor.shape)
            return function(counted, **options)

        return call

    for name in ("allreduce", "allgather"):
        monkeypatch.setattr(collectives.hvd, name, counting(getattr(stock, name)))
    compressor = compression()
    reduce = make_step(variables(), hvd.DistributedGradientTape, compression=compressor)
    for step in range(4):
        given.clear()
        reduce(gradients_of(hvd.rank(), step))
        assert compressor.stats.bytes_sent == sum(given)


@pytest.mark.parametrize(
    "compression", [hvd.MiCROCompressor, hvd.A2SGDCompressor, hvd.TopKCompressor, hvd.QSGDCompressor]
)
def test_results_of_a_step_are_the_users_to_keep(compression: Any) -> None:
    parameters = variables()
    compressor = compression()

    @tf.function
    def reduce(*gradients: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(p * g) for p, g in zip(parameters, gradients, strict=True)])
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, parameters)

    kept = []
    for step in range(6):
        results = reduce(*(tf.constant(g, tf.float32) for g in gradients_of(hvd.rank(), step)))
        copies = [np.array(g) for g in results]
        if step % 2:
            kept.append((results, copies))
    for results, copies in kept:
        assert_close(results, copies, 0, 0)


def test_a2sgds_payload_does_not_depend_on_the_model() -> None:
    sent = []
    for size in (10, 10_000):
        compressor = hvd.A2SGDCompressor()
        p = [tf.Variable(tf.zeros(size), name="p")]
        for step in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(p[0] * known_gradient((size,), hvd.rank(), step))
            hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, p)
        sent.append(compressor.stats.bytes_sent)
    assert sent[0] == sent[1] < 50
