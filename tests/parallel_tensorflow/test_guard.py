"""`verify_every`, and `density_schedule`: what has to be the same on all ranks, and is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf
from test_faults import error_on_all_ranks
from training import MLP, batch, same_on_all_ranks

import horovod_sparse.tensorflow as hvd

pytestmark = pytest.mark.laws
LAST = hvd.size() - 1


def trainer(model: MLP, compressor: Any, run_in: Any = tf.function) -> Callable[[int], None]:
    @run_in
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        for p, gradient in zip(model.parameters, tape.gradient(loss, model.parameters), strict=True):
            p.assign_sub(0.1 * gradient)

    return lambda i: step(*map(tf.constant, batch(hvd.rank(), i)))


@pytest.mark.parametrize("run_in", [tf.function, lambda f: f], ids=["graph", "eager"])
@pytest.mark.parametrize("make", [hvd.MiCROCompressor, hvd.TopKCompressor, hvd.QSGDCompressor])
def test_replicas_that_differ_in_a_bit(make: type, run_in: Any) -> None:
    model = MLP()
    step = trainer(model, make(verify_every=4), run_in)
    for i in range(8):
        step(i)
    w2 = model.parameters[2]
    if hvd.rank() == LAST:
        value = w2.numpy()
        value[3, 5] = np.nextafter(value[3, 5], np.float32(9))
        w2.assign(value)
    message = error_on_all_ranks(lambda: step(8))
    assert "after 8 steps, the digest of parameter 'w2' is " in message
    assert f"on rank {LAST}. " in message


@pytest.mark.parametrize("make", [hvd.MiCROCompressor, hvd.A2SGDCompressor])
def test_replicas_that_are_the_same_pass(make: type) -> None:
    compressor = make(verify_every=2)
    step = trainer(MLP(), compressor)
    for i in range(7):
        step(i)
    assert compressor.stats.step == 7


def test_warm_up_goes_from_dense_to_the_target_and_on_from_a_saved_state() -> None:
    model, resumed = MLP(), MLP()
    compressor = hvd.MiCROCompressor(density=0.02, density_schedule=hvd.WarmUp(4))
    again = hvd.MiCROCompressor(density=0.02, density_schedule=hvd.WarmUp(4))
    step, step_again = trainer(model, compressor), trainer(resumed, again)
    for i in range(6):
        if i == 2:
            again.load_state_dict(compressor.state_dict())
            for p, q in zip(resumed.parameters, model.parameters, strict=True):
                p.assign(q)
        step(i)
        if i >= 2:
            step_again(i)
            assert again.stats.target_density == compressor.stats.target_density
        assert compressor.stats.target_density == pytest.approx(0.02 ** (min(i, 4) / 4))
    for p, q in zip(resumed.parameters, model.parameters, strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())
    assert same_on_all_ranks(model.parameters)


def test_functions_that_differ_between_ranks() -> None:
    compressor = hvd.MiCROCompressor(density_schedule=lambda step: 0.1 if step < 3 or hvd.rank() != LAST else 0.2)
    step = trainer(MLP(), compressor)
    for i in range(3):
        step(i)
    message = error_on_all_ranks(lambda: step(3))
    assert f"the density of step 3 is 0.1 on rank 0, but 0.2 on rank {LAST}" in message


# Checkpoints


@pytest.mark.parametrize("make", [hvd.MiCROCompressor, hvd.TopKCompressor])
def test_states_of_all_ranks_of_another_world(make: type) -> None:
    """Of one with twice as many ranks: the sum over the ranks is what it was, and arrives."""
    model, compressor = MLP(), make()
    step = trainer(model, compressor)
    for i in range(3):
        step(i)
    own = compressor.state_dict()
    every = stock.allgather_object(own, name="test.states")
    size = hvd.size()
    doubled = [{**state, "rank": r, "world_size": 2 * size} for r, state in enumerate(every + every)]
    loaded = make()
    loaded.load_state_dict(doubled)
    for name, part in loaded.state_dict()["residual"].items():
        total = hvd.allreduce(tf.constant(part), op=hvd.Sum, name=f"test.sum.{name}")
        np.testing.assert_allclose(total, 2 * sum(state["residual"][name] for state in every), rtol=1e-5, atol=1e-6)
    model = MLP()
    trainer(model, loaded)(3)
    assert loaded.stats.step == 4
    assert same_on_all_ranks(model.parameters)
    with pytest.raises(ValueError, match="not of all of the"):
        loaded.load_state_dict(doubled[:-1])


def test_state_of_rank_0_on_all_ranks() -> None:
    """The usual checkpoint: what the others held back is lost, and counts no more than once."""
    model, compressor = MLP(), hvd.MiCROCompressor()
    step = trainer(model, compressor)
    for i in range(3):
        step(i)
    state = stock.broadcast_object(compressor.state_dict(), root_rank=0, name="test.state")
    resumed, other = hvd.MiCROCompressor(), MLP()
    resumed.load_state_dict(state)
    assert ("residual" in resumed.state_dict()) == (hvd.rank() == 0)
    trainer(other, resumed)(3)
    assert resumed.stats.step == 4
    assert same_on_all_ranks(other.parameters)
