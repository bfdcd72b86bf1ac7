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


def without(*names):
    """Code that makes it as if these packages were not installed."""
    return f"""
        import sys
        from importlib.machinery import PathFinder
        class WithoutSome:
            @staticmethod
            def find_spec(name, path=None, target=None):
                return None if name.split(".")[0] in {names} else PathFinder.find_spec(name, path, target)
        sys.meta_path[:] = [WithoutSome if finder is PathFinder else finder for finder in sys.meta_path]
    """


def imported_by(statement):
    """The top-level packages that are loaded after `statement`."""
    return set(python(f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})").split())


def import_error(module, preparation):
    """The message of the ImportError that importing a front end raises after `preparation`."""
    code = """
        import sys
        {preparation}
        try:
            import horovod_sparse.{module}
        except ImportError as error:
            print("MESSAGE", error)
    """
    *_, message = python(code.format(module=module, preparation=preparation)).split("MESSAGE ")
    return message


@pytest.mark.parametrize("name", ["horovod_sparse", "horovod_sparse.core", "horovod_sparse.core.virtual"])
def test_package_and_core_import_no_framework(name):
    packages = imported_by(f"import {name}")
    assert "horovod_sparse" in packages
    assert packages.isdisjoint(FRAMEWORKS)


FRONT_ENDS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
front_ends = pytest.mark.parametrize(("module", "framework"), FRONT_ENDS.items())


def test_torch_front_end_does_not_import_tensorflow():
    packages = imported_by("import horovod_sparse.torch")
    assert {"torch", "horovod"} <= packages
    assert packages.isdisjoint({"tensorflow", "keras", "tf_keras"})


@pytest.mark.parametrize("name", ["horovod_sparse.tensorflow", "horovod_sparse.tensorflow.keras"])
def test_tensorflow_front_end_does_not_import_torch(name):
    packages = imported_by(f"import {name}")
    assert {"tensorflow", "horovod"} <= packages
    assert packages.isdisjoint({"torch"})


@pytest.mark.parametrize("legacy", [0, 1])
def test_tensorflow_trains_where_torch_is_not_installed(legacy):
    code = f"""{without("torch")}
        import os
        os.environ["TF_USE_LEGACY_KERAS"] = "{legacy}"
        import tensorflow as tf
        import horovod_sparse.tensorflow.keras as hvd
        hvd.init()
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), compression=hvd.MiCROCompressor), "mse")
        model.fit(tf.ones((4, 3)), tf.ones((4, 1)), verbose=0)
        print("trained with", tf.keras.Model.__module__)
    """
    assert f"trained with {'tf_keras' if legacy else 'keras'}" in python(code)


def test_torch_trains_where_tensorflow_is_not_installed():
    code = f"""{without("tensorflow", "keras", "tf_keras")}
        import torch
        import horovod_sparse.torch as hvd
        hvd.init()
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=hvd.MiCROCompressor)
        model(torch.ones(4, 3)).mean().backward()
        optimizer.step()
        print("trained")
    """
    assert "trained" in python(code)


def test_core_steps_on_numpy_arrays_where_no_framework_is_installed():
    code = f"""{without(*FRAMEWORKS)}
        import numpy as np
        from horovod_sparse.core import A2SGD, FlatLayout, MiCRO, virtual
        layout = FlatLayout.flat(8)
        for method in (MiCRO(layout, 0.25), A2SGD(layout)):
            (update,), _ = virtual.run([method.step([np.arange(8, dtype="float32")], 0, 1)])
            print(update.gradient[0].tolist())
    """
    assert python(code).splitlines() == [str([0.0] * 6 + [6.0, 7.0]), str([float(i) for i in range(8)])]


def test_core_steps_where_numba_finds_no_directory_for_its_cache():
    code = """
        import numpy as np
        from numba.core import caching
        caching.CacheImpl._locator_classes = []
        from horovod_sparse.core import A2SGD, FlatLayout, virtual
        (update,), _ = virtual.run([A2SGD(FlatLayout.flat(3)).step([np.ones(3, "float32")], 0, 1)])
        print(update.gradient[0].tolist())
    """
    assert python(code).strip() == str([1.0] * 3)


@front_ends
def test_missing_framework_is_an_import_error_that_tells_to_install_it(module, framework):
    message = import_error(module, f"sys.modules['{module}'] = None")
    assert framework in message
    assert f"pip install {module}" in message


@front_ends
def test_missing_horovod_is_an_import_error_that_tells_how_to_install_it(module, framework):
    message = import_error(module, "sys.modules['horovod'] = None")
    assert "Horovod" in message
    assert f"HOROVOD_WITH_{framework.upper()}=1 pip install" in message


@front_ends
def test_horovod_without_the_extension_is_an_import_error_that_tells_to_build_it_again(module, framework):
    preparation = f"""
        import horovod.common.util
        def check_extension(*_):
            raise ImportError("Extension horovod.{module} has not been built")
        horovod.common.util.check_extension = check_extension
    """
    message = import_error(module, preparation)
    assert "built without it" in message
    assert f"HOROVOD_WITH_{framework.upper()}=1 pip install" in message


def test_missing_transformers_is_an_import_error_that_tells_to_install_it():
    message = import_error("torch.huggingface", "sys.modules['transformers'] = None")
    assert message.strip().endswith("needs transformers: pip install 'horovod_sparse[huggingface]'")
