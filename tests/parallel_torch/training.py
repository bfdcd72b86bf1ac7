"""What the parallel tests share: known gradients, training loops, and comparisons between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import horovod.torch as hvd
import torch
from torch import nn


def seeded(*key: int) -> torch.Generator:
    """A generator that depends on `key` alone, so that every rank can know every rank's data."""
    seed = 0
    for part in key:
        seed = seed * 1_000_003 + part + 1
    return torch.Generator().manual_seed(seed)


def known_gradients(model: nn.Module, rank: int, step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients that each rank can compute for each rank."""
    generator = seeded(rank, step)
    return {
        name: scale * torch.randn(p.shape, generator=generator).to(p.dtype)
        for name, p in sorted(model.named_parameters())
        if p.requires_grad
    }


def backward_with(model: nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    """A backward pass whose gradients are exactly `gradients`; a parameter that is not named gets none."""
    sum((p * gradients[name]).sum() for name, p in model.named_parameters() if name in gradients).backward()


def distributed(
    model: nn.Module, compression: object, lr: float = 0.1, momentum: float = 0.0, **options: object
) -> torch.optim.Optimizer:
    """SGD in stock Horovod's optimizer, with its `options`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Take steps with the `known_gradients` of this rank."""
    for step in steps:
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.step()


def mean_over_ranks(gradients_of: Callable[[int], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of every rank's gradients in float64, without communication."""
    every = [gradients_of(rank) for rank in range(hvd.size())]
    return {name: sum(g[name].double() for g in every) / hvd.size() for name in every[0]}


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    """Bitwise the same, NaN included."""
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors])
    every = hvd.allgather(flat.unsqueeze(0).view(torch.int64), name="test.same_on_all_ranks")
    return bool((every == every[0]).all())


def mlp(seed: int = 0, sizes: tuple[int, ...] = (20, 64, 10)) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def loss_on(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss on data of this rank and step, for a model of 20 inputs and 10 classes."""
    generator = seeded(rank, step)
    x = torch.randn(16, 20, generator=generator)
    return nn.functional.cross_entropy(model(x), (x[:, :10] + x[:, 10:]).argmax(1))
