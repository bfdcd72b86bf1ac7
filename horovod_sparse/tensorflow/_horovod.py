"""Where this front end takes Horovod from."""

from __future__ import annotations

from typing import Any

from horovod_sparse._horovod import import_horovod

# What our operations are called begins with this: Horovod's elastic `run` tells an operation that has failed, since a
# rank is dead, by the name of one of its own in the message.
PREFIX = "HorovodAllreduce.horovod_sparse"

hvd: Any = import_horovod("tensorflow", "TensorFlow", "tensorflow")
