"""The laws of MiCRO, for many virtual ranks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import (
    BACKENDS,
    Reference,
    World,
    flat,
    make_gradients,
    micro_options,
    plain_decode,
    scenarios,
    to_backend,
    to_numpy,
)

from horovod_sparse.core import Allgather, Allreduce, FlatLayout, MiCRO, TensorSpec
from horovod_sparse.core.kernels import kernels_for

FLOAT16 = np.finfo(np.float16)

both_backends = pytest.mark.parametrize("backend", BACKENDS)
narrow_dtypes = pytest.mark.parametrize("value_dtype", ["float16", "bfloat16"])


def world_of(scenario, options, backend, **kwargs):
    return World(lambda layout: MiCRO(layout, **options), scenario.layout, scenario.ranks, backend, **kwargs)


def everywhere(outcome, values):
    """A vector of `values` at the indices that were updated, 0 elsewhere."""
    vector = np.zeros(outcome.layout.numel)
    vector[outcome.indices] = values
    return vector


class Books:
    """What came in, what went out, and what is held back must agree, for each element, at every step."""

    def __init__(self, layout, ranks):
        self.numbers = np.finfo(layout.dtype)
        self.ranks = ranks
        self.steps = 0
        self.came = np.zeros(layout.numel)
        self.magnitude = np.zeros(layout.numel)
        self.went = np.zeros(layout.numel)

    def check(self, gradients, outcome, residuals):
        self.steps += 1
        vectors = np.array([flat(gradient) for gradient in gradients])
        self.came += vectors.mean(axis=0)
        self.magnitude += abs(vectors).mean(axis=0)
        self.went += self._sent(outcome)
        held_back = residuals.astype(np.float64).mean(axis=0)
        # In each step, an accumulation rounds once, the sum over the ranks n - 1 times, the mean once, and what a
        # narrow dtype rounds off once: each time by eps / 2 of no more than all that came in, or by half a subnormal.
        roundings = self.steps * (self.ranks + 2)
        tolerance = roundings * (self.numbers.eps * self.magnitude + self.numbers.smallest_subnormal)
        assert (abs(self.went + held_back - self.came) <= tolerance).all()

    def _sent(self, outcome):
        """The mean update, without what summing in a narrow dtype rounds off; which is checked here."""
        applied = outcome.applied[0]
        arrays = np.array([to_numpy(request.array) for request in outcome.rounds[-1]])
        if arrays.dtype != np.float16:  # with bfloat16, what summing rounds off stays in a residual, too
            return applied
        sent = everywhere(outcome, arrays.astype(np.float64).mean(axis=0))
        magnitude = everywhere(outcome, abs(arrays.astype(np.float64)).mean(axis=0))
        # n - 1 additions, each of which rounds by eps / 2 at most; then the mean, in the layout's dtype.
        summing = (self.ranks - 1) * FLOAT16.eps * magnitude + self.numbers.eps * abs(applied)
        assert (abs(applied - sent) <= summing).all()
        return sent


@both_backends
@given(scenario=scenarios(), options=micro_options())
def test_what_came_in_went_out_or_is_held_back_at_every_step(backend, scenario, options):
    world = world_of(scenario, options, backend)
    books = Books(scenario.layout, scenario.ranks)
    for gradients in scenario.steps:
        outcome = world.step(gradients)
        books.check(gradients, outcome, world.residuals())


@both_backends
@given(scenario=scenarios(), options=micro_options(density=0.1))
def test_selected_indices_ascend_inside_the_partition_of_the_rank(backend, scenario, options):
    world = world_of(scenario, options, backend)
    d, n = scenario.layout.numel, scenario.ranks
    for t, gradients in enumerate(scenario.steps):
        outcome = world.step(gradients)
        assert len(outcome.messages) == n
        selections = []
        for rank, message in enumerate(outcome.messages):
            number = (rank + t) % n
            indices = plain_decode(message, number * d // n, "uint8")
            assert (np.diff(indices) > 0).all()
            assert all(number * d // n <= i < (number + 1) * d // n for i in indices)
            selections += indices
        assert outcome.indices.dtype == np.int32
        assert outcome.indices.tolist() == sorted(selections)


@both_backends
@given(scenario=scenarios(), options=micro_options(density=0.05, value_dtype=None))
def test_step_is_the_published_one_given_its_threshold(backend, scenario, options):
    world = world_of(scenario, options, backend)
    reference = Reference(scenario.layout, scenario.ranks)
    numbers = np.finfo(scenario.layout.dtype)
    for gradients in scenario.steps:
        outcome = world.step(gradients)
        reference.accumulate(gradients)
        threshold = outcome.updates[0].threshold
        assert threshold > 0
        reached = abs(reference.owners()) >= reference.acc.dtype.type(threshold)
        assert outcome.indices.tolist() == np.flatnonzero(reached).tolist()
        magnitude = abs(reference.acc).astype(np.float64).mean(axis=0)
        update = reference.send(outcome.indices)
        tolerance = (scenario.ranks + 1) * numbers.eps * magnitude + numbers.smallest_subnormal
        assert (abs(outcome.applied[0] - update) <= tolerance).all()
        assert (outcome.applied[0][~reached] == 0).all()
        assert np.array_equal(world.residuals(), reference.acc)


@both_backends
@given(scenario=scenarios(), options=micro_options())
def test_updates_are_bitwise_equal_on_all_ranks(backend, scenario, options):
    world = world_of(scenario, options, backend)
    for gradients in scenario.steps:
        outcome = world.step(gradients)
        updates = {
            (
                None if update.indices is None else to_numpy(update.indices).tobytes(),
                update.threshold,
            )
            for update in outcome.updates
        }
        assert len(updates) == 1
        assert len({vector.tobytes() for vector in outcome.applied}) == 1


@both_backends
@given(scenario=scenarios(steps=3), options=micro_options())
def test_first_round_is_told_in_advance(backend, scenario, options):
    world = world_of(scenario, options, backend)
    for gradients in scenario.steps:
        told = [rank.first_round for rank in world.ranks]
        first = [to_numpy(request.array) for request in world.step(gradients).rounds[0]]
        assert told == [(array.size, array.dtype.name) for array in first]


@both_backends
@given(scenario=scenarios(), options=micro_options(density=1.0, value_dtype=None))
def test_density_1_is_the_dense_average(backend, scenario, options):
    world = world_of(scenario, options, backend)
    numbers = np.finfo(scenario.layout.dtype)
    for gradients in scenario.steps:
        outcome = world.step(gradients)
        vectors = np.array([flat(gradient) for gradient in gradients])
        tolerance = scenario.ranks * numbers.eps * abs(vectors).mean(axis=0) + numbers.smallest_subnormal
        assert (abs(outcome.applied[0] - vectors.mean(axis=0)) <= tolerance).all()
        assert (world.residuals() == 0).all()
        assert outcome.updates[0].threshold == 0
        assert not outcome.messages


@both_backends
@given(scenario=scenarios(steps=6), options=micro_options())
def test_flush_sends_all_that_is_held_back(backend, scenario, options):
    world = world_of(scenario, options, backend)
    books = Books(scenario.layout, scenario.ranks)
    flushed = len(scenario.steps) // 2
    for t, gradients in enumerate(scenario.steps):
        for rank in world.ranks:
            rank.dense = t == flushed
        outcome = world.step(gradients)
        residuals = world.residuals()
        books.check(gradients, outcome, residuals)
        assert not any(rank.dense for rank in world.ranks)
        if t == flushed:
            assert (residuals == 0).all()
            assert not outcome.messages
        elif options["density"] < 1:
            assert outcome.messages


@both_backends
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@settings(max_examples=15)
@given(scenario=scenarios(steps=4), options=micro_options(), flushing=st.booleans(), data=st.data())
def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(backend, bad, scenario, options, flushing, data):
    world = world_of(scenario, options, backend)
    books = Books(scenario.layout, scenario.ranks)
    when = data.draw(st.integers(0, len(scenario.steps) - 1))
    for t, gradients in enumerate(scenario.steps):
        if t == when:
            poisoned = copy.deepcopy(gradients)
            tensor = data.draw(st.sampled_from([g for g in data.draw(st.sampled_from(poisoned)) if g.size]))
            tensor[data.draw(st.integers(0, tensor.size - 1))] = bad
            before = world.residuals() if t else np.zeros_like(Reference(scenario.layout, scenario.ranks).acc)
            estimators = [rank.estimator.state() for rank in world.ranks]
            for rank in world.ranks:
                rank.dense = flushing
            skipped = world.step(poisoned)
            assert skipped.updates == [None] * scenario.ranks
            assert world.residuals().tobytes() == before.tobytes()
            assert [rank.estimator.state() for rank in world.ranks] == estimators
            assert {rank.t for rank in world.ranks} == {t + 1}
            assert all(rank.dense == flushing for rank in world.ranks)
        outcome = world.step(gradients)
        books.check(gradients, outcome, world.residuals())
        if t == when and flushing:
            assert (world.residuals() == 0).all()


@both_backends
@pytest.mark.parametrize("kind", [Allgather, Allreduce])
@given(scenario=scenarios(steps=2), options=micro_options(density=0.1, value_dtype=None))
def test_step_that_fails_in_a_later_round_keeps_the_gradient_in_the_residual(backend, kind, scenario, options):
    *before, gradients = scenario.steps
    world = world_of(scenario, options, backend)
    reference = Reference(scenario.layout, scenario.ranks)
    for earlier in before:
        reference.accumulate(earlier)
        reference.send(world.step(earlier).indices)
    reference.accumulate(gradients)
    steps = [
        rank.step([to_backend(g, backend) for g in gradient], i, scenario.ranks)
        for i, (rank, gradient) in enumerate(zip(world.ranks, gradients, strict=True))
    ]
    requests = [step.send(None) for step in steps]
    # The counts are reduced, once or more; then the indices are gathered, and at last the values reduced.
    gathered = False
    while not (isinstance(requests[0], Allgather) if kind is Allgather else gathered):
        gathered = isinstance(requests[0], Allgather)
        arrays = [request.array for request in requests]
        answer = kernels_for(arrays[0]).join(arrays) if gathered else sum(arrays)
        requests = [step.send(answer) for step in steps]
    assert isinstance(requests[0], kind)
    for step in steps:
        with pytest.raises(ConnectionError):
            step.throw(ConnectionError())
    assert np.array_equal(world.residuals(), reference.acc)


def large_values(ranks):
    return [[np.array([1e6, -1e6, 7e4, 6e4, 1.0], np.float32)] for _ in range(ranks)]


@both_backends
@narrow_dtypes
@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 18, 50, 64, 100, 257])
def test_large_values_in_a_narrow_dtype_stay_finite(backend, value_dtype, density, ranks):
    layout = FlatLayout.flat(5)
    world = World(lambda layout: MiCRO(layout, density, value_dtype=value_dtype), layout, ranks, backend)
    books = Books(layout, ranks)
    for _ in range(3):
        with np.errstate(over="ignore"):  # a failure of the assertion says more
            outcome = world.step(large_values(ranks))
        assert np.isfinite(outcome.applied[0]).all()
        assert np.isfinite(world.residuals()).all()
        books.check(large_values(ranks), outcome, world.residuals())


@both_backends
@narrow_dtypes
@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_large_values_in_a_narrow_dtype_arrive_in_the_end(backend, value_dtype, density, ranks):
    layout = FlatLayout.flat(5)
    world = World(lambda layout: MiCRO(layout, density, value_dtype=value_dtype), layout, ranks, backend)
    world.step(large_values(ranks))
    nothing = [[np.zeros(5, np.float32)] for _ in range(ranks)]
    for _ in range(200):
        world.step(nothing)
    assert (world.residuals() == 0).all()


@both_backends
@narrow_dtypes
@pytest.mark.parametrize("ranks", [2, 4])
def test_narrow_dtype_halves_the_bytes_of_the_values(backend, value_dtype, ranks):
    """What a rank sends in an allreduce of B bytes is 2 (n - 1) / n B; bfloat16 does it in two halves."""
    layout = FlatLayout.flat(1000)
    gradients = make_gradients(np.random.default_rng(0), "normal", layout, ranks)
    world = World(lambda layout: MiCRO(layout, 0.1, value_dtype=value_dtype), layout, ranks, backend)
    outcome = world.step(gradients)
    at = next(i for i, requests in enumerate(outcome.rounds) if isinstance(requests[0], Allgather))
    arrays = [to_numpy(requests[0].array) for requests in outcome.rounds[at + 1 :]]
    values = 2 * len(outcome.indices)
    padding = 2 * ranks
    if value_dtype == "float16":
        assert [array.nbytes for array in arrays] == [values]
    else:
        scattered, gathered = (array.nbytes for array in arrays)
        assert values <= scattered < values + padding
        assert gathered * ranks == scattered


@both_backends
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_bfloat16_conserves_all_that_it_rounds_off(backend, ranks):
    """All: what is rounded off the sum as well; but for the roundings of the layout's own dtype."""
    layout = FlatLayout.flat(200, "float64")
    world = World(lambda layout: MiCRO(layout, 0.1, value_dtype="bfloat16"), layout, ranks, backend)
    gradients = make_gradients(np.random.default_rng(0), "normal", layout, ranks)
    outcome = world.step(gradients)
    (applied, *_), residual = outcome.applied, world.residuals().mean(axis=0)
    assert (residual[outcome.indices] != 0).any()
    vectors = np.array([flat(gradient) for gradient in gradients])
    np.testing.assert_allclose(applied + residual, vectors.mean(axis=0), rtol=0, atol=1e-14)
    exact = vectors.mean(axis=0)[outcome.indices]
    assert (abs(applied[outcome.indices] - exact) <= 2.0**-8 * 2 * abs(vectors[:, outcome.indices]).mean(axis=0)).all()


@both_backends
@given(scenario=scenarios(), options=micro_options())
def test_memory_of_the_gradient_may_be_the_steps(backend, scenario, options):
    beside, in_place = (world_of(scenario, options, backend, in_place=place) for place in (False, True))
    for gradients in scenario.steps:
        assert np.array_equal(beside.step(gradients).applied, in_place.step(gradients).applied)
        assert np.array_equal(beside.residuals(), in_place.residuals())


@both_backends
@pytest.mark.parametrize("threshold", ["adaptive", "paper"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_layout_without_elements_takes_steps(backend, threshold, ranks):
    layout = FlatLayout([TensorSpec("empty", (0, 3), "float32")])
    world = World(lambda layout: MiCRO(layout, threshold=threshold), layout, ranks, backend)
    for _ in range(3):
        outcome = world.step([[np.empty(0, np.float32)] for _ in range(ranks)])
        assert outcome.indices.size == 0
