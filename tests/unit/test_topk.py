"""The laws of top-k with error feedback, for many virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import BACKENDS, World, flat, make_gradients, plain_decode, residual_of, scenarios, to_backend, to_numpy

from horovod_sparse.core import FlatLayout, TensorSpec, TopK
from horovod_sparse.core.indices import code_dtype
from horovod_sparse.core.kernels import kernels_for

both_backends = pytest.mark.parametrize("backend", BACKENDS)
densities = st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.999, 1.0])


def world_of(scenario, density, backend, **options):
    return World(lambda layout: TopK(layout, density), scenario.layout, scenario.ranks, backend, **options)


def largest(acc, k):
    """The positions, ascending, of the k largest magnitudes; the first of equal ones."""
    return np.sort(np.argsort(-abs(acc), kind="stable")[:k])


class Reference:
    """Top-k over plain numpy arrays: the accumulators of all ranks, shape (ranks, d)."""

    def __init__(self, layout, ranks, density):
        self.acc = np.zeros((ranks, layout.numel), layout.dtype)
        self.k = max(round(density * layout.numel), 1)

    def step(self, gradients):
        """What each rank selects, its k-th magnitude, the mean update in float64, and the magnitude of what it sums."""
        for acc, gradient in zip(self.acc, gradients, strict=True):
            acc += flat(gradient).astype(acc.dtype)
        selections = [largest(acc, self.k) for acc in self.acc]
        sent = np.zeros_like(self.acc, np.float64)
        for acc, row, selected in zip(self.acc, sent, selections, strict=True):
            row[selected] = acc[selected]
            acc[selected] = 0
        thresholds = [abs(row[selected]).min() for row, selected in zip(sent, selections, strict=True)]
        return selections, thresholds, sent.mean(axis=0), abs(sent).mean(axis=0)


@both_backends
@settings(max_examples=20)
@given(scenario=scenarios(), density=densities, in_place=st.booleans())
def test_step_is_the_published_one(backend, scenario, density, in_place):
    world = world_of(scenario, density, backend, in_place=in_place)
    reference = Reference(scenario.layout, scenario.ranks, density)
    numbers = np.finfo(scenario.layout.dtype)
    for gradients in scenario.steps:
        outcome = world.step(gradients)
        assert len(outcome.rounds) == 2
        selections, thresholds, mean, magnitude = reference.step(gradients)
        values = reference.k * np.dtype(scenario.layout.dtype).itemsize
        for message, selected in zip(outcome.messages, selections, strict=True):
            assert plain_decode(message[:-values], 0, code_dtype(density)) == selected.tolist()
        assert outcome.indices.tolist() == sorted(set(np.concatenate(selections).tolist()))
        assert [update.threshold for update in outcome.updates] == thresholds
        tolerance = (scenario.ranks + 1) * numbers.eps * magnitude + numbers.smallest_subnormal
        assert (abs(outcome.applied[0] - mean) <= tolerance).all()
        assert len({applied.tobytes() for applied in outcome.applied}) == 1
        assert np.array_equal(world.residuals(), reference.acc)


@both_backends
@settings(max_examples=20)
@given(scenario=scenarios(steps=4), density=densities)
def test_what_came_in_went_out_or_is_held_back_at_every_step(backend, scenario, density):
    world = world_of(scenario, density, backend)
    numbers = np.finfo(scenario.layout.dtype)
    came = np.zeros((scenario.ranks, scenario.layout.numel))
    magnitude, went = np.zeros((2, scenario.layout.numel))
    for t, gradients in enumerate(scenario.steps):
        outcome = world.step(gradients)
        vectors = np.array([flat(gradient) for gradient in gradients])
        came += vectors
        magnitude += abs(vectors).mean(axis=0)
        went += outcome.applied[0]
        tolerance = (t + 1) * (scenario.ranks + 2) * (numbers.eps * magnitude + numbers.smallest_subnormal)
        assert (abs(went + world.residuals().astype(np.float64).mean(axis=0) - came.mean(axis=0)) <= tolerance).all()


@both_backends
@settings(max_examples=15)
@given(scenario=scenarios(steps=2))
def test_density_one_is_the_dense_mean(backend, scenario):
    world = world_of(scenario, 1.0, backend)
    for gradients in scenario.steps:
        outcome = world.step(gradients)
        vectors = np.array([flat(gradient) for gradient in gradients])
        numbers = np.finfo(scenario.layout.dtype)
        tolerance = scenario.ranks * (numbers.eps * abs(vectors).mean(axis=0) + numbers.smallest_subnormal)
        assert (abs(outcome.applied[0] - vectors.mean(axis=0)) <= tolerance).all()
        assert not world.residuals().any()


@both_backends
@settings(max_examples=15)
@given(scenario=scenarios(steps=2), bad=st.sampled_from([np.nan, np.inf, -np.inf]), data=st.data())
def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(backend, scenario, bad, data):
    world = world_of(scenario, 0.1, backend)
    for gradients in scenario.steps:
        world.step(gradients)
    residuals = world.residuals()
    rank = data.draw(st.integers(0, scenario.ranks - 1))
    next(g for g in gradients[rank] if g.size)[0] = bad
    outcome = world.step(gradients)
    assert outcome.updates == [None] * scenario.ranks
    assert world.residuals().tobytes() == residuals.tobytes()
    assert {rank.t for rank in world.ranks} == {len(scenario.steps) + 1}


@both_backends
@settings(max_examples=15)
@given(scenario=scenarios())
def test_step_whose_messages_are_lost_keeps_the_gradient_in_the_residual(backend, scenario):
    rank = TopK(scenario.layout, 0.1)
    acc = np.zeros(scenario.layout.numel, scenario.layout.dtype)
    for gradients in scenario.steps:
        acc += flat(gradients[0]).astype(acc.dtype)
        step = rank.step([to_backend(g, backend) for g in gradients[0]], 0, 1)
        flag = next(step).array
        step.send(flag)
        with pytest.raises(ConnectionError):
            step.throw(ConnectionError())
        assert np.array_equal(residual_of(rank), acc)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "kind", ["normal", "heavy", "zeros", "equal", "denormal", "one corner", "sampled", "unsampled"]
)
@pytest.mark.parametrize("k", [1, 50, 3000, 10_000])
def test_selection_is_exact_whatever_the_sample_says(kind, k, threads, monkeypatch):
    """In "sampled" and "unsampled", the large elements are those, or are not those, of which the sample is taken."""
    host = kernels_for(np.empty(0))
    monkeypatch.setattr(host, "thread_count", lambda: threads)
    monkeypatch.setattr(host._in_threads, "__kwdefaults__", {"grain": 1000})
    rng = np.random.default_rng(k)
    layout = FlatLayout([TensorSpec("a", (4000,), "float32"), TensorSpec("b", (6000,), "float32")])
    if "sampled" in kind:
        taken = np.concatenate([np.arange(size) % host.SAMPLED == 0 for size in (4000, 6000)])
        vector = rng.standard_normal(10_000).astype(np.float32) * np.where(taken == (kind == "sampled"), 100, 1)
    else:
        vector = flat(make_gradients(rng, kind, layout, 1)[0])
    vector = vector.astype(np.float32)
    for backend in BACKENDS:
        parts = [to_backend(part, backend) for part in (vector[:4000], vector[4000:])]
        kernels = kernels_for(parts[0])
        indices, least = kernels.top_k(kernels.flat_vector(parts, "float32"), k, "int32")
        wanted = largest(vector, k)
        assert np.array_equal(to_numpy(indices), wanted)
        assert least == abs(vector[wanted]).min()


def test_selection_grows_with_the_ranks():
    layout = FlatLayout.flat(10_000)
    rng = np.random.default_rng(0)
    selected = []
    for ranks in (1, 4, 16):
        world = World(lambda layout: TopK(layout, 0.01), layout, ranks)
        outcome = world.step(make_gradients(rng, "normal", layout, ranks))
        selected.append(len(outcome.indices))
    assert selected[0] == 100
    assert 380 <= selected[1] <= 400
    assert 1400 <= selected[2] <= 1600
