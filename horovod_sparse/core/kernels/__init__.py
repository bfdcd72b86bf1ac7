"""The loops over gradients: numba for numpy arrays in host memory, torch for tensors on a device.

Both modules offer the same functions; `kernels_for` picks by the type of an array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.core.collectives import Array


def kernels_for(array: Array) -> Any:
    """The module of kernels (`host` or `device`) that works on arrays of this kind."""
    if isinstance(array, np.ndarray):
        from horovod_sparse.core.kernels import host

        return host
    from horovod_sparse.core.kernels import device

    return device
