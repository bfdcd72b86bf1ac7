"""The laws of the methods in a stock `hvd.DistributedOptimizer`, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, floor, log2

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops
from torch import nn
from training import (
    backward_with,
    known_gradients,
    loss_on,
    mean_over_ranks,
    mlp,
    same_on_all_ranks,
    snapshot,
)

from horovod_sparse.torch import (
    A2SGDCompressor,
    Compression,
    MiCROCompressor,
    QSGDCompressor,
    TopKCompressor,
    get_compressor,
)

pytestmark = pytest.mark.laws


def plain_sgd(model: nn.Module, compression: object, **options: object) -> torch.optim.Optimizer:
    """SGD with a learning rate of 1: a step subtracts the update itself."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **options
    )


# Sums of up to 4 half-precision values round at 2**-11 of the values, which reach about 4 * sqrt(50 steps).
TOLERANCES = {
    **{
        partial(MiCROCompressor, 0.02, threshold, value_dtype): 0.4 if value_dtype == "float16" else 1e-12
        for threshold in ("adaptive", "paper")
        for value_dtype in (None, "float16", "bfloat16")
    },
    partial(TopKCompressor, 0.02): 1e-12,
}


@pytest.mark.parametrize(("make", "tolerance"), TOLERANCES.items())
def test_nothing_is_lost(make: Callable[[], object], tolerance: float) -> None:
    model = mlp().double()
    optimizer = plain_sgd(model, make())
    applied = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(20):
        before = snapshot(model)
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.step()
        mean = mean_over_ranks(lambda rank, step=step: known_gradients(model, rank, step))
        residual = get_compressor(optimizer).state_dict()["residual"]
        for name, p in model.named_parameters():
            applied[name] += before[name] - p.detach()
            wanted[name] += mean[name]
            held_back = hvd.allreduce(residual[name], op=hvd.Average, name=f"test.residual.{name}")
            torch.testing.assert_close(applied[name] + held_back, wanted[name], rtol=0, atol=tolerance)


def test_update_is_the_mean_accumulator_where_an_owner_selects() -> None:
    """The first step, computed independently: acc is the gradient, rank i owns partition i of the flat vector."""
    model = mlp()
    optimizer = plain_sgd(model, MiCROCompressor(density=0.05))
    backward_with(model, known_gradients(model, hvd.rank(), 0))
    optimizer.synchronize()
    threshold = get_compressor(optimizer).stats.threshold

    every = [known_gradients(model, rank, 0) for rank in range(hvd.size())]
    flat = torch.stack([torch.cat([g[name].reshape(-1) for name in sorted(g)]) for g in every])
    d = flat.shape[1]
    owner = torch.cat([torch.full(((i + 1) * d // hvd.size() - i * d // hvd.size(),), i) for i in range(hvd.size())])
    selected = flat.gather(0, owner.unsqueeze(0)).squeeze(0).abs() >= threshold
    wanted = torch.where(selected, flat.double().mean(0), 0.0)
    got = torch.cat([p.grad.reshape(-1) for _, p in sorted(model.named_parameters())])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-7)
    assert get_compressor(optimizer).stats.selected == int(selected.sum())


@pytest.mark.parametrize("compression", [MiCROCompressor, TopKCompressor])
def test_density_one_is_horovods_dense_average(compression: type) -> None:
    model = mlp()
    optimizer = plain_sgd(model, compression(density=1.0))
    for step in range(3):
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.synchronize()
        for name, p in model.named_parameters():
            dense = hvd.allreduce(known_gradients(model, hvd.rank(), step)[name], name=f"test.dense.{name}")
            torch.testing.assert_close(p.grad, dense, rtol=1e-6, atol=1e-7)
        with optimizer.skip_synchronize():
            optimizer.step()
    stats = get_compressor(optimizer).stats
    assert (stats.density, stats.selected) == (1.0, stats.numel)


def test_topk_is_the_mean_of_what_the_ranks_select() -> None:
    """The first step, computed independently."""
    model = mlp()
    optimizer = plain_sgd(model, TopKCompressor(density=0.05))
    backward_with(model, known_gradients(model, hvd.rank(), 0))
    optimizer.synchronize()
    every = [known_gradients(model, rank, 0) for rank in range(hvd.size())]
    flat = torch.stack([torch.cat([g[name].reshape(-1) for name in sorted(g)]) for g in every])
    k = round(0.05 * flat.shape[1])
    sent = torch.zeros_like(flat).scatter(1, flat.abs().topk(k).indices, flat.gather(1, flat.abs().topk(k).indices))
    got = torch.cat([p.grad.reshape(-1) for _, p in sorted(model.named_parameters())])
    torch.testing.assert_close(got, sent.mean(0), rtol=1e-6, atol=1e-7)
    stats = get_compressor(optimizer).stats
    assert stats.selected == int((sent != 0).any(0).sum())
    assert stats.threshold == float(flat[hvd.rank()].abs().topk(k).values.min())


def test_qsgd_is_the_mean_to_within_a_level() -> None:
    model = mlp()
    optimizer = plain_sgd(model, QSGDCompressor(bits=8))
    for step in range(3):
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.synchronize()
        mean = mean_over_ranks(lambda rank, step=step: known_gradients(model, rank, step))
        for name, p in model.named_parameters():
            # 512 normally distributed elements have a norm of about sqrt(512).
            torch.testing.assert_close(p.grad.double(), mean[name], rtol=0, atol=1.2 * 512**0.5 / 127)
        assert same_on_all_ranks(p.grad for p in model.parameters())
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize(
    "compression", [MiCROCompressor(threshold="paper"), MiCROCompressor, TopKCompressor, QSGDCompressor]
)
def test_replicas_are_bitwise_equal_over_300_steps(compression: object) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    losses = []
    for step in range(300):
        optimizer.zero_grad()
        loss = loss_on(model, hvd.rank(), step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            assert same_on_all_ranks(model.parameters())
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    assert get_compressor(optimizer).stats.step == 300


def test_adaptive_density_is_met_from_the_third_step_on() -> None:
    model = mlp(sizes=(20, 2000, 30, 10))
    optimizer = plain_sgd(model, MiCROCompressor)
    for step in range(15):
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step, scale=1e-6 if step < 10 else 1e-5))
        optimizer.step()
        stats = get_compressor(optimizer).stats
        if step >= 2:
            assert stats.density == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("granularity", ["model", "tensor"])
def test_a2sgd_applies_the_local_error_and_the_global_means(granularity: str) -> None:
    model = mlp()
    optimizer = plain_sgd(model, A2SGDCompressor(granularity))
    for step in range(3):
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.synchronize()
        every = [{n: g.double() for n, g in known_gradients(model, rank, step).items()} for rank in range(hvd.size())]
        for name, p in model.named_parameters():
            parts = [torch.cat([g[n].reshape(-1) for n in g]) if granularity == "model" else g[name] for g in every]
            plus = [part[part >= 0].mean() for part in parts]
            minus = [-part[part < 0].mean() for part in parts]
            g = every[hvd.rank()][name]
            enc = torch.where(g >= 0, plus[hvd.rank()], -minus[hvd.rank()])
            error = g - enc
            wanted = error + torch.where(g >= 0, sum(plus) / hvd.size(), -sum(minus) / hvd.size())
            torch.testing.assert_close(p.grad.double(), wanted, rtol=1e-5, atol=1e-6)
        with optimizer.skip_synchronize():
            optimizer.step()


def test_a2sgd_payload_does_not_grow_with_the_model() -> None:
    def bytes_of_the_second_step(width: int) -> int:
        model = mlp(sizes=(20, width, 10))
        optimizer = plain_sgd(model, A2SGDCompressor)
        for step in range(2):
            optimizer.zero_grad()
            backward_with(model, known_gradients(model, hvd.rank(), step))
            optimizer.step()
        return get_compressor(optimizer).stats.bytes_sent

    # Two means of four bytes; beside them a token for each of the 4 tensors, a 1 for the rank's presence, two flags,
    # and a fingerprint of 16 bits, each a digit that counts up to all ranks, in numbers of 24 bits.
    fingerprint = ceil(16 / floor(24 / log2(hvd.size() + 1)))
    wanted = 2 * 4 + 4 * 4 + 3 * 4 + fingerprint * 4
    assert bytes_of_the_second_step(8) == bytes_of_the_second_step(800) == wanted


def test_a2sgd_with_equal_gradients_changes_nothing() -> None:
    model = mlp()
    optimizer = plain_sgd(model, A2SGDCompressor)
    for step in range(3):
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, 0, step))
        optimizer.synchronize()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, known_gradients(model, 0, step)[name], rtol=1e-6, atol=1e-6)
        with optimizer.skip_synchronize():
            optimizer.step()


def test_a2sgd_averages_the_parameters_when_it_is_due_and_when_asked() -> None:
    model = mlp()
    optimizer = plain_sgd(model, A2SGDCompressor(sync_every=3))
    for step in range(7):
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.step()
        assert same_on_all_ranks(model.parameters()) == (step % 3 == 2)
    mean = {n: hvd.allreduce(p.detach().double(), name=f"test.mean.{n}") for n, p in model.named_parameters()}
    get_compressor(optimizer).synchronize_parameters()
    assert same_on_all_ranks(model.parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), mean[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "compression",
    [
        Compression.micro,
        Compression.a2sgd,
        Compression.topk,
        Compression.qsgd,
        MiCROCompressor(0.05, "adaptive", "float16"),
    ],
)
def test_bytes_sent_is_what_horovod_was_given(compression: object, monkeypatch: pytest.MonkeyPatch) -> None:
    given = 0

    def counting(function: Callable[..., int]) -> Callable[..., int]:
        def count(tensor: torch.Tensor, *arguments: object) -> int:
            nonlocal given
            given += tensor.numel() * tensor.element_size()
            return function(tensor, *arguments)

        return count

    for name in ("_allreduce_async", "_allgather_async"):
        monkeypatch.setattr(mpi_ops, name, counting(getattr(mpi_ops, name)))
    model = mlp()
    optimizer = plain_sgd(model, compression)
    for step in range(6):
        optimizer.zero_grad()
        given = 0
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.step()
        assert get_compressor(optimizer).stats.bytes_sent == given
