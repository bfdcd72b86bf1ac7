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


LOADING = """
    def loaded(lr=0.1, compression=MiCROCompressor, held_back=True):
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1, bias=False), "b": torch.nn.Linear(2, 1, bias=False)})
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
        names = ["a.weight", "b.weight"]
        states = [
            {
                "method": "micro", "step": 7, "rank": r, "world_size": 2, "threshold": {},
                "residual": {n: torch.full((1, 2), r + 1.0) for n in names}, "rates": dict.fromkeys(names, 0.1),
            }
            for r in range(2)
        ]
        get_compressor(optimizer).load_state_dict(states)
        return model, optimizer

    def moved(model, optimizer, *layers, scaler=None):
        "How far a step moves each layer; those named have gradients of 0."
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        loss = sum(0 * model[layer](torch.ones(2)).sum() for layer in layers)
        if scaler:
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
        return [round(float((before[n] - p).mean()), 6) for n, p in model.named_parameters()]
"""


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("m, o = loaded(); print(moved(m, o, 'a', 'b'), moved(m, o, 'a', 'b'))", "[0.3, 0.3] [0.0, 0.0]"),
        ("m, o = loaded(); print(moved(m, o, 'a'), moved(m, o, 'a', 'b'))", "[0.3, 0.3] [0.0, 0.0]"),
        ("m, o = loaded(lr=0.001); print(moved(m, o, 'a', 'b'))", "[0.3, 0.3]"),
        ("m, o = loaded(lr=0); moved(m, o, 'a'); o.param_groups[0]['lr'] = 0.1; print(moved(m, o, 'b'))", "[0.3, 0.3]"),
        ("m, o = loaded(); print(moved(m, o, 'a', 'b', scaler=torch.amp.GradScaler('cpu')))", "[0.3, 0.3]"),
    ],
    ids=["once", "no gradient", "learning rate", "at rest", "scaled"],
)
@pytest.mark.parametrize("elastic", ["0", "1"])
def test_what_two_ranks_held_back_is_applied_by_one(code: str, wanted: str, elastic: str) -> None:
    finished = run(textwrap.dedent(LOADING) + code, HOROVOD_ELASTIC=elastic)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == wanted


@pytest.mark.parametrize("compression", ["MiCROCompressor", "A2SGDCompressor"])
def test_sparse_gradients(compression: str) -> None:
    finished = run(
        f"""
        model = torch.nn.Embedding(10, 3, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression={compression})
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        print("trained")
        """
    )
    assert "trained" in finished.stdout, finished.stderr
