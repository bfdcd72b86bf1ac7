"""Gradient compression for `horovod.tensorflow`: MiCRO, A2SGD, top-k and QSGD.

Either take the compressors to stock Horovod, where they work on what it reduces together, a tensor or a group:

    import horovod.tensorflow as hvd
    from horovod_sparse.tensorflow import MiCROCompressor
    tape = hvd.DistributedGradientTape(tape, compression=MiCROCompressor, groups=1)

or import this module as `hvd`, for the whole model at once, and for the variables of Keras 3: it offers all of
`horovod.tensorflow`, with the tapes, `DistributedOptimizer`, `broadcast_variables` and `Compression` ours. For Keras
optimizers, callbacks and models there is `horovod_sparse.tensorflow.keras`.
"""

from horovod_sparse.core import StepStats, WarmUp
from horovod_sparse.tensorflow import elastic
from horovod_sparse.tensorflow._horovod import hvd as _hvd
from horovod_sparse.tensorflow.compressor import (
    A2SGDCompressor,
    MiCROCompressor,
    QSGDCompressor,
    TopKCompressor,
    get_compressor,
)
from horovod_sparse.tensorflow.functions import broadcast_variables
from horovod_sparse.tensorflow.optimizer import DistributedOptimizer
from horovod_sparse.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

globals().update({name: value for name, value in vars(_hvd).items() if name[0] != "_" and name not in globals()})


class Compression(_hvd.Compression):  # type: ignore[misc]
    """Horovod's compressors and ours: `none`, `fp16`, `micro`, `a2sgd`, `topk`, `qsgd`."""

    micro = MiCROCompressor
    a2sgd = A2SGDCompressor
    topk = TopKCompressor
    qsgd = QSGDCompressor


__all__ = [
    "A2SGDCompressor",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "MiCROCompressor",
    "PartialDistributedGradientTape",
    "QSGDCompressor",
    "StepStats",
    "TopKCompressor",
    "WarmUp",
    "broadcast_variables",
    "elastic",
    "get_compressor",
]
