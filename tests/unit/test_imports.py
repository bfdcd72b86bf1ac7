"""What an import brings in, and what it says when something is missing. Each in a fresh interpreter."""

import subprocess
import sys
import textwrap

import pytest

FRAMEWORKS = ("torch", "tensorflow", "horovod", "keras", "tf_keras")


def python(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(statement):
    """The top-level packages that are loaded after `statement`."""
    return set(python(f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})").split())


def import_error(preparation):
    """The message of the ImportError that `import horovod_sparse.torch` raises after `preparation`."""
    code = """
        import sys
        {preparation}
        try:
            import horovod_sparse.torch
        except ImportError as error:
            print("MESSAGE", error)
    """
    *_, message = python(code.format(preparation=preparation)).split("MESSAGE ")
    return message


@pytest.mark.parametrize("name", ["horovod_sparse", "horovod_sparse.core", "horovod_sparse.core.virtual"])
def test_package_and_core_import_no_framework(name):
    packages = imported_by(f"import {name}")
    assert "horovod_sparse" in packages
    assert packages.isdisjoint(FRAMEWORKS)


def test_torch_front_end_does_not_import_tensorflow():
    packages = imported_by("import horovod_sparse.torch")
    assert {"torch", "horovod"} <= packages
    assert packages.isdisjoint({"tensorflow", "keras", "tf_keras"})


def test_core_steps_on_numpy_arrays_where_no_framework_is_installed():
    code = f"""
        import sys
        for name in {FRAMEWORKS}:
            sys.modules[name] = None
        import numpy as np
        from horovod_sparse.core import A2SGD, FlatLayout, MiCRO, virtual
        layout = FlatLayout.flat(8)
        for method in (MiCRO(layout, 0.25), A2SGD(layout)):
            (update,), _ = virtual.run([method.step([np.arange(8, dtype="float32")], 0, 1)])
            gradient = np.arange(8, dtype="float32")
            update.write(layout, [gradient])
            print(gradient.tolist())
    """
    assert python(code).splitlines() == [str([0.0] * 6 + [6.0, 7.0]), str([float(i) for i in range(8)])]


def test_missing_torch_is_an_import_error_that_tells_to_install_it():
    message = import_error("sys.modules['torch'] = None")
    assert "PyTorch" in message
    assert "pip install torch" in message


def test_missing_horovod_is_an_import_error_that_tells_how_to_install_it():
    message = import_error("sys.modules['horovod'] = None")
    assert "Horovod" in message
    assert "HOROVOD_WITH_PYTORCH=1 pip install" in message


def test_horovod_without_its_torch_extension_is_an_import_error_that_tells_to_build_it_again():
    preparation = """
        import horovod.common.util
        def check_extension(*_):
            raise ImportError("Extension horovod.torch has not been built")
        horovod.common.util.check_extension = check_extension
    """
    message = import_error(preparation)
    assert "built without it" in message
    assert "HOROVOD_WITH_PYTORCH=1 pip install" in message
