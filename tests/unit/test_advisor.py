"""What the advisor concludes from figures, and how it watches a script. At work: tests/jobs/test_advise.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from horovod_sparse.advisor import command
from horovod_sparse.advisor.advice import Advice
from horovod_sparse.advisor.rehearsal import CANDIDATES, Candidate, Link, Rehearsal, Rehearsed
from horovod_sparse.advisor.script import STEPS, WARM_UP, Clock, Stopped, TooFewSteps, framework_of
from horovod_sparse.core.collectives import Array, Collective
from horovod_sparse.core.layout import TensorSpec

LINK = Link((4, 1024, 1_000_000), (0.001, 0.002, 0.1), (0.001, 0.002, 0.2))


def advice(compute_s: float, error_s: float = 0.0, **step_s: float) -> Advice:
    """With these times of a step, by the beginning of the setting; 1 second for the others."""
    times = [next((s for name, s in step_s.items() if name in c.setting.replace(".", "_")), 1.0) for c in CANDIDATES]
    return Advice(
        4,
        10**6,
        compute_s,
        LINK,
        [Rehearsed(c, s, error_s, 0.0, 10.0, 3) for c, s in zip(CANDIDATES, times, strict=True)],
    )


@pytest.mark.parametrize(
    ("step_s", "recommended", "speed_up", "words"),
    [
        ({}, "Compression.none", 1.0, "does not pay"),
        ({"A2SGD": 0.97}, "Compression.none", 1.0, "does not pay"),
        ({"fp16": 0.5, "A2SGD": 0.49}, "Compression.fp16", 2.0, "Half precision is enough"),
        ({"0_1": 0.41, "0_01)": 0.401, "0_001": 0.4}, "MiCROCompressor(density=0.1)", 1 / 0.41, "pays"),
        ({"0_1": 0.42, "0_01)": 0.401, "0_001": 0.4}, "MiCROCompressor(density=0.01)", 1 / 0.401, "pays"),
        ({"0_01)": 0.5, "A2SGD": 0.4}, "A2SGDCompressor", 2.5, "pays"),
        ({"0_1": 0.99, "A2SGD": 0.96}, "A2SGDCompressor", 1 / 0.96, "pays"),
    ],
)
def test_the_gentlest_setting_that_is_as_good_as_the_fastest(
    step_s: dict[str, float], recommended: str, speed_up: float, words: str
) -> None:
    given = advice(0.3, **step_s)
    assert given.recommended.candidate.setting == recommended
    assert given.speed_up == pytest.approx(speed_up)
    assert words in given.lines()[0]
    assert given.as_json()["recommended"] == recommended
    assert [c["setting"] for c in given.as_json()["candidates"]] == [c.setting for c in CANDIDATES]


def test_an_exchange_that_is_still_most_of_a_step_is_told() -> None:
    assert "more than half" in advice(0.1, A2SGD=0.3).lines()[-1]
    assert "more than half" not in " ".join(advice(0.2, A2SGD=0.3).lines())


def test_noise_matters_where_it_may_hide_the_fastest() -> None:
    given = advice(0.1, error_s=0.2, fp16=0.5)
    assert [r.candidate.setting for r in given.noisy] == ["Compression.fp16"]
    assert "vary too much to tell" in given.lines()[0]
    assert len(advice(0.1, error_s=0.2, fp16=0.65).noisy) == len(CANDIDATES)
    assert given.as_json()["recommended"] is given.as_json()["speed_up"] is None
    assert advice(0.1, error_s=0.05, fp16=0.5).noisy == []
    assert "may be noise" in advice(0.1, error_s=0.05, fp16=0.9).lines()[1]
    assert "may be noise" not in advice(0.1, error_s=0.05, fp16=0.8).lines()[1]


def test_link() -> None:
    assert LINK.latency_s == 0.001
    assert LINK.allreduce_of(500) == pytest.approx(0.001 + 0.001 * 496 / 1020)
    assert LINK.allreduce_of(3_000_000) == pytest.approx(0.3)
    assert LINK.bits_per_s(4) == pytest.approx(8 * 1.5 * 1_000_000 / 0.1)


class OneRank:
    """All ranks of a job that has one."""

    rank, size = 0, 1
    started = 0

    def start(self, request: Collective, name: str) -> Callable[[], Array]:
        self.started += 1
        return lambda: request.array

    def start_dense(self, array: Array, name: str, half: bool) -> Callable[[], None]:
        return lambda: None

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def join(self) -> None:
        pass


@pytest.mark.parametrize("candidate", CANDIDATES[2:-1])
def test_rehearsed_gradients_are_new_in_each_step(candidate: Candidate) -> None:
    """If they came back, what a rank holds back would pile up below the threshold, which then is searched for again."""
    ranks = OneRank()
    tensors = [TensorSpec("large", (4_000_000,), "float32"), TensorSpec("small", (1_000,), "float32")]
    rehearsal = Rehearsal(ranks, tensors, compute_s=0.0, idle=True)
    for _ in range(5):
        rehearsal.step(candidate)
    ranks.started = 0
    for _ in range(10):
        rehearsal.step(candidate)
    assert ranks.started == 10 * 4  # tokens, the first round, indices, values


MODEL = [np.zeros((3, 4)), np.zeros(5)]


def test_clock_stops_a_script_and_takes_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([0, 50, 60, 70, *(71 + 2 * i for i in range(STEPS - 1)), 200])
    monkeypatch.setattr("horovod_sparse.advisor.script.time.perf_counter", lambda: next(ends))
    clock = Clock()
    tick = clock.watch(MODEL, ["float32", "float32"])
    for _ in range(WARM_UP + STEPS):
        tick()
        assert not clock.done
    with pytest.raises(Stopped):
        tick()
    assert clock.done
    assert clock.profile().compute_s == 2


def test_too_few_steps() -> None:
    clock = Clock()
    tick = clock.watch(MODEL, ["float32", "float32"])
    for _ in range(5):
        tick()
    with pytest.raises(TooFewSteps, match=r"took 5 steps .* 7 are needed"):
        clock.profile()


def test_a_step_of_two_models_that_take_turns_is_one_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr("horovod_sparse.advisor.script.time.perf_counter", lambda: now)
    clock = Clock()
    first, second = clock.watch(MODEL[:1], ["float32"]), clock.watch(MODEL[1:], ["float16"])
    while not clock.done:
        now += 90
        with suppress(Stopped):
            second()
        now += 10
        with suppress(Stopped):
            first()
    assert clock.profile().compute_s == 100
    assert [(spec.shape, spec.dtype) for spec in clock.profile().tensors] == [((3, 4), "float32"), ((5,), "float16")]


def test_a_model_that_gets_another_optimizer_is_the_same() -> None:
    clock = Clock()
    for _ in range(3):
        tick = clock.watch(MODEL, ["float32", "float32"])
        for _ in range(3):
            tick()
    assert [spec.numel for spec in clock.profile().tensors] == [12, 5]


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("import horovod.torch as hvd", "torch"),
        ("from horovod_sparse.tensorflow.keras import callbacks", "tensorflow"),
        ("import horovod.tensorflow as hvd", "tensorflow"),
        ("import tensorflow_datasets, horovod_sparse.torch", "torch"),
    ],
)
def test_framework_of_a_script(text: str, framework: str, tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(text)
    assert framework_of(tmp_path / "train.py") == framework


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], None), "give a SCRIPT, or else --parameters"),
        ((["train.py"], 5.0), "give a SCRIPT, or else --parameters"),
        ((["missing.py"], None), "missing.py: "),
        (([], 0.5), "--parameters 0.5: "),
        (([], float("nan")), "--parameters nan: "),
        (([], 1e13), r"--parameters 1e\+13: "),
    ],
)
def test_what_cannot_be_asked(arguments: Any, message: str) -> None:
    with pytest.raises(command.CannotAdvise, match=message):
        command.run(*arguments, compute_s=0.0, framework=None, seconds=1.0, json_file=None)


def test_unknown_framework() -> None:
    with pytest.raises(command.CannotAdvise, match="--framework jax: it must be one of torch, tensorflow"):
        command.run([], 5.0, 0.0, "jax", 1.0, None)


def test_json_that_cannot_be_written(tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in str(command.unwritable(tmp_path / "file" / "out.json"))
    assert command.unwritable(tmp_path / "new" / "out.json") is None


def test_a_single_rank() -> None:
    with pytest.raises(command.CannotAdvise, match="horovodrun -np N horovod-sparse advise"):
        command.run([], 5.0, 0.0, "torch", 1.0, None)
