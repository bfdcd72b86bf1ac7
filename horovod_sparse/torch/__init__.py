"""Gradient compression for `horovod.torch`: MiCRO, A2SGD, top-k and QSGD.

Either take the compressors to stock Horovod:

    import horovod.torch as hvd
    from horovod_sparse.torch import MiCROCompressor
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=MiCROCompressor)

or import this module as `hvd`: it offers all of `horovod.torch`, with `Compression` and `DistributedOptimizer` ours.
"""

from horovod_sparse.core import StepStats, WarmUp
from horovod_sparse.torch._horovod import hvd as _hvd
from horovod_sparse.torch.compressor import (
    A2SGDCompressor,
    MiCROCompressor,
    QSGDCompressor,
    TopKCompressor,
    get_compressor,
)
from horovod_sparse.torch.optimizer import DistributedOptimizer

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
    "DistributedOptimizer",
    "MiCROCompressor",
    "QSGDCompressor",
    "StepStats",
    "TopKCompressor",
    "WarmUp",
    "get_compressor",
]
