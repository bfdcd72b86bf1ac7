"""Starts a benchmark's ranks on this machine, and ends them with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


def objects(lines: Iterable[str]) -> Iterator[Any]:
    """The JSON objects in lines, one in each. Text may be around them: colorama, which numba uses, resets colours."""
    return (json.JSONDecoder().raw_decode(line, line.index("{"))[0] for line in lines if "{" in line)


def launch(ranks: int, script: str, *arguments: str, environment: dict[str, str]) -> Generator[Any, None, None]:
    """Run a script under mpirun; yields the JSON objects that its ranks print. The ranks end with the iterator.

    Raises:
        RuntimeError: a rank failed; with what it said.
    """
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "--oversubscribe", "-np", str(ranks), sys.executable, script, *arguments]
    with (
        # A rank that is ended may have no time to remove its temporary files.
        TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as temporary,
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            env={**os.environ, **AS_ROOT, "TMPDIR": temporary, **environment},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # on Ctrl-C, mpirun is ended once, from here
        ) as process,
    ):
        assert process.stdout
        try:
            yield from objects(process.stdout)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"mpirun ended with status {process.returncode}\n{errors.read()}")
