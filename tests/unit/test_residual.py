"""What is held back follows the learning rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import BACKENDS, World, flat, make_gradients, micro_options, residual_of, scenarios

from horovod_sparse.core import FlatLayout, MiCRO, TopK

both_backends = pytest.mark.parametrize("backend", BACKENDS)
RATES = [1.0, 0.5, 0.1, 0.003, 0.0]


def spread(layout, rates):
    """A vector with each tensor's rate at its elements."""
    return np.repeat(rates, [spec.numel for spec in layout.tensors])


@both_backends
@given(
    scenario=scenarios(kinds=("normal", "heavy", "zeros", "one rank"), steps=6),
    make=st.one_of(
        micro_options(value_dtype=None, density=0.1).map(lambda o: lambda layout: MiCRO(layout, **o)),
        st.just(lambda layout: TopK(layout, 0.1)),
    ),
    data=st.data(),
)
def test_each_gradient_has_its_effect_at_the_learning_rate_of_its_own_step(backend, scenario, make, data):
    """The sum of rate * update, and rate * residual, is that of rate * gradient; a gradient at a rate of 0 has none."""
    layout = scenario.layout
    world = World(make, layout, scenario.ranks, backend)
    came, went, magnitude = (np.zeros(layout.numel) for _ in range(3))
    last = np.zeros(len(layout.tensors))
    for gradients in scenario.steps:
        rates = np.array([data.draw(st.sampled_from(RATES)) for _ in layout.tensors])
        last = np.where(rates > 0, rates, last)
        vectors = np.array([flat(gradient) for gradient in gradients])
        outcome = world.step(gradients, rates.tolist())
        # Before the first rate > 0 there is none to count in: what is held back counts in the first.
        counted = spread(layout, last)
        known = counted > 0
        came += spread(layout, rates) * vectors.mean(axis=0)
        magnitude += counted * abs(vectors).mean(axis=0)
        went += spread(layout, rates) * outcome.applied[0]
        if not known.all():
            return
        held_back = counted * world.residuals().astype(np.float64).mean(axis=0)
        eps = np.finfo(layout.dtype).eps
        tolerance = len(scenario.steps) * (scenario.ranks + 4) * (eps * magnitude + 1e-30)
        assert (abs(went + held_back - came) <= tolerance).all()


@both_backends
@pytest.mark.parametrize("make", [MiCRO, TopK])
def test_without_rates_and_with_equal_ones_nothing_is_rescaled(backend, make):
    layout = FlatLayout.flat(500)
    rng = np.random.default_rng(0)
    plain, equal = (World(lambda layout: make(layout, 0.1), layout, 3, backend) for _ in range(2))
    for _ in range(4):
        gradients = make_gradients(rng, "normal", layout, 3)
        assert np.array_equal(plain.step(gradients).applied, equal.step(gradients, [0.1]).applied)
    assert np.array_equal(plain.residuals(), equal.residuals())


@both_backends
def test_a_learning_rate_that_all_but_vanishes_for_a_while_loses_only_what_was_sent_at_it(backend):
    layout = FlatLayout.flat(500)
    world = World(lambda layout: MiCRO(layout, 0.1), layout, 2, backend)
    gradients = make_gradients(np.random.default_rng(0), "normal", layout, 2)
    nothing = [[np.zeros(500, np.float32)]] * 2
    total = flat(gradients[0]) / 2 + flat(gradients[1]) / 2
    applied = world.step(gradients, [0.1]).applied[0]
    for rate in (1e-9, 1e-9, 0.1, 0.1):
        applied = applied + rate / 0.1 * world.step(nothing, [rate]).applied[0]
    # Two steps, of a tenth of the elements each, were sent while it had all but vanished.
    held_back = world.residuals().mean(axis=0)
    lost = abs(applied + held_back - total) > 1e-4
    assert lost.mean() <= 0.25
    assert np.allclose((applied + held_back)[~lost], total[~lost], atol=1e-4)


@both_backends
def test_a_learning_rate_that_all_but_vanishes_leaves_the_residual_finite(backend):
    layout = FlatLayout.flat(500)
    world = World(lambda layout: MiCRO(layout, 0.1), layout, 2, backend)
    rng = np.random.default_rng(0)
    for rate in (1.0, 1e-30, 1e-38):
        outcome = world.step(make_gradients(rng, "normal", layout, 2), [rate])
        assert outcome.updates[0] is not None
        assert all(np.isfinite(residual_of(rank)).all() for rank in world.ranks)


@both_backends
def test_a_skipped_step_does_not_count_the_residual_at_its_rate(backend):
    layout = FlatLayout.flat(100)
    gradients = make_gradients(np.random.default_rng(0), "normal", layout, 2)
    bad = [[np.full(100, np.nan, np.float32)], gradients[1]]
    skipping, straight = (World(lambda layout: MiCRO(layout, 0.1), layout, 2, backend) for _ in range(2))
    for world in (skipping, straight):
        world.step(gradients, [1.0])
    assert skipping.step(bad, [0.01]).updates == [None, None]
    straight.ranks[0].t = straight.ranks[1].t = 2
    assert np.array_equal(skipping.step(gradients, [0.5]).applied, straight.step(gradients, [0.5]).applied)
