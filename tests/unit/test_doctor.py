"""The doctor: on this environment, on broken ones, and on the texts of errors that Horovod's users have reported."""

from __future__ import annotations

import json
import os
import re
import shutil
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
    keras_finding,
    mpirun_finding,
    network_links,
    python_finding,
)

TORCH, TENSORFLOW = FRAMEWORKS
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])

# What import_horovod raises for a Horovod that was built without the framework.
NOT_BUILT = (
    "ImportError: horovod_sparse.tensorflow needs Horovod built with TensorFlow; the Horovod installed here was built "
    "without it, or for another version of it. Build it again, with TensorFlow installed: ..."
)
TEXTS = {
    NOT_BUILT: "build Horovod again",
    "ImportError: Extension horovod.torch has not been built: /x/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so not found\n"
    "If this is not expected, reinstall Horovod with HOROVOD_WITH_PYTORCH=1": "build Horovod again",
    "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.0.1 as it may crash.\nUserWarning: Failed to "
    "initialize NumPy: _ARRAY_API not found\nRuntimeError: Numpy is not available": "numpy<2",
    "[vm:26449] [[INVALID],INVALID] ORTE_ERROR_LOG: A system-required executable either could not be found or was not "
    "executable by this user in file /openmpi-4.1.8/orte/mca/ess/singleton/ess_singleton_module.c at line 572\n"
    "Sorry!  You were supposed to get help about:\n    orte_init:startup:internal-failure": "OPAL_PREFIX",
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
    finding = explain("Horovod", Probe(None, traceback), "install it again")
    assert finding.level == PROBLEM
    assert TEXTS[text] in finding.remedy


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (Probe(None, "Traceback\nOSError: no disk\n"), "OSError: no disk"),
        (Probe(None, "", "crashed with SIGSEGV"), "importing it crashed with SIGSEGV: it printed nothing"),
        # Open MPI says so of parts that a machine does not need, and works.
        (
            Probe(None, "mca_base_component_repository_open: unable to open mca_pml_pami (ignored)\nKeyError: 'x'\n"),
            "KeyError: 'x'",
        ),
    ],
)
def test_other_errors_are_told_as_they_are(probe: Probe, text: str) -> None:
    assert explain("PyTorch", probe, "install it again") == Finding(PROBLEM, "PyTorch", text, "install it again")


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
    assert "build Horovod again" in finding.remedy


def test_another_version_does_not_hide_another_cause() -> None:
    finding = front_end_finding(TORCH, Probe(None, "orte_init failed"), {"pytorch": "2.0.1"}, "2.1.0")
    assert "OPAL_PREFIX" in finding.remedy


def test_horovod_that_only_mpirun_can_start() -> None:
    alone = Probe(None, "orte_init failed")
    figures = {"mpi": True, "gloo": True, "nccl": False}
    assert doctor.retried(alone, Probe(None, "still")) == alone
    finding = front_end_finding(TORCH, doctor.retried(alone, Probe(figures, "")), {}, "2.1.0")
    assert finding.level == WARNING
    assert finding.remedy.startswith("start it with mpirun or horovodrun; or export OPAL_PREFIX=")


def test_a_newer_framework_that_still_works_is_no_problem() -> None:
    probe = Probe({"mpi": False, "gloo": True, "nccl": False}, "")
    assert front_end_finding(TORCH, probe, {"pytorch": "2.0.1"}, "2.1.0").level == OK


def horovod_findings(gpus: int = 0, **errors: str) -> dict[str, Finding]:
    """Those of the Horovod that is here, where importing a front end gives some error."""
    built = {"mpi": True, "gloo": True, "nccl": False, "libmpi": []}
    probes = {f.name: Probe({"version": "1.0", "gpus": gpus}, "") for f in FRAMEWORKS}
    for f in FRAMEWORKS:
        probes[f"Horovod with {f.name}"] = Probe(None, errors[f.module]) if f.module in errors else Probe(built, "")
    return {finding.subject: finding for finding in doctor.horovod_findings(FRAMEWORKS, probes)}


def test_built_without_a_framework() -> None:
    findings = horovod_findings(tensorflow=NOT_BUILT)
    assert findings["Horovod with TensorFlow"].level == WARNING  # for Horovod works with PyTorch
    assert "without this framework" in findings["Horovod with TensorFlow"].text
    findings = horovod_findings(torch=NOT_BUILT, tensorflow=NOT_BUILT)
    assert findings["Horovod with PyTorch"].level == findings["Horovod with TensorFlow"].level == PROBLEM


def test_gpus_without_nccl() -> None:
    assert "NCCL" not in horovod_findings()
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in horovod_findings(gpus=2)["NCCL"].remedy


@pytest.mark.parametrize(
    ("keras", "tf_keras", "environment", "level", "words"),
    [
        (None, None, {"TF_USE_LEGACY_KERAS": "1"}, PROBLEM, "pip install 'tf_keras~=2.21.0'"),
        ("2.21.0", "2.21.0", {"TF_USE_LEGACY_KERAS": "1"}, OK, ""),
        ("2.16.0", "2.16.0", {"TF_USE_LEGACY_KERAS": "True"}, WARNING, "tf_keras~=2.21.0"),
        ("3.15.1", "2.21.0", {}, WARNING, "horovod_sparse.tensorflow.keras"),
        ("2.15.0", None, {}, OK, ""),  # the Keras of TensorFlow before 2.16
    ],
)
def test_keras(keras: str | None, tf_keras: str | None, environment: dict[str, str], level: str, words: str) -> None:
    figures = {"version": "2.21.0", **({"keras": keras} if keras else {"keras_error": "ImportError"})}
    finding = keras_finding(figures, tf_keras, environment)
    assert finding.level == level
    assert words in finding.remedy


@pytest.mark.parametrize(("legacy", "package", "level"), [("0", "keras", WARNING), ("1", "tf_keras", OK)])
def test_keras_that_is_here(legacy: str, package: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", legacy)
    figures = doctor.run_probe(TENSORFLOW.probe).figures
    assert figures
    assert figures["keras"] == distribution(package).version
    assert keras_finding(figures, distribution("tf_keras").version, os.environ).level == level


def test_keras_that_cannot_be_imported() -> None:
    figures = {"version": "2.21.0", "keras_error": "Traceback\nModuleNotFoundError: No module named 'pkg_resources'\n"}
    finding = keras_finding(figures, None, {})
    assert (finding.level, finding.remedy) == (PROBLEM, "pip install 'setuptools<81'")


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


def fake_mpirun(folder: Path, script: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    mpirun = folder / "bin" / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n{script}\n")
    mpirun.chmod(0o755)
    return mpirun


def test_mpirun_of_another_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mpirun = fake_mpirun(tmp_path, "echo 'mpirun (Open MPI) 4.1.2'")
    monkeypatch.setenv("PATH", f"{mpirun.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    findings = list(doctor.mpi_findings(["/opt/openmpi/lib/libmpi.so.40"]))
    texts = [finding.text for finding in findings]
    assert f"Horovod has loaded /opt/openmpi/lib/libmpi.so.40, but {mpirun} is of another installation" in texts
    assert "Open MPI refuses to run as root" in texts
    assert not any("another installation" in f.text for f in doctor.mpi_findings([str(tmp_path / "lib" / "libmpi.so")]))


def test_which_library_belongs_to_which_mpirun(tmp_path: Path) -> None:
    """As Debian lays them out: mpirun in /usr/bin is a link, and the library lies deeper than its bin."""
    mpirun = fake_mpirun(tmp_path / "usr", "")
    (tmp_path / "alternatives").symlink_to(mpirun)
    library = tmp_path / "usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4"
    assert doctor.same_installation(str(tmp_path / "alternatives"), str(library))
    assert not doctor.same_installation(str(mpirun), str(tmp_path / "usr/local/lib/libmpi.so.40"))


@pytest.mark.parametrize("script", ["sleep 60", None])
def test_mpirun_that_does_not_answer(script: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mpirun = fake_mpirun(tmp_path, f"exec {script}")
    if script is None:
        mpirun.write_bytes(b"\x7fELF no program")
    monkeypatch.setenv("PATH", f"{mpirun.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.5)
    finding = list(doctor.mpi_findings([]))[-1]
    assert (finding.level, "--gloo" in finding.remedy) == (WARNING, True), finding


@pytest.mark.parametrize(("python", "level"), [((3, 9), PROBLEM), ((3, 10), OK), ((3, 13), OK), ((3, 14), PROBLEM)])
def test_python(python: tuple[int, int], level: str) -> None:
    assert python_finding(python).level == level


@pytest.mark.parametrize("needed", [True, False])
def test_compiler(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(doctor.compiler_findings(needed)).level == OK
    monkeypatch.setenv("CXX", "false")
    findings = list(doctor.compiler_findings(needed))
    assert findings[0].level == (PROBLEM if needed else WARNING)
    assert "a C++17 compiler" in findings[0].text
    assert "g++" in findings[0].remedy


def test_versions_that_cannot_build_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", {"setuptools": "81.0.0", "cmake": "4.4.5"}.get)
    remedies = [finding.remedy for finding in doctor.compiler_findings(needed=True)]
    assert "pip install 'setuptools<81'" in remedies
    assert "export CMAKE_POLICY_VERSION_MINIMUM=3.5" in remedies
    assert not any(finding.remedy for finding in doctor.compiler_findings(needed=False))


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

COMMAND = """
import sys
from horovod_sparse import cli, doctor
doctor.TIMEOUT_S = float(sys.argv.pop(1))
try:
    cli.app(["doctor", *sys.argv[1:]])
finally:
    print("MODULES", *sys.modules, file=sys.stderr)
"""


def run(*arguments: str, python: str = sys.executable, time_out: float = 100, **environment: str) -> Any:
    return subprocess.run(
        [python, "-c", COMMAND, str(time_out), *arguments],
        env={**os.environ, "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def findings_of(done: Any) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in json.loads(done.stdout)}


def write_packages(folder: Path, **sources: str) -> str:
    """A PYTHONPATH that has these packages before any others."""
    for package, source in sources.items():
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(source)
    return str(folder)


def test_this_environment_fits() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Horovod with PyTorch +works on a single rank; built with MPI, Gloo", done.stdout)
    assert re.search(r"Horovod with TensorFlow +works on a single rank; built with MPI, Gloo", done.stdout)
    assert "All fits" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_as_a_rank_of_a_job_and_without_an_opal_prefix(tmp_path: Path) -> None:
    """Under mpirun, as docs/doctor.md advises for several hosts; and a plain Python whose Open MPI finds no files."""
    path = write_packages(tmp_path, tensorflow="raise ImportError('none')")  # only to be faster
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-np", "1", sys.executable, "-c", COMMAND, "100", "--json"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        mpirun, env={**os.environ, **root, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100
    )
    assert findings_of(done)["Horovod with PyTorch"]["level"] == "ok", done.stdout
    findings = findings_of(run("--json", PYTHONPATH=path, OPAL_PREFIX=""))
    assert findings["Horovod with PyTorch"]["level"] == "warning"
    assert "aborts in a plain python" in findings["Horovod with PyTorch"]["text"]


@pytest.mark.parametrize(
    ("source", "torch", "remedy"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "importing it crashed with SIGSEGV", "torch"),
        ("import os; os.abort()", "importing it crashed with SIGABRT", "torch"),
        ("import os; os._exit(7)", "importing it ended with 7", "torch"),
        ("import time; time.sleep(60)", "importing it did not end in 3 s", "torch"),
        # A process that outlives the import keeps its stdout open.
        ("import subprocess; subprocess.Popen(['sleep', '30']); raise OSError('no disk')", "OSError: no disk", "torch"),
        ("raise TypeError('Descriptors cannot be created directly.')", "protobuf is too new", "protobuf"),
    ],
)
def test_broken_frameworks_are_findings(source: str, torch: str, remedy: str, tmp_path: Path) -> None:
    path = write_packages(
        tmp_path, torch=source, tensorflow="raise TypeError('Descriptors cannot be created directly.')"
    )
    done = run("--json", time_out=3, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    findings = findings_of(done)
    assert findings["PyTorch"]["level"] == findings["TensorFlow"]["level"] == "problem"
    assert findings["PyTorch"]["text"].startswith(torch)
    assert remedy in findings["PyTorch"]["remedy"]
    assert "protobuf" in findings["TensorFlow"]["remedy"]
    assert "Horovod with PyTorch" not in findings


@pytest.mark.parametrize(
    ("other", "name", "how"), [("torch", "TensorFlow", "without"), ("tensorflow", "PyTorch", "for another version")]
)
def test_a_horovod_built_otherwise(other: str, name: str, how: str, tmp_path: Path) -> None:
    """The real Horovod, whose extensions are missing, or lack what the installed frameworks do not have."""
    path = write_packages(tmp_path, **{other: "raise ImportError('none')"})  # only to be faster
    shutil.copytree(SITE_PACKAGES / "horovod", tmp_path / "horovod", ignore=shutil.ignore_patterns("mpi_lib*"))
    if how == "for another version":
        source = tmp_path / "extension.c"
        source.write_text(
            "extern int _ZN5torch8autograd4impl9gradientE; int *used = &_ZN5torch8autograd4impl9gradientE;"
        )
        extension = tmp_path / "horovod/torch" / f"mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX')}"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", extension, source], check=True, timeout=60)
    done = run("--json", PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    finding = findings_of(done)[f"Horovod with {name}"]
    assert how in finding["text"], finding
    assert "build Horovod again" in finding["remedy"]


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
    modules = done.stderr.split("MODULES ")[1].split()
    assert "horovod_sparse.doctor" in modules
    assert not {"numpy", "numba", "horovod_sparse.core"} & set(modules)
    words = run(python=python, PYTHONPATH=str(base)).stdout
    assert "problems to solve" in words
