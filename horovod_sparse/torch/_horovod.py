"""Where this front end takes Horovod from."""

from __future__ import annotations

from typing import Any

from horovod_sparse._horovod import import_horovod

hvd: Any = import_horovod("torch", "PyTorch", "torch")
