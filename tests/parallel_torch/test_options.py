"""Everything that Horovod's users do with an optimizer, with our compression.

Each scenario is trained with stock dense Horovod, with MiCRO at density 1.0, which must give the same parameters, with
MiCRO at a low density, which must keep the replicas bitwise equal, and with A2SGD on equal data, where it must give the
parameters of dense training too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn
from training import (
    backward_with,
    known_gradients,
    loss_on,
    mean_over_ranks,
    mlp,
    same_on_all_ranks,
    seeded,
    snapshot,
)

from horovod_sparse.torch import A2SGDCompressor, MiCROCompressor, TopKCompressor, get_compressor

STEPS = 6


class Dense(hvd.Compression.none):
    """Horovod's dense reduction, also of gradients that are not contiguous, which by itself it refuses."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor.contiguous(), None


class OddShapes(nn.Module):
    """A scalar, an empty and a non-contiguous parameter, tied weights, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.transposed = nn.Parameter(torch.randn(20, 20).t())
        self.inner = nn.Linear(20, 20, bias=False)
        self.tied = nn.Linear(20, 20)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.head = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scale * x @ self.transposed + self.empty.sum()
        return self.head(torch.tanh(self.frozen(torch.tanh(self.tied(torch.tanh(self.inner(x)))))))


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
        self.convolutions.to(memory_format=torch.channels_last)
        self.head = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x[:, None, :, None].expand(-1, 4, -1, 5).contiguous(memory_format=torch.channels_last)
        return self.head(self.convolutions(images).mean((1, 3)))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 20, sparse=True)
        self.head = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words((x.abs() * 100).long() % 30).mean(1))


def sgd(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def two_parameter_groups(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.SGD([{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}], lr=0.05)


@dataclass
class Scenario:
    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    options: Callable[[nn.Module], dict[str, object]] = lambda model: {}
    passes: int = 1
    set_to_none: bool = True
    clip: bool = False
    named: bool = True
    scale: Callable[[], float] = field(default=lambda: 1.0)

    def train(self, compression: object, data_rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.model()
        optimizer = hvd.DistributedOptimizer(
            self.optimizer(model),
            named_parameters=model.named_parameters() if self.named else None,
            compression=compression,
            backward_passes_per_step=self.passes,
            **self.options(model),
        )
        for step in range(STEPS):
            optimizer.zero_grad() if self.set_to_none else self.zero_in_place(model)
            for i in range(self.passes):
                loss = self.scale() * loss_on(model, data_rank, self.passes * step + i)
                loss.backward()
            if self.clip:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        return model, optimizer

    @staticmethod
    def zero_in_place(model: nn.Module) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()


def halves(model: nn.Module) -> list[list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [parameters[:2], parameters[2:3]]  # and the rest, each by itself


SCENARIOS = {
    "plain": Scenario(),
    "unnamed parameters": Scenario(named=False),
    "gradients zeroed in place": Scenario(set_to_none=False),
    "synchronize, clip, skip_synchronize": Scenario(clip=True),
    "three backward passes per step": Scenario(passes=3),
    "three backward passes, gradients zeroed in place": Scenario(passes=3, set_to_none=False),
    "one group": Scenario(options=lambda model: {"groups": 1}),
    "two groups": Scenario(options=lambda model: {"groups": 2}),
    "explicit groups": Scenario(options=lambda model: {"groups": halves(model)}),
    "groups and three backward passes": Scenario(options=lambda model: {"groups": 2}, passes=3),
    "momentum": Scenario(optimizer=lambda model: sgd(model, momentum=0.9)),
    "nesterov and weight decay": Scenario(
        optimizer=lambda model: sgd(model, momentum=0.9, nesterov=True, weight_decay=0.01)
    ),
    "adam": Scenario(optimizer=lambda model: torch.optim.Adam(model.parameters(), eps=1e-3)),
    "adamw, foreach": Scenario(optimizer=lambda model: torch.optim.AdamW(model.parameters(), eps=1e-3, foreach=True)),
    "several parameter groups": Scenario(optimizer=two_parameter_groups),
    "odd shapes, tied and frozen": Scenario(model=OddShapes),
    "channels last": Scenario(model=ChannelsLast),
    "sparse embedding": Scenario(model=Embedding),
    "sparse embedding as dense": Scenario(model=Embedding, options=lambda model: {"sparse_as_dense": True}),
    "float64": Scenario(model=lambda: WithDtype(torch.float64)),
    "sum": Scenario(options=lambda model: {"op": hvd.Sum}, scale=lambda: 1 / hvd.size()),
    "gradient_predivide_factor": Scenario(options=lambda model: {"gradient_predivide_factor": 1.7}),
}


class WithDtype(nn.Module):
    """A model that computes in another dtype, between inputs and outputs of float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = mlp().to(dtype)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.dtype)).float()


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=SCENARIOS)
def scenario(request: pytest.FixtureRequest) -> Scenario:
    return SCENARIOS[request.param]


def test_micro_at_density_one_trains_like_dense(scenario: Scenario) -> None:
    reference, _ = scenario.train(Dense, hvd.rank())
    model, optimizer = scenario.train(MiCROCompressor(density=1.0), hvd.rank())
    assert_same_parameters(model, reference)
    assert same_on_all_ranks(model.parameters())
    assert get_compressor(optimizer).stats.step == STEPS


def test_micro_keeps_replicas_equal(scenario: Scenario) -> None:
    model, optimizer = scenario.train(MiCROCompressor, hvd.rank())
    assert same_on_all_ranks(model.parameters())
    stats = get_compressor(optimizer).stats
    assert stats.step == STEPS
    assert stats.density == pytest.approx(0.01, rel=0.5)


def test_a2sgd_on_equal_data_trains_like_dense(scenario: Scenario) -> None:
    reference, _ = scenario.train(Dense, 0)
    model, optimizer = scenario.train(A2SGDCompressor(sync_every=4), 0)
    assert_same_parameters(model, reference)
    assert get_compressor(optimizer).stats.step == STEPS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "compression",
    [lambda: MiCROCompressor(density=1.0), A2SGDCompressor, lambda: TopKCompressor(density=1.0)],
    ids=["micro", "a2sgd", "topk"],
)
def test_half_precision_parameters(compression: Callable[[], object], dtype: torch.dtype) -> None:
    """Horovod itself cannot reduce bfloat16 in PyTorch; the reference is float32, to the precision of the halves."""
    half = Scenario(model=lambda: WithDtype(dtype))
    reference, _ = Scenario(model=lambda: WithDtype(torch.float32)).train(Dense, 0)
    model, _ = half.train(compression(), 0)
    assert same_on_all_ranks(model.parameters())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=0.05, atol=0.02)


class Branches(nn.Module):
    """Only one branch gets a gradient; which one depends on the rank and the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(20, 10) for _ in range(3)])
        self.never = nn.Linear(20, 10)
        self.choice = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[self.choice](x)


@pytest.mark.laws
@pytest.mark.parametrize("compression", [MiCROCompressor, MiCROCompressor(density=1.0)], ids=["sparse", "dense"])
def test_parameters_without_a_gradient_on_some_ranks(compression: object) -> None:
    def train(compression: object) -> nn.Module:
        model = Branches()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)
        for step in range(8):
            model.choice = (hvd.rank() + step) % 3
            optimizer.zero_grad()
            loss_on(model, hvd.rank(), step).backward()
            optimizer.step()
        return model

    model = train(compression)
    assert same_on_all_ranks(model.parameters())
    if compression is not MiCROCompressor:
        assert_same_parameters(model, train(Dense))


@pytest.mark.laws
@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
def test_hooks_that_fire_in_another_order_on_each_rank(compression: object) -> None:
    """The parts of the loss, and so the hooks, come in another order on each rank; so do the modules."""
    names = [f"part{i}" for i in range(8)]
    order = torch.randperm(8, generator=seeded(hvd.rank())).tolist()
    model = nn.ModuleDict()
    for i in order:
        torch.manual_seed(i)
        model[names[i]] = nn.Linear(20, 10)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)
    for step in range(10):
        optimizer.zero_grad()
        for i in torch.randperm(8, generator=seeded(hvd.rank(), step)).tolist():
            loss_on(model[names[i]], hvd.rank(), step).backward()
        optimizer.step()
    if compression is A2SGDCompressor:
        get_compressor(optimizer).synchronize_parameters()
    assert same_on_all_ranks(p for _, p in sorted(model.named_parameters()))


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    model.requires_grad_(False)
    yield
    model.requires_grad_(True)


@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
def test_two_optimizers_trained_in_turn(compression: type) -> None:
    """As for a GAN: the same class for both optimizers, the same parameter names in both models."""
    generator, judge = mlp(1, (20, 30, 20)), mlp(2, (20, 40, 1))
    optimizers = [
        hvd.DistributedOptimizer(sgd(m), m.named_parameters(), compression=compression) for m in (generator, judge)
    ]
    for step in range(10):
        noise = torch.randn(16, 20, generator=seeded(hvd.rank(), step))
        optimizers[1].zero_grad()
        (judge(generator(noise).detach()).mean() - judge(noise).mean()).backward()
        optimizers[1].step()
        with frozen(judge):
            optimizers[0].zero_grad()
            (-judge(generator(noise)).mean()).backward()
            optimizers[0].step()
    first, second = (get_compressor(optimizer) for optimizer in optimizers)
    assert first is not second
    assert first.stats.numel == sum(p.numel() for p in generator.parameters())
    assert second.stats.numel == sum(p.numel() for p in judge.parameters())
    for model, compressor in ((generator, first), (judge, second)):
        if compression is A2SGDCompressor:
            compressor.synchronize_parameters()
        assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
def test_two_optimizers_in_one_backward_pass(compression: type) -> None:
    """Their hooks interleave, in another order on each rank."""
    models = nn.ModuleDict({"a": mlp(1), "b": mlp(2)})
    named = list(models.named_parameters())
    optimizers = {
        key: hvd.DistributedOptimizer(
            sgd(models[key]), [(n, p) for n, p in named if n[0] == key], compression=compression
        )
        for key in "ab"
    }
    for step in range(6):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        keys = "ab" if (hvd.rank() + step) % 2 else "ba"
        for key in keys:
            loss_on(models[key], hvd.rank(), step).backward()
        # Once the ranks have met, they may even take the steps in another order.
        for key in keys if step > 0 else "ab":
            optimizers[key].step()
    if compression is A2SGDCompressor:
        for optimizer in optimizers.values():
            get_compressor(optimizer).synchronize_parameters()
    assert same_on_all_ranks(models.parameters())


@pytest.mark.laws
@pytest.mark.parametrize("compressor", [MiCROCompressor, TopKCompressor])
@pytest.mark.parametrize("saved", [False, True])
def test_each_gradient_has_its_effect_at_the_learning_rate_of_its_own_step(
    compressor: type[MiCROCompressor] | type[TopKCompressor], saved: bool
) -> None:
    """With SGD, whatever is held back and sent later; also by a compressor that continues from a saved state."""
    model = mlp().double()
    head = list(model[-1].parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in head)]
    rates = [(0.5, 0.1), (0.5, 0.02), (0.005, 0.02), (0.0025, 0.01), (0.0025, 0.4)]

    sgd = torch.optim.SGD([{"params": rest, "lr": 1.0}, {"params": head, "lr": 1.0}])
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compressor(0.05))
    start = snapshot(model)
    total = {name: torch.zeros_like(p) for name, p in start.items()}
    for step, of_groups in enumerate(rates):
        if saved:
            get_compressor(optimizer).load_state_dict(get_compressor(optimizer).state_dict())
        for group, rate in zip(optimizer.param_groups, of_groups, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.step()
        mean = mean_over_ranks(lambda rank, step=step: known_gradients(model, rank, step))
        for name, p in model.named_parameters():
            rate = of_groups[1] if any(p is q for q in head) else of_groups[0]
            total[name] += rate * mean[name]
            residual = get_compressor(optimizer).state_dict()["residual"][name]
            held_back = rate * hvd.allreduce(residual, op=hvd.Average, name=f"test.held_back.{name}")
            torch.testing.assert_close(start[name] - p.detach() + held_back, total[name], rtol=0, atol=1e-12)
    assert held_back.abs().max() > 0


@pytest.mark.parametrize(
    ("make", "follow", "expected"),
    [
        (torch.optim.SGD, None, 0.1),
        (torch.optim.SGD, False, 0.0),
        (partial(torch.optim.SGD, momentum=0.9), None, 0.0),
        (partial(torch.optim.SGD, momentum=0.9), True, 0.1),
        (torch.optim.Adam, None, 0.0),
        (torch.optim.Adam, True, 0.1),
    ],
)
def test_the_residual_follows_the_learning_rate_of_sgd_unless_told_otherwise(
    make: Callable[..., torch.optim.Optimizer], follow: bool | None, expected: float
) -> None:
    model = mlp()
    compression = MiCROCompressor(0.05, follow_learning_rate=follow)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
    )
    loss_on(model, hvd.rank(), 0).backward()
    optimizer.step()
    assert set(compression.state_dict()["rates"].values()) == {expected}


def test_parameters_whose_gradients_share_memory() -> None:
    """Autograd hands both summands the same tensor."""
    a, b = (nn.Parameter(torch.zeros(4, 8)) for _ in range(2))
    compressor = MiCROCompressor(0.5)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)], compression=compressor)
    factors = torch.arange(1.0, 33).view(4, 8)
    for step in range(6):
        optimizer.zero_grad()
        if step == 5:
            compressor.flush()
        ((a.unsqueeze(0) + b.unsqueeze(0)) * factors).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.data_ptr() == b.grad.data_ptr() or step  # what this test is about
        optimizer.step()
    for p in (a, b):
        torch.testing.assert_close(p.detach(), -6 * factors)


@pytest.mark.parametrize("lent", ["view", "itself", "numpy"])
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_a_buffer_that_its_owner_clears_and_fills_stays_the_gradients_memory(lent: str, density: float) -> None:
    p = nn.Parameter(torch.zeros(64))
    array = np.zeros(64, np.float32)
    buffer = torch.from_numpy(array) if lent == "numpy" else torch.zeros(64)
    p.grad = buffer.view(64) if lent == "view" else buffer
    compressor = MiCROCompressor(density)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], compression=compressor)
    total = torch.zeros(64)
    for step in range(6):
        if step == 5:
            compressor.flush()
        if lent == "numpy":
            array[:] = 0
        else:
            buffer.zero_()
        gradient = torch.randn(64, generator=seeded(step))
        total += gradient
        (p * gradient).sum().backward()
        optimizer.step()
    torch.testing.assert_close(p.detach(), -total, rtol=1e-5, atol=1e-5)


def test_memory_goes_back_and_forth_where_nobody_else_has_it() -> None:
    """Neither new memory for each step, nor a copy: the gradients of three steps lie in the same two places."""
    p = nn.Parameter(torch.zeros(1000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], compression=MiCROCompressor(0.1))
    places = []
    for step in range(6):
        if p.grad is not None:
            p.grad.zero_()
        (p * torch.randn(1000, generator=seeded(step))).sum().backward()
        optimizer.step()
        assert p.grad is not None
        places.append(p.grad.data_ptr())
    assert len(set(places[1:])) == 2
    assert places[2] == places[4] != places[3]
