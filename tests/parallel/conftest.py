"""Tests of the front ends on real Horovod: `mpirun -np N python -m pytest tests/parallel`.

All ranks run all tests in the same order. Rank 0 reports; another rank prints only what fails on it. A test that hangs
is ended by pytest-timeout, which ends the process and so, through mpirun, the job.
"""

from __future__ import annotations

import os
import sys

import horovod.torch as hvd
import pytest
import torch

torch.set_num_threads(1)
hvd.init()


@pytest.hookimpl(trylast=True)  # once there is a reporter to silence
def pytest_configure(config: pytest.Config) -> None:
    if hvd.rank() > 0:
        config.pluginmanager.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if hvd.rank() > 0 and report.failed:
        print(f"rank {hvd.rank()}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
