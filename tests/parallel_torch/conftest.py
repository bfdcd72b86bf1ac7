"""Tests of the PyTorch front end on real Horovod: `mpirun -np N python -m pytest tests/parallel_torch`."""

from __future__ import annotations

import os

import horovod.torch as hvd
import pytest
import torch
from ranks import OneReport

torch.set_num_threads(1)
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
hvd.init()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OneReport(hvd.rank()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Joins first: of what other tests have left some ranks alone waiting for, Horovod would then want the rest."""
    items.sort(key=lambda item: item.path.name != "test_joins.py")
