"""The kernels for host memory and for devices: both do what plain numpy does, and steps do not tell them apart."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from worlds import BACKENDS, World, micro_options, scenarios, to_backend, to_numpy

from horovod_sparse.core import A2SGD, FlatLayout, MiCRO, Partition, TensorSpec
from horovod_sparse.core.kernels import host, kernels_for

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
    } - {"FlatVector", "empty", "default_thread_count", "thread_count"}  # of host memory alone
    assert "select" in functions
    assert all(callable(getattr(device, name)) for name in functions)


@st.composite
def pieces(draw, dtype, strategy=vectors, **limits):
    """A few vectors, some of them empty; at least one."""
    return draw(st.lists(strategy(dtype, **limits), min_size=1, max_size=4))


def layout_of(parts):
    return FlatLayout(TensorSpec(f"{i}", part.shape, part.dtype.name) for i, part in enumerate(parts))


def vector_of(side, parts):
    """The parts as one flat vector."""
    return side.kernels.flat_vector([side.array(part) for part in parts], parts[0].dtype.name)


def content(side, vector, parts):
    """What a flat vector holds, as one numpy array."""
    return np.concatenate([to_numpy(part) for part in side.kernels.split(vector, layout_of(parts))])


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request, monkeypatch):
    monkeypatch.setattr(host, "thread_count", lambda: request.param)
    monkeypatch.setattr(host, "GRAIN", 32)
    monkeypatch.setattr(host._in_threads, "__kwdefaults__", {"grain": 4})
    return request.param


several_threads = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@both_backends
@both_dtypes
def test_numbers_beside_and_join(backend, dtype):
    side = on(backend)
    like = side.array(np.ones(2, dtype))
    numbers = side.kernels.numbers([1.5, np.nan], like, dtype)
    joined = to_numpy(side.kernels.join([like, numbers]))
    assert joined.dtype == dtype
    assert np.array_equal(joined, [1, 1, 1.5, np.nan], equal_nan=True)
    beside = side.kernels.beside(np.array([0.5, -2.0]), like, dtype)
    assert type(beside) is type(like)
    assert beside.dtype == like.dtype
    assert beside.tolist() == [0.5, -2.0]


@both_backends
@both_dtypes
def test_zeros_have_the_sizes_of_the_layout(backend, dtype):
    side = on(backend)
    layout = FlatLayout([TensorSpec("a", (2, 3), dtype), TensorSpec("b", (0,), "float16"), TensorSpec("c", (), dtype)])
    parts = side.kernels.split(side.kernels.zeros(layout, side.array(np.zeros(1))), layout)
    assert [len(part) for part in parts] == [6, 0, 1]
    assert all(part.dtype == side.array(np.zeros(1, dtype)).dtype for part in parts)
    assert not any(to_numpy(part).any() for part in parts)


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
@pytest.mark.parametrize("in_place", [True, False])
@several_threads
@given(data=st.data())
def test_accumulate_adds_and_tells_whether_the_sum_is_finite(backend, dtype, in_place, threads, data):
    parts = data.draw(pieces(dtype, moderate))
    residuals = [data.draw(arrays(dtype, part.size, elements=st.sampled_from([0.0, 1.0, -0.5]))) for part in parts]
    factors = st.lists(st.sampled_from([1.0, 2.0, 0.25]), min_size=len(parts), max_size=len(parts))
    weights, scales = np.array(data.draw(factors)), np.array(data.draw(factors))
    pairs = zip(parts, weights, residuals, scales, strict=True)
    sums = np.concatenate([np.dtype(dtype).type(w) * p + np.dtype(dtype).type(s) * r for p, w, r, s in pairs])
    bad = data.draw(st.sampled_from([None, np.nan, np.inf, -np.inf]))
    part = data.draw(st.sampled_from(parts))
    if bad is not None and part.size:
        part[data.draw(st.integers(0, part.size - 1))] = bad
    side = on(backend)
    given = [side.array(part) for part in parts]
    out = given if in_place else [side.array(np.full_like(part, 7)) for part in parts]
    residual, gradient = vector_of(side, residuals), side.kernels.flat_vector(given, dtype)
    acc, nan_unless_finite = side.kernels.accumulate(residual, gradient, out, weights, scales, layout_of(parts))
    assert np.array_equal(content(side, residual, parts), np.concatenate(residuals))
    if bad is None or not part.size:
        assert float(nan_unless_finite) == 0
        assert np.array_equal(content(side, acc, parts), sums)
    else:
        assert np.isnan(float(nan_unless_finite))


@both_backends
@both_dtypes
@several_threads
@given(data=st.data())
def test_count_at_least_counts_elements_as_large_as_a_magnitude(backend, dtype, threads, data):
    parts = data.draw(pieces(dtype, moderate))
    flat = np.concatenate(parts)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, flat.size)] * 2)))
    present = np.concatenate([np.array([0.5, 7.0], dtype), abs(flat)])
    magnitudes = np.unique(data.draw(st.lists(st.sampled_from(present.tolist()), max_size=9)))
    side = on(backend)
    counts = side.kernels.count_at_least(vector_of(side, parts), Partition(start, stop), magnitudes, 1)
    counts = to_numpy(side.kernels.numbers(counts, side.array([0.0]), "float32"))
    assert counts.tolist() == [int((abs(flat[start:stop]) >= m).sum()) for m in magnitudes]


@both_backends
@pytest.mark.parametrize("stride", [2, 5])
def test_count_of_a_sample_is_of_every_stride_th_line_wherever_the_tensors_end(backend, stride):
    rng = np.random.default_rng(0)
    flat = rng.standard_normal(10_000).astype(np.float32)
    side = on(backend)
    magnitudes = np.array([0.5, 1.0, 2.0])
    start, stop = 37, 9_111
    owned = flat[start:stop]
    sample = np.concatenate([owned[i : i + 128] for i in range(0, owned.size, 128 * stride)])
    wanted = [(abs(sample) >= m).sum() * owned.size / sample.size for m in magnitudes]
    for cuts in ([], [1, 2, 3, 40, 45, 5_000], range(0, 10_000, 7)):
        vector = vector_of(side, np.split(flat, cuts))
        counts = side.kernels.count_at_least(vector, Partition(start, stop), magnitudes, stride)
        counts = to_numpy(side.kernels.numbers(counts, side.array([0.0]), "float64"))
        np.testing.assert_allclose(counts, wanted, rtol=1e-6)


@both_backends
@both_dtypes
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@several_threads
@given(data=st.data())
def test_select_gives_the_positions_of_elements_as_large_as_the_threshold(backend, dtype, index_dtype, threads, data):
    parts = data.draw(pieces(dtype))
    flat = np.concatenate(parts)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, flat.size)] * 2)))
    threshold = data.draw(st.sampled_from([1.0, 1e-45, 2.0, 0.3]))
    side = on(backend)
    selected = side.kernels.select(vector_of(side, parts), Partition(start, stop), threshold, index_dtype)
    assert to_numpy(selected).dtype == index_dtype
    wanted = start + np.flatnonzero(abs(flat[start:stop]) >= flat.dtype.type(threshold))
    assert to_numpy(selected).tolist() == wanted.tolist()


@both_backends
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("density", [0.0, 0.003, 0.1, 1.0])
def test_select_from_more_elements_than_it_looks_at_together(backend, size, density):
    rng = np.random.default_rng(size)
    x = np.where(rng.random(size) < density, -2.0, 0.5).astype(np.float32)
    side = on(backend)
    selected = side.kernels.select(vector_of(side, [x]), Partition(0, size), 1.0, "int32")
    assert to_numpy(selected).tolist() == np.flatnonzero(x < -1).tolist()


@both_backends
@both_dtypes
@several_threads
@given(data=st.data())
def test_take_put_and_write_sparse(backend, dtype, threads, data):
    parts = data.draw(pieces(dtype, moderate))
    flat = np.concatenate(parts)
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, flat.size - 1)))) if flat.size else [], np.int32)
    values = np.arange(1, indices.size + 1, dtype=dtype)
    side = on(backend)
    vector = vector_of(side, parts)
    rest = flat.copy()
    rest[indices] = 0
    sparse = np.zeros_like(flat)
    sparse[indices] = values

    assert np.array_equal(to_numpy(side.kernels.take(vector, side.array(indices))), flat[indices])
    assert np.array_equal(content(side, vector, parts), rest)
    side.kernels.put(vector, side.array(indices), side.array(values))
    assert np.array_equal(content(side, vector, parts), rest + sparse)
    side.kernels.write_sparse(vector, side.array(indices), side.array(values))
    assert np.array_equal(content(side, vector, parts), sparse)
    assert np.array_equal(to_numpy(side.kernels.take(vector, None)), sparse)
    assert not content(side, vector, parts).any()
    side.kernels.write_sparse(vector, None, side.array(flat))
    assert np.array_equal(content(side, vector, parts), flat)
    side.kernels.put(vector, None, 0.0)
    assert not content(side, vector, parts).any()


@both_backends
@both_dtypes
@several_threads
@given(data=st.data())
def test_sign_sums_are_those_of_the_elements_of_either_sign(backend, dtype, threads, data):
    parts = data.draw(pieces(dtype, moderate))
    side = on(backend)
    sums = side.kernels.sign_sums(vector_of(side, parts), layout_of(parts))
    assert sums.shape == (len(parts), 4)
    for part, (positive, positives, negative, negatives) in zip(parts, sums, strict=True):
        wide = part.astype(np.float64)
        above = wide >= 0
        assert (positives, negatives) == (above.sum(), (~above).sum())
        assert positive == pytest.approx(wide[above].sum(), rel=1e-13)
        assert negative == pytest.approx(-wide[~above].sum(), rel=1e-13)


@both_backends
@both_dtypes
@pytest.mark.parametrize("in_place", [True, False])
@several_threads
@given(data=st.data())
def test_shift_by_sign_is_exact_in_the_dtype_of_the_vector(backend, dtype, in_place, threads, data):
    parts = data.draw(pieces(dtype, moderate))
    shifts = np.random.default_rng(0).standard_normal((len(parts), 2))
    side = on(backend)
    given = [side.array(part) for part in parts]
    out = given if in_place else [side.array(np.full_like(part, 7)) for part in parts]
    vector = side.kernels.flat_vector(given, dtype)
    shifted = content(side, side.kernels.shift_by_sign(vector, shifts, out, layout_of(parts)), parts)
    kind = np.dtype(dtype).type
    wanted = [np.where(x >= 0, x + kind(up), x - kind(down)) for x, (up, down) in zip(parts, shifts, strict=True)]
    assert np.array_equal(shifted, np.concatenate(wanted))


@both_backends
@given(data=st.data())
def test_bfloat16_is_the_nearest_one_and_never_infinite(backend, data):
    x = data.draw(vectors("float32"))
    side = on(backend)
    bits = side.kernels.to_bfloat16(side.array(x))
    assert bits.itemsize == 2
    rounded = to_numpy(side.kernels.from_bfloat16(bits, "float32"))
    largest = float(ml_dtypes.finfo("bfloat16").max)
    with np.errstate(over="ignore"):
        nearest = x.clip(-largest, largest).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(rounded, nearest)
    assert np.isfinite(rounded).all()


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(host, "thread_count", lambda: 2)
    gradient = np.ones(4 * host.GRAIN, np.float32)

    def total():
        return host.sign_sums(host.flat_vector([gradient], "float32"), FlatLayout.flat(gradient.size))[0, 0]

    assert total() == gradient.size
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(total()))
    child.start()
    assert queue.get(timeout=30) == gradient.size
    child.join(30)


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
