"""The drop-in `DistributedOptimizer` of the TensorFlow namespace: for optimizers of Keras, and for TensorFlow 1's."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import tensorflow as tf

from horovod_sparse._compressor import is_or_makes
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compressor import SparseCompressor
from horovod_sparse.tensorflow.gradients import Reducer

_signature = inspect.signature(hvd.DistributedOptimizer)


@wraps(hvd.DistributedOptimizer)
def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:
    options = _signature.bind(*args, **kwargs).arguments
    optimizer = options.pop("optimizer")
    compression = options.get("compression", hvd.Compression.none)
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from horovod_sparse.tensorflow.keras.optimizer import DistributedOptimizer as for_keras

        options.pop("use_locking", None)
        return for_keras(optimizer, **options)
    if not is_or_makes(compression, SparseCompressor):
        return hvd.DistributedOptimizer(optimizer, **options)
    if isinstance(compression, type):
        compression = compression()
    distributed = hvd.DistributedOptimizer(optimizer, **{**options, "compression": hvd.Compression.none})
    names = ("sparse_as_dense", "op", "gradient_predivide_factor", "process_set")
    reducer = Reducer("DistributedOptimizer", compression, **{name: options[name] for name in names if name in options})

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def allreduce_grads(grads: Any, vars: Any = None, use_generic_names: bool = False) -> list[Any]:
        return reducer(list(grads), list(vars), generic=use_generic_names)

    distributed._compression = compression
    distributed._allreduce_grads = allreduce_grads
    if distributed._agg_helper:
        distributed._agg_helper._allreduce_grads = allreduce_grads
    return distributed
