"""The kernels for host memory and for devices: both do what plain numpy does, and steps do not tell them apart."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from worlds import BACKENDS, World, micro_options, scenarios, to_backend, to_numpy

from horovod_sparse.core import A2SGD, MiCRO
from horovod_sparse.core.kernels import kernels_for

both_backends = pytest.mark.parametrize("backend", BACKENDS)
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


def on(backend):
    """The kernels of `backend`, and how to hand them a numpy array."""
    kernels = kernels_for(to_backend(np.zeros(1), backend))
    return SimpleNamespace(kernels=kernels, array=lambda array: to_backend(np.asarray(array), backend))


@st.composite
def vectors(draw, dtype, **limits):
    """A vector of few elements, many of which are equal."""
    few = [0.0, -0.0, 1.0, -1.0, 1.5, -2.0, 1e-40, 3e38]
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, **limits)
    few = [value for value in few if abs(value) <= limits.get("max_value", np.inf)]
    return draw(arrays(dtype, st.integers(0, 40), elements=st.one_of(st.sampled_from(few), numbers)))


def moderate(dtype):
    return vectors(dtype, min_value=-(2.0**100), max_value=2.0**100)


@both_backends
def test_kernels_are_picked_by_the_kind_of_array(backend):
    name = {"numpy": "host", "torch": "device"}[backend]
    assert on(backend).kernels.__name__ == f"horovod_sparse.core.kernels.{name}"


def test_both_modules_offer_the_same_functions():
    host, device = (on(backend).kernels for backend in BACKENDS)
    functions = {
        name
        for name, value in vars(host).items()
        if name[0] != "_" and callable(value) and getattr(value, "__module__", "") == host.__name__
    }
    assert "select" in functions
    assert all(callable(getattr(device, name)) for name in functions)


@both_backends
@both_dtypes
def test_zeros_numbers_beside_and_join(backend, dtype):
    side = on(backend)
    like = side.array(np.ones(2, dtype))
    zeros, numbers = side.kernels.zeros(like, 3, dtype), side.kernels.numbers([1.5, np.nan], like, dtype)
    joined = to_numpy(side.kernels.join([zeros, numbers]))
    assert joined.dtype == dtype
    assert np.array_equal(joined, [0, 0, 0, 1.5, np.nan], equal_nan=True)
    beside = side.kernels.beside(np.array([0.5, -2.0]), like, dtype)
    assert type(beside) is type(like)
    assert beside.dtype == like.dtype
    assert beside.tolist() == [0.5, -2.0]


@both_backends
@both_dtypes
@given(data=st.data())
def test_all_finite_tells_any_nan_or_infinity(backend, dtype, data):
    x = data.draw(vectors(dtype))
    side = on(backend)
    assert side.kernels.all_finite(side.array(x))
    if x.size:
        x[data.draw(st.integers(0, x.size - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        assert not side.kernels.all_finite(side.array(x))


@both_backends
@both_dtypes
@given(data=st.data())
def test_count_at_least_counts_elements_as_large_as_a_magnitude(backend, dtype, data):
    residuals = data.draw(st.lists(moderate(dtype), max_size=3))
    gradients = [data.draw(arrays(dtype, r.size, elements=st.sampled_from([0.0, 1.0, -0.5]))) for r in residuals]
    sums = [abs(r + g) for r, g in zip(residuals, gradients, strict=True)]
    present = np.concatenate([np.array([0.5, 7.0], dtype), *sums])
    magnitudes = np.unique(data.draw(st.lists(st.sampled_from(present.tolist()), max_size=9)))
    side = on(backend)
    pairs = [(side.array(r), side.array(g)) for r, g in zip(residuals, gradients, strict=True)]
    counts = to_numpy(
        side.kernels.numbers(side.kernels.count_at_least(pairs, magnitudes), side.array([0.0]), "float32")
    )
    assert counts.tolist() == [sum(int((s >= m).sum()) for s in sums) for m in magnitudes]


@both_backends
@both_dtypes
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@given(data=st.data())
def test_select_gives_the_positions_of_elements_as_large_as_the_threshold(backend, dtype, index_dtype, data):
    x = data.draw(vectors(dtype))
    threshold = data.draw(st.sampled_from([1.0, 1e-45, 2.0, 0.3]))
    first = data.draw(st.integers(0, 1000))
    side = on(backend)
    selected = to_numpy(side.kernels.select(side.array(x), threshold, first, index_dtype))
    assert selected.dtype == index_dtype
    assert selected.tolist() == (first + np.flatnonzero(abs(x) >= x.dtype.type(threshold))).tolist()


@both_backends
@given(st.sets(st.integers(0, 10**6), max_size=30), st.integers(0, 30))
def test_in_ascending_order_sorts_rotated_indices(backend, indices, shift):
    side = on(backend)
    rotated = np.roll(np.array(sorted(indices), np.int32), shift)
    assert to_numpy(side.kernels.in_ascending_order(side.array(rotated))).tolist() == sorted(indices)


@both_backends
@given(st.sets(st.integers(0, 49), max_size=30), st.lists(st.integers(0, 50), max_size=6).map(sorted))
def test_bounds_cut_indices_at_the_offsets_of_the_tensors(backend, indices, inner):
    side = on(backend)
    offsets = (0, *inner, 50)
    bounds = side.kernels.bounds(side.array(np.array(sorted(indices), np.int32)), offsets)
    assert list(bounds) == [sum(i < offset for i in indices) for offset in offsets]


@both_backends
@both_dtypes
@given(data=st.data())
def test_gather_put_accumulate_and_write_sparse(backend, dtype, data):
    x = data.draw(moderate(dtype))
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, x.size - 1)))) if x.size else [], np.int32)
    values = np.arange(1, indices.size + 1, dtype=dtype)
    side = on(backend)
    expected = np.zeros_like(x)
    expected[indices] = values

    assert np.array_equal(to_numpy(side.kernels.gather(side.array(x), side.array(indices))), x[indices])
    target = side.array(np.zeros_like(x))
    side.kernels.put(target, side.array(indices), side.array(values))
    assert np.array_equal(to_numpy(target), expected)
    side.kernels.put(target, None, side.array(x))
    assert np.array_equal(to_numpy(target), x)
    side.kernels.accumulate(target, side.array(x))
    assert np.array_equal(to_numpy(target), x + x)
    side.kernels.write_sparse(target, side.array(indices), side.array(values))
    assert np.array_equal(to_numpy(target), expected)


@both_backends
@both_dtypes
@given(data=st.data())
def test_sign_sums_are_those_of_the_elements_of_either_sign(backend, dtype, data):
    x = data.draw(moderate(dtype))
    side = on(backend)
    wide = x.astype(np.float64)
    above = wide >= 0
    sums = side.kernels.sign_sums(side.array(x))
    assert sums[1] == above.sum()
    assert sums[3] == (~above).sum()
    assert sums[0] == pytest.approx(wide[above].sum(), rel=1e-13)
    assert sums[2] == pytest.approx(-wide[~above].sum(), rel=1e-13)


@both_backends
@both_dtypes
@given(data=st.data())
def test_shift_by_sign_is_exact_in_the_dtype_of_the_vector(backend, dtype, data):
    x = data.draw(moderate(dtype))
    side = on(backend)
    shifted = side.array(x)
    up, down = 0.1, 0.3
    elsewhere = side.array(np.zeros_like(x))
    side.kernels.shift_by_sign(shifted, up, down, elsewhere)
    assert np.array_equal(to_numpy(shifted), x)
    side.kernels.shift_by_sign(shifted, up, down, shifted)
    kind = x.dtype.type
    for result in (shifted, elsewhere):
        assert np.array_equal(to_numpy(result), np.where(x >= 0, x + kind(up), x - kind(down)))


@both_backends
@both_dtypes
@given(data=st.data(), ranks=st.sampled_from([1, 2, 3, 18, 100, 1000]))
def test_round_to_float16_is_nearest_and_its_sum_over_the_ranks_is_finite(backend, dtype, data, ranks):
    x = data.draw(vectors(dtype))
    side = on(backend)
    rounded = to_numpy(side.kernels.round_to(side.array(x), "float16", ranks))
    assert rounded.dtype == np.float16
    small = abs(x) < 30_000 / ranks
    assert np.array_equal(rounded[small], x[small].astype(np.float16))
    assert (np.sign(rounded[~small]) == np.sign(x[~small])).all()
    total = np.zeros_like(rounded)
    for _ in range(ranks):
        total = total + rounded
    assert np.isfinite(total).all()


@given(scenario=scenarios(), options=micro_options())
def test_micro_steps_are_the_same_with_both_kernels(scenario, options):
    worlds = [World(lambda layout: MiCRO(layout, **options), scenario.layout, scenario.ranks, b) for b in BACKENDS]
    for gradients in scenario.steps:
        host, device = (world.step(gradients) for world in worlds)
        assert [type(requests[0]) for requests in host.rounds] == [type(requests[0]) for requests in device.rounds]
        assert host.updates[0].threshold == device.updates[0].threshold
        assert np.array_equal(host.indices, device.indices)
        assert np.array_equal(to_numpy(host.updates[0].values), to_numpy(device.updates[0].values))
        assert np.array_equal(host.applied, device.applied)
        assert np.array_equal(worlds[0].residuals(), worlds[1].residuals())


@pytest.mark.parametrize("granularity", ["model", "tensor"])
@given(scenario=scenarios())
def test_a2sgd_steps_are_the_same_with_both_kernels(granularity, scenario):
    layout = scenario.layout
    worlds = [World(lambda layout: A2SGD(layout, granularity), layout, scenario.ranks, b) for b in BACKENDS]
    for gradients in scenario.steps:
        host, device = (world.step(gradients) for world in worlds)
        # Each sums in an order of its own, in float64; so a mean, sent in the layout's dtype, may be rounded either
        # way.
        means = np.max([to_numpy(request.array) for request in host.rounds[0]], initial=0)
        shift = (means * np.finfo(layout.dtype).eps + np.finfo(layout.dtype).smallest_subnormal) * 2
        difference = abs(np.array(host.applied) - np.array(device.applied))
        assert (difference <= shift + np.finfo(layout.dtype).eps * abs(np.array(host.applied))).all()
