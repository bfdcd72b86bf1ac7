"""Horovod's functions of variables, for those of any Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compressor import tf_variable


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> Any:
    """Give the variables of all ranks the values that they have on `root_rank`."""
    return hvd.broadcast_variables([tf_variable(v) for v in variables], root_rank, process_set, inplace)
