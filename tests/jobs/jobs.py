"""Starts Horovod jobs with horovodrun, waits for them, and reads the logs of their workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# Three names for this machine, so that Horovod takes it for three hosts. It needs no ssh for a name of 127.0.0.1.
HOSTS = ["localhost", "127.0.0.1", "127.1"]
TIMEOUT_S = 90.0

# horovodrun, which imports TensorFlow to find out whether Horovod was built with Gloo, or else PyTorch: that is faster.
HOROVODRUN = """
import sys
sys.modules["tensorflow"] = None
from horovod.runner.launch import run_commandline
run_commandline()
"""

Line = dict[str, Any]
"""A line of a log: what happened in which process, and figures."""


class Job:
    """A job under horovodrun: a context that ends all of its processes.

    Args:
        folder: an empty one, for all files of the job.
        trainer: the script that each rank runs.
        settings: what the script is told; see worker.py.
        environment: variables to set.
    """

    def __init__(self, folder: Path, trainer: str, settings: dict[str, Any], environment: dict[str, str] | None = None):
        self.folder = folder
        (folder / "settings.json").write_text(json.dumps(settings))
        self._trainer = [sys.executable, str(Path(__file__).with_name(trainer)), str(folder)]
        quiet = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {**os.environ, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **quiet, **(environment or {})}

    def start(self, ranks: int) -> Job:
        """A job that ends with its first rank that fails. It is kept from noticing that, until `stop`."""
        script = f'"$@"; echo $? > {self.folder}/exit.$HOROVOD_RANK.new; '
        script += f"mv {self.folder}/exit.$HOROVOD_RANK.new {self.folder}/exit.$HOROVOD_RANK; sleep 300"
        return self._run(["-np", str(ranks), "sh", "-c", script, "sh", *self._trainer])

    def start_elastic(self, ranks: int, patience_s: int) -> Job:
        """A job that begins on as many hosts.

        Args:
            patience_s: how long a rank waits for another. It takes a new rank some time to come; on the other hand, if
                one of more than two has died, a second one may wait that long for a third, which waits for nobody.
        """
        (self.folder / "hosts").write_text("".join(f"{host}:1\n" for host in HOSTS[:ranks]))
        script = self.folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
        script.chmod(0o755)
        sizes = ["-np", str(ranks), "--min-np", "1", "--max-np", "3"]
        discovery = ["--network-interface", "lo", "--host-discovery-script", str(script)]
        return self._run([*sizes, *discovery, "--gloo-timeout-seconds", str(patience_s), *self._trainer])

    def _run(self, arguments: list[str]) -> Job:
        with (self.folder / "output.txt").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", HOROVODRUN, "--gloo", *arguments],
                stdout=output,
                stderr=output,
                env=self._environment,
            )
        return self

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is still running. horovodrun gives each worker a process group of its own."""
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self._process.kill()
        for child in children:
            if child.is_running():
                child.kill()
        self._process.wait()

    def wait(self) -> int:
        """The job's exit code."""
        self._wait_until(lambda: self._process.poll() is not None)
        return int(self._process.returncode)

    def wait_for_exits(self, ranks: int) -> list[int]:
        """The exit codes of all ranks of a job that is not elastic."""
        files = [self.folder / f"exit.{rank}" for rank in range(ranks)]
        self._wait_until(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"the job hangs\n{self.report()}"
            time.sleep(0.1)

    def lines(self, event: str) -> list[Line]:
        """The logs' lines about an event; those of one process in their order."""
        logs = [path.read_text().splitlines() for path in sorted(self.folder.glob("*.jsonl"))]
        return [line for text in logs for line in map(json.loads, text) if line["event"] == event]

    def report(self) -> str:
        """What to tell if a test fails."""
        ends = [path.read_text().splitlines()[-1] for path in sorted(self.folder.glob("*.jsonl"))]
        output = (self.folder / "output.txt").read_text().splitlines()
        return "\n".join(["The last line of each log:", *ends, "The end of the output:", *output[-60:]])
