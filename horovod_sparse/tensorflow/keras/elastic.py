"""Elastic training: what `horovod.tensorflow.keras.elastic` offers, with a `KerasState` for any Keras."""

from horovod.tensorflow.keras.elastic import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

from horovod_sparse.tensorflow.elastic import TensorFlowKerasState as KerasState

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
