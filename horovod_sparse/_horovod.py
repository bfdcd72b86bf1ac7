"""A front end of Horovod, or an ImportError that says what is missing and how to get it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def import_horovod(module: str, framework: str, package: str) -> Any:
    """`horovod.<module>`, say `horovod.torch`, for a framework, say PyTorch, that pip knows as `package`.

    Raises:
        ImportError: the framework is missing, or Horovod, or Horovod was built without the framework.
    """
    rebuild = (
        f"HOROVOD_WITH_{framework.upper()}=1 pip install --no-cache-dir --no-build-isolation horovod "
        f"(for today's {framework} see 'Install it' in the README of horovod_sparse)"
    )
    try:
        import_module(package)
    except ImportError as error:
        raise ImportError(f"horovod_sparse.{module} needs {framework}: pip install {package}") from error
    try:
        hvd = import_module(f"horovod.{module}")
    except ImportError as error:
        if "has not been built" not in str(error):
            raise ImportError(f"horovod_sparse.{module} needs Horovod, built with {framework}: {rebuild}") from error
        hvd = None
    # Without its extension, horovod.torch imports all the same, empty, and prints a warning.
    if not hasattr(hvd, "allreduce"):
        raise ImportError(
            f"horovod_sparse.{module} needs Horovod built with {framework}; the Horovod installed here was built "
            f"without it, or for another version of it. Build it again, with {framework} installed: {rebuild}"
        )
    return hvd
