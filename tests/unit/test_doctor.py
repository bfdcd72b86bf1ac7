"""The doctor: on this environment, on broken ones, and on the texts of errors that Horovod's users have reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from horovod_sparse import doctor
from horovod_sparse.doctor import (
    FRAMEWORKS,
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Probe,
    explain,
    front_end_finding,
    keras_findings,
    mpirun_finding,
    network_links,
    python_finding,
)

TORCH, TENSORFLOW = FRAMEWORKS
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])

TEXTS = {
    "TypeError: Descriptors cannot not be created directly.\nIf this call came from a _pb2.py file": "protobuf<=3.20",
    "TypeError: Descriptors cannot be created directly.": "protobuf<=3.20",
    "ImportError: cannot import name 'runtime_version' from 'google.protobuf' (/x/__init__.py)": "--upgrade protobuf",
    "google.protobuf.runtime_version.VersionError: Detected incompatible Protobuf Gencode/Runtime versions when "
    "loading x.proto: gencode 6.31.1 runtime 5.29.5": "--upgrade protobuf",
    "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.1.0 as it may crash.": "numpy<2",
    "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header": "numpy<2",
    "horovod.common.exceptions.HorovodVersionMismatchError: Framework tensorflow installed with version 2.3.0 but "
    "found version 2.4.1.": "build Horovod again",
    "ImportError: /x/horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so: undefined symbol: "
    "_ZN5torch8autograd4impl9gradientE": "build Horovod again",
    "OSError: libmpi.so.40: cannot open shared object file: No such file or directory": "LD_LIBRARY_PATH",
    "OSError: /x/mpi_lib.so: undefined symbol: ompi_mpi_op_sum": "LD_LIBRARY_PATH",
    "ImportError: libcudart.so.11.0: cannot open shared object file: No such file or directory": "CUDA",
    "ImportError: /lib64/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by /x.so)": "libstdc++",
    "It looks like opal_init failed for some reason; your parallel process is\nlikely to abort.": "OPAL_PREFIX",
    "ModuleNotFoundError: No module named 'pkg_resources'": "setuptools<81",
    "RuntimeError: cannot cache function '_select': no locator available for file '/x/host.py'": "NUMBA_CACHE_DIR",
}


@pytest.mark.parametrize("text", TEXTS)
def test_known_errors_have_their_remedy(text: str) -> None:
    traceback = (
        f"Traceback (most recent call last):\n  File ...\n{text}\n\nImportError: horovod_sparse.torch needs Horovod"
    )
    finding = explain("Horovod", Probe(None, traceback))
    assert finding.level == PROBLEM
    assert TEXTS[text] in finding.remedy


def test_other_errors_are_told_as_they_are() -> None:
    assert explain("PyTorch", Probe(None, "Traceback\nOSError: no disk\n")).text == "OSError: no disk"
    assert explain("PyTorch", Probe(None, "", "crashed with SIGSEGV")).text.startswith(
        "importing it crashed with SIGSEGV"
    )


@pytest.mark.parametrize(
    ("built_for", "version", "level", "words"),
    [
        ({"pytorch": "2.0.1+cu118"}, "2.1.0", PROBLEM, "built for PyTorch 2.0.1+cu118, but 2.1.0 is installed"),
        ({"pytorch": "2.1.0+cu118"}, "2.1.0+cpu", PROBLEM, "OSError: strange"),
        ({}, "2.1.0", PROBLEM, "OSError: strange"),
    ],
)
def test_horovod_built_for_another_version(built_for: Any, version: str, level: str, words: str) -> None:
    finding = front_end_finding(TORCH, Probe(None, "OSError: strange"), built_for, version)
    assert (finding.level, words in finding.text) == (level, True), finding


def test_a_newer_framework_that_still_works_is_no_problem() -> None:
    probe = Probe({"mpi": False, "gloo": True, "nccl": False}, "")
    assert front_end_finding(TORCH, probe, {"pytorch": "2.0.1"}, "2.1.0").level == OK


def horovod_findings(monkeypatch: pytest.MonkeyPatch, gpus: int = 0, **errors: str) -> dict[str, Finding]:
    """Those of the Horovod that is here, where importing a front end gives some error."""
    built = {"mpi": True, "gloo": True, "nccl": False, "libmpi": []}
    probes = {f.name: Probe({"gpus": gpus}, "") for f in FRAMEWORKS}
    for f in FRAMEWORKS:
        probes[f"Horovod with {f.name}"] = Probe(None, errors[f.module]) if f.module in errors else Probe(built, "")
    return {finding.subject: finding for finding in doctor.horovod_findings(FRAMEWORKS, probes)}


def test_built_without_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "ImportError: Extension horovod.torch has not been built: /x.so not found\n\nImportError: build it again"
    findings = horovod_findings(monkeypatch, torch=missing)
    assert findings["Horovod with PyTorch"].level == WARNING  # for Horovod works with TensorFlow
    assert findings["Horovod with PyTorch"].text == "build it again"
    findings = horovod_findings(monkeypatch, torch=missing, tensorflow=missing)
    assert findings["Horovod with PyTorch"].level == findings["Horovod with TensorFlow"].level == PROBLEM


def test_gpus_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NCCL" not in horovod_findings(monkeypatch)
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in horovod_findings(monkeypatch, gpus=2)["NCCL"].remedy


@pytest.mark.parametrize(
    ("tf_keras", "environment", "level", "words"),
    [
        (None, {"TF_USE_LEGACY_KERAS": "1"}, PROBLEM, "pip install tf_keras==2.21.0"),
        ("2.21.0", {"TF_USE_LEGACY_KERAS": "1"}, OK, ""),
        ("2.16.0", {"TF_USE_LEGACY_KERAS": "True"}, WARNING, "tf_keras~=2.21.0"),
        ("2.21.0", {}, WARNING, "horovod_sparse.tensorflow.keras"),
    ],
)
def test_keras(tf_keras: str | None, environment: dict[str, str], level: str, words: str) -> None:
    (finding,) = keras_findings("2.21.0", tf_keras, environment)
    assert finding.level == level
    assert words in finding.remedy


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", OK),
        ("mpirun (Open MPI) 5.0.6\n", WARNING),
        ("prterun (PRRTE) 3.0.5\n", OK),
        ("HYDRA build details:\n    Version: 4.1.1\n", OK),
        ("", OK),
    ],
)
def test_mpirun(text: str, level: str) -> None:
    finding = mpirun_finding("/usr/bin/mpirun", text)
    assert finding.level == level
    assert ("--gloo" in finding.remedy) == (level == WARNING)


def test_mpirun_of_another_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.2'\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mpirun.parent}{os.pathsep}{os.environ['PATH']}")
    texts = [finding.text for finding in doctor.mpi_findings(["/opt/openmpi/lib/libmpi.so.40"])]
    assert f"Horovod has loaded /opt/openmpi/lib/libmpi.so.40, but {mpirun} is of another installation" in texts
    assert not any("another installation" in f.text for f in doctor.mpi_findings([str(tmp_path / "lib" / "libmpi.so")]))


@pytest.mark.parametrize(("python", "level"), [((3, 9), PROBLEM), ((3, 10), OK), ((3, 13), OK), ((3, 14), PROBLEM)])
def test_python(python: tuple[int, int], level: str) -> None:
    assert python_finding(python).level == level


@pytest.mark.parametrize("needed", [True, False])
def test_compiler(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(doctor.compiler_findings(needed)).level == OK
    monkeypatch.setenv("CXX", "false")
    findings = list(doctor.compiler_findings(needed))
    assert findings[0].level == (PROBLEM if needed else OK)
    assert "a C++17 compiler" in findings[0].text
    assert ("g++" in findings[0].remedy) == needed


def test_network_links(tmp_path: Path) -> None:
    for name, carrier, speed in [("eth0", "1", "25000"), ("eth1", "0", "1000"), ("ib0", "1", "-1"), ("lo", "1", "10")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "carrier").write_text(carrier)
        (tmp_path / name / "speed").write_text(speed)
    assert list(network_links(tmp_path)) == ["eth0 25 Gbit/s", "ib0, speed unknown"]
    assert list(network_links(tmp_path / "nothing")) == []


def base_install() -> set[str]:
    """The files and folders of what pip installs by default, and of what that needs."""
    waiting, seen, names = ["numpy", "numba", "typer"], set(), set()
    while waiting:
        found = distribution(waiting.pop())
        seen.add(found.name)
        names |= {path.parts[0] for path in found.files or () if not path.parts[0].endswith((".dist-info", ".."))}
        for requirement in map(Requirement, found.requires or ()):
            if requirement.name not in seen and (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ):
                waiting.append(requirement.name)
    return names


# The command

COMMAND = "from horovod_sparse.cli import app; app(['doctor', *__import__('sys').argv[1:]])"


def run(*arguments: str, python: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", COMMAND, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def findings_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in json.loads(done.stdout)}


def test_this_environment_fits() -> None:
    done = run(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Horovod with PyTorch +works on a single rank; built with MPI, Gloo", done.stdout)
    assert "All fits" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "PROBLEM" not in done.stdout


def test_broken_frameworks_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that crashes, and one that raises what others have reported."""
    for package, text in {
        "torch": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "tensorflow": "raise TypeError('Descriptors cannot be created directly.')",
    }.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    done = run("--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    findings = findings_of(done)
    assert findings["PyTorch"]["level"] == "problem"
    assert "crashed with SIGSEGV" in findings["PyTorch"]["text"]
    assert "protobuf" in findings["TensorFlow"]["remedy"]
    assert "Horovod with PyTorch" not in findings


def test_a_framework_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.5)
    probe = doctor.run_probe("import sys, time; print('still waiting', file=sys.stderr, flush=True); time.sleep(60)")
    assert explain("PyTorch", probe).text == "importing it did not end in 0 s: still waiting"


def test_the_base_install_alone(tmp_path: Path) -> None:
    """In a fresh environment with what pip installs by default, the doctor runs, and says what is missing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=60)
    python = str(tmp_path / "venv" / "bin" / "python")
    base = tmp_path / "base"
    base.mkdir()
    for name in base_install():
        (base / name).symlink_to(SITE_PACKAGES / name)
    (base / "horovod_sparse").symlink_to(Path(doctor.__file__).parent)
    done = run("--json", python=python, PYTHONPATH=str(base), CXX="false")
    assert done.returncode == 1, done.stderr
    findings = findings_of(done)
    assert findings["numba"]["level"] == "ok", findings["numba"]
    assert findings["frameworks"]["remedy"] == "pip install torch, or tensorflow"
    assert findings["Horovod"]["text"] == "not installed"
    assert findings["compiling"]["level"] == "problem"
    words = run(python=python, PYTHONPATH=str(base)).stdout
    assert "problems to solve" in words
