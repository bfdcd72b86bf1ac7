"""Tests of the PyTorch front end on real Horovod: `mpirun -np N python -m pytest tests/parallel_torch`."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from ranks import OneReport

torch.set_num_threads(1)
hvd.init()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OneReport(hvd.rank()))
