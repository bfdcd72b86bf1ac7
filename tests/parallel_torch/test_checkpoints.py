"""Saved states: on the same ranks, on others, and from rank 0 alone. See also `State` in test_faults.py."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from training import backward_with, distributed, known_gradients, mlp, same_on_all_ranks, snapshot, train

from horovod_sparse.torch import A2SGDCompressor, MiCROCompressor, QSGDCompressor, TopKCompressor, get_compressor

pytestmark = pytest.mark.laws


def saved_and_read(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def states_of_another_world(make: Callable[[], object], world_size: int) -> list[dict[str, Any]]:
    """As `world_size` ranks would have saved them, in float64, each with a residual of its own."""
    model = mlp().double()
    optimizer = distributed(model, make(), lr=1.0)
    train(model, optimizer, range(4))
    state = get_compressor(optimizer).state_dict()
    state = hvd.broadcast_object(state, root_rank=0, name="test.one_state")
    return [
        saved_and_read(
            {
                **state,
                "rank": rank,
                "world_size": world_size,
                "residual": {name: part * (rank + 1) for name, part in state["residual"].items()},
            }
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("make", [MiCROCompressor, TopKCompressor])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_sum_of_the_residuals_is_that_of_the_states_of_another_world(make: type, world_size: int) -> None:
    states = states_of_another_world(make, world_size)
    model = mlp().double()
    optimizer = distributed(model, make(), lr=1.0)
    compressor = get_compressor(optimizer)
    compressor.load_state_dict(states[::-1])
    sums = {name: sum(state["residual"][name] for state in states) for name in states[0]["residual"]}
    for name, part in compressor.state_dict()["residual"].items():
        total = hvd.allreduce(part, op=hvd.Sum, name=f"test.sum.{name}")
        torch.testing.assert_close(total, sums[name], rtol=1e-12, atol=1e-12)

    # It arrives: a step with gradients of 0, which is flushed, applies the mean of what is held back.
    before = snapshot(model)
    compressor.flush()
    backward_with(model, {name: torch.zeros_like(p) for name, p in model.named_parameters()})
    optimizer.step()
    assert compressor.stats.step == 5
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), sums[name] / hvd.size(), rtol=1e-10, atol=1e-12)
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("make", [A2SGDCompressor, QSGDCompressor])
def test_methods_without_a_residual_take_states_of_another_world(make: type) -> None:
    model = mlp()
    optimizer = distributed(model, make(), lr=0.1)
    train(model, optimizer, range(2))
    state = get_compressor(optimizer).state_dict()
    get_compressor(optimizer).load_state_dict([{**state, "rank": r, "world_size": 5} for r in range(5)])
    train(model, optimizer, range(2, 4))
    assert get_compressor(optimizer).stats.step == 4


def test_states_that_are_not_those_of_all_ranks() -> None:
    states = states_of_another_world(MiCROCompressor, 3)
    for given, message in [
        (states[:2], r"of the ranks \[0, 1\], not of all of the 3 ranks"),
        ([states[0], states[1], states[1]], r"of the ranks \[0, 1, 1\]"),
        ([*states[:2], {**states[2], "step": 9}], "not of the same step of the same model"),
        ([*states[:2], {**states[2], "residual": {"other": torch.zeros(3)}}], "not of the same step of the same model"),
        ([*states[:2], {"method": "micro", "rank": 2}], "a state without a step"),
        ([*states[:2], {"method": "a2sgd"}], "the state is of 'a2sgd', not of 'micro'"),
        ([], "the state is of 'list', not of 'micro'"),
        (None, "the state is of 'NoneType', not of 'micro'"),
    ]:
        with pytest.raises(ValueError, match=message):
            MiCROCompressor().load_state_dict(given)


@pytest.mark.parametrize("flushed", [True, False])
def test_checkpoint_of_rank_0_alone(flushed: bool) -> None:
    """After a flush it has everything; without it, what the other ranks held back is lost, and nothing counts twice."""
    model = mlp().double()
    optimizer = distributed(model, MiCROCompressor, lr=1.0)
    train(model, optimizer, range(3))
    if flushed:
        get_compressor(optimizer).flush()
    train(model, optimizer, range(3, 4))
    saved = {"model": model.state_dict(), "compressor": get_compressor(optimizer).state_dict()}
    saved = hvd.broadcast_object(saved, root_rank=0, name="test.checkpoint")

    resumed = mlp().double()
    resumed.load_state_dict(saved["model"])
    optimizer = distributed(resumed, MiCROCompressor, lr=1.0)
    get_compressor(optimizer).load_state_dict(saved["compressor"])
    get_compressor(optimizer).flush()
    train(resumed, optimizer, range(4, 5))
    assert get_compressor(optimizer).stats.step == 5
    for name, p in resumed.named_parameters():
        wanted = sum(known_gradients(model, rank, 4)[name] for rank in range(hvd.size())) / hvd.size()
        wanted = wanted + (0 if flushed else saved["compressor"]["residual"][name] / hvd.size())
        torch.testing.assert_close(saved["model"][name] - p.detach(), wanted, rtol=0, atol=1e-12)


def test_loaded_state_is_a_copy() -> None:
    model, other = mlp(), mlp()
    optimizers = [distributed(m, MiCROCompressor, lr=0.1) for m in (model, other)]
    train(model, optimizers[0], range(2))
    state = get_compressor(optimizers[0]).state_dict()
    other.load_state_dict(model.state_dict())
    get_compressor(optimizers[1]).load_state_dict(state)
    for part in state["residual"].values():
        part.fill_(7.0)
    train(model, optimizers[0], range(2, 4))
    train(other, optimizers[1], range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_states_from_before_those_that_had_joined_were_back() -> None:
    """As a checkpoint at the end of an epoch with uneven data: their steps differ, and their learning rates."""
    model = mlp().double()
    optimizer = distributed(model, MiCROCompressor, lr=1.0)
    last = hvd.rank() == hvd.size() - 1
    for step in range(2 if last else 4):
        optimizer.param_groups[0]["lr"] = 1.0 if step < 3 else 0.1
        train(model, optimizer, range(step, step + 1))
    hvd.join()
    own = saved_and_read(get_compressor(optimizer).state_dict())
    every = hvd.allgather_object(own, name="test.uneven")
    resumed = mlp().double()
    optimizer = distributed(resumed, MiCROCompressor, lr=0.1)
    get_compressor(optimizer).load_state_dict(own)
    train(resumed, optimizer, range(4, 5))
    assert get_compressor(optimizer).stats.step == 5
    assert same_on_all_ranks(resumed.parameters())
    again = MiCROCompressor()
    again.load_state_dict(every)
    held_back = again.state_dict()
    for name, part in held_back["residual"].items():
        total = hvd.allreduce(part * held_back["rates"][name], op=hvd.Sum, name=f"test.uneven.{name}")
        wanted = sum(state["residual"][name] * state["rates"][name] for state in every)
        torch.testing.assert_close(total, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(hvd.size() < 3, reason="needs a process set of several ranks, and one more")
def test_states_loaded_before_the_compressor_has_met_its_process_set() -> None:
    process_set = hvd.add_process_set(list(range(1, hvd.size())))
    states = states_of_another_world(MiCROCompressor, 2)
    model, compressor = mlp().double(), MiCROCompressor()
    compressor.load_state_dict(states)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compressor, process_set=process_set
    )
    start = snapshot(model)
    compressor.flush()
    if process_set.included():
        backward_with(model, {name: torch.zeros_like(p) for name, p in model.named_parameters()})
        optimizer.step()
        for name, p in model.named_parameters():
            wanted = sum(state["residual"][name] for state in states) / process_set.size()
            torch.testing.assert_close(start[name] - p.detach(), wanted, rtol=1e-10, atol=1e-12)
    hvd.barrier()
    hvd.remove_process_set(process_set)
