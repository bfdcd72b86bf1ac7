"""The laws of QSGD, for many virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import BACKENDS, World, flat, scenarios, to_backend, to_numpy

from horovod_sparse.core import QSGD, FlatLayout, TensorSpec

both_backends = pytest.mark.parametrize("backend", BACKENDS)
all_bits = pytest.mark.parametrize("bits", [2, 4, 8])
options = st.fixed_dictionaries({"bits": st.sampled_from([2, 4, 8]), "bucket_size": st.sampled_from([4, 32, 512])})


def world_of(scenario, options, backend, **how):
    return World(lambda layout: QSGD(layout, **options), scenario.layout, scenario.ranks, backend, **how)


def bucket_norms(vector, size):
    """The 2-norm of its bucket, for each element of a vector of float64."""
    buckets = np.pad(vector, (0, -len(vector) % size)).reshape(-1, size)
    return np.repeat(np.linalg.norm(buckets, axis=1), size)[: len(vector)]


def plain_decode(message, numel, bits, bucket_size, dtype):
    """Each element's norm, and its level with its sign."""
    buckets = -(-numel // bucket_size)
    split_at = buckets * np.dtype(dtype).itemsize
    norms = np.frombuffer(message[:split_at].tobytes(), dtype).astype(np.float64)
    codes = [byte >> shift & (2**bits - 1) for byte in message[split_at:].tolist() for shift in range(0, 8, bits)]
    return np.repeat(norms, bucket_size)[:numel], np.array(codes[:numel]) - (2 ** (bits - 1) - 1)


@both_backends
@settings(max_examples=20)
@given(scenario=scenarios(steps=3), options=options, in_place=st.booleans())
def test_step_is_the_published_one(backend, scenario, options, in_place):
    world = world_of(scenario, options, backend, in_place=in_place)
    layout, numbers = scenario.layout, np.finfo(scenario.layout.dtype)
    s = 2 ** (options["bits"] - 1) - 1
    for gradients in scenario.steps:
        outcome = world.step(gradients)
        assert len(outcome.rounds) == 2
        rounded = []
        for gradient, message in zip(gradients, outcome.messages, strict=True):
            vector = flat(gradient).astype(layout.dtype).astype(np.float64)
            norms, levels = plain_decode(message, layout.numel, dtype=layout.dtype, **options)
            wanted = bucket_norms(vector, options["bucket_size"])
            assert (abs(norms - wanted) <= 8 * numbers.eps * wanted + numbers.smallest_subnormal).all()
            exact = s * np.divide(vector, norms, out=np.zeros_like(vector), where=norms > 0)
            assert (abs(levels - exact) < 1 + 4 * s * numbers.eps).all()
            assert (levels * vector >= 0).all()
            assert (abs(levels) <= s).all()
            rounded.append(levels * norms / s)
        magnitude = np.abs(rounded).mean(axis=0)
        tolerance = (scenario.ranks + 4) * (numbers.eps * magnitude + s * numbers.smallest_subnormal)
        assert (abs(outcome.applied[0] - np.mean(rounded, axis=0)) <= tolerance).all()
        assert len({applied.tobytes() for applied in outcome.applied}) == 1


@settings(max_examples=20)
@given(scenario=scenarios(steps=2), options=options)
def test_kernels_agree_to_the_bit(scenario, options):
    host, device = (world_of(scenario, options, backend) for backend in BACKENDS)
    for gradients in scenario.steps:
        ours, theirs = host.step(gradients), device.step(gradients)
        if scenario.layout.dtype == "float32":  # sums of squares in float64 may round in another way
            assert np.array_equal(ours.messages, theirs.messages)
            assert np.array_equal(ours.applied, theirs.applied)
        else:
            np.testing.assert_allclose(ours.applied, theirs.applied, rtol=1e-12)


@all_bits
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_payload(bits, dtype):
    for numel in (1, 511, 512, 513, 5000):
        rank = QSGD(FlatLayout.flat(numel, dtype), bits)
        step = rank.step([np.ones(numel, dtype)], 0, 1)
        message = step.send(next(step).array).array
        assert message.nbytes == -(-numel * bits // 8) + np.dtype(dtype).itemsize * -(-numel // 512)


@both_backends
@all_bits
def test_rounding_is_right_on_average_and_within_the_papers_bound(bits, backend):
    """Of many draws, one a step, the mean is the vector, and the variance is no larger than lemma 3.1 allows."""
    numel, size, draws = 100, 64, 3000
    s = 2 ** (bits - 1) - 1
    vector = np.random.default_rng(0).standard_t(3, numel).astype(np.float32)
    rank = QSGD(FlatLayout.flat(numel), bits, size)
    given = to_backend(vector, backend)
    total = np.zeros(numel)
    squared_error = 0.0
    for _ in range(draws):
        step = rank.step([given], 0, 1)
        request = step.send(next(step).array)
        with pytest.raises(StopIteration) as stop:
            step.send(request.array)
        drawn = to_numpy(stop.value.value.gradient[0]).astype(np.float64)
        total += drawn
        squared_error += np.square(drawn - vector)[:size].sum()
    norms = bucket_norms(vector.astype(np.float64), size)
    fraction = s * abs(vector) / norms % 1
    deviation = norms / s * np.sqrt(fraction * (1 - fraction) / draws)
    assert (abs(total / draws - vector) <= 4.5 * deviation + 1e-6 * norms).all()
    assert squared_error / draws <= min(size / s**2, np.sqrt(size) / s) * norms[0] ** 2
    variance = (np.square(norms / s) * fraction * (1 - fraction))[:size].sum()
    assert squared_error / draws == pytest.approx(variance, rel=0.1)


def test_random_numbers_are_reproducible_and_differ_between_elements_steps_ranks_and_models():
    numel = 4096
    ones = np.ones(numel, np.float32)  # each a level of s / sqrt(512), rounded up with the same probability

    def rounded_up(rank, steps, name="flat"):
        algorithm = QSGD(FlatLayout([TensorSpec(name, (numel,), "float32")]), 2)
        for _ in range(steps):
            step = algorithm.step([ones], rank, 4)
            message = step.send(next(step).array).array
        _, levels = plain_decode(message, numel, 2, 512, "float32")
        return levels

    assert np.array_equal(rounded_up(0, 1), rounded_up(0, 1))
    draws = [rounded_up(0, 1), rounded_up(0, 2), rounded_up(1, 1), rounded_up(0, 1, "other")]
    draws += [np.roll(draws[0], 1), np.roll(draws[0], 512)]
    p = 512**-0.5
    assert np.mean(draws[:4]) == pytest.approx(p, rel=0.2)
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert abs(correlation).max() < 5 / np.sqrt(numel)


@both_backends
@settings(max_examples=15)
@given(scenario=scenarios(steps=1), options=options, bad=st.sampled_from([np.nan, np.inf, -np.inf]), data=st.data())
def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(backend, scenario, options, bad, data):
    world = world_of(scenario, options, backend)
    gradients = scenario.steps[0]
    rank = data.draw(st.integers(0, scenario.ranks - 1))
    next(g for g in gradients[rank] if g.size)[-1] = bad
    outcome = world.step(gradients)
    assert outcome.updates == [None] * scenario.ranks
    assert len(outcome.rounds) == 1
    assert {rank.t for rank in world.ranks} == {1}


@both_backends
@all_bits
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -3.0, 1e38])
def test_extreme_values(value, bits, backend):
    """A vector with a single element that is not 0 is its own norm, and arrives as it is."""
    vector = np.zeros(700, np.float32)
    vector[600] = value
    outcome = World(lambda layout: QSGD(layout, bits), FlatLayout.flat(700), 2, backend).step([[vector], [vector]])
    np.testing.assert_allclose(outcome.applied[0], vector, rtol=1e-6, atol=1e-45)
    full = np.full(700, value, np.float32)
    outcome = World(lambda layout: QSGD(layout, bits), FlatLayout.flat(700), 2, backend).step([[full], [full]])
    assert np.isfinite(outcome.applied).all()


@pytest.mark.parametrize("bits", [2, 8])
def test_threads_change_nothing(bits, monkeypatch):
    from horovod_sparse.core.kernels import host

    layout = FlatLayout([TensorSpec("a", (host.GRAIN + 77,), "float32"), TensorSpec("b", (3 * host.GRAIN,), "float32")])
    rng = np.random.default_rng(0)
    gradients = [[rng.standard_normal(spec.numel).astype(np.float32) for spec in layout.tensors] for _ in range(2)]
    outcomes = []
    for threads in (1, 3):
        monkeypatch.setattr(host, "thread_count", lambda threads=threads: threads)
        outcomes.append(World(lambda layout: QSGD(layout, bits), layout, 2).step(gradients))
    assert np.array_equal(outcomes[0].messages, outcomes[1].messages)
    assert np.array_equal(outcomes[0].applied, outcomes[1].applied)
