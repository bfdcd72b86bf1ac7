"""The algorithms, free of any framework and of any communication.

A step is a generator: it yields the collectives it needs (`Allgather`, `Allreduce`), is sent their results, and returns
the update. Whoever drives it supplies the communication: a front end over Horovod, or `virtual.run`, which drives
many ranks in one process.
"""

from horovod_sparse.core.a2sgd import A2SGD
from horovod_sparse.core.collectives import Allgather, Allreduce, Alltoall, Collective
from horovod_sparse.core.layout import FlatLayout, TensorSpec
from horovod_sparse.core.micro import MiCRO
from horovod_sparse.core.partition import Partition, owned_partition, partition
from horovod_sparse.core.qsgd import QSGD
from horovod_sparse.core.schedule import WarmUp
from horovod_sparse.core.stats import StepStats
from horovod_sparse.core.step import Update
from horovod_sparse.core.threshold import AdaptiveThreshold, PaperThreshold
from horovod_sparse.core.topk import TopK

__all__ = [
    "A2SGD",
    "QSGD",
    "AdaptiveThreshold",
    "Allgather",
    "Allreduce",
    "Alltoall",
    "Collective",
    "FlatLayout",
    "MiCRO",
    "PaperThreshold",
    "Partition",
    "StepStats",
    "TensorSpec",
    "TopK",
    "Update",
    "WarmUp",
    "owned_partition",
    "partition",
]
