"""`horovod.torch`, or an ImportError that says what is missing and how to get it."""

from __future__ import annotations

from typing import Any

REBUILD = (
    "HOROVOD_WITH_PYTORCH=1 pip install --no-cache-dir --no-build-isolation horovod "
    "(for today's PyTorch see 'Install it' in the README of horovod_sparse)"
)


def import_horovod() -> Any:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError("horovod_sparse.torch needs PyTorch: pip install torch") from error
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ImportError(f"horovod_sparse.torch needs Horovod, built with PyTorch: {REBUILD}") from error
    # Without its extension, horovod.torch imports all the same, empty, and prints a warning.
    if not hasattr(hvd, "allreduce_async_"):
        raise ImportError(
            "horovod_sparse.torch needs Horovod built with PyTorch; the Horovod installed here was built without it, "
            f"or for another version of it. Build it again, with PyTorch installed: {REBUILD}"
        )
    return hvd


hvd: Any = import_horovod()
