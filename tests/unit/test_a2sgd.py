"""The laws of A2SGD, for many virtual ranks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import BACKENDS, World, flat, make_gradients, scenarios, to_numpy

from horovod_sparse.core import A2SGD, Allreduce, FlatLayout, TensorSpec

both_backends = pytest.mark.parametrize("backend", BACKENDS)
granularities = pytest.mark.parametrize("granularity", ["model", "tensor"])


def world_of(scenario, granularity, backend):
    return World(lambda layout: A2SGD(layout, granularity), scenario.layout, scenario.ranks, backend)


def published(vectors):
    """DESIGN: (the gradient to apply, a bound of the means) for each rank, from vectors of shape (ranks, elements)."""
    positive = vectors >= 0
    up = np.array([g[p].mean() if p.any() else 0 for g, p in zip(vectors, positive, strict=True)])[:, None]
    down = np.array([abs(g[~p]).mean() if (~p).any() else 0 for g, p in zip(vectors, positive, strict=True)])[:, None]
    error = vectors - (up * positive - down * ~positive)
    means = up + down
    return error + up.mean() * positive - down.mean() * ~positive, np.broadcast_to(means + means.mean(), error.shape)


def expected(layout, vectors, granularity):
    if granularity == "model":
        return published(vectors)
    parts = [published(part) for part in np.split(vectors, layout.offsets[1:-1], axis=1) if part.size]
    return tuple(np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True))


def roundings(layout, ranks):
    """A tolerance, relative to the gradient and the means: what the wire's dtype rounds off, and the local sums."""
    # The means are rounded to the layout's dtype, added n - 1 times and divided; the shift is rounded and added. The
    # local sums are in float64, with d additions.
    return (ranks + 4) * np.finfo(layout.dtype).eps + layout.numel * np.finfo(np.float64).eps


@both_backends
@granularities
@given(scenario=scenarios())
def test_applied_gradient_is_the_published_one(backend, granularity, scenario):
    world = world_of(scenario, granularity, backend)
    layout = scenario.layout
    for gradients in scenario.steps:
        outcome = world.step(gradients)
        vectors = np.array([flat(gradient) for gradient in gradients])
        wanted, means = expected(layout, vectors, granularity)
        # A mean is rounded to a subnormal on each rank; each shift and each result once more.
        tolerance = roundings(layout, scenario.ranks) * (abs(vectors) + means)
        tolerance += 3 * np.finfo(layout.dtype).smallest_subnormal
        assert (abs(np.array(outcome.applied) - wanted) <= tolerance).all()


@both_backends
@granularities
@given(scenario=scenarios())
def test_equal_gradients_on_all_ranks_are_not_changed(backend, granularity, scenario):
    world = world_of(scenario, granularity, backend)
    layout = scenario.layout
    for gradients in scenario.steps:
        same = [gradients[0]] * scenario.ranks
        outcome = world.step(same)
        vector = flat(gradients[0])
        _, means = expected(layout, np.array([vector]), granularity)
        tolerance = roundings(layout, scenario.ranks) * (abs(vector) + means[0])
        tolerance += 3 * np.finfo(layout.dtype).smallest_subnormal
        assert (abs(np.array(outcome.applied) - vector) <= tolerance).all()


@both_backends
@granularities
@pytest.mark.parametrize("ranks", [1, 4])
def test_payload_does_not_grow_with_the_number_of_elements(backend, granularity, ranks):
    rng = np.random.default_rng(0)
    sizes = set()
    for elements in (1, 10, 1000, 100_000):
        layout = FlatLayout([TensorSpec("a", (elements,), "float32"), TensorSpec("b", (3,), "float32")])
        world = World(lambda layout: A2SGD(layout, granularity), layout, ranks, backend)
        outcome = world.step(make_gradients(rng, "normal", layout, ranks))
        assert len(outcome.rounds) == 1
        assert world.ranks[0].first_round == (to_numpy(outcome.rounds[0][0].array).size, "float32")
        assert all(isinstance(request, Allreduce) for request in outcome.rounds[0])
        sizes |= {to_numpy(request.array).nbytes for request in outcome.rounds[0]}
    assert sizes == {2 * 4 * (1 if granularity == "model" else 2)}


@both_backends
@granularities
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@settings(max_examples=15)
@given(scenario=scenarios(steps=3), data=st.data())
def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(backend, granularity, bad, scenario, data):
    world = world_of(scenario, granularity, backend)
    untouched = world_of(scenario, granularity, backend)
    for t, gradients in enumerate(scenario.steps):
        poisoned = copy.deepcopy(gradients)
        tensor = data.draw(st.sampled_from([g for g in data.draw(st.sampled_from(poisoned)) if g.size]))
        tensor[data.draw(st.integers(0, tensor.size - 1))] = bad
        assert world.step(poisoned).updates == [None] * scenario.ranks
        assert np.array_equal(world.step(gradients).applied, untouched.step(gradients).applied)
        assert {rank.t for rank in world.ranks} == {2 * t + 2}


@both_backends
@granularities
@given(scenario=scenarios())
def test_memory_of_the_gradient_may_be_the_steps(backend, granularity, scenario):
    beside = world_of(scenario, granularity, backend)
    in_place = World(lambda layout: A2SGD(layout, granularity), scenario.layout, scenario.ranks, backend, in_place=True)
    for gradients in scenario.steps:
        assert np.array_equal(beside.step(gradients).applied, in_place.step(gradients).applied)


@both_backends
@granularities
def test_layout_without_elements_takes_a_step(backend, granularity):
    layout = FlatLayout([TensorSpec("empty", (0, 3), "float32")])
    world = World(lambda layout: A2SGD(layout, granularity), layout, 2, backend)
    outcome = world.step([[np.empty(0, np.float32)] for _ in range(2)])
    assert outcome.applied[0].size == 0
