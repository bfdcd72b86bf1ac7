"""`verify_every`, and `density_schedule`: what has to be the same on all ranks, and is not."""

from __future__ import annotations

from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from training import distributed, mlp, same_on_all_ranks, train

from horovod_sparse.torch import (
    A2SGDCompressor,
    MiCROCompressor,
    QSGDCompressor,
    TopKCompressor,
    WarmUp,
    get_compressor,
)

pytestmark = pytest.mark.laws
LAST = hvd.size() - 1


def message_on_all_ranks(act: Callable[[], None]) -> str:
    with pytest.raises(RuntimeError) as error:
        act()
    every = hvd.allgather_object(str(error.value), name="test.guard")
    assert len(set(every)) == 1, every
    return every[0]


@pytest.mark.parametrize("make", [MiCROCompressor, TopKCompressor, QSGDCompressor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_that_differ_in_a_bit(make: type, dtype: torch.dtype) -> None:
    model = nn.ModuleDict({f"differs_{make.__name__}_{dtype}".replace(".", "_"): mlp().to(dtype)})
    optimizer = distributed(model, make(verify_every=4))
    train(model, optimizer, range(8))
    with torch.no_grad():
        if hvd.rank() == LAST:
            last = list(model.parameters())[-1]
            last[3] = torch.nextafter(last[3], torch.tensor(9.0, dtype=dtype))
    name = list(dict(model.named_parameters()))[-1]
    message = message_on_all_ranks(lambda: train(model, optimizer, range(8, 9)))
    assert f"after 8 steps, the digest of parameter '{name}' is " in message
    assert f"on rank {LAST}. " in message
    assert "broadcast_parameters" in message


def test_first_rank_and_parameter_that_differ_are_named() -> None:
    model = nn.ModuleDict({"first_named": mlp()})
    optimizer = distributed(model, MiCROCompressor(verify_every=1))
    train(model, optimizer, range(1))
    with torch.no_grad():
        if hvd.rank() > 0:
            model["first_named"][2].weight[0, 0] += hvd.rank()
            model["first_named"][2].bias[0] += hvd.rank()
    message = message_on_all_ranks(lambda: train(model, optimizer, range(1, 2)))
    assert "parameter 'first_named.2.bias'" in message
    assert "on rank 1. " in message


@pytest.mark.parametrize("make", [MiCROCompressor, TopKCompressor, QSGDCompressor, A2SGDCompressor])
def test_replicas_that_are_the_same_pass(make: type) -> None:
    """A2SGD's are not, by design; there only the rest is compared."""
    model = mlp()
    optimizer = distributed(model, make(verify_every=2))
    train(model, optimizer, range(7))
    assert get_compressor(optimizer).stats.step == 7


@pytest.mark.parametrize("make", [MiCROCompressor, TopKCompressor])
def test_warm_up_goes_from_dense_to_the_target(make: type) -> None:
    model = mlp(sizes=(20, 400, 10))
    optimizer = distributed(model, make(density=0.01, density_schedule=WarmUp(4)))
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        stats = get_compressor(optimizer).stats
        assert stats.target_density == pytest.approx(0.01 ** (min(step, 4) / 4))
        if make is MiCROCompressor:
            assert stats.density == pytest.approx(stats.target_density, rel=0.15)
    assert same_on_all_ranks(model.parameters())


def test_schedule_goes_on_where_the_state_was_saved() -> None:
    def density(step: int) -> float:
        return 0.5 if step < 6 else 0.05

    model, resumed = mlp(), mlp()
    optimizer = distributed(model, MiCROCompressor(density_schedule=density))
    train(model, optimizer, range(4))
    optimizer_2 = distributed(resumed, MiCROCompressor(density_schedule=density))
    resumed.load_state_dict(model.state_dict())
    get_compressor(optimizer_2).load_state_dict(get_compressor(optimizer).state_dict())
    for step in range(4, 9):
        train(model, optimizer, range(step, step + 1))
        train(resumed, optimizer_2, range(step, step + 1))
        assert get_compressor(optimizer_2).stats.target_density == density(step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


def test_functions_that_differ_between_ranks() -> None:
    """They do from the fourth step on."""
    model = nn.ModuleDict({"functions_differ": mlp()})
    compressor = MiCROCompressor(density_schedule=lambda step: 0.1 if step < 3 or hvd.rank() != LAST else 0.2)
    optimizer = distributed(model, compressor)
    train(model, optimizer, range(3))
    message = message_on_all_ranks(lambda: train(model, optimizer, range(3, 4)))
    assert f"the density of step 3 is 0.1 on rank 0, but 0.2 on rank {LAST}" in message
    assert "density_schedule" in message


@pytest.mark.parametrize("bad", [0.0, 1.5, float("nan"), None, "dense", True])
def test_function_that_returns_no_density(bad: object) -> None:
    model = nn.ModuleDict({f"no_density_{str(bad).replace('.', '_')}": mlp()})
    optimizer = distributed(model, MiCROCompressor(density_schedule=lambda step: 0.1 if step < 2 else bad))
    train(model, optimizer, range(2))
    message = message_on_all_ranks(lambda: train(model, optimizer, range(2, 3)))
    assert "density_schedule, for step 2" in message


def test_function_that_raises_on_one_rank() -> None:
    def density(step: int) -> float:
        return 0.1 / (0 if (step, hvd.rank()) == (2, LAST) else 1)

    model = nn.ModuleDict({"schedule_raises": mlp()})
    optimizer = distributed(model, MiCROCompressor(density_schedule=density))
    train(model, optimizer, range(2))
    message = message_on_all_ranks(lambda: train(model, optimizer, range(2, 3)))
    assert f"rank {LAST}: density_schedule, for step 2, raised ZeroDivisionError('float division by zero'): " in message


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (WarmUp(5), WarmUp(6), "density_schedule is 'WarmUp(steps=5)' on rank 0, but 'WarmUp(steps=6)'"),
        (None, WarmUp(6), "density_schedule is 'None' on rank 0, but 'WarmUp(steps=6)'"),
    ],
)
def test_schedules_that_differ_between_ranks(first: object, second: object, message: str) -> None:
    model = nn.ModuleDict({f"schedules_{first}".replace(".", "_"): mlp()})
    optimizer = distributed(model, MiCROCompressor(density_schedule=second if hvd.rank() == LAST else first))
    assert message in message_on_all_ranks(lambda: train(model, optimizer, range(1)))
