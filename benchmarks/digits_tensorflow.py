"""What digits.py does in TensorFlow, with Keras 3."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray

import horovod_sparse.tensorflow as hvd

__all__ = ["Trainer", "hvd"]

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            *(layers.Input((1, 8, 8)), layers.Reshape((8, 8, 1))),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPool2D(2)),
            *(layers.Flatten(), layers.Dropout(0.25), layers.Dense(128, activation="relu"), layers.Dense(10)),
        ]
    )


class Trainer:
    def __init__(self, seed: int, momentum: float, compression: Any) -> None:
        keras.utils.clear_session()  # the variables get the same names in each training, and MiCRO goes by their order
        keras.utils.set_random_seed(seed % 2**32)
        self._model = make_model()
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(momentum=momentum), compression=compression)
        self.optimizer.build(self._model.trainable_variables)
        # Not all variables: each rank keeps its own dropout.
        hvd.broadcast_variables(self._model.trainable_variables, root_rank=0)

    def shuffled(self, n: int) -> NDArray[np.int64]:
        return np.random.permutation(n)

    def step(self, images: NDArray[np.float32], digits: NDArray[np.int64], learning_rate: float) -> float:
        self.optimizer.learning_rate = learning_rate
        return float(self._step(images, digits))

    @tf.function
    def _step(self, images: tf.Tensor, digits: tf.Tensor) -> tf.Tensor:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self._loss(digits, self._model(images, training=True))
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def parameters(self) -> NDArray[np.float32]:
        return np.concatenate([variable.numpy().ravel() for variable in self._model.trainable_variables])

    def predict(self, images: NDArray[np.float32]) -> NDArray[np.int64]:
        return self._model(images, training=False).numpy().argmax(1)
