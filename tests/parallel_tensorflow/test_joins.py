"""`hvd.join()`: a rank whose data ends earlier. The others go on, with steps that are dense.

It is called once in all, for a second `hvd.join()` in a process does not wait, in Horovod 0.28.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from training import LEGACY, batch, keras_model, known_gradient, same_on_all_ranks

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as keras_hvd

pytestmark = pytest.mark.laws
LAST = hvd.size() - 1
COMPRESSORS = {
    "micro": hvd.MiCROCompressor,
    "topk": hvd.TopKCompressor,
    "qsgd": hvd.QSGDCompressor,
    "a2sgd": lambda: hvd.A2SGDCompressor(sync_every=2),
}


class Trained:
    """Variables that take known gradients, at a learning rate of 1."""

    def __init__(self, compressor: Any) -> None:
        self.compressor = compressor
        self.variables = [
            tf.Variable(tf.zeros(shape, tf.float64), name=f"v{i}") for i, shape in enumerate([(30, 50), 50])
        ]

        @tf.function
        def step(gradients: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(self.variables, gradients, strict=True)])
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            for v, update in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
                v.assign_sub(update)

        self._step = step

    def train(self, *steps: int) -> None:
        for step in steps:
            self._step(
                [tf.constant(known_gradient(v.shape, hvd.rank(), step, i)) for i, v in enumerate(self.variables)]
            )


def scaled_model() -> Any:
    """A Keras model whose loss is scaled."""
    optimizers = tf.keras.optimizers
    scaling = tf.keras.mixed_precision.LossScaleOptimizer if LEGACY else optimizers.LossScaleOptimizer
    model = keras_model()
    optimizer = keras_hvd.DistributedOptimizer(scaling(optimizers.SGD(0.1)), compression=hvd.MiCROCompressor)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def test_ranks_go_on_without_one_that_has_joined_and_with_it_when_it_is_back() -> None:
    trained = {name: Trained(make()) for name, make in COMPRESSORS.items()}
    model = scaled_model()
    before = [np.array(w) for w in model.get_weights()]
    ended = {rank: 5 - (rank == LAST) * 2 for rank in range(hvd.size())}
    for step in range(ended[hvd.rank()]):
        for each in trained.values():
            each.train(step)
        model.train_on_batch(*batch(hvd.rank(), step))
        assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True)), "a step was skipped"
        before = [np.array(w) for w in model.get_weights()]
    last = hvd.join()
    for each in trained.values():
        hvd.broadcast_variables(each.variables, root_rank=int(last))
        each.train(10, 11, 12)
        assert each.compressor.stats.step == 8

    for name in ("micro", "topk"):
        held_back = trained[name].compressor.state_dict()["residual"]
        for i, v in enumerate(trained[name].variables):
            steps = [(rank, step) for rank, end in ended.items() for step in [*range(end), 10, 11, 12]]
            wanted = sum(known_gradient(v.shape, rank, step, i) for rank, step in steps) / hvd.size()
            mean = hvd.allreduce(tf.constant(held_back[f"v{i}"]), name=f"test.joined.{name}.{i}").numpy()
            np.testing.assert_allclose(mean - v.numpy(), wanted, rtol=0, atol=1e-10)
    trained["a2sgd"].compressor.synchronize_parameters()
    for name, each in trained.items():
        assert same_on_all_ranks(each.variables), name
