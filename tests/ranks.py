"""For tests that all ranks run in the same order, under mpirun: rank 0 reports; another prints only what fails on it.

A test that hangs is ended by pytest-timeout, which ends the process and so, through mpirun, the job.
"""

from __future__ import annotations

import os
import sys

import pytest


class OneReport:
    """A plugin, for the rank that it is given."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @pytest.hookimpl(trylast=True)  # once there is a reporter to silence
    def pytest_configure(self, config: pytest.Config) -> None:
        if self.rank > 0:
            config.pluginmanager.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.rank > 0 and report.failed:
            print(f"rank {self.rank}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
