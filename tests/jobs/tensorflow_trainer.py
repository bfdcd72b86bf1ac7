"""Trains a small model in TensorFlow, elastically or not; see worker.py for what the tests make of it.

The model is one of plain variables, trained by a tape in a `tf.function`, or one of Keras.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf
import worker

import horovod_sparse.tensorflow as hvd

COMPRESSIONS: dict[str, Any] = {
    "none": lambda: hvd.Compression.none,
    "micro": lambda: hvd.MiCROCompressor(density=0.05),
    "a2sgd": lambda: hvd.A2SGDCompressor(sync_every=5),
}

hvd.init()
tf.random.set_seed(hvd.rank())
compression = COMPRESSIONS[worker.settings["compression"]]()
compressor = None if worker.settings["compression"] == "none" else hvd.get_compressor(compression)


class PlainModel:
    """Variables, and a tape."""

    def __init__(self) -> None:
        shapes = [(16, 64), (64,), (64, 8), (8,)]
        self.trained = [
            tf.Variable(tf.random.normal(shape, stddev=0.2), name=f"v{i}") for i, shape in enumerate(shapes)
        ]
        self.variables = self.trained
        self.state = hvd.elastic.TensorFlowState(self.variables, batch=0, world=0)

    @tf.function(reduce_retracing=True)
    def train(self, inputs: Any, outputs: Any) -> None:
        first, first_bias, second, second_bias = self.trained
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(inputs @ first + first_bias)
            loss = tf.reduce_mean((hidden @ second + second_bias - outputs) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for variable, gradient in zip(self.trained, tape.gradient(loss, self.trained), strict=True):
            variable.assign_sub(0.05 * gradient)


class KerasModel:
    """A compiled model."""

    def __init__(self) -> None:
        import horovod_sparse.tensorflow.keras as keras_hvd

        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Input((16,)), layers.Dense(64, "relu"), layers.Dense(8)])
        optimizer = keras_hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05, momentum=0.9), compression=compression)
        model.compile(optimizer, "mse", jit_compile=False)
        self.train = model.train_on_batch
        self.variables = model.trainable_variables
        self.state = keras_hvd.elastic.KerasState(model, batch=0, world=0)


model = {"plain": PlainModel, "keras": KerasModel}[worker.settings["model"]]()


def log(event: str, state: Any) -> None:
    arrays = [np.asarray(v) for v in model.variables]
    place = {"world": state.world, "rank": hvd.rank(), "size": hvd.size(), "batch": state.batch}
    worker.log(event, **place, digest=worker.digest(arrays), **worker.figures(compressor))


def train(state: Any) -> None:
    state.world += 1
    log("start", state)
    for trained in count():
        worker.harm("anywhere", state.world, hvd.rank(), trained)
        worker.harm("before step", state.world, hvd.rank(), trained)
        model.train(*map(tf.constant, worker.batch_for(hvd.rank(), state.batch)))
        log("step", state)
        state.batch += 1
        if worker.finished(state.world, state.batch, trained):
            return
        if state.batch % worker.COMMIT_EVERY == 0:
            if isinstance(compressor, hvd.A2SGDCompressor):
                compressor.synchronize_parameters()
            log("commit", state)
            state.commit()


if worker.settings["elastic"]:
    hvd.elastic.run(train)(model.state)
else:
    hvd.broadcast_variables(model.variables, root_rank=0)
    model.state.commit = model.state.save
    try:
        train(model.state)
    except Exception as error:
        kind = type(error)
        worker.log("error", rank=hvd.rank(), kind=f"{kind.__module__}.{kind.__name__}", text=str(error))
        sys.exit(3)
