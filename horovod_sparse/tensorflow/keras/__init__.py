"""Gradient compression for Keras: `import horovod_sparse.tensorflow.keras as hvd`.

It offers all of `horovod.tensorflow.keras`, with `Compression`, `DistributedOptimizer`, `load_model` and `callbacks`
ours: they work with Keras 3 and, where TF_USE_LEGACY_KERAS=1 makes it `tf.keras`, with the legacy Keras.
"""

import horovod.tensorflow.keras as _hvd

from horovod_sparse.core import StepStats, WarmUp
from horovod_sparse.tensorflow import (
    A2SGDCompressor,
    Compression,
    MiCROCompressor,
    QSGDCompressor,
    TopKCompressor,
    broadcast_variables,
    get_compressor,
)
from horovod_sparse.tensorflow.keras import callbacks, elastic
from horovod_sparse.tensorflow.keras.model import load_model
from horovod_sparse.tensorflow.keras.optimizer import DistributedOptimizer

globals().update({name: value for name, value in vars(_hvd).items() if name[0] != "_" and name not in globals()})

__all__ = [
    "A2SGDCompressor",
    "Compression",
    "DistributedOptimizer",
    "MiCROCompressor",
    "QSGDCompressor",
    "StepStats",
    "TopKCompressor",
    "WarmUp",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "get_compressor",
    "load_model",
]
