"""Gradient compression for Horovod, switched on by one argument.

The front ends are `horovod_sparse.torch`, `horovod_sparse.tensorflow` and `horovod_sparse.tensorflow.keras`; the
methods themselves, framework-neutral, are in `horovod_sparse.core`. Importing this package imports no framework.
"""

__version__ = "0.1.0"
