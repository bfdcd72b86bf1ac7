"""What is built from this tree, and what it does where it alone is installed: not in a checkout, and without a network.

The environment to install in is new, and sees the packages of this one, but not its horovod_sparse.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
import yaml

import horovod_sparse

ROOT = Path(__file__).resolve().parents[2]
NAME = f"horovod_sparse-{horovod_sparse.__version__}"


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """What a command prints, which has to end with `status`."""
    # The last: at the exit of a rank, numba with colorama writes an escape code amid what another one prints.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **quiet}, text=True, capture_output=True, timeout=100, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build a `wheel` or an `sdist`, with the tools that are installed here."""
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", out, tree, cwd=tree)
    (built,) = out.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone of the repository would hold, with the changes of the day."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    copy = tmp_path_factory.mktemp("tree") / "horovod_sparse"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".ci", *ignored))
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the wheel is installed."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    # In this order: pip would find the version that is installed here good enough.
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=environment)
    libraries = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=environment).strip()
    # The .pth files of a directory that is named in a .pth file are not read: our own, of the checkout, among them.
    (Path(libraries) / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def test_the_version_is_the_same_everywhere(wheel: Path, python: Path, tmp_path: Path) -> None:
    version = horovod_sparse.__version__
    metadata = contents(wheel)[f"{NAME}.dist-info/METADATA"].decode()
    assert f"\nVersion: {version}\n" in metadata
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.search(r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version
    assert run(python.parent / "horovod-sparse", "--version", cwd=tmp_path).split() == ["horovod-sparse", version]
    assert version_of("horovod_sparse") == version


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, tree: Path) -> None:
    of_package = {name for name in contents(wheel) if not name.startswith(f"{NAME}.dist-info/")}
    assert of_package == {str(p.relative_to(tree)) for p in (tree / "horovod_sparse").rglob("*") if p.is_file()}
    assert "horovod_sparse/py.typed" in of_package
    assert contents(wheel)[f"{NAME}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert "\nLicense-Expression: Apache-2.0\n" in contents(wheel)[f"{NAME}.dist-info/METADATA"].decode()


def test_the_sdist_holds_the_whole_tree_and_builds_the_same_wheel(
    sdist: Path, wheel: Path, tree: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / NAME
    files = {path.relative_to(tree): path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    built_here = {path for path in files if path.parts[0] in ("build", "horovod_sparse.egg-info")}
    missing = [str(path) for path in files.keys() - built_here if not (unpacked / path).is_file()]
    assert missing == []
    assert all((unpacked / path).read_bytes() == files[path] for path in files.keys() - built_here)
    assert contents(build("wheel", unpacked, tmp_path / "wheel")) == contents(wheel)


def test_an_import_brings_in_no_framework(python: Path, tmp_path: Path) -> None:
    code = "import horovod_sparse, sys; print(horovod_sparse.__file__, *{name.split('.')[0] for name in sys.modules})"
    file, *modules = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert {"torch", "tensorflow", "keras", "tf_keras", "horovod"}.isdisjoint(modules)


def test_the_command_line_helps(python: Path, tmp_path: Path) -> None:
    assert "Gradient compression for Horovod" in run(python.parent / "horovod-sparse", "--help", cwd=tmp_path)
    run(python.parent / "horovod-sparse", "--nonsense", cwd=tmp_path, status=2)


TRAINING = """
    import horovod.torch as hvd
    import torch

    import horovod_sparse
    from horovod_sparse.torch import MiCROCompressor, get_compressor

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=MiCROCompressor(density=0.05))
    torch.manual_seed(hvd.rank() + 1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 100)).square().mean().backward()
        optimizer.step()
    weights = hvd.allgather_object(model.weight.tolist())
    if hvd.rank() == 0:
        print("trained", horovod_sparse.__file__, get_compressor(optimizer).stats.step, weights[0] == weights[1])
"""


def test_two_ranks_train_far_from_the_checkout(python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    mpirun = Path(sys.executable).with_name("mpirun")
    command = ["timeout", "--kill-after=5", "90", mpirun, "--oversubscribe", "-np", "2", python, "train.py"]
    output = run(*command, cwd=tmp_path)
    trained = re.search(r"trained (\S+) 5 True", output)
    assert trained, output
    assert Path(trained[1]).is_relative_to(python.parents[1])


def test_mypy_sees_the_types_of_a_user_s_calls(python: Path, tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text("[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")  # which would take a minute
    script = """
        from horovod_sparse.torch import MiCROCompressor, get_compressor

        compressor = MiCROCompressor(density=0.05, threshold="paper")
        reveal_type(compressor)
        MiCROCompressor(density="0.05")
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "script.py"]
    lines = run(*command, cwd=tmp_path, status=1).splitlines()
    assert [line for line in lines if "error" in line and "density" in line]
    assert 'note: Revealed type is "horovod_sparse.torch.compressor.MiCROCompressor"' in "\n".join(lines)
