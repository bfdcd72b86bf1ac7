"""Three thousand steps of a graph: replicas stay the same to the bit, nothing grows."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import tensorflow as tf
from training import MLP, batch, same_on_all_ranks

import horovod_sparse.tensorflow as hvd

STEPS = 3000


@pytest.mark.timeout(240)
def test_long_run() -> None:
    model, compressor = MLP(), hvd.MiCROCompressor(0.02, verify_every=1000)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        for p, gradient in zip(model.parameters, tape.gradient(loss, model.parameters), strict=True):
            p.assign_sub(0.05 * gradient)

    batches = [tuple(map(tf.constant, batch(hvd.rank(), i))) for i in range(20)]
    densities = []
    memory = 0
    for i in range(STEPS):
        step(*batches[i % len(batches)])
        densities.append(compressor.stats.density)
        if i % 500 == 499:
            assert same_on_all_ranks(model.parameters)
        if i == STEPS // 3:
            memory = psutil.Process().memory_info().rss
    assert compressor.stats.step == STEPS
    assert psutil.Process().memory_info().rss - memory < 8e6
    assert sum(densities[10:]) / len(densities[10:]) == pytest.approx(0.02, rel=0.05)
