"""What the tests share: known gradients and data, models, and comparisons between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

LEGACY = tf.keras.__name__.startswith("tf_keras")


def known_gradient(shape: Sequence[int], rank: int, step: int, index: int = 0) -> NDArray[np.float64]:
    """A gradient that each rank can compute for each rank."""
    return np.random.default_rng((rank, step, index)).standard_normal(tuple(shape))


def mean_over_ranks(gradient_of: Callable[[int], NDArray[Any]]) -> NDArray[np.float64]:
    """The mean of every rank's gradient, without communication."""
    return np.mean([np.asarray(gradient_of(rank), np.float64) for rank in range(hvd.size())], axis=0)


def batch(rank: int, step: int, size: int = 16) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Data of a rank and step: 20 inputs, 10 classes."""
    x = np.random.default_rng((rank, step)).standard_normal((size, 20)).astype(np.float32)
    return x, (x[:, :10] + x[:, 10:]).argmax(1)


def same_on_all_ranks(tensors: Iterable[Any]) -> bool:
    """Bitwise the same, NaN included."""
    flat = np.concatenate([np.asarray(t, np.float64).ravel() for t in tensors])
    every = hvd.allgather(tf.constant(flat.view(np.int64)[None]), name="test.same").numpy()
    return bool((every == every[0]).all())


class MLP(tf.Module):
    """20 inputs, 10 classes."""

    def __init__(self, seed: int = 0, hidden: int = 64, dtype: str = "float32") -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        shapes = {"w1": (20, hidden), "b1": (hidden,), "w2": (hidden, 10), "b2": (10,)}
        self.parameters = [
            tf.Variable(0.2 * rng.standard_normal(shape), name=name, dtype=dtype) for name, shape in shapes.items()
        ]

    def loss(self, x: Any, y: Any) -> Any:
        w1, b1, w2, b2 = (tf.cast(p, tf.float32) for p in self.parameters)
        logits = tf.tanh(x @ w1 + b1) @ w2 + b2
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


def keras_model(seed: int = 0, hidden: int = 64) -> Any:
    tf.keras.utils.set_random_seed(seed)
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((20,)), layers.Dense(hidden, "tanh"), layers.Dense(10)])
    model.build((None, 20))
    return model


def assert_close(ours: Iterable[Any], theirs: Iterable[Any], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for a, b in zip(list(ours), list(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol)
