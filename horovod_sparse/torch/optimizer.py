"""The drop-in `DistributedOptimizer`."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.compressor import SparseCompressor, get_compressor

_signature = inspect.signature(hvd.DistributedOptimizer)


@wraps(hvd.DistributedOptimizer)
def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:
    arguments = _signature.bind(*args, **kwargs).arguments
    compression = arguments.get("compression", hvd.Compression.none)
    if not hasattr(compression, "compress") or not hasattr(compression, "decompress"):
        raise TypeError(
            f"compression={compression!r}: it must be a compressor, such as Compression.micro, Compression.a2sgd, "
            "Compression.fp16, Compression.none, or an instance such as MiCROCompressor(density=0.001)"
        )
    ours = isinstance(compression, SparseCompressor) or (
        isinstance(compression, type) and issubclass(compression, SparseCompressor)
    )
    if ours and arguments.get("op") == hvd.Adasum:
        raise ValueError(f"compression={compression!r} does not work with op=hvd.Adasum: use hvd.Average or hvd.Sum")
    optimizer = hvd.DistributedOptimizer(*args, **kwargs)
    if ours:
        get_compressor(optimizer)
    return optimizer
