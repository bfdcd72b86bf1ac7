"""The drop-in `DistributedOptimizer`."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from horovod_sparse._compressor import is_or_makes, operation
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.compressor import SparseCompressor, get_compressor

_signature = inspect.signature(hvd.DistributedOptimizer)


@wraps(hvd.DistributedOptimizer)
def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:
    arguments = _signature.bind(*args, **kwargs).arguments
    compression = arguments.get("compression", hvd.Compression.none)
    ours = is_or_makes(compression, SparseCompressor)
    op = arguments.get("op", hvd.Average)
    if ours and op not in (hvd.Average, hvd.Sum):
        name = (compression if isinstance(compression, type) else type(compression)).__name__
        raise ValueError(
            f"{name} does not work with op={operation(hvd, op)}: use op=hvd.Average or op=hvd.Sum, or "
            "compression=hvd.Compression.fp16"
        )
    optimizer = hvd.DistributedOptimizer(*args, **kwargs)
    if ours:
        get_compressor(optimizer)
    return optimizer
