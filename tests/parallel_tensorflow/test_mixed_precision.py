"""Loss scaling with a tape: what is held back has the units of the loss itself. Keras's own loops: test_keras.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf
from training import LEGACY, MLP, batch, same_on_all_ranks

import horovod_sparse.tensorflow as hvd

pytestmark = pytest.mark.keras
SCALES = [2.0**10, 2.0**11, 2.0**4, 1.0, 2.0**16, 2.0**-3, 2.0**10]
HOLDING_BACK = {
    "micro": hvd.MiCROCompressor,
    "float16": partial(hvd.MiCROCompressor, value_dtype="float16"),
    "topk": hvd.TopKCompressor,
}


def train(make: Callable[[], Any], tapes: Any, scales: list[float], run_in: Callable[..., Any]) -> tuple[MLP, Any]:
    """A model after a step with each of the scales, and its compressor."""
    model, compressor = MLP(), make()
    scale = tf.Variable(1.0)
    inner = tf.keras.optimizers.SGD(0.1)
    if LEGACY:
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner, dynamic=False, initial_scale=1.0)
        optimizer._loss_scale = scale
    else:
        optimizer = tf.keras.optimizers.LossScaleOptimizer(inner)
        optimizer.build(model.parameters)
        scale = optimizer.dynamic_scale

    @run_in
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
            scaled = optimizer.get_scaled_loss(loss) if LEGACY else optimizer.scale_loss(loss)
        gradients = tapes(tape, compression=compressor).gradient(scaled, model.parameters)
        for p, gradient in zip(model.parameters, gradients, strict=True):
            p.assign_sub(0.1 * gradient / tf.cast(scale, gradient.dtype))

    for i, value in enumerate(scales):
        scale.assign(value)
        step(*map(tf.constant, batch(hvd.rank(), i)))
    return model, compressor


@pytest.mark.parametrize("make", HOLDING_BACK.values(), ids=HOLDING_BACK)
@pytest.mark.parametrize("run_in", [tf.function, lambda f: f], ids=["graph", "eager"])
def test_changing_loss_scales_change_nothing(make: Callable[[], Any], run_in: Callable[..., Any]) -> None:
    """Scales are powers of 2, which round nothing: parameters and residuals are those of a run without scaling."""
    scaled, compressor = train(make, hvd.DistributedGradientTape, SCALES, run_in)
    plain, reference = train(make, hvd.DistributedGradientTape, [1.0] * len(SCALES), run_in)
    for p, q in zip(scaled.parameters, plain.parameters, strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())
    residual = reference.state_dict()["residual"]
    for name, held_back in compressor.state_dict()["residual"].items():
        np.testing.assert_array_equal(held_back, residual[name])
    assert same_on_all_ranks(scaled.parameters)


def test_stock_tapes_know_the_scale_too() -> None:
    scaled, _ = train(hvd.MiCROCompressor, stock.DistributedGradientTape, SCALES, tf.function)
    plain, _ = train(hvd.MiCROCompressor, stock.DistributedGradientTape, [1.0] * len(SCALES), tf.function)
    for p, q in zip(scaled.parameters, plain.parameters, strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())
