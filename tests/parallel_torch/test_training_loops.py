"""What training loops do besides: clip gradients, drop the learning rate, freeze, load, fork, use threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import backward_with, distributed, known_gradients, loss_on, mlp, same_on_all_ranks, snapshot, train

from horovod_sparse.torch import A2SGDCompressor, MiCROCompressor, QSGDCompressor, TopKCompressor, get_compressor

METHODS = [MiCROCompressor, TopKCompressor, QSGDCompressor, partial(A2SGDCompressor, sync_every=2)]
laws = pytest.mark.laws


def replicas_agree(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    compressor = get_compressor(optimizer)
    if isinstance(compressor, A2SGDCompressor):
        compressor.synchronize_parameters()
    return same_on_all_ranks(model.parameters())


# Clipping


@laws
@pytest.mark.parametrize("make", METHODS)
def test_gradients_clipped_after_the_exchange(make: Callable[[], object]) -> None:
    model = mlp()
    optimizer = distributed(model, make())
    for step in range(6):
        optimizer.zero_grad()
        loss_on(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        before = snapshot(model)
        with optimizer.skip_synchronize():
            optimizer.step()
        if make in METHODS[:3]:  # A2SGD averages the parameters after some steps
            change = torch.cat([(p - before[n]).flatten() for n, p in model.named_parameters()]).norm()
            assert change <= 0.1 * 0.01 * 1.001
    assert replicas_agree(model, optimizer)


@laws
def test_gradients_clipped_before_the_exchange() -> None:
    """In hooks of the parameters, which run before Horovod's: nothing of what was clipped off is held back."""
    model = mlp().double()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    optimizer = distributed(model, MiCROCompressor, lr=1.0)
    start = snapshot(model)
    train(model, optimizer, range(4))
    get_compressor(optimizer).flush()
    train(model, optimizer, range(4, 5))
    for name, p in model.named_parameters():
        clipped = [
            known_gradients(model, rank, step)[name].clamp(-0.5, 0.5) for rank in range(hvd.size()) for step in range(5)
        ]
        torch.testing.assert_close(start[name] - p.detach(), sum(clipped) / hvd.size(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", METHODS)
@pytest.mark.parametrize("first_step", [True, False])
def test_gradients_clipped_while_they_are_exchanged(make: Callable[[], object], first_step: bool) -> None:
    model = nn.ModuleDict({f"clipped_early_{METHODS.index(make)}_{first_step}": mlp()})
    optimizer = distributed(model, make())
    train(model, optimizer, range(0 if first_step else 2))
    optimizer.zero_grad()
    backward_with(model, known_gradients(model, hvd.rank(), 2))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(RuntimeError, match=r"was changed after the backward pass.+optimizer.synchronize\(\)"):
        optimizer.step()


# Learning rates


@laws
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("make", [MiCROCompressor, TopKCompressor])
def test_learning_rate_that_drops_a_hundredfold(make: type, momentum: float) -> None:
    """With plain SGD, each gradient has the effect of its own step's rate; in any case, nothing is lost."""
    model = mlp().double()
    optimizer = distributed(model, make(), 1.0, momentum)
    start = snapshot(model)
    for step in range(8):
        optimizer.param_groups[0]["lr"] = 1.0 if step < 4 else 0.01
        train(model, optimizer, range(step, step + 1))
    assert same_on_all_ranks(model.parameters())
    if momentum == 0:
        residual = get_compressor(optimizer).state_dict()["residual"]
        for name, p in model.named_parameters():
            effect = sum(known_gradients(model, hvd.rank(), s)[name] * (1.0 if s < 4 else 0.01) for s in range(8))
            held_back = hvd.allreduce(residual[name], name=f"test.lr.{name}") * 0.01
            wanted = hvd.allreduce(effect, name=f"test.effect.{name}")
            torch.testing.assert_close(start[name] - p.detach() + held_back, wanted, rtol=0, atol=1e-10)


@laws
def test_gradients_at_a_learning_rate_of_0_have_no_effect_later() -> None:
    """A warm-up often begins with it."""
    model, reference = mlp(), mlp()
    optimizer, optimizer_of_reference = distributed(model, MiCROCompressor), distributed(reference, MiCROCompressor)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.0 if step < 3 else 0.1
        train(model, optimizer, range(step, step + 1))
    assert get_compressor(optimizer).stats.step == 6
    optimizer.param_groups[0]["lr"] = 0.1
    start = snapshot(mlp())
    get_compressor(optimizer).flush()
    train(model, optimizer, range(6, 7))
    for step in range(3, 7):
        if step == 6:
            get_compressor(optimizer_of_reference).flush()
        train(reference, optimizer_of_reference, range(step, step + 1))
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert not torch.equal(p, start[name])


# The optimizer's state, and its parameters


@laws
@pytest.mark.parametrize("make", METHODS)
def test_optimizer_that_goes_back_to_a_saved_state_in_mid_run(make: Callable[[], object]) -> None:
    model, reference = mlp(), mlp()
    optimizers = [distributed(m, make(), momentum=0.9) for m in (model, reference)]
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        train(m, optimizer, range(3))
    saved = optimizers[0].state_dict()
    optimizers[0].load_state_dict(saved)
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        train(m, optimizer, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


@laws
def test_parameters_that_are_frozen_in_mid_run() -> None:
    """They have gradients no more: Horovod exchanges zeros, and what is held back of them still arrives."""
    model = mlp().double()
    optimizer = distributed(model, MiCROCompressor, lr=1.0)
    start = snapshot(model)
    train(model, optimizer, range(3))
    model[0].weight.requires_grad_(False)
    train(model, optimizer, range(3, 5))
    get_compressor(optimizer).flush()
    train(model, optimizer, range(5, 6))
    total = sum(known_gradients(mlp().double(), rank, s)["0.weight"] for rank in range(hvd.size()) for s in range(3))
    torch.testing.assert_close(start["0.weight"] - model[0].weight, total / hvd.size(), rtol=0, atol=1e-12)


class FineTuned:
    """A model of which the first layer is frozen, and comes to the optimizer, or to life, later."""

    def __init__(self, make: Callable[[], object], how: str, groups: int | None = None) -> None:
        self.model = mlp().double()
        self.first = list(self.model[0].parameters())
        for p in self.first:
            p.requires_grad_(False)
        self.how = how
        names = dict(self.model.named_parameters())
        if how == "added":
            names = {name: p for name, p in names.items() if p.requires_grad}
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(names.values(), lr=1.0), names.items(), compression=make(), groups=groups
        )

    def thaw(self) -> None:
        for p in self.first:
            p.requires_grad_(True)
        if self.how == "added":
            self.optimizer.add_param_group({"params": self.first, "lr": 1.0})


@laws
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("how", ["unfrozen", "added"])
@pytest.mark.parametrize("make", [MiCROCompressor, TopKCompressor])
def test_parameters_that_are_unfrozen_or_added_in_mid_run(make: type, how: str, groups: int | None) -> None:
    """Stock Horovod would leave them to each rank. Nothing is lost of any gradient, from the first one on."""
    tuned = FineTuned(make, how, groups)
    model, optimizer = tuned.model, tuned.optimizer
    start = snapshot(model)
    train(model, optimizer, range(3))
    tuned.thaw()
    train(model, optimizer, range(3, 6))
    assert get_compressor(optimizer).stats.numel == sum(p.numel() for p in model.parameters())
    assert get_compressor(optimizer).stats.density < 0.1
    get_compressor(optimizer).flush()
    train(model, optimizer, range(6, 7))
    assert get_compressor(optimizer).stats.step == 7
    assert same_on_all_ranks(model.parameters())
    frozen = FineTuned(make, how).model
    for name, p in model.named_parameters():
        early = [known_gradients(frozen, rank, s) for rank in range(hvd.size()) for s in range(3)]
        late = [known_gradients(model, rank, s) for rank in range(hvd.size()) for s in range(3, 7)]
        wanted = sum(g[name] for g in early + late if name in g) / hvd.size()
        torch.testing.assert_close(start[name] - p.detach(), wanted, rtol=0, atol=1e-12)


@laws
@pytest.mark.parametrize("make", [QSGDCompressor, partial(A2SGDCompressor, "tensor", 2), A2SGDCompressor])
@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_parameters_come_later_to_methods_without_a_residual(make: Callable[[], object], how: str) -> None:
    tuned = FineTuned(make, how)
    start = snapshot(tuned.model)
    train(tuned.model, tuned.optimizer, range(3))
    tuned.thaw()
    train(tuned.model, tuned.optimizer, range(3, 6))
    assert get_compressor(tuned.optimizer).stats.step == 6
    assert replicas_agree(tuned.model, tuned.optimizer)
    assert not any(torch.equal(p, start[name]) for name, p in tuned.model.named_parameters())


@laws
@pytest.mark.parametrize("make", METHODS)
@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_sparse_embedding_that_comes_later(make: Callable[[], object], how: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(30, 20, sparse=True), "head": nn.Linear(20, 10)})
    model["words"].weight.requires_grad_(how == "added")
    names = {n: p for n, p in model.named_parameters() if how == "unfrozen" or n != "words.weight"}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(names.values(), lr=0.1), names.items(), compression=make(), sparse_as_dense=True
    )
    before = model["words"].weight.detach().clone()
    for step in range(5):
        if step == 2:
            model["words"].weight.requires_grad_(True)
            if how == "added":
                optimizer.add_param_group({"params": [model["words"].weight], "lr": 0.1})
        if step == 4 and make in METHODS[:2]:
            get_compressor(optimizer).flush()
        model.zero_grad(set_to_none=True)
        x = model["words"](torch.arange(8) + 2 * hvd.rank()) + torch.ones(8, 20)
        model["head"](x).square().mean().backward()
        optimizer.step()
    assert not torch.equal(model["words"].weight, before)
    assert replicas_agree(model, optimizer)


@laws
def test_parameters_that_the_optimizer_has_no_more() -> None:
    """What is held back of them stays, as at a learning rate of 0."""
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=MiCROCompressor)
    train(model, optimizer, range(2))
    del optimizer.param_groups[1]
    before = model[2].weight.detach().clone()
    train(model, optimizer, range(2, 5))
    assert torch.equal(model[2].weight, before)
    assert same_on_all_ranks(model.parameters())


# Process sets


@laws
@pytest.mark.parametrize("make", METHODS)
def test_process_sets_train_models_of_their_own(make: Callable[[], object]) -> None:
    """The even ranks one, the odd ranks another one, at the same time, with different numbers of steps."""
    groups = [range(0, hvd.size(), 2), range(1, hvd.size(), 2)]
    sets = [hvd.add_process_set(list(ranks)) for ranks in groups]
    mine = hvd.rank() % 2
    model = mlp(seed=mine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=make(), process_set=sets[mine]
    )
    for step in range(4 + mine):
        optimizer.zero_grad()
        loss_on(model, hvd.rank(), step).backward()
        optimizer.step()
    compressor = get_compressor(optimizer)
    if len(groups[mine]) > 1:
        assert compressor.stats.step == 4 + mine
        if isinstance(compressor, A2SGDCompressor):
            compressor.synchronize_parameters()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]).unsqueeze(0)
    every = hvd.allgather(flat, name="test.process_sets")
    for ranks in groups:
        assert all(torch.equal(every[rank], every[ranks[0]]) for rank in ranks)
    assert not torch.equal(every[0], every[1])
    for process_set in sets:
        hvd.remove_process_set(process_set)


# Threads, and processes


@laws
@pytest.mark.parametrize("make", METHODS)
def test_two_models_in_two_threads(make: Callable[[], object]) -> None:
    """Each with its own compressor; the threads run as they like, on each rank in another order."""

    def run(name: str, seed: int, model: nn.Module, results: dict[str, list[torch.Tensor]]) -> None:
        optimizer = distributed(model, make())
        for step in range(20):
            optimizer.zero_grad()
            loss_on(model[name], hvd.rank(), 100 * seed + step).backward()
            optimizer.step()
        assert get_compressor(optimizer).stats.step == 20
        results[name] = [p.detach() for p in model.parameters()]

    def run_in_threads(together: bool) -> list[list[torch.Tensor]]:
        results: dict[str, list[torch.Tensor]] = {}
        names = [f"thread_{METHODS.index(make)}_{i}" for i in range(2)]
        models = [nn.ModuleDict({name: mlp(seed)}) for seed, name in enumerate(names)]
        triples = zip(names, range(2), models, strict=True)
        threads = [threading.Thread(target=run, args=(*triple, results)) for triple in triples]
        for thread in threads if hvd.rank() % 2 or not together else threads[::-1]:
            thread.start()
            if not together:
                thread.join()
        for thread in threads:
            thread.join()
        return [results[name] for name in names]

    at_once, in_turn = run_in_threads(True), run_in_threads(False)
    for ours, theirs in zip(at_once, in_turn, strict=True):
        if hvd.size() == 2:  # of more, Horovod may sum in another order, and round otherwise
            assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
        if make in METHODS[:3]:
            assert same_on_all_ranks(ours)


@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
def test_data_loader_that_forks(compression: type) -> None:
    """After the first steps, whose threads and locks its workers inherit."""
    model = mlp(sizes=(20, 2000, 10))
    optimizer = distributed(model, compression)
    train(model, optimizer, range(2))
    data = TensorDataset(torch.randn(64, 20, generator=torch.Generator().manual_seed(hvd.rank())))
    for _ in range(2):
        for (x,) in DataLoader(data, batch_size=16, num_workers=2, multiprocessing_context="fork"):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert get_compressor(optimizer).stats.step == 10
    assert replicas_agree(model, optimizer)


# Devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and Horovod built for it")
@pytest.mark.parametrize("make", METHODS)
def test_model_on_two_devices(make: Callable[[], object]) -> None:
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    model = nn.Sequential(nn.Linear(20, 64), nn.Linear(64, 10).to(device))
    optimizer = distributed(model, make())
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        model[1](model[0](x).to(device)).square().mean().backward()
        optimizer.step()
    assert replicas_agree(model.cpu(), optimizer)
