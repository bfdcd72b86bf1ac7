"""A plain `python train.py`, without a launcher; each test in a process of its own, where Horovod is started or not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

TRAINING = """
    import horovod.torch as hvd, torch
    from horovod_sparse.torch import A2SGDCompressor, MiCROCompressor, get_compressor
    hvd.init()

    def train(compression):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if compression:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
        return model, optimizer
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(TRAINING) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("compression", ["MiCROCompressor", "MiCROCompressor(0.2)", "A2SGDCompressor(sync_every=2)"])
@pytest.mark.parametrize("elastic", ["0", "1"])  # an elastic job registers Horovod's hooks even on a single rank
def test_training_equals_plain_pytorch(compression: str, elastic: str) -> None:
    finished = run(
        f"""
        plain, _ = train(None)
        ours, optimizer = train({compression})
        assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), ours.parameters()))
        compressor = get_compressor(optimizer)
        assert compressor.stats is None
        if hasattr(compressor, "synchronize_parameters"):
            compressor.synchronize_parameters()
        print(compressor.state_dict())
        """,
        HOROVOD_ELASTIC=elastic,
    )
    assert finished.returncode == 0, finished.stderr
    assert "'step': 0" in finished.stdout


def test_horovod_that_is_not_initialised() -> None:
    finished = run("hvd.shutdown()\ntrain(MiCROCompressor)")
    assert finished.returncode == 1
    assert "Horovod has not been initialized; use hvd.init()" in finished.stderr
