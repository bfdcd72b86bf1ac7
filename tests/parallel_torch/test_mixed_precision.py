"""Loss scaling, autocast, and parameters of 16 bits: what is held back has the units of the loss itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import backward_with, known_gradients, loss_on, mlp, same_on_all_ranks, snapshot

from horovod_sparse.torch import A2SGDCompressor, MiCROCompressor, QSGDCompressor, TopKCompressor, get_compressor

pytestmark = pytest.mark.laws


class Scaled:
    """A model that is trained with loss scales, as Horovod's documentation has it."""

    def __init__(self, compression: object, scaler: Any, model: nn.Module | None = None, lr: float = 0.1) -> None:
        self.model = model or mlp()
        self.scaler = scaler
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.optimizer = hvd.DistributedOptimizer(optimizer, self.model.named_parameters(), compression=compression)

    def step(self, loss: torch.Tensor, scale: float | None = None) -> None:
        if scale is not None:
            self.scaler.update(scale)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.optimizer.synchronize()
        self.scaler.unscale_(self.optimizer)
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def compressor(self) -> Any:
        return get_compressor(self.optimizer)


def scaler(**options: Any) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 10**6, **options})
    made.scale(torch.ones(1))  # it has no scale before that
    return made


def without_scaling() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", enabled=False)


HOLDING_BACK = [
    MiCROCompressor,
    partial(MiCROCompressor, threshold="paper"),
    partial(MiCROCompressor, value_dtype="float16"),
    partial(MiCROCompressor, value_dtype="bfloat16"),
    TopKCompressor,
]


@pytest.mark.parametrize("make", HOLDING_BACK)
def test_changing_loss_scales_change_nothing(make: Callable[[], object]) -> None:
    """Scales are powers of 2, which round nothing: parameters and residuals are those of a run without scaling."""
    scaled, plain = Scaled(make(), scaler()), Scaled(make(), without_scaling())
    scales = [2.0**10, 2.0**11, 2.0**4, 1.0, 2.0**16, 2.0**16, 2.0**-3, 2.0**10]
    for step, scale in enumerate(scales):
        for run in (scaled, plain):
            run.step(loss_on(run.model, hvd.rank(), step), scale if run is scaled else None)
    for p, q in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q)
    residual = plain.compressor.state_dict()["residual"]
    for name, held_back in scaled.compressor.state_dict()["residual"].items():
        assert torch.equal(held_back, residual[name])
        assert held_back.abs().max() > 0


@pytest.mark.parametrize("make", [*HOLDING_BACK, A2SGDCompressor, QSGDCompressor])
def test_overflow_on_one_rank_skips_the_step_on_all(make: Callable[[], object]) -> None:
    run = Scaled(make(), scaler(growth_interval=3))
    skipped = 0
    for step in range(10):
        factor = float("inf") if (step, hvd.rank()) == (4, hvd.size() - 1) else 1.0
        parameters, residual = snapshot(run.model), run.compressor.state_dict().get("residual", {})
        run.step(loss_on(run.model, hvd.rank(), step) * factor)
        skipped += run.compressor.stats.skipped
        if step == 4:
            assert all(torch.equal(p, parameters[n]) for n, p in run.model.named_parameters())
            after = run.compressor.state_dict().get("residual", {})
            assert all(torch.equal(after[name], held_back) for name, held_back in residual.items())
    assert skipped == 1
    # 3 steps, doubled; the 5th halves it; 3 more, doubled.
    assert run.scaler.get_scale() == 2.0**11
    state = [float(value) for value in run.scaler.state_dict().values()]
    if make is A2SGDCompressor:
        run.compressor.synchronize_parameters()
    assert same_on_all_ranks([torch.tensor(state), *run.model.parameters()])
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a2sgd_averages_after_a_step_that_the_scaler_skips() -> None:
    """The averaging is due with the third step, which the scaler skips on all ranks."""
    run = Scaled(A2SGDCompressor(sync_every=3), scaler())
    for step in range(4):
        factor = float("inf") if (step, hvd.rank()) == (2, 0) else 1.0
        run.step(loss_on(run.model, hvd.rank(), step) * factor)
        if step == 2:
            assert run.compressor.stats.skipped
    run.optimizer.zero_grad()
    loss_on(run.model, hvd.rank(), 4).backward()
    run.optimizer.synchronize()  # at the latest, before the next step is exchanged
    assert not run.compressor._exchange.averaging_due
    run.compressor.synchronize_parameters()
    assert same_on_all_ranks(run.model.parameters())


def test_nothing_is_lost_while_the_scale_changes() -> None:
    """In float64, to rounding, with scales that are no powers of 2: updates + residual = gradients."""
    run = Scaled(MiCROCompressor, scaler(), mlp().double(), lr=1.0)
    start = snapshot(run.model)
    for step in range(6):
        gradients = known_gradients(run.model, hvd.rank(), step)
        loss = sum((p * gradients[name]).sum() for name, p in run.model.named_parameters())
        run.step(loss, [1000.0, 3.0, 77777.0, 0.1, 12.0, 5000.0][step])
    residual = run.compressor.state_dict()["residual"]
    for name, p in run.model.named_parameters():
        total = sum(known_gradients(run.model, hvd.rank(), step)[name] for step in range(6))
        mean = hvd.allreduce(total, name=f"test.scales.{name}")
        held_back = hvd.allreduce(residual[name], name=f"test.scales.residual.{name}")
        # The scaler takes its scales, and their inverses, in float32.
        torch.testing.assert_close(start[name] - p.detach() + held_back, mean, rtol=0, atol=1e-5)


def test_scale_that_changes_between_accumulated_passes_and_inside_checkpoints() -> None:
    """Reentrant checkpointing runs a backward pass inside another; a parameter may have no gradient on some ranks."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.seldom = mlp(1), nn.Linear(10, 10), nn.Linear(10, 10)

        def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=True)
            return self.seldom(x) if seldom else self.second(x)

    runs = [Scaled(MiCROCompressor, scaler(), Model()), Scaled(MiCROCompressor, without_scaling(), Model())]
    runs[1].model.load_state_dict(runs[0].model.state_dict())
    for step in range(5):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + hvd.rank())).requires_grad_()
        for run in runs:
            loss = run.model(x, (step + hvd.rank()) % 3 == 0).square().mean()
            run.step(loss, 2.0 ** (5 + 3 * step) if run is runs[0] else None)
    for p, q in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert same_on_all_ranks(runs[0].model.parameters())


def test_two_models_of_which_one_has_its_loss_scaled() -> None:
    """As in a GAN with a scaler for the one and none for the other, stepped in turn."""
    scaled, plain = Scaled(MiCROCompressor, scaler(), mlp(1)), Scaled(MiCROCompressor, without_scaling(), mlp(2))
    alone = Scaled(MiCROCompressor, without_scaling(), mlp(1)), Scaled(MiCROCompressor, without_scaling(), mlp(2))
    for step in range(5):
        scaled.step(loss_on(scaled.model, hvd.rank(), step), 2.0 ** (3 * step))
        plain.step(loss_on(plain.model, hvd.rank(), step))
        for run in alone:
            run.step(loss_on(run.model, hvd.rank(), step))
    for run, reference in zip((scaled, plain), alone, strict=True):
        for p, q in zip(run.model.parameters(), reference.model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("make", [MiCROCompressor, A2SGDCompressor, TopKCompressor, QSGDCompressor])
def test_autocast(make: type) -> None:
    run = Scaled(make(), scaler())
    losses = []
    for step in range(30):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_on(run.model, hvd.rank(), step)
        run.step(loss)
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])
    if make is A2SGDCompressor:
        run.compressor.synchronize_parameters()
    assert same_on_all_ranks(run.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [MiCROCompressor, TopKCompressor])
def test_residual_of_parameters_of_16_bits_is_kept_in_32(make: type, dtype: torch.dtype) -> None:
    """What a step of 16 bits could not hold is not rounded away: gradients far below it add up."""
    model = nn.Linear(40, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression=make(density=1 / 40)
    )
    large, small = torch.full((1, 40), 0.0, dtype=dtype), torch.full((1, 40), 2.0**-12, dtype=dtype)
    large[0, 0] = 1.0
    total = torch.zeros(1, 40, dtype=torch.float64)
    for step in range(20):
        optimizer.zero_grad()
        gradient = large + small if step else large + 64 * small
        backward_with(model, {"weight": gradient})
        total += gradient.double()
        optimizer.step()
    held_back = get_compressor(optimizer).state_dict()["residual"]["weight"]
    assert held_back.dtype == torch.float32
    assert torch.equal(held_back[0, 1:].double(), total[0, 1:])


def test_scaler_that_unscales_before_the_exchange_has_ended_gets_an_error() -> None:
    """`scaler.step(optimizer)` alone changes gradients that are on their way, or skips the step on one rank alone."""
    model = nn.ModuleDict({"unscaled_too_early": mlp()})
    run = Scaled(MiCROCompressor, scaler(), model)
    for step in range(2):
        run.step(loss_on(model["unscaled_too_early"], hvd.rank(), step))
    run.optimizer.zero_grad()
    run.scaler.scale(loss_on(model["unscaled_too_early"], hvd.rank(), 2)).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer.synchronize\(\) before scaler.unscale_\(optimizer\)"):
        run.scaler.step(run.optimizer)
    run.optimizer.synchronize()
    run.scaler.unscale_(run.optimizer)
    with run.optimizer.skip_synchronize():
        run.scaler.step(run.optimizer)
    assert same_on_all_ranks(model.parameters())


def effect_of_what_is_held_back(run: Scaled) -> dict[str, torch.Tensor]:
    residual = run.compressor.state_dict()["residual"]
    return {name: hvd.allreduce(part, name=f"test.effect.{name}") for name, part in residual.items()}


def test_step_without_a_backward_pass_after_scaled_ones() -> None:
    """As to flush before a checkpoint: it is not scaled, and nobody unscales it."""
    run = Scaled(MiCROCompressor, scaler(), mlp().double(), lr=1.0)
    for step in range(3):
        run.step(loss_of(run.model, step))
    wanted, before = effect_of_what_is_held_back(run), snapshot(run.model)
    run.compressor.flush()
    run.optimizer.zero_grad()
    run.optimizer.step()
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), wanted[name], rtol=1e-6, atol=1e-9)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    gradients = known_gradients(model, hvd.rank(), step)
    return sum((p * gradients[name]).sum() for name, p in model.named_parameters())


@pytest.mark.parametrize("make", [MiCROCompressor, TopKCompressor])
@pytest.mark.parametrize("scaled", [True, False])
def test_rank_that_has_no_gradients_in_some_steps(make: type, scaled: bool) -> None:
    """Of a scaled loss, in the first step and in a later one; or of one that is not scaled, after scaled ones."""
    runs = [Scaled(make(), scaler()), Scaled(make(), without_scaling())]
    for step in range(6):
        for run in runs:
            away = hvd.rank() == hvd.size() - 1 and step in (0, 3)
            loss = torch.zeros(1, requires_grad=True).sum() if away else loss_on(run.model, hvd.rank(), step)
            if run is runs[0] and (scaled or step < 3):
                run.step(loss, 2.0 ** (5 + step))
            else:
                run.optimizer.zero_grad()
                if not away or scaled:
                    loss.backward()
                run.optimizer.step()
    assert same_on_all_ranks(runs[0].model.parameters())
    for p, q in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_scaled_backward_pass_that_fails_is_forgotten() -> None:
    scaled, plain = scaler(), Scaled(MiCROCompressor, without_scaling())
    reference = Scaled(MiCROCompressor, without_scaling())
    if hvd.rank() == hvd.size() - 1:
        x = torch.ones(2, requires_grad=True)
        y = x * 1

        def fail(_: torch.Tensor) -> None:
            raise MemoryError

        y.register_hook(fail)
        with pytest.raises(MemoryError):
            scaled.scale(y.sum()).backward()
    for step in range(4):
        for run in (plain, reference):
            run.step(loss_on(run.model, hvd.rank(), step))
    for p, q in zip(plain.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert same_on_all_ranks(plain.model.parameters())


def test_scales_that_differ_between_ranks() -> None:
    run = Scaled(MiCROCompressor, scaler(), nn.ModuleDict({"scales_differ": mlp()}))
    for step in range(2):
        run.step(loss_on(run.model["scales_differ"], hvd.rank(), step))
    scale = 2.0 ** (8 if hvd.rank() == hvd.size() - 1 else 9)
    with pytest.raises(RuntimeError, match=r"the loss scale is 512.0 on rank 0, but 256.0 on rank \d"):
        run.step(loss_on(run.model["scales_differ"], hvd.rank(), 2), scale)


def test_scaler_keeps_what_it_does_without_us() -> None:
    """Several outputs, nested, in iterators, and none that needs gradients."""
    s = scaler()
    x = torch.ones(2, requires_grad=True)
    a, (b, c) = s.scale([x * 2, (x * 3, torch.ones(1))])
    assert torch.equal(a, x * 2 * 2.0**10)
    assert torch.equal(b, x * 3 * 2.0**10)
    assert torch.equal(c, torch.full((1,), 2.0**10))
    assert without_scaling().scale(x) is x
    assert [float(y[0]) for y in s.scale(x * i for i in range(3))] == [0.0, 1024.0, 2048.0]
