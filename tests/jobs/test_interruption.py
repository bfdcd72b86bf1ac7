"""Long commands end on Ctrl-C with one line, and leave nothing behind; what they cannot write, they say at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jobs import HOROVODRUN

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
BIN = Path(sys.executable).parent
TIMEOUT_S = 60.0


class Command:
    """A command in a session of its own: a context that ends all of its processes.

    Args:
        folder: an empty one, where the command's temporary files go.
        environment: variables to set.
    """

    def __init__(self, folder: Path, *command: str | Path, cwd: Path = ROOT, environment: dict[str, str] | None = None):
        self._mark = str(folder)  # in the environment of all that the command starts
        self.temporary = folder / "t"
        self.temporary.mkdir()
        self._output = folder / "output.txt"
        root = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "TTY_COMPATIBLE": "0"}
        places = {"PATH": f"{BIN}:{os.environ['PATH']}", "TMPDIR": str(self.temporary), "INTERRUPTED": self._mark}
        places["TORCHINDUCTOR_CACHE_DIR"] = str(
            folder / "torch"
        )  # not in the temporary directory, where torch keeps it
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, **root, **quiet, **places, **(environment or {})},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def processes(self, word: str = "") -> list[psutil.Process]:
        """The command's processes that run and have `word` in their command line."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # others come and go
                if process.environ().get("INTERRUPTED") == self._mark and word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"it has ended\n{self.output()}"
            assert time.monotonic() < deadline, f"it does not get there\n{self.output()}"
            time.sleep(0.1)

    def output(self) -> str:
        return self._output.read_text()

    def interrupt(self, group: bool = False) -> int:
        """As Ctrl-C in a terminal (`group`), or as a program would; returns the status. Nothing may be left."""
        (os.killpg if group else os.kill)(self.process.pid, signal.SIGINT)
        status = self.process.wait(TIMEOUT_S)
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.processes() == []
        assert "Traceback" not in self.output()
        assert list(self.temporary.iterdir()) == []
        return status


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder; its name is short, for Open MPI makes sockets in it."""
    folder = tmp_path_factory.mktemp("i")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_the_demo(folder: Path) -> None:
    figures = folder / "figures" / "digits.json"
    horovodrun = [sys.executable, "-c", HOROVODRUN, "-np", "2"]
    options = ["--epochs", "5", "--json", figures, "--plot", folder / "digits.png"]
    with Command(folder, *horovodrun, sys.executable, BENCHMARKS / "digits.py", *options) as command:
        command.wait_until(figures.exists)  # the first training has ended
        command.interrupt(group=True)
        assert json.loads(figures.read_text())["runs"][0]["compression"] == "none"
        assert list(figures.parent.iterdir()) == [figures]


@pytest.mark.parametrize("group", [True, False])
def test_ranks_that_a_benchmark_has_started(folder: Path, group: bool) -> None:
    with Command(folder, sys.executable, BENCHMARKS / "rounds.py", "--repeats", "100000") as command:
        command.wait_until(lambda: len(command.processes()) >= 4)  # mpirun and two ranks
        assert command.interrupt(group) == 130
        assert command.output().split()[-1] == "Interrupted."


def test_all_benchmarks(folder: Path) -> None:
    shutil.copytree(BENCHMARKS, folder / "benchmarks")
    with Command(folder, sys.executable, folder / "benchmarks" / "bench.py", cwd=folder) as command:
        command.wait_until(lambda: len(command.processes()) >= 2)
        assert command.interrupt() == 130
        assert command.output().split()[-1] == "Interrupted."


def test_while_a_benchmark_still_imports(folder: Path) -> None:
    with Command(folder, sys.executable, BENCHMARKS / "kernels.py") as command:
        maps = Path(f"/proc/{command.process.pid}/maps")
        command.wait_until(lambda: "libtorch" in maps.read_text())
        assert command.interrupt() in (130, -signal.SIGINT)
        assert command.output().split() == ["Interrupted."]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="network namespaces need root and iproute2")
def test_hosts_in_namespaces(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind("\0hvdsparse")
        except OSError:
            pytest.skip("another process uses the hosts")
    with Command(folder, sys.executable, BENCHMARKS / "network.py", "--reduced") as command:
        command.wait_until(lambda: len(command.processes("network.py")) >= 4)  # two of them are mpirun and this one
        # In one directory, Open MPI's daemons collide now and then.
        assert {of.parent.name for of in Path("/run/hvdsparse").glob("**/ompi.*")} >= {"hvdsparse1", "hvdsparse2"}
        assert command.interrupt() == 130
        for what in (["ip", "netns", "list"], ["ip", "link"]):
            assert "hvdsparse" not in subprocess.run(what, capture_output=True, text=True, check=True).stdout
        assert not Path("/run/hvdsparse").exists()


BACKEND = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time; print('compiling', flush=True); time.sleep(300)"])
"""


@pytest.mark.parametrize("group", [True, False])
def test_the_set_up_while_it_compiles(folder: Path, group: bool) -> None:
    tree = folder / "tree"
    (tree / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "set_up.py", tree / "tools")
    # A requirement that takes long to build, and needs no network.
    (tree / "tools" / "requirements.txt").write_text("./slow\n")
    (tree / "slow").mkdir()
    (tree / "slow" / "backend.py").write_text(BACKEND)
    (tree / "slow" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    code = "import sys; sys.path.insert(0, 'tools'); import set_up; set_up.FREE_GIB = 0; sys.exit(set_up.main())"
    base = Path(sys.base_prefix) / "bin" / "python3"  # .venv's own Python would find itself in a tree that it is not of
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    with Command(folder, base, "-c", code, cwd=tree, environment=cache) as command:
        command.wait_until(lambda: bool(command.processes("compiling")))
        assert command.interrupt(group) == 130
        assert "set-up interrupted; nothing was left behind" in command.output().splitlines()[-1]
        assert not (tree / ".venv").exists()


def test_what_cannot_be_written_is_said_before_the_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "x.json"
    scripts = ["convergence", "density", "digits", "kernels", "network", "overhead", "rounds", "scaling"]
    started = {
        script: subprocess.Popen(
            [sys.executable, BENCHMARKS / f"{script}.py", "--json", output],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for script in scripts
    }
    try:
        for script, process in started.items():
            said, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 2, (script, said)
            assert "Invalid value for '--json'" in said
            assert "Traceback" not in said
    finally:
        for process in started.values():
            process.kill()
