"""The loops over gradients: numba for numpy arrays in host memory, torch for tensors on a device.

Both modules offer the same functions; `kernels_for` picks by the type of an array.
"""

from __future__ import annotations

import sys
from typing import Any

from horovod_sparse.core.collectives import Array


def kernels_for(array: Array) -> Any:
    """The module of kernels (`host` or `device`) that works on arrays, and vectors, of this kind."""
    torch = sys.modules.get("torch")  # not imported here: there is no tensor if it is not
    if torch and isinstance(array, torch.Tensor):
        from horovod_sparse.core.kernels import device

        return device
    from horovod_sparse.core.kernels import host

    return host
