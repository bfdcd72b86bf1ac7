"""What goes wrong: it ends in the right result, or in one clear error on every rank; never in a hang."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from training import backward_with, distributed, known_gradients, loss_on, mlp, same_on_all_ranks, snapshot, train

import horovod_sparse.torch
from horovod_sparse.torch import (
    A2SGDCompressor,
    Compression,
    MiCROCompressor,
    QSGDCompressor,
    TopKCompressor,
    get_compressor,
)


def named(prefix: str, model: nn.Module) -> nn.Module:
    """Horovod may be left waiting for some of these parameters: they need names that no other test uses."""
    return nn.ModuleDict({prefix: model})


def assert_raised_on_all_ranks(error: pytest.ExceptionInfo[BaseException]) -> None:
    """The same message on every rank, at the same time."""
    message = torch.tensor([ord(c) for c in str(error.value)])
    every = hvd.allgather(message, name="test.message").view(hvd.size(), -1)
    assert (every == message).all()


# Non-finite gradients


@pytest.mark.laws
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor, TopKCompressor, QSGDCompressor])
def test_nonfinite_gradient_on_one_rank_skips_the_step_on_all(compression: type, bad: float) -> None:
    model = mlp()
    optimizer = distributed(model, compression)
    train(model, optimizer, range(3))
    before = get_compressor(optimizer).state_dict()
    parameters = snapshot(model)

    optimizer.zero_grad()
    gradients = known_gradients(model, hvd.rank(), 3)
    if hvd.rank() == hvd.size() - 1:
        gradients["2.weight"][3, 5] = bad
    backward_with(model, gradients)
    optimizer.synchronize()
    assert not all(torch.isfinite(p.grad).all() for p in model.parameters())
    stats = get_compressor(optimizer).stats
    assert stats.skipped
    after = get_compressor(optimizer).state_dict()
    for name, held_back in before.get("residual", {}).items():
        assert torch.equal(after["residual"][name], held_back)
    for name, p in model.named_parameters():
        assert torch.equal(p, parameters[name])

    train(model, optimizer, range(4, 8))  # as a loss scaler would: without a step, on to the next gradients
    assert not get_compressor(optimizer).stats.skipped
    assert get_compressor(optimizer).stats.step == 8
    if compression is A2SGDCompressor:
        get_compressor(optimizer).synchronize_parameters()
    assert same_on_all_ranks(model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.laws
def test_a2sgd_step_that_one_rank_alone_does_not_take_when_averaging_is_due() -> None:
    model = mlp()
    optimizer = distributed(model, A2SGDCompressor(sync_every=3))
    for step in range(6):
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.synchronize()
        if not (step == 2 and hvd.rank() == 0):
            with optimizer.skip_synchronize():
                optimizer.step()
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor(sync_every=2)])
def test_loss_scaler_skips_the_same_steps_on_all_ranks(compression: object) -> None:
    model = mlp()
    optimizer = distributed(model, compression)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    skipped = 0
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_on(model, hvd.rank(), step)
        scaler.scale(loss * (float("inf") if (step, hvd.rank()) == (3, 1) else 1.0)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        skipped += get_compressor(optimizer).stats.skipped
    assert skipped == 1
    if isinstance(compression, A2SGDCompressor):
        compression.synchronize_parameters()
    assert same_on_all_ranks([torch.tensor(scaler.get_scale()), *model.parameters()])
    assert all(torch.isfinite(p).all() for p in model.parameters())


# Empty selections


@pytest.mark.laws
def test_gradients_of_zero_select_nothing() -> None:
    model = mlp()
    optimizer = distributed(model, MiCROCompressor)
    parameters = snapshot(model)
    for _ in range(3):
        optimizer.zero_grad()
        backward_with(model, {n: torch.zeros_like(p) for n, p in model.named_parameters()})
        optimizer.step()
        assert get_compressor(optimizer).stats.selected == 0
    assert all(torch.equal(p, parameters[n]) for n, p in model.named_parameters())
    train(model, optimizer, range(3))
    assert get_compressor(optimizer).stats.selected > 0
    assert same_on_all_ranks(model.parameters())


@pytest.mark.laws
def test_selection_that_is_empty_on_all_ranks_but_one() -> None:
    model = nn.Linear(100, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = distributed(model, MiCROCompressor, lr=1.0)
    for step in range(5):
        optimizer.zero_grad()
        gradient = torch.zeros(1, 100)
        gradient[0, 99] = hvd.rank() + 1
        backward_with(model, {"weight": gradient})
        optimizer.step()
        assert get_compressor(optimizer).stats.selected == 1
        mean = sum(range(1, hvd.size() + 1)) / hvd.size()
        assert model.weight[0, 99].item() == pytest.approx(-mean * (step + 1))


# Ranks that differ


def wider_on_the_last_rank() -> nn.Module:
    return mlp(sizes=(20, 65 if hvd.rank() == hvd.size() - 1 else 64, 10))


def deeper_on_the_last_rank() -> nn.Module:
    return mlp(sizes=(20, 64, 64, 10) if hvd.rank() == hvd.size() - 1 else (20, 64, 10))


@pytest.mark.laws
@pytest.mark.parametrize("build", [wider_on_the_last_rank, deeper_on_the_last_rank])
@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
@pytest.mark.parametrize("by_hand", [False, True])
def test_models_that_differ_between_ranks(build: object, compression: type, by_hand: bool) -> None:
    name = f"{build.__name__}_{compression.__name__}_{by_hand}"
    model = named(name, build())
    optimizer = distributed(model, compression)
    parameters = snapshot(model)
    backward_with(model, known_gradients(model, hvd.rank(), 0))
    with pytest.raises(RuntimeError, match=rf"the next parameter is '{name}.+ on rank 0, but .+ on rank") as error:
        optimizer.synchronize() if by_hand else optimizer.step()
    assert_raised_on_all_ranks(error)
    assert all(torch.equal(p, parameters[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (MiCROCompressor(0.01), MiCROCompressor(0.02), "density is 0.01 on rank 0, but 0.02 on rank 1"),
        (MiCROCompressor(), MiCROCompressor(threshold="paper"), "threshold is 'adaptive' on rank 0, but 'paper'"),
        (A2SGDCompressor(sync_every=5), A2SGDCompressor(), "sync_every is 5 on rank 0, but 100 on rank 1"),
        (A2SGDCompressor("tensor"), A2SGDCompressor(), "granularity is 'tensor' on rank 0, but 'model' on rank 1"),
        (MiCROCompressor(), A2SGDCompressor(), "the method is micro on rank 0, but a2sgd on rank 1"),
        (TopKCompressor(0.1), TopKCompressor(0.2), "density is 0.1 on rank 0, but 0.2 on rank 1"),
        (QSGDCompressor(), QSGDCompressor(8), "bits is 4 on rank 0, but 8 on rank 1"),
        (TopKCompressor(), QSGDCompressor(), "the method is topk on rank 0, but qsgd on rank 1"),
    ],
)
def test_settings_that_differ_between_ranks(first: object, second: object, message: str) -> None:
    model = named(message.replace(".", "_"), mlp())
    optimizer = distributed(model, second if hvd.rank() == 1 else first)
    backward_with(model, known_gradients(model, hvd.rank(), 0))
    with pytest.raises(RuntimeError, match=message) as error:
        optimizer.step()
    assert_raised_on_all_ranks(error)


# A model that changes


@pytest.mark.parametrize("everywhere", [True, False])
def test_parameter_that_changes_its_shape_after_the_first_step(everywhere: bool) -> None:
    name = f"reshaped_{everywhere}"
    model = named(name, mlp())
    optimizer = distributed(model, MiCROCompressor)
    train(model, optimizer, range(2))
    before = get_compressor(optimizer).state_dict()
    gradients = known_gradients(model, hvd.rank(), 2)
    # PyTorch refuses a gradient of another shape, so the parameter gets none: Horovod makes one, of zeros.
    del gradients[f"{name}.0.weight"]
    if everywhere or hvd.rank() == 1:
        model[name][0].weight.data = torch.zeros(64, 21)
    model.zero_grad()
    backward_with(model, gradients)
    with pytest.raises(RuntimeError, match=r"the model has '.+0.weight' \(float32\[64, 21\]\) where it had") as error:
        optimizer.step()
    assert_raised_on_all_ranks(error)
    after = get_compressor(optimizer).state_dict()
    assert all(torch.equal(after["residual"][name], held_back) for name, held_back in before["residual"].items())


@pytest.mark.laws
@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor, TopKCompressor, QSGDCompressor])
def test_parameter_that_is_added_on_one_rank_alone(compression: type) -> None:
    model = named(f"added_{compression.__name__}", mlp())
    optimizer = distributed(model, compression)
    train(model, optimizer, range(2))
    parameters = snapshot(model)
    if hvd.rank() == hvd.size() - 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 7))]})
    optimizer.zero_grad()
    backward_with(model, known_gradients(model, hvd.rank(), 2))
    with pytest.raises(RuntimeError, match=r"the next parameter is .+allreduce.noname.1.0.+ on rank") as error:
        optimizer.step()
    assert_raised_on_all_ranks(error)
    assert all(torch.equal(p, parameters[n]) for n, p in model.named_parameters())


def test_complex_parameter() -> None:
    model = nn.ParameterDict({"wave": torch.zeros(4, dtype=torch.complex64)})
    optimizer = distributed(model, MiCROCompressor)
    (model["wave"] * (1 + 1j)).sum().abs().backward()
    with pytest.raises(RuntimeError, match=r"'wave' .complex64.+ compresses float16") as error:
        optimizer.step()
    assert_raised_on_all_ranks(error)


def test_sparse_gradient_in_a_group() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = distributed(model, MiCROCompressor, groups=1)
    parameters = snapshot(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse") as error:
        optimizer.step()
    assert_raised_on_all_ranks(error)
    assert torch.equal(model.weight, parameters["weight"])


def test_frozen_integer_parameter_is_left_alone() -> None:
    for compression in (MiCROCompressor, A2SGDCompressor(sync_every=1)):
        model = mlp()
        model.register_parameter("table", nn.Parameter(torch.arange(5), requires_grad=False))
        optimizer = distributed(model, compression)
        loss_on(model, hvd.rank(), 0).backward()
        optimizer.step()
        assert torch.equal(model.table, torch.arange(5))


# Wrong calls


@pytest.mark.parametrize("compression", [MiCROCompressor, MiCROCompressor(), A2SGDCompressor, A2SGDCompressor()])
@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(3, dtype=torch.int64)])
def test_tensor_that_no_parameter_of_an_optimizer_owns(compression: object, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"not the gradient of a parameter of a horovod.torch.DistributedOptimizer"):
        hvd.allreduce(tensor, compression=compression)


@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
def test_adasum(compression: type) -> None:
    model = mlp()
    adasum = distributed(model, compression, op=hvd.Adasum)
    parameters = snapshot(model)
    with pytest.raises(ValueError, match=r"does not work with op=hvd.Adasum"):
        backward_with(model, known_gradients(model, hvd.rank(), 0))
    assert all(torch.equal(p, parameters[n]) for n, p in model.named_parameters())
    with pytest.raises(ValueError, match=r"does not work with op=hvd.Adasum"):
        get_compressor(adasum)
    with pytest.raises(ValueError, match=r"does not work with op=hvd.Adasum"):
        horovod_sparse.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1), compression=compression, op=hvd.Adasum
        )


def test_operations_that_make_no_sense() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"^MiCROCompressor does not work with op=hvd.Min: use op=hvd.Average or"):
        get_compressor(distributed(model, MiCROCompressor, op=hvd.Min))
    with pytest.raises(ValueError, match=r"^MiCROCompressor does not work with op=hvd.Product: use op=hvd.Average"):
        horovod_sparse.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1), compression=MiCROCompressor, op=hvd.Product
        )


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy, copy.copy])
def test_compressor_cannot_be_pickled_or_copied(duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"^a TopKCompressor cannot be pickled or copied: save its state_dict\(\)"):
        duplicate(TopKCompressor())
    assert pickle.loads(pickle.dumps(TopKCompressor)) is TopKCompressor


@pytest.mark.parametrize("compressor", [MiCROCompressor(), A2SGDCompressor()])
def test_one_instance_for_two_optimizers(compressor: object) -> None:
    first, second = mlp(), mlp()
    optimizers = [distributed(model, compressor) for model in (first, second)]
    train(first, optimizers[0], range(1))
    with pytest.raises(ValueError, match="already serves another optimizer"):
        backward_with(second, known_gradients(second, hvd.rank(), 0))


def test_get_compressor_of_an_optimizer_that_has_none() -> None:
    model = mlp()
    for optimizer in (distributed(model, hvd.Compression.fp16), torch.optim.SGD(model.parameters(), lr=1)):
        with pytest.raises(TypeError, match=r"get_compressor takes an optimizer made by hvd.DistributedOptimizer"):
            get_compressor(optimizer)


def test_compression_that_is_no_compressor() -> None:
    model = mlp()
    with pytest.raises(TypeError, match="compression='micro': it must be a compressor"):
        horovod_sparse.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), compression="micro")


def test_synchronize_parameters_before_there_is_an_optimizer() -> None:
    with pytest.raises(RuntimeError, match=r"get_compressor\(optimizer\).synchronize_parameters"):
        A2SGDCompressor().synchronize_parameters()


def test_sync_every_none_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_sparse._compressor._warned_of", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            A2SGDCompressor(sync_every=None)
    assert len(caught) == (1 if hvd.rank() == 0 else 0)


# State


@pytest.mark.laws
@pytest.mark.parametrize("caller", [0, None])
def test_flush_sends_everything_even_if_one_rank_alone_asks(caller: int | None) -> None:
    model = mlp().double()
    optimizer = distributed(model, MiCROCompressor, lr=1.0)
    start = snapshot(model)
    train(model, optimizer, range(4))
    if caller in (None, hvd.rank()):
        get_compressor(optimizer).flush()
    train(model, optimizer, range(4, 5))
    compressor = get_compressor(optimizer)
    assert compressor.stats.density == 1.0
    assert all((held_back == 0).all() for held_back in compressor.state_dict()["residual"].values())
    for name, p in model.named_parameters():
        total = sum(known_gradients(model, hvd.rank(), step)[name] for step in range(5))
        mean = hvd.allreduce(total, name=f"test.flush.{name}")
        torch.testing.assert_close(start[name] - p.detach(), mean, rtol=0, atol=1e-12)
    train(model, optimizer, range(5, 8))
    assert compressor.stats.density == pytest.approx(0.01, rel=0.5)


@pytest.mark.laws
@pytest.mark.parametrize(
    "compression",
    [
        MiCROCompressor,
        lambda: MiCROCompressor(threshold="paper"),
        A2SGDCompressor,
        TopKCompressor,
        lambda: QSGDCompressor(8),
    ],
)
def test_state_dict_continues_bit_for_bit(compression: type) -> None:
    model = mlp()
    optimizer = distributed(model, compression())
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save(get_compressor(optimizer).state_dict(), file)
    parameters = snapshot(model)
    train(model, optimizer, range(5, 10))

    resumed = mlp()
    resumed.load_state_dict(parameters)
    optimizer_2 = distributed(resumed, compression())
    file.seek(0)
    get_compressor(optimizer_2).load_state_dict(torch.load(file, weights_only=True))
    assert get_compressor(optimizer_2).state_dict()["step"] == 5
    train(resumed, optimizer_2, range(5, 10))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
    measured = {"bytes_sent": 0, "selection_s": 0.0, "exchange_s": 0.0}  # a first step talks, and times differ
    stats, resumed_stats = (get_compressor(o).stats._replace(**measured) for o in (optimizer, optimizer_2))
    assert resumed_stats == stats


def test_state_of_another_model() -> None:
    other, model = mlp(sizes=(20, 30, 10)), named("other_state", mlp())
    other_optimizer, optimizer = distributed(other, MiCROCompressor), distributed(model, MiCROCompressor)
    train(other, other_optimizer, range(1))
    get_compressor(optimizer).load_state_dict(get_compressor(other_optimizer).state_dict())
    backward_with(model, known_gradients(model, hvd.rank(), 0))
    with pytest.raises(
        RuntimeError, match=r"the loaded state does not fit: it has '0.bias' \(float32\[30\]\)"
    ) as error:
        optimizer.step()
    assert_raised_on_all_ranks(error)


@pytest.mark.parametrize(
    "broken",
    [
        {"step": float("inf")},
        {"step": -3},
        {"step": None},
        {"residual": 3},
        {"threshold": [1]},
        {"threshold": {"threshold": "x"}},
    ],
)
def test_state_that_is_broken_on_one_rank(broken: dict[str, object]) -> None:
    model = named(f"broken_{broken}", mlp())
    optimizer = distributed(model, MiCROCompressor)
    train(model, optimizer, range(1))
    state = get_compressor(optimizer).state_dict()
    get_compressor(optimizer).load_state_dict({**state, **(broken if hvd.rank() == 1 else {})})
    optimizer.zero_grad()
    backward_with(model, known_gradients(model, hvd.rank(), 1))
    with pytest.raises(RuntimeError, match="rank 1: the loaded state does not fit") as error:
        optimizer.step()
    assert_raised_on_all_ranks(error)


def test_state_saved_before_the_first_step() -> None:
    model, again = mlp(), mlp()
    optimizer, optimizer_again = distributed(model, MiCROCompressor), distributed(again, MiCROCompressor)
    get_compressor(optimizer_again).load_state_dict(get_compressor(optimizer).state_dict())
    train(model, optimizer, range(3))
    train(again, optimizer_again, range(3))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_state_of_another_method() -> None:
    with pytest.raises(ValueError, match="the state is of 'a2sgd', not of 'micro'"):
        MiCROCompressor().load_state_dict(A2SGDCompressor().state_dict())


@pytest.mark.laws
@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor, TopKCompressor, QSGDCompressor])
def test_reset_on_one_rank_only(compression: type) -> None:
    model = named(f"reset_{compression.__name__}", mlp())
    optimizer = distributed(model, compression)
    train(model, optimizer, range(2))
    if hvd.rank() == 0:
        get_compressor(optimizer).reset()
    optimizer.zero_grad()
    backward_with(model, known_gradients(model, hvd.rank(), 2))
    with pytest.raises(RuntimeError, match="the step is 0 on rank 0, but 2 on rank 1") as error:
        optimizer.step()
    assert_raised_on_all_ranks(error)


@pytest.mark.laws
def test_reset_on_all_ranks_starts_afresh() -> None:
    model, again = mlp(), mlp()
    optimizer, optimizer_again = distributed(model, MiCROCompressor), distributed(again, MiCROCompressor)
    train(model, optimizer, range(3))
    train(again, optimizer_again, range(7))
    again.load_state_dict(mlp().state_dict())
    get_compressor(optimizer_again).reset()
    assert get_compressor(optimizer_again).stats is None
    train(again, optimizer_again, range(3))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
@pytest.mark.parametrize("loads", [True, False])
def test_step_that_is_given_up_after_the_backward_pass(compression: type, loads: bool) -> None:
    """Horovod forgets a step under way when the optimizer's state is loaded; so must the compressor."""
    model, reference = mlp(), mlp()
    optimizer, optimizer_of_reference = distributed(model, compression), distributed(reference, compression)
    train(model, optimizer, range(3))
    train(reference, optimizer_of_reference, range(6))

    saved, state = optimizer.state_dict(), get_compressor(optimizer).state_dict()
    backward_with(model, known_gradients(model, hvd.rank(), 99))
    hvd.barrier()
    optimizer.load_state_dict(saved)
    if loads:
        get_compressor(optimizer).load_state_dict(state)
    train(model, optimizer, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def some_of(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(list(gradients.items())[:2])


@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
def test_part_of_a_step_that_is_given_up(compression: type) -> None:
    model, reference = mlp(), mlp()
    optimizer, optimizer_of_reference = distributed(model, compression), distributed(reference, compression)
    train(model, optimizer, range(3))
    train(reference, optimizer_of_reference, range(6))
    backward_with(model, some_of(known_gradients(model, hvd.rank(), 99)))
    hvd.barrier()
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_step_that_is_given_up_and_that_one_rank_alone_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_sparse.torch.compressor.GIVE_UP_S", 0.5)
    model = named("given_up_unevenly", mlp())
    optimizer = distributed(model, MiCROCompressor)
    train(model, optimizer, range(3))
    gradients = known_gradients(model, hvd.rank(), 99)
    backward_with(model, gradients if hvd.rank() == 0 else some_of(gradients))
    hvd.barrier()
    optimizer.load_state_dict(optimizer.state_dict())
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match="all ranks must give up the same steps"):
            backward_with(model, gradients)


@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
@pytest.mark.parametrize("everywhere", [True, False])
def test_reset_between_backward_and_step(compression: type, everywhere: bool) -> None:
    """The step under way is still taken, from the state before; the next one starts afresh."""
    model = named(f"midway_{compression.__name__}_{everywhere}", mlp())
    optimizer = distributed(model, compression)
    train(model, optimizer, range(2))
    backward_with(model, known_gradients(model, hvd.rank(), 2))
    if everywhere or hvd.rank() == 0:
        get_compressor(optimizer).reset()
    optimizer.step()
    if everywhere:
        train(model, optimizer, range(3, 5))
        assert get_compressor(optimizer).stats.step == 2
    else:
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), 3))
        with pytest.raises(RuntimeError, match="the step is 0 on rank 0, but 3 on rank 1"):
            optimizer.step()


@pytest.mark.parametrize("everywhere", [True, False])
def test_reset_before_a_step_that_is_skipped(everywhere: bool) -> None:
    model = named(f"midway_skipped_{everywhere}", mlp())
    optimizer = distributed(model, MiCROCompressor)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward_with(model, known_gradients(model, hvd.rank(), 2, float("inf") if hvd.rank() else 1.0))
    if everywhere or hvd.rank() == 0:
        get_compressor(optimizer).reset()
    optimizer.synchronize()
    assert get_compressor(optimizer).stats.skipped
    if everywhere:
        train(model, optimizer, range(3, 5))
        assert same_on_all_ranks(model.parameters())


def test_reset_on_one_rank_while_the_averaging_is_due() -> None:
    model = named("reset_while_due", mlp())
    optimizer = distributed(model, A2SGDCompressor(sync_every=2))
    for step in range(2):
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.synchronize()
        if (step, hvd.rank()) == (1, 0):
            get_compressor(optimizer).reset()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("compression", [MiCROCompressor, A2SGDCompressor])
@pytest.mark.parametrize("used_in", [(False, True, True, False, True), (True, False, True)])
def test_sparse_embedding_that_is_not_used_in_some_steps(compression: type, used_in: tuple[bool, ...]) -> None:
    """Its gradient is then one of zeros, and dense."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(30, 20, sparse=True), "head": nn.Linear(20, 10)})
    optimizer = distributed(model, compression)
    for step, used in enumerate(used_in):
        model.zero_grad(set_to_none=True)
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        if used:
            x = x + model["words"](torch.arange(8) + 2 * hvd.rank())
        model["head"](x).square().mean().backward()
        optimizer.step()
    assert get_compressor(optimizer).stats.step == len(used_in)
    if compression is A2SGDCompressor:
        get_compressor(optimizer).synchronize_parameters()
    assert same_on_all_ranks(model.parameters())


# The drop-in namespace


def test_drop_in_namespace_is_horovod_with_our_compression() -> None:
    for name in dir(hvd):
        if not name.startswith("_"):
            assert hasattr(horovod_sparse.torch, name), name
    assert horovod_sparse.torch.size() == hvd.size()
    assert issubclass(Compression, hvd.Compression)
    assert (Compression.none, Compression.fp16) == (hvd.Compression.none, hvd.Compression.fp16)
    assert (Compression.micro, Compression.a2sgd) == (MiCROCompressor, A2SGDCompressor)
    model, stock = mlp(), mlp()
    optimizer = horovod_sparse.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), Compression.micro
    )
    train(model, optimizer, range(3))
    train(stock, distributed(stock, MiCROCompressor), range(3))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), stock.parameters(), strict=True))
