"""Random histories of exchanges, step by step against a plain dense model. `python tests/fuzz.py FIRST COUNT`

A seed makes one history: a model, a method with its settings, a world of ranks, and steps, between which ranks flush,
reset, save and load, leave, come back, or disagree. After each step, an oracle in float64, which shares nothing with
the algorithms but their rules, says what the updates and the residuals must have been.
"""

from __future__ import annotations

import copy
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core import Allreduce, TensorSpec, virtual
from horovod_sparse.core.exchange import A2SGDExchange, MiCROExchange, QSGDExchange, TopKExchange
from horovod_sparse.core.schedule import WarmUp

Vector = NDArray[np.float64]
Gradient = dict[TensorSpec, NDArray[Any]]

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (40,), (4, 3, 6), (600,), (50, 60)]
DENSITIES = [1.0, 0.5, 0.1, 0.02, 0.001, 1e-6]
RATES = [1.0, 1.0, 0.5, 0.1, 0.01, 0.0]
BUCKET = 512  # elements that share a norm in QSGD
MAX_ROUNDS = 16  # a step that takes more does not end
TINY = 1e-36  # what lies below all that is computed here, whose own rounding is not relative


# Driving


def guarded(step: Any, absent: bool) -> Iterator[Any]:
    """`step`, whose RuntimeError is its result, and which may ask for nothing but Allreduce if some rank is `absent`.

    Ranks that have called `hvd.join()` add zeros to an Allreduce: that is the sum over the others.
    """
    answer = None
    for _ in range(MAX_ROUNDS):
        try:
            request = step.send(answer)
        except StopIteration as stop:
            return stop.value
        except RuntimeError as error:
            return error
        assert isinstance(request, Allreduce) or not absent, f"{request} while some ranks have joined"
        answer = yield request
    raise AssertionError(f"the step has not ended after {MAX_ROUNDS} rounds")


def same_error(results: Sequence[Any], *parts: str) -> None:
    """All ranks raised one and the same error, which mentions `parts`."""
    texts = {str(result) if isinstance(result, RuntimeError) else None for result in results}
    assert len(texts) == 1, f"different errors: {texts}"
    (text,) = texts
    assert text is not None, "no error on any rank"
    assert all(part in text for part in parts), f"{parts} not in: {text}"


# The oracle


class Model:
    """The tensors, and where they lie in the flat vector."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = sorted(specs)
        self.sizes = [prod(spec.shape) for spec in self.specs]
        self.bounds = list(accumulate(self.sizes, initial=0))
        self.numel = self.bounds[-1]
        self.dtype = "float64" if any(spec.dtype == "float64" for spec in specs) else "float32"
        self.eps = float(np.finfo(self.dtype).eps)

    def flat(self, arrays: Sequence[NDArray[Any]]) -> Vector:
        return np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])

    def spread(self, values: Vector) -> Vector:
        """Each tensor's value at each of its elements."""
        return np.repeat(values, self.sizes)


class Books:
    """What each rank holds back, and what came in and went out: each in units of its effect on the parameters.

    Attributes:
        held: of each rank, the residual that was found right after the last step.
        counted: of each rank and tensor, the learning rate that it was held back at; 0 where there was none.
    """

    def __init__(self, model: Model, ranks: int, follows: bool) -> None:
        self.model = model
        self.follows = follows
        self.held = np.zeros((ranks, model.numel))
        self.counted = np.zeros((ranks, len(model.specs)))
        self.start()

    def start(self) -> None:
        """Open the books anew, with what is held back now."""
        self.came = self.effect()
        self.went, self.bound = np.zeros((2, self.model.numel))

    def effect(self) -> Vector:
        """Of all that is held back."""
        rates = np.array([self.model.spread(rates) for rates in self.counted]) if self.follows else 1.0
        return (rates * self.held).sum(axis=0)

    def accumulate(self, gradients: dict[int, Vector], rates: Vector | None) -> tuple[Vector, Vector]:
        """What the ranks that take part have accumulated, and by how much it may have been rounded off.

        The ratio of the rates is rounded, its product, and the sum: three times eps / 2 of what is added at most.
        """
        rows, errors = [], []
        for rank, gradient in gradients.items():
            scale = weight = np.ones(self.model.numel)
            if rates is not None:
                old = self.counted[rank].copy()
                new = np.where(rates > 0, rates, old)
                scale = self.model.spread(np.where((old > 0) & (new > 0), old / np.where(new > 0, new, 1), 1))
                weight = self.model.spread((rates > 0).astype(float))
                self.counted[rank] = new
                self.came += self.model.spread(rates) * gradient
                # What was held back at no known rate counts at the first one.
                self.came += self.model.spread(np.where(old > 0, 0, new)) * self.held[rank]
            else:
                self.came += gradient
            rows.append(scale * self.held[rank] + weight * gradient)
            errors.append(1.5 * self.model.eps * (abs(scale * self.held[rank]) + abs(weight * gradient)) + TINY)
        return np.array(rows), np.array(errors)

    def close(
        self, acc: Vector, error: Vector, update: Vector, held: dict[int, Vector], rates: Vector | None, summing: float
    ) -> None:
        """Check that nothing was lost, and keep what is `held` now.

        The sum over n ranks is rounded n - 1 times, the mean once, by eps / 2 of the sum of magnitudes at most, and
        what stays behind once more: less than n + 2 in all. `summing` is the relative error of sums in a narrow dtype.
        """
        ranks = len(self.held)
        magnitude = abs(acc).sum(axis=0)
        bound = error.sum(axis=0) + ((ranks + 2) * self.model.eps + summing) * magnitude
        sent = acc - np.array(list(held.values()))
        at_rest = self.model.spread(np.zeros(len(self.model.specs)) if rates is None else rates == 0).astype(bool)
        assert (abs(sent) <= error)[:, at_rest].all(), "what was sent at a rate of 0, with no effect, has not stayed"
        assert (abs(ranks * update - sent.sum(axis=0)) <= bound)[~at_rest].all(), "a step has lost something"
        counted = np.array([self.model.spread(self.counted[rank]) for rank in held]) if self.follows else np.ones(1)
        applied = np.where(at_rest, 0, counted[0] * ranks * update)
        for rank, row in held.items():
            self.held[rank] = row
        self.went += applied
        self.bound += counted.max(axis=0) * bound
        lost = abs(self.went + self.effect() - self.came)
        assert (lost <= 2 * self.bound).all(), "over several steps, something was lost"


def check_micro(
    acc: Vector, error: Vector, present: Sequence[int], ranks: int, t: int, update: Any, density: float, adaptive: bool
) -> NDArray[np.bool_]:
    """Which elements were sent: those that reach the threshold with their owner, no others."""
    d = acc.shape[1]
    chosen = np.zeros(d, bool)
    chosen[update.indices] = True
    assert len(update.indices) == chosen.sum(), "an index twice"
    assert (np.diff(update.indices) > 0).all(), "indices do not ascend"
    owner, margin = np.zeros((2, d))
    for row, rank in enumerate(present):
        number = (rank + t) % ranks
        part = slice(number * d // ranks, (number + 1) * d // ranks)
        owner[part], margin[part] = abs(acc[row, part]), error[row, part]
    threshold = update.threshold
    margin = margin + np.finfo(np.float32).eps * threshold
    assert chosen[owner - margin > threshold].all(), "an element that reached the threshold was not sent"
    assert not chosen[owner + margin < threshold].any(), "an element below the threshold was sent"
    k = max(density * d, 1.0)
    if adaptive and k >= 20:  # but for elements that are equal
        above, reached = (owner > 1.001 * threshold).sum(), (owner >= 0.999 * threshold).sum()
        assert above <= 1.25 * k + 4, f"{above} elements sent in the place of {k}"
        assert reached >= min(0.75 * k - 4, (owner > 10 * TINY).sum()), f"{reached} elements sent in the place of {k}"
    return chosen


def check_topk(
    acc: Vector, error: Vector, held: Vector, update: Any, density: float, at_rest: int
) -> NDArray[np.bool_]:
    """Which elements each rank sent: its k largest. Those that are equal, to rounding, may be any.

    It shows by what is not held back any more, but for so many elements as are `at_rest`.
    """
    d = acc.shape[1]
    k = min(max(round(density * d), 1), d)
    sent = np.zeros(acc.shape, bool)
    union = np.zeros(d, bool)
    union[update.indices] = True
    assert len(update.indices) == union.sum(), "an index twice"
    for row, (magnitude, margin, rest) in enumerate(zip(abs(acc), error, held, strict=True)):
        least = np.sort(magnitude)[d - k] if k else np.inf
        most = magnitude + margin + error[row].max(initial=0)
        surely = magnitude - margin - error[row].max(initial=0) > least
        maybe = ~surely & (most >= least)
        sent[row] = (rest == 0) & (surely | maybe) & union
        assert sent[row][surely & (magnitude > margin)].all(), "one of the largest elements was not sent"
        zeros = (maybe & (magnitude <= margin)).sum() + at_rest
        assert k - zeros <= sent[row].sum() <= k + zeros, f"a rank sent {sent[row].sum()} elements in the place of {k}"
    assert union[sent.any(axis=0) & (abs(acc) > error).any(axis=0)].all(), "an element was sent that is in no index"
    return sent


def check_narrow(acc: Vector, held: Vector, chosen: NDArray[np.bool_], dtype: str) -> None:
    """Of an element that was sent in a narrow dtype, no more stays behind than that rounds off.

    float16 spans twelve decades: that holds in them. bfloat16 rounds the sum too, and keeps that with one rank's part.
    """
    largest = abs(acc[:, chosen]).sum(axis=0)
    relative, least, most = (2.0**-10, 2.0**-24, 3e4) if dtype == "float16" else (2.0**-7, 0.0, np.inf)
    within = largest < most / len(acc)
    assert (abs(held[:, chosen]) <= relative * largest + least)[:, within].all(), f"{dtype} holds back too much"


def means_by_sign(gradient: Vector) -> tuple[float, float]:
    up, down = gradient[gradient >= 0], -gradient[gradient < 0]
    return up.sum() / max(up.size, 1), down.sum() / max(down.size, 1)


def check_a2sgd(model: Model, gradients: Vector, updates: Sequence[Vector], by_tensor: bool) -> None:
    """Each rank's gradient, shifted to the mean of the means: rounded twice a sum over the ranks, twice the shift."""
    bounds = model.bounds if by_tensor else [0, model.numel]
    ranks = len(gradients)
    for start, stop in pairwise(bounds):
        parts = gradients[:, start:stop]
        means = np.array([means_by_sign(part) for part in parts])
        up, down = means.mean(axis=0)
        for part, (own_up, own_down), update in zip(parts, means, updates, strict=True):
            wanted = part + np.where(part >= 0, up - own_up, own_down - down)
            tolerance = (ranks + 6) * model.eps * (abs(part) + means.sum()) + TINY
            assert (abs(update[start:stop] - wanted) <= tolerance).all(), "not the gradient, shifted"


def check_qsgd(model: Model, gradients: Vector, update: Vector, bits: int) -> None:
    """Each rank's elements are within one level of what they were."""
    level = np.zeros(model.numel)
    for start in range(0, model.numel, BUCKET):
        part = gradients[:, start : start + BUCKET]
        level[start : start + BUCKET] = np.linalg.norm(part, axis=1).mean() / (2 ** (bits - 1) - 1)
    tolerance = level * (1 + 2**bits * (len(gradients) + 4) * model.eps) + TINY
    assert (abs(update - gradients.mean(axis=0)) <= tolerance).all(), "more than a level away"


# Histories


def world_digests(model: Model) -> dict[str, int]:
    """Where all parameters are the same."""
    return {spec.name: 7 for spec in model.specs}


class History:
    """One random history.

    Attributes:
        worlds: the exchanges, one a rank; there may be a second world that goes through the same, and must do the same
            to the bit, although its states are saved and loaded in between.
        names: what went on, for whoever looks for the reason of a failure.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.names: list[str] = []
        self.faults: Counter[str] = Counter()
        self.steps = 0
        self.n = int(self.rng.integers(1, 10))
        self.model = self._random_model()
        self._draw_settings()
        self.t = 0
        self.absent: set[int] = set()
        self.asked: set[int] = set()  # who knows that all is to be sent
        self.may_be_dense = False
        self.led = self.news = False
        self.loss_scale = 1.0
        self.scale = 10.0 ** self.rng.uniform(-5, 3)
        self.names.append(f"{self.n} ranks, {self.method} {self.settings}, {[str(s) for s in self.model.specs]}")
        self.twin = bool(self.rng.random() < 0.4)
        self.worlds = [[self._exchange() for _ in range(self.n)] for _ in range(1 + self.twin)]
        self.books = Books(self.model, self.n, self.follows)

    def run(self) -> None:
        if self.n > 1 and self.rng.random() < 0.25:
            self._one_is_different()
        self._meet()
        for _ in range(int(self.rng.integers(4, 16))):
            self.poisoned = self.model.numel > 0 and bool(self.rng.random() < 0.08)
            for _ in range(self._pick([1, 1, 1, 2])):
                self._event()
            self._step()
        if self.absent:
            self._all_back()
            self.poisoned = False
            self._step()

    # What is drawn

    def _pick(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def _random_model(self) -> Model:
        one = self._pick([*DTYPES, None, None])
        number = int(self.rng.integers(1, 7))
        return Model([TensorSpec(f"t{i}", self._pick(SHAPES), one or self._pick(list(DTYPES))) for i in range(number)])

    def _draw_settings(self) -> None:
        self.method = self._pick(["micro", "micro", "micro", "topk", "topk", "a2sgd", "qsgd"])
        verify = {"verify_every": self._pick([None, None, 1, 3])}
        self.follows = self.method in ("micro", "topk") and bool(self.rng.random() < 0.5)
        densities = [self._pick(DENSITIES) for _ in range(5)]
        schedules = [None, None, WarmUp(4), lambda t: densities[t % 5]]
        common = {"density": self._pick(DENSITIES), "follow_learning_rate": self.follows}
        common |= {"density_schedule": self._pick(schedules), **verify}
        if self.method == "micro":
            narrow = self._pick([None, None, "float16", "bfloat16"])
            self.settings = {
                **common,
                "threshold": self._pick(["adaptive", "adaptive", "paper"]),
                "value_dtype": narrow,
            }
        elif self.method == "topk":
            self.settings = common
        elif self.method == "a2sgd":
            self.settings = {"granularity": self._pick(["model", "tensor"]), "sync_every": self._pick([None, 1, 4])}
            self.settings |= verify
        else:
            self.settings = {"bits": self._pick([2, 4, 8]), **verify}

    def _exchange(self, **other: Any) -> Any:
        made = {"micro": MiCROExchange, "topk": TopKExchange, "a2sgd": A2SGDExchange, "qsgd": QSGDExchange}
        exchange = made[self.method](**{**self.settings, **other})
        exchange.digests = lambda: world_digests(self.model)
        return exchange

    def _density(self) -> float:
        """The one that this step should have."""
        schedule, target = self.settings["density_schedule"], self.settings["density"]
        if schedule is None:
            return float(target)
        return target ** min(self.t / 4, 1.0) if isinstance(schedule, WarmUp) else schedule(self.t)

    def _random_gradient(self, kind: str, common: Vector) -> tuple[Gradient, Vector]:
        """As it is given to a rank, and the true one: flat, not scaled."""
        vector = self.rng.standard_normal(self.model.numel)
        if kind == "heavy":
            vector = self.rng.standard_t(1.5, self.model.numel)
        elif kind == "sparse":
            vector *= self.rng.random(self.model.numel) < 0.03
        elif kind == "zeros":
            vector *= 0.0
        elif kind == "equal":
            vector = np.ones(self.model.numel) * np.sign(vector)
        elif kind == "common":
            vector = common
        gradient = {}
        bounds = zip(self.model.specs, self.model.bounds, self.model.bounds[1:], strict=False)
        for spec, start, stop in bounds:
            limit = 6e4 if spec.dtype == "float16" else 1e30
            values = (self.scale * self.loss_scale * vector[start:stop]).clip(-limit, limit)
            gradient[spec] = values.astype(DTYPES[spec.dtype])
        return gradient, self.model.flat(list(gradient.values())) / self.loss_scale

    # What happens between the steps

    def _event(self) -> None:
        """Something may happen; what it is supposed to do is checked, here or in the next step."""
        if self.absent:
            events = [self._nothing, self._nothing, self._someone_joins, self._all_back, self._all_back]
            events += [self._flush_while_some_are_absent]
        else:
            events = [self._nothing] * 8 + [self._flush_one, self._flush_all, self._reset_all, self._saved_and_loaded]
            events += [self._other_scale, self._other_loss_scale, self._poison, self._resized, self._elastic]
            events += [self._load_that_of_rank_0]
            if self.n > 1:
                events += [self._reset_one, self._other_model, self._someone_joins, self._someone_joins]
                events += [self._digests_differ, self._digests_differ]
        event = self._pick(events)
        self.names.append(f"t={self.t} {event.__name__}")
        self.faults[event.__name__] += event is not self._nothing
        event()

    def _nothing(self) -> None:
        pass

    def _other_scale(self) -> None:
        self.scale = 10.0 ** self.rng.uniform(-5, 3)

    def _other_loss_scale(self) -> None:
        if self.method in ("micro", "topk"):
            self.loss_scale = 2.0 ** self.rng.integers(-2, 17)

    def _poison(self) -> None:
        self.poisoned = self.model.numel > 0

    def _flush(self, ranks: Sequence[int]) -> None:
        if self.method in ("micro", "topk"):
            for world in self.worlds:
                for rank in ranks:
                    world[rank].flush()
            self.asked |= set(ranks)

    def _flush_one(self) -> None:
        self._flush([self._pick(range(self.n))])
        self.poisoned |= self.model.numel > 0 and bool(self.rng.random() < 0.3)

    def _flush_all(self) -> None:
        self._flush(range(self.n))

    def _forget(self) -> None:
        """All state is gone."""
        self.t = 0
        self.asked = set()
        self.may_be_dense = self.led = False
        self.news = True
        self.books = Books(self.model, self.n, self.follows)

    def _reset_all(self) -> None:
        for world in self.worlds:
            for exchange in world:
                exchange.reset()
        self._forget()

    def _reset_one(self) -> None:
        if self.t and not self.led:
            rank = self._pick(range(self.n))
            for world in self.worlds:
                world[rank].reset()
            self._must_fail("the ranks disagree: the step")
            self._reset_all()

    def _other_model(self) -> None:
        """One rank has one more tensor: the others learn it. Without it, all goes on."""
        if self.t and not self.news:
            rank = self._pick(range(self.n))
            extra = {TensorSpec("t9", (3,), "float32"): np.ones(3, np.float32)}
            self._must_fail("the ranks disagree: the next parameter", extra={rank: extra})
            self.news = True

    def _one_is_different(self) -> None:
        """In its settings, or its model: all get to know before the first step."""
        rank = self._pick(range(self.n))
        specs = dict.fromkeys(range(self.n), self.model.specs)
        world = [self._exchange() for _ in range(self.n)]
        if self.rng.random() < 0.5:
            specs[rank] = [*self.model.specs, TensorSpec("t9", (3,), "float32")]
        else:
            others = {"a2sgd": {"granularity": "other"}, "qsgd": {"bits": 2 if self.settings.get("bits") != 2 else 4}}
            others["a2sgd"] = {"sync_every": 9}
            world[rank] = self._exchange(**others.get(self.method, {"density": 0.3}))
        steps = [guarded(exchange.meet(specs[i]), absent=False) for i, exchange in enumerate(world)]
        self.faults["_one_is_different"] += 1
        same_error(virtual.run(steps)[0], "the ranks disagree", f"on rank {rank or 1}")

    def _saved_and_loaded(self) -> None:
        """In the last world only: where there are two, they must stay the same."""
        if self.asked or self.may_be_dense or self.led:  # a flush is no part of a state, nor is what is to catch up
            return
        self.news = True
        world = self.worlds[-1]
        states = [copy.deepcopy(exchange.state()) for exchange in world]
        if self.rng.random() < 0.5:
            world[:] = [self._exchange() for _ in world]
            self._meet()
        for rank, exchange in enumerate(world):
            exchange.place = rank, self.n
            exchange.load(states[rank])
        self._check_states()

    def _resized(self) -> None:
        """All states are loaded in a world of another size."""
        if self.led or (self.t and self.news):  # some ranks may be new, and have nothing to save yet
            return
        self._loaded()
        size = int(self.rng.integers(1, 10))
        everything = self.books.held.sum(axis=0)
        magnitude = abs(self.books.held).sum(axis=0)
        for number, world in enumerate(self.worlds):
            states = [copy.deepcopy(exchange.state()) for exchange in world]
            self.rng.shuffle(states)  # type: ignore[arg-type]
            self.worlds[number] = [self._exchange() for _ in range(size)]
            for rank, exchange in enumerate(self.worlds[number]):
                exchange.place = rank, size
                exchange.load(states)
        self.n = size
        self._meet()
        counted = self.books.counted[0]
        self.books = Books(self.model, size, self.follows)
        self.books.counted[:] = counted
        if self.method in ("micro", "topk"):
            self.books.held[:] = [self._residual(exchange) for exchange in self.worlds[0]]
            lost = abs(self.books.held.sum(axis=0) - everything)
            assert (lost <= 10 * self.model.eps * magnitude).all(), "a load in another world has lost something"
            self.books.start()

    def _loaded(self) -> None:
        """A flush that was asked for is forgotten."""
        self.news = True
        self.asked = set()
        self.may_be_dense = False

    def _load_that_of_rank_0(self) -> None:
        if self.led:
            return
        self._loaded()
        for world in self.worlds:
            state = copy.deepcopy(world[0].state())
            for rank, exchange in enumerate(world):
                exchange.place = rank, self.n
                exchange.load(state)
        self.books.held[1:] = 0
        self.books.start()

    def _elastic(self) -> None:
        """Some ranks leave, others are new; those that stay keep what they hold back."""
        if self.t and (self.news or self.led):  # those that stay might be new themselves, or have missed steps
            return
        stay = sorted(self.rng.choice(self.n, int(self.rng.integers(1, self.n + 1)), replace=False).tolist())
        size = len(stay) + int(self.rng.integers(0, 4))
        places = sorted(self.rng.choice(size, len(stay), replace=False).tolist())
        for number, world in enumerate(self.worlds):
            new = [self._exchange() for _ in range(size)]
            for old, place in zip(stay, places, strict=True):
                new[place] = world[old]
                new[place].rejoin()
            self.worlds[number] = new
        before, self.books = self.books, Books(self.model, size, self.follows)
        self.books.held[places], self.books.counted[places] = before.held[stay], before.counted[stay]
        self.books.start()
        self.asked = {place for old, place in zip(stay, places, strict=True) if old in self.asked}
        self.led = self.may_be_dense = self.t > 0
        self.news = True
        self.n = size
        self._meet()

    def _someone_joins(self) -> None:
        """One or more ranks have no more data; one at least goes on."""
        present = self._present()
        if len(present) > 1 and not (self.t and self.news) and (self.absent or not self.led):
            number = int(self.rng.integers(1, len(present)))
            self.absent |= set(self.rng.choice(present, number, replace=False).tolist())
            if not self.t:
                self._must_fail("hvd.join()")
                self._all_back()

    def _all_back(self) -> None:
        """As Horovod has it: whoever has joined waits until all have."""
        self.absent = set()
        self.may_be_dense |= self.led

    def _flush_while_some_are_absent(self) -> None:
        """It has to wait until all are back."""
        self._flush([self._pick(self._present())])

    def _digests_differ(self) -> None:
        every = self.settings["verify_every"]
        if every and self.t and self.t % every == 0 and not self.led:
            rank, spec = self._pick(range(self.n)), self._pick(self.model.specs)
            right = world_digests(self.model)
            for world in self.worlds:
                world[rank].digests = lambda: {**right, spec.name: 8}
            self._must_fail(f"parameter {spec.name!r}", f"on rank {rank or 1}", f"after {self.t} steps")
            for world in self.worlds:
                world[rank].digests = lambda: right

    # Steps

    def _present(self) -> list[int]:
        return [rank for rank in range(self.n) if rank not in self.absent]

    def _meet(self) -> None:
        for world in self.worlds:
            steps = [guarded(exchange.meet(self.model.specs), absent=False) for exchange in world]
            assert virtual.run(steps)[0] == [None] * len(world)

    def _drive(self, world: list[Any], given: dict[int, Gradient], rates: Vector | None, in_place: bool) -> list[Any]:
        """One step of the ranks in `given`; what each returned, or raised."""
        steps = []
        for rank, gradient in given.items():
            gradient = dict(reversed([(spec, array.copy()) for spec, array in gradient.items()]))
            out = {spec: np.empty(array.size, self.model.dtype) for spec, array in gradient.items()}
            units: dict[str, Any] = {}
            if self.method in ("micro", "topk"):
                units["loss_scale"] = self.loss_scale
                if rates is not None:
                    units["rates"] = dict.fromkeys(gradient, 1.0) | dict(
                        zip(self.model.specs, rates.tolist(), strict=True)
                    )
            step = world[rank].step(gradient, rank, self.n, out if in_place else None, **units)
            steps.append(guarded(step, bool(self.absent)))
        return virtual.run(steps)[0]

    def _draw_step(self) -> tuple[dict[int, Gradient], dict[int, Vector], Vector | None]:
        """The gradients of the ranks that are present, as given, and as they truly are; and the learning rates."""
        kind = self._pick(["normal", "normal", "normal", "heavy", "sparse", "zeros", "equal", "common"])
        common = self.rng.standard_normal(self.model.numel)
        drawn = {rank: self._random_gradient(kind, common) for rank in self._present()}
        rates = None
        if self.follows:
            rates = self._pick(RATES) * np.array([self._pick([1.0, 1.0, 0.1]) for _ in self.model.specs])
        return {r: given for r, (given, _) in drawn.items()}, {r: true for r, (_, true) in drawn.items()}, rates

    def _must_fail(self, *parts: str, extra: dict[int, Gradient] | None = None) -> None:
        """A step that raises the same error on all ranks that are present, in all worlds."""
        given, _, rates = self._draw_step()
        for rank, more in (extra or {}).items():
            given[rank] = {**given[rank], **more}
        for world in self.worlds:
            same_error(self._drive(world, given, rates, in_place=False), *parts)

    def _step(self) -> None:
        """One step, and all that is known of it."""
        self.steps += 1
        given, true, rates = self._draw_step()
        if self.poisoned:
            gradient = given[self._pick(self._present())]
            tensor = gradient[self._pick([spec for spec in gradient if gradient[spec].size])]
            tensor[int(self.rng.integers(tensor.size))] = self._pick([np.nan, np.inf, -np.inf])
        in_place = bool(self.rng.random() < 0.5)
        runs = [self._drive(world, given, rates, in_place) for world in self.worlds]
        for results in runs:
            for result in results:
                if isinstance(result, RuntimeError):
                    raise AssertionError(f"unexpected: {result}") from result
        for ours, theirs in zip(*runs, strict=True) if self.twin else ():
            assert self._bytes(ours) == self._bytes(theirs), "what was saved and loaded goes on in another way"
        self.t += 1
        updates, present = runs[0], self._present()
        for world in self.worlds:
            assert {world[rank].stats.step for rank in present} == {self.t}, "the number of steps is wrong"
        led, self.led = self.led, bool(self.absent)
        self.news = False
        if self.asked and not self.absent:  # now all know
            self.asked = set(range(self.n))
        if self.method == "a2sgd":
            self._check_averaging(led)
        if self.poisoned:
            assert updates == [None] * len(updates), "a step that is not finite was taken"
            self.may_be_dense |= bool(self.absent)
            self._check_states()
            return
        assert None not in updates, "a finite step was skipped"
        if self.method != "a2sgd":
            assert len({self._bytes(update) for update in updates}) == 1, "the ranks' updates differ"
        flats = [self.model.flat(update.gradient) / self.loss_scale for update in updates]
        gradients = np.array(list(true.values()))
        if self.method == "a2sgd":
            check_a2sgd(self.model, gradients, flats, self.settings["granularity"] == "tensor")
        elif self.method == "qsgd":
            self._check_qsgd(gradients, flats[0])
        else:
            self._check_residuals(true, rates, updates[0], flats[0])
        if not self.absent:
            self.asked = set()
        self.may_be_dense = False

    def _check_averaging(self, led: bool) -> None:
        every = self.settings["sync_every"]
        for world in self.worlds:
            due = {world[rank].averaging_due for rank in self._present()}
            wanted = every is not None and not self.absent and (self.t % every == 0 or led)
            assert due == {wanted}, f"averaging is due: {due}, after {self.t} steps"
            for exchange in world:
                exchange.averaging_due = False

    def _check_qsgd(self, gradients: Vector, update: Vector) -> None:
        if not self.absent:  # a dense step, when some have come back, is within a level as well
            check_qsgd(self.model, gradients, update, self.settings["bits"])
            return
        tolerance = (self.n + 2) * self.model.eps * abs(gradients).sum(axis=0) / self.n + TINY
        assert (abs(update - gradients.sum(axis=0) / self.n) <= tolerance).all(), "a dense step is not the mean"

    def _check_residuals(self, true: dict[int, Vector], rates: Vector | None, update: Any, applied: Vector) -> None:
        present = self._present()
        density = self._density_of_last_step()
        acc, error = self.books.accumulate(true, rates)
        held = {rank: self._residual(self.worlds[0][rank]) for rank in present}
        rests = np.array(list(held.values()))
        left = rests.copy()
        at_rest = np.zeros(0, np.int64) if rates is None else np.flatnonzero(self.model.spread(rates) == 0)
        left[:, at_rest] = 0  # what is sent at a rate of 0 stays, see `Books.close`
        narrow = self.settings.get("value_dtype")
        if update.indices is None:
            dense = self.asked or self.may_be_dense or self.absent
            assert dense or (density == 1 and self.method == "micro"), "a dense step that nobody asked for"
            sent = np.ones(acc.shape, bool)
            narrow = None if dense else narrow
        else:
            assert not self.asked, "a flush that was none"
            assert not self.absent
            if self.method == "topk":
                sent = check_topk(acc, error, left, update, density, len(at_rest))
            else:
                adaptive = self.settings["threshold"] == "adaptive"
                chosen = check_micro(acc, error, present, self.n, self.t - 1, update, density, adaptive)
                sent = np.broadcast_to(chosen, acc.shape)
                if narrow:
                    check_narrow(acc, left, chosen, narrow)
            unsent = np.ones(len(applied), bool)
            unsent[update.indices] = False
            assert (applied[unsent] == 0).all(), "an update where nothing was sent"
        assert (abs(rests - acc)[~sent] <= error[~sent]).all(), "what was not sent is not held back"
        assert narrow or (left[sent] == 0).all(), "what was sent is held back"
        self.books.close(acc, error, applied, held, rates, self.n * 2.0**-10 if narrow == "float16" else 0.0)

    def _density_of_last_step(self) -> float:
        self.t -= 1
        density = self._density()
        self.t += 1
        return density

    def _check_states(self) -> None:
        """What the ranks would save is what they are known to have."""
        if self.method in ("micro", "topk"):
            for world in self.worlds:
                for rank in self._present():
                    same = np.array_equal(self._residual(world[rank]), self.books.held[rank])
                    assert same, "a residual has changed without a step"

    def _residual(self, exchange: Any) -> Vector:
        residual = exchange.state().get("residual") or {s.name: np.zeros(s.shape) for s in self.model.specs}
        return self.model.flat([residual[spec.name] for spec in self.model.specs]).copy()

    @staticmethod
    def _bytes(update: Any) -> bytes:
        if update is None:
            return b""
        indices = b"" if update.indices is None else update.indices.tobytes()
        return b"".join([indices, *(array.tobytes() for array in update.gradient)])


def failure(seed: int) -> tuple[History, str]:
    """The history of a seed, and what is wrong with it; "" if nothing is."""
    history = History(seed)
    try:
        history.run()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} in {frame.name}, line {frame.lineno}: {error}"
        return history, "\n    ".join([what, *history.names])
    return history, ""


def main(first: int, count: int) -> int:
    """Run `count` seeds from `first` on; tell how it goes, and return how many have failed."""
    steps = 0
    faults: Counter[str] = Counter()
    failing = []
    told = time.monotonic()
    for seed in range(first, first + count):
        history, what = failure(seed)
        steps += history.steps
        faults += history.faults
        if what:
            failing.append(seed)
            print(f"seed {seed}: {what}", flush=True)
        if time.monotonic() - told > 10 or seed == first + count - 1:
            told = time.monotonic()
            done = seed - first + 1
            print(f"{done} inputs, {steps} steps, {faults.total()} faults, failing: {failing}", flush=True)
    print(", ".join(f"{name.strip('_')} {number}" for name, number in sorted(faults.items())))
    return len(failing)


if __name__ == "__main__":
    sys.exit(1 if main(int(sys.argv[1]), int(sys.argv[2])) else 0)
