"""The threshold estimators: does the number of selected elements meet k, and what does the selection capture?"""

from __future__ import annotations

import json
from math import sqrt

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from worlds import Reference, World, make_gradients, scenarios, to_numpy

from horovod_sparse.core import FlatLayout, MiCRO, TensorSpec

RANKS = 4
LAYERS = (30_000, 5_000, 25_000, 1, 999, 20_000)
LAYOUT = FlatLayout(TensorSpec(f"layer{i}", (size,), "float32") for i, size in enumerate(LAYERS))


def layered(rng, scales, draw=np.random.Generator.standard_normal):
    """A step's gradients, each layer with a scale of its own."""
    return [
        [(scale * draw(rng, size)).astype(np.float32) for scale, size in zip(scales, LAYERS, strict=True)]
        for _ in range(RANKS)
    ]


def student(freedom):
    return lambda rng, size: rng.standard_t(freedom, size)


def half_zeros(rng, size):
    return rng.standard_normal(size) * (rng.random(size) < 0.5)


DISTRIBUTIONS = {
    "normal": np.random.Generator.standard_normal,
    "laplace": lambda rng, size: rng.laplace(size=size),
    "student-2": student(2),
    "cauchy": student(1),
    "lognormal": lambda rng, size: rng.lognormal(sigma=2, size=size),
    "uniform": lambda rng, size: rng.uniform(-1, 1, size),
    "half zeros": half_zeros,
}
EVEN = (1.0,) * len(LAYERS)
UNEVEN = (0.1, 10.0, 1.0, 1.0, 5.0, 0.3)


def run(density, steps):
    """For each of the steps' gradients: its number, the outcome, and the owners' accumulators that it selects from."""
    world = World(lambda layout: MiCRO(layout, density), LAYOUT, RANKS)
    reference = Reference(LAYOUT, RANKS)
    for t, gradients in enumerate(steps):
        outcome = world.step(gradients)
        reference.accumulate(gradients)
        owners = reference.owners()
        reference.send(outcome.indices)
        yield t, outcome, owners


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("scales", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_adaptive_density_is_within_10_percent_from_the_third_step_on(distribution, scales):
    rng = np.random.default_rng(1)
    steps = [layered(rng, scales, DISTRIBUTIONS[distribution]) for _ in range(6)]
    for t, outcome, _ in run(0.01, steps):
        if t >= 2:
            assert len(outcome.indices) / LAYOUT.numel == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e-3, 1e4, 1e30])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
def test_adaptive_density_is_within_10_percent_at_any_scale(scale, density):
    rng = np.random.default_rng(2)
    steps = [layered(rng, [scale * s for s in UNEVEN]) for _ in range(5)]
    for t, outcome, _ in run(density, steps):
        if t >= 2:
            assert len(outcome.indices) / LAYOUT.numel == pytest.approx(density, rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 10, 1e-6, 1e6])
@pytest.mark.parametrize("scale", [1e-8, 1, 1e4])
def test_adaptive_density_is_within_10_percent_three_steps_after_a_jump_of_the_scale(scale, factor):
    rng = np.random.default_rng(3)
    jump = 4
    steps = [layered(rng, [scale * s * (factor if t >= jump else 1) for s in UNEVEN]) for t in range(jump + 6)]
    for t, outcome, _ in run(0.01, steps):
        if 2 <= t < jump or t >= jump + 3:
            assert len(outcome.indices) / LAYOUT.numel == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_adaptive_density_is_within_10_percent_in_the_very_first_step(distribution):
    steps = [layered(np.random.default_rng(4), UNEVEN, DISTRIBUTIONS[distribution])]
    for _, outcome, _ in run(0.01, steps):
        assert len(outcome.indices) / LAYOUT.numel == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_steady_gradients_take_three_rounds_without_a_search_for_the_threshold(distribution):
    rng = np.random.default_rng(9)
    steps = [layered(rng, UNEVEN, DISTRIBUTIONS[distribution]) for _ in range(10)]
    for t, outcome, _ in run(0.01, steps):
        assert len(outcome.rounds) == 3 or t < 7


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_selection_captures_at_least_95_percent_of_what_the_exact_shared_threshold_captures(distribution):
    rng = np.random.default_rng(5)
    # Layers and ranks of different scales: thresholds that are not shared would miss much.
    steps = [
        [[g * np.float32(2.0**rank) for g in gradient] for rank, gradient in enumerate(gradients)]
        for gradients in (layered(rng, UNEVEN, DISTRIBUTIONS[distribution]) for _ in range(6))
    ]
    for _, outcome, owners in run(0.01, steps):
        energies = owners.astype(np.float64) ** 2
        largest = np.sort(energies)[-len(outcome.indices) :]
        assert energies[outcome.indices].sum() >= 0.95 * largest.sum()


FLOATS = {
    dtype: st.one_of(
        st.floats(width=width, allow_nan=False, allow_infinity=False),
        st.floats(width=width, min_value=-(2.0**-120), max_value=2.0**-120),
        st.sampled_from([0.0, 1.0, -1.0, float(limits.max), float(limits.smallest_subnormal), 5e-45, 1e-40]),
    )
    for dtype, width, limits in (("float32", 32, np.finfo("float32")), ("float64", 64, np.finfo("float64")))
}
few_values = st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, 5e-45, 1e-40]), min_size=1, max_size=2)


@st.composite
def adversarial(draw):
    """A step of one rank to a few, whose elements are any finite numbers, often equal ones."""
    dtype = draw(st.sampled_from(sorted(FLOATS)))
    ranks, d = draw(st.integers(1, 5)), draw(st.integers(1, 60))
    elements = draw(st.one_of(st.just(FLOATS[dtype]), few_values.map(st.sampled_from)))
    return [[vector] for vector in draw(arrays(dtype, (ranks, d), elements=elements))]


def vectors(dtype, *values):
    return [[np.array(values, dtype)]]


@given(adversarial(), st.sampled_from([0.001, 0.03, 0.1, 0.5, 0.95]))
@example(vectors("float32", *[np.finfo("float32").max] * 20), 0.1)
@example(vectors("float64", *[np.finfo("float64").max] * 20), 0.1)
@example(vectors("float32", *[1e-45] * 20), 0.1)
@example(vectors("float32", *[5e-45] * 20), 0.1)
@example(vectors("float64", *[5e-322] * 20), 0.1)
@example(vectors("float32", *[2e-45] * 9, *[3e-45] * 9, 1.0), 0.5)
@example(vectors("float32", *[0.0] * 20), 0.1)
@example(vectors("float32", 1e-45, 3e38), 0.5)
@example(vectors("float64", 5e-324, 1e308), 0.5)
def test_adaptive_threshold_is_found_for_any_finite_numbers(gradients, density):
    # Bounded in `World`: a step that goes on asking fails.
    layout = FlatLayout.flat(gradients[0][0].size, gradients[0][0].dtype.name)
    k = max(density * layout.numel, 1)
    world = World(lambda layout: MiCRO(layout, density), layout, len(gradients))
    reference = Reference(layout, len(gradients))
    # A mean of huge numbers may overflow, here as in a dense average.
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(3):
            outcome = world.step(gradients)
            reference.accumulate(gradients)
            if not np.isfinite(reference.acc).all():
                return
            magnitudes = abs(reference.owners()).astype(np.float64)
            reference.send(outcome.indices)
            selected, threshold = len(outcome.indices), outcome.updates[0].threshold
            # Of few elements no count is close to k. But it is no less than half of it, as long as there are elements
            # that are neither 0 nor subnormal; and what exceeds it by more than half are elements as good as equal.
            normal = magnitudes >= np.finfo(layout.dtype).tiny
            assert selected >= min(k / 2, np.count_nonzero(normal))
            assert normal[outcome.indices].all()
            assert np.count_nonzero(magnitudes > 1.001 * threshold) <= max(1.5 * k, k + 1)


def test_adaptive_threshold_raises_no_warning_in_its_search():
    for dtype in ("float32", "float64"):
        for value in (5e-324, 1e-45, 1.0, float(np.finfo(dtype).max)):
            layout = FlatLayout.flat(20, dtype)
            world = World(lambda layout: MiCRO(layout, 0.1), layout, 1)
            with np.errstate(all="raise", under="ignore"):
                world.step([[np.full(20, value, dtype)]])


def published_rule(k, selected):
    """The published thresholds, given the numbers that they selected; and which factors moved them."""
    threshold, factors = 1 / (2 * sqrt(k)), []
    thresholds = [threshold]
    for count in selected:
        e = count / k
        if e > 1.1:
            factors.append(1.005)
        elif 0.909 < e <= 1.1:
            factors.append(1.00125)
        else:
            factors.append(0.995)
        threshold *= factors[-1]
        thresholds.append(threshold)
    return thresholds, factors


@pytest.mark.parametrize("ranks", [1, 3])
def test_paper_threshold_follows_the_published_rule_step_by_step(ranks):
    d, density, steps = 2000, 0.05, 700
    k = density * d
    layout = FlatLayout.flat(d)
    rng = np.random.default_rng(6)
    world = World(lambda layout: MiCRO(layout, density, threshold="paper"), layout, ranks)
    reference = Reference(layout, ranks)
    thresholds, selected = [], []
    for _ in range(steps):
        gradients = [[(0.02 * rng.standard_normal(d)).astype(np.float32)] for _ in range(ranks)]
        reference.accumulate(gradients)
        wanted = published_rule(k, selected)[0][-1]
        reached = np.flatnonzero(abs(reference.owners()) >= np.float32(wanted))
        outcome = world.step(gradients)
        assert outcome.updates[0].threshold == pytest.approx(wanted, rel=1e-12)
        assert np.array_equal(outcome.indices, reached)
        reference.send(reached)
        thresholds.append(wanted)
        selected.append(len(reached))
    factors = published_rule(k, selected)[1]
    assert min(factors.count(factor) for factor in (1.005, 1.00125, 0.995)) >= 20


@pytest.mark.parametrize(("e", "factor"), [(1.1, 1.00125), (1.11, 1.005), (0.909, 0.995), (0.91, 1.00125), (0, 0.995)])
def test_paper_rule_at_the_ends_of_its_branches(e, factor):
    k = 1000
    estimator = MiCRO(FlatLayout.flat(100_000), threshold="paper").estimator

    def threshold():
        step = estimator.estimate(estimator.magnitudes(k), np.empty(0), k, None)
        with pytest.raises(StopIteration) as stop:
            next(step)
        return stop.value.value

    first = threshold()
    assert first == pytest.approx(1 / (2 * sqrt(k)), rel=1e-15)
    estimator.observe(round(e * k), k)
    assert threshold() == pytest.approx(first * factor, rel=1e-15)


@pytest.mark.parametrize("threshold", ["adaptive", "paper"])
@given(scenario=scenarios(steps=6), density=st.sampled_from([0.01, 0.1, 0.5]))
def test_estimator_continues_identically_from_a_saved_state(threshold, scenario, density):
    assert_restored_continues(threshold, scenario.layout, density, scenario.steps)


@pytest.mark.parametrize("threshold", ["adaptive", "paper"])
def test_estimator_continues_identically_from_a_state_saved_after_a_step_of_zeros(threshold):
    layout = FlatLayout.flat(1000)
    rng = np.random.default_rng(8)
    kinds = ["heavy", "heavy", "zeros", "equal", "normal", "normal"]
    # A density at which a step sends all that a gradient of equal elements adds.
    assert_restored_continues(threshold, layout, 0.9, [make_gradients(rng, kind, layout, 1) for kind in kinds])


def assert_restored_continues(threshold, layout, density, steps):
    """Steps of ranks whose estimators are replaced by restored ones before each step are those of ranks left alone."""
    worlds = [World(lambda layout: MiCRO(layout, density, threshold), layout, len(steps[0])) for _ in range(2)]
    for gradients in steps:
        for rank in worlds[1].ranks:
            state = json.loads(json.dumps(rank.estimator.state()))
            rank.estimator = MiCRO(layout, density, threshold).estimator
            rank.estimator.load(state)
        alone, restored = (world.step(gradients) for world in worlds)
        assert restored.updates[0].threshold == alone.updates[0].threshold
        assert np.array_equal(restored.indices, alone.indices)
        assert len(restored.rounds) == len(alone.rounds)
        for one, other in zip(restored.rounds, alone.rounds, strict=True):
            assert to_numpy(one[0].array).tobytes() == to_numpy(other[0].array).tobytes()
