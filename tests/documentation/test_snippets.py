"""Every block of code in the README and the documentation runs, on two ranks where it is Python.

pages.py has what is not run, and why, and what each page takes for granted.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pages import NOT_RUN, ROOT, Block, blocks, scripts, snippets

HERE = Path(__file__).parent
TIMEOUT_S = 170
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": os.pathsep.join([str(ROOT / "docs" / "examples"), str(HERE)]),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # At the exit of a rank, numba with colorama writes an escape code amid what another one prints.
    "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1",
}
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for all pages: commands find there what the Python blocks of their page have written."""
    return tmp_path_factory.mktemp("pages")


def place(block: Block) -> str:
    return f"{block.page}:{block.line}"


def run(command: Sequence[str], folder: Path) -> str:
    """Its output; the test fails if it does, or if it hangs."""
    process = subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
        pytest.fail(f"it hangs: {' '.join(command)}\n{output[-4000:]}")
    assert process.returncode == 0, output[-6000:]
    return output


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_snippets(framework, folder):
    output = run(
        ["mpirun", "-np", "2", sys.executable, str(HERE / "run_snippets.py"), framework, str(folder)],
        folder,
    )
    for page, of_page in snippets(framework).items():
        assert f"{page}: {len(of_page)} blocks ran" in output


@pytest.mark.parametrize(("script", "commands"), scripts(), ids=place)
def test_script(script, commands, tmp_path):
    (tmp_path / "train.py").write_text(script.text)
    output = run(["bash", "-ec", commands.text], tmp_path)
    if "test accuracy" in script.text:
        (accuracy,) = re.findall(r"test accuracy: ([\d.]+)%", output)
        densities = re.findall(r"density ([\d.]+)", output)
        assert float(accuracy) > 90
        assert [float(density) for density in densities] == pytest.approx([0.01] * len(densities), rel=0.1)
        assert densities


commands = [b for b in blocks("sh") if b not in {c for _, c in scripts()} and not b.reason_not_to_run]


@pytest.mark.parametrize("block", commands, ids=place)
def test_commands(block, folder):
    own = folder / Path(block.page).stem
    own.mkdir(exist_ok=True)
    run(["bash", "-ec", block.text], own)


def test_what_is_not_run_is_there():
    assert {start for start in NOT_RUN for b in blocks("sh") if b.text.startswith(start)} == set(NOT_RUN)
