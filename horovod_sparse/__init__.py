"""Gradient compression for Horovod, switched on by one argument.

The front ends are `horovod_sparse.torch` and, framework-neutral, `horovod_sparse.core`. Importing this package imports
no framework.
"""

__version__ = "0.1.0"
