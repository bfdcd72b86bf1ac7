"""Three thousand steps: replicas stay the same to the bit, nothing is lost, nothing grows."""

from __future__ import annotations

from functools import partial

import horovod.torch as hvd
import psutil
import pytest
import torch
from training import backward_with, known_gradients, mlp, same_on_all_ranks

from horovod_sparse.torch import A2SGDCompressor, MiCROCompressor, QSGDCompressor, TopKCompressor, get_compressor

STEPS = 3000
CYCLE = 10  # of steps, whose gradients come again and again: rounding that goes one way adds up
METHODS = {
    "micro": partial(MiCROCompressor, 0.02, verify_every=1000),
    "topk": partial(TopKCompressor, 0.02, verify_every=1000),
    "qsgd": partial(QSGDCompressor, 8, verify_every=1000),
    "a2sgd": partial(A2SGDCompressor, sync_every=50),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("method", METHODS)
def test_long_run(method: str) -> None:
    steps = STEPS if method in ("micro", "a2sgd") else STEPS // 3
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=METHODS[method]())
    given = [known_gradients(model, hvd.rank(), step) for step in range(CYCLE)]
    means = [torch.zeros(1)] * CYCLE
    for step in range(CYCLE):
        every = [known_gradients(model, rank, step) for rank in range(hvd.size())]
        means[step] = sum(torch.cat([g[n].double().flatten() for n in sorted(g)]) for g in every) / hvd.size()
    came, went, magnitude = (torch.zeros_like(means[0]) for _ in range(3))
    densities = []
    memory = 0
    for step in range(steps):
        optimizer.zero_grad()
        backward_with(model, given[step % CYCLE])
        optimizer.synchronize()
        came += means[step % CYCLE]
        magnitude += means[step % CYCLE].abs()
        went += torch.cat([p.grad.double().flatten() for _, p in sorted(model.named_parameters())])
        with optimizer.skip_synchronize():
            optimizer.step()
        stats = get_compressor(optimizer).stats
        densities.append(stats.density)
        if step % 250 == 249 and (method != "a2sgd" or stats.step % 50 == 0):
            assert same_on_all_ranks(model.parameters())
        if step == steps // 3:
            memory = psutil.Process().memory_info().rss
    assert stats.step == steps
    assert psutil.Process().memory_info().rss - memory < 8e6
    if method == "micro":
        assert sum(densities[10:]) / len(densities[10:]) == pytest.approx(0.02, rel=0.05)
    if method in ("micro", "topk"):
        residual = get_compressor(optimizer).state_dict()["residual"]
        held_back = torch.cat([residual[name].double().flatten() for name in sorted(residual)])
        held_back = hvd.allreduce(held_back, name="test.long_run.residual")
        # Each step rounds what is held back, some 50 gradients of which half cancel out, by a 2**-24th at most.
        assert ((came - went - held_back).abs() <= 50 * 2.0**-24 * magnitude.mean() * 3).all()
