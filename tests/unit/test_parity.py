"""The front ends agree: the same gradients give the same indices and updates in PyTorch and in TensorFlow."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import parity
import pytest

ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
MPIRUN = Path(sys.executable).parent / "mpirun"


@pytest.fixture(scope="module", params=[2, 3])
def results(request, tmp_path_factory):
    """What each front end did, on so many ranks."""
    folder = tmp_path_factory.mktemp("parity")
    for framework in ("torch", "tensorflow"):
        command = [MPIRUN, "--oversubscribe", "-np", str(request.param), sys.executable, parity.__file__, framework]
        done = subprocess.run(
            [*command, folder / framework],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
    return [np.load(folder / f"{framework}.npz") for framework in ("torch", "tensorflow")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("setting", parity.SETTINGS)
def test_same_gradients_give_the_same_indices_and_updates(results, setting):
    in_torch, in_tensorflow = results
    for step in range(parity.STEPS):
        ours, theirs = in_torch[f"{setting}/{step}"], in_tensorflow[f"{setting}/{step}"]
        np.testing.assert_array_equal(ours != 0, theirs != 0)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
        assert np.isnan(ours).all() == (step == 8)
        np.testing.assert_allclose(
            in_torch[f"{setting}/{step}/stats"], in_tensorflow[f"{setting}/{step}/stats"], rtol=1e-6
        )
    if setting in ("micro", "micro, float16"):  # the published threshold is far from its target yet
        assert 0 < np.count_nonzero(in_torch[f"{setting}/11"]) < 0.2 * len(ours)
