"""`hvd.join()`: ranks whose data ends earlier. The others go on, with steps that are dense."""

from __future__ import annotations

from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from training import backward_with, distributed, known_gradients, mlp, same_on_all_ranks, snapshot, train

from horovod_sparse.torch import A2SGDCompressor, MiCROCompressor, QSGDCompressor, TopKCompressor, get_compressor

pytestmark = pytest.mark.laws
LAST = hvd.size() - 1


def join_and_share(model: nn.Module) -> None:
    """As Horovod's documentation has it: whoever joined last knows best."""
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)


@pytest.mark.parametrize("make", [MiCROCompressor, lambda: MiCROCompressor(value_dtype="bfloat16"), TopKCompressor])
def test_nothing_is_lost_when_ranks_join_and_come_back(make: Callable[[], object]) -> None:
    """A joined rank counts as one with gradients of 0, as in Horovod; what it holds back waits for its return."""
    model = mlp().double()
    optimizer = distributed(model, make(), lr=1.0)
    start = snapshot(model)
    ended = {rank: 5 - (rank == LAST) * 2 for rank in range(hvd.size())}
    train(model, optimizer, range(ended[hvd.rank()]))
    if hvd.rank() != LAST:
        assert get_compressor(optimizer).stats.density == 1.0
    join_and_share(model)
    train(model, optimizer, range(10, 14))
    compressor = get_compressor(optimizer)
    assert compressor.stats.step == 9
    assert compressor.stats.density < 0.1
    assert same_on_all_ranks(model.parameters())
    residual = compressor.state_dict()["residual"]
    for name, p in model.named_parameters():
        steps = [(rank, step) for rank, end in ended.items() for step in [*range(end), *range(10, 14)]]
        wanted = sum(known_gradients(model, rank, step)[name] for rank, step in steps) / hvd.size()
        held_back = hvd.allreduce(residual[name], name=f"test.joined.{name}")
        torch.testing.assert_close(start[name] - p.detach() + held_back, wanted, rtol=0, atol=1e-10)


def test_a2sgd_goes_on_with_the_ranks_that_are_left() -> None:
    model = mlp()
    optimizer = distributed(model, A2SGDCompressor(sync_every=2), lr=1.0)
    train(model, optimizer, range(3 if hvd.rank() == LAST else 7))
    join_and_share(model)
    train(model, optimizer, range(10, 11))  # averages what was due in the meantime
    assert same_on_all_ranks(model.parameters())
    train(model, optimizer, range(11, 14))
    assert get_compressor(optimizer).stats.step == 11
    get_compressor(optimizer).synchronize_parameters()
    assert same_on_all_ranks(model.parameters())


def test_a2sgd_takes_the_means_of_the_ranks_that_are_left() -> None:
    """Those of two ranks with the same gradients are their own means: nothing changes."""
    model = mlp()
    optimizer = distributed(model, A2SGDCompressor(sync_every=None), lr=1.0)
    gradients = known_gradients(model, 0, 0)
    for _ in range(1 if hvd.rank() == LAST else 3):
        optimizer.zero_grad()
        backward_with(model, gradients)
        optimizer.synchronize()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-5, atol=1e-6)
        with optimizer.skip_synchronize():
            optimizer.step()
    hvd.join()


def test_qsgd_goes_on_with_the_ranks_that_are_left() -> None:
    model = mlp().double()
    optimizer = distributed(model, QSGDCompressor(), lr=1.0)
    train(model, optimizer, range(1 if hvd.rank() == LAST else 2))
    if hvd.rank() != LAST:  # the last step was dense, and exact
        for name, p in model.named_parameters():
            wanted = sum(known_gradients(model, rank, 1)[name] for rank in range(LAST)) / hvd.size()
            torch.testing.assert_close(p.grad, wanted, rtol=0, atol=1e-12)
    join_and_share(model)
    train(model, optimizer, range(10, 12))
    assert same_on_all_ranks(model.parameters())


def test_gradient_that_is_not_finite_while_a_rank_is_away() -> None:
    model = mlp()
    optimizer = distributed(model, MiCROCompressor, lr=1.0)
    train(model, optimizer, range(2))
    if hvd.rank() != LAST:
        before = get_compressor(optimizer).state_dict()["residual"]
        optimizer.zero_grad()
        gradients = known_gradients(model, hvd.rank(), 2, float("inf") if hvd.rank() == 0 else 1.0)
        backward_with(model, gradients)
        optimizer.synchronize()
        assert get_compressor(optimizer).stats.skipped
        after = get_compressor(optimizer).state_dict()["residual"]
        assert all(torch.equal(after[name], held_back) for name, held_back in before.items())
    hvd.join()
    train(model, optimizer, range(3, 6))
    assert same_on_all_ranks(model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_flush_while_a_rank_is_away_holds_for_it_too_when_it_is_back() -> None:
    model = mlp().double()
    optimizer = distributed(model, MiCROCompressor, lr=1.0)
    train(model, optimizer, range(2))
    if hvd.rank() != LAST:
        get_compressor(optimizer).flush()
        train(model, optimizer, range(2, 3))
    join_and_share(model)
    train(model, optimizer, range(10, 11))
    assert get_compressor(optimizer).stats.density == 1.0
    assert all((held_back == 0).all() for held_back in get_compressor(optimizer).state_dict()["residual"].values())
    train(model, optimizer, range(11, 12))
    assert get_compressor(optimizer).stats.density < 0.1


def test_what_needs_all_ranks_says_so() -> None:
    """`synchronize_parameters()`, or to compare notes on a state that was loaded."""
    model, other = nn.ModuleDict({"join_a2sgd": mlp()}), nn.ModuleDict({"join_micro": mlp()})
    a2sgd, micro = A2SGDCompressor(), MiCROCompressor()
    optimizers = [distributed(model, a2sgd, lr=1.0), distributed(other, micro, lr=1.0)]
    train(model, optimizers[0], range(2))
    train(other, optimizers[1], range(2))
    if hvd.rank() != LAST:
        message = rf"1 of {hvd.size()} ranks have called hvd.join\(\)"
        with pytest.raises(RuntimeError, match=message):
            a2sgd.synchronize_parameters()
        micro.load_state_dict(micro.state_dict())
        with pytest.raises(RuntimeError, match=message):
            train(other, optimizers[1], range(2, 3))
    hvd.join()
