"""Tests of the TensorFlow front end on real Horovod: `mpirun -np N python -m pytest tests/parallel_tensorflow`.

`tf.keras` is Keras 3; with TF_USE_LEGACY_KERAS=1 in the environment, the legacy Keras.
"""

from __future__ import annotations

import os

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from ranks import OneReport

# On one thread, as on a small machine, an operation that blocks would block everything.
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
hvd.init()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OneReport(hvd.rank()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Joins first: of what other tests have left some ranks alone waiting for, Horovod would then want the rest."""
    items.sort(key=lambda item: item.path.name != "test_joins.py")
