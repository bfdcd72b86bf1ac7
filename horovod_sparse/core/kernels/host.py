"""Kernels over vectors of float32 or float64 in host memory: numba loops, in as many threads as the framework uses.

All of d is touched as few times as can be, by loops that the compiler vectorises or that have no branch to mispredict.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from horovod_sparse.core.layout import FlatLayout
from horovod_sparse.core.partition import Partition, partition

Values = NDArray[np.floating[Any]]
Indices = NDArray[np.integer[Any]]

# TensorFlow takes arrays over without a copy if they are aligned so.
ALIGNMENT = 64
# Elements that are worth a thread of their own: handing work to it takes some 50 microseconds.
GRAIN = 1 << 19
# Elements in which `select` looks for hits at once, and in which `write_sparse` works: they stay in the first cache.
CHUNK = 1024
# Elements that `count_at_least` looks at together when it samples.
LINE = 128
# Elements that `take` prefetches ahead.
AHEAD = 32
BFLOAT16_MAX = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])


def default_thread_count() -> int:
    """As many as OpenMP would use: OMP_NUM_THREADS, or the cores that this process may run on."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


thread_count: Callable[[], int] = default_thread_count
"""How many threads the kernels may use; a front end puts its framework's own number here."""


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """numba's `njit`, with a cache on disk where numba finds a directory for it."""

    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            compiled: Callable[..., Any] = njit(cache=True, **options)(function)
        except RuntimeError:
            compiled = njit(**options)(function)
        return compiled

    return compile


@_compiled()
def _address(array):  # type: ignore[no-untyped-def]
    """Where the array's memory begins: compiled, since numpy takes longer to tell than for a short loop."""
    return array.ctypes.data


class FlatVector:
    """A flat vector that lies in several pieces of memory: one-dimensional arrays of one dtype, end to end."""

    def __init__(self, arrays: Sequence[Values]) -> None:
        self.arrays = list(arrays)
        self.dtype = arrays[0].dtype
        if any(array.dtype != self.dtype or not array.flags.c_contiguous for array in arrays):
            raise ValueError("the arrays must be contiguous and of one dtype")
        self.offsets = np.cumsum([0, *(array.size for array in arrays)])
        self.numel = int(self.offsets[-1])
        # What the compiled loops need: where the pieces are, where each begins and ends, and what they hold.
        addresses = np.array([_address(array) for array in arrays], np.int64)
        self.loop_arguments = (addresses, self.offsets, np.empty(0, self.dtype))


def empty(numel: int, dtype: str) -> Values:
    """An aligned array of any values."""
    itemsize = np.dtype(dtype).itemsize
    memory = np.empty(numel * itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    aligned: Values = memory[start : start + numel * itemsize].view(dtype)
    return aligned


def zeros(layout: FlatLayout, like: Values) -> FlatVector:
    """A vector of zeros in `layout`, in the memory where `like` lies."""
    vector = FlatVector([empty(tensor.numel, layout.dtype) for tensor in layout.tensors])
    put(vector, None, 0.0)
    return vector


def flat_vector(arrays: Sequence[Values], dtype: str) -> FlatVector:
    """One-dimensional arrays end to end, as `dtype`; in their own memory if they can be."""
    numpy_dtype = np.dtype(dtype)
    return FlatVector([np.ascontiguousarray(array, numpy_dtype) for array in arrays])


def empty_like(vector: FlatVector) -> list[Values]:
    """Memory for as many elements."""
    return [empty(array.size, vector.dtype.name) for array in vector.arrays]


def split(vector: FlatVector, layout: FlatLayout) -> list[Values]:
    """The vector's parts, one a tensor, in its own memory."""
    return vector.arrays


def cast(x: Values, dtype: str) -> Values:
    """`x` as `dtype`; `x` itself if it is."""
    return np.asarray(x, dtype)


def beside(x: Any, like: Values, dtype: str) -> Values:
    """A copy of `x` as `dtype`, in the memory where `like` lies."""
    return np.asarray(x).astype(dtype)


def numbers(values: Sequence[float] | NDArray[Any], like: Values, dtype: str) -> Values:
    """A few numbers as an array, in the memory where `like` lies."""
    return np.asarray(values, dtype)


def join(arrays: Sequence[Values]) -> Values:
    """The arrays end to end, in new memory."""
    return np.concatenate(arrays)


# Threads


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """The threads besides the caller's; a forked process has to make its own."""
    return ThreadPoolExecutor(max_workers=max(os.cpu_count() or 1, 1), thread_name_prefix="horovod_sparse")


def _in_threads(kernel: Callable[..., Any], size: int, *arguments: Any, grain: int = GRAIN) -> list[Any]:
    """kernel(start, stop, *arguments), with the elements 0 to `size` cut up among the threads; the results in order."""
    number = min(thread_count(), size // grain)
    if number <= 1:
        return [kernel(0, size, *arguments)]
    first, *rest = (partition(size, number, i) for i in range(number))
    others = [_pool(os.getpid()).submit(kernel, *part, *arguments) for part in rest]
    return [kernel(*first, *arguments), *(other.result() for other in others)]


# The loops. Those over a FlatVector take its `loop_arguments`, and work on its elements `start` to `stop`.


@intrinsic
def _as_pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """An address as a pointer: there is no array type for pieces of memory that are only known when the loop runs."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@_compiled(nogil=True, inline="always")
def _piece(i, start, stop, addresses, offsets, like):  # type: ignore[no-untyped-def]
    """The elements `start` to `stop` that lie in the i-th array, and where they begin in the flat vector."""
    low, high = max(start, offsets[i]), max(min(stop, offsets[i + 1]), start, offsets[i])
    pointer: Any = _as_pointer(addresses[i] + (low - offsets[i]) * like.itemsize)  # type: ignore[call-arg]
    return carray(pointer, (high - low,), like.dtype), low


@_compiled(nogil=True, inline="always")
def _pieces(start, stop, offsets):  # type: ignore[no-untyped-def]
    """The numbers of the arrays in which the elements `start` to `stop` lie."""
    first = np.searchsorted(offsets, start, side="right") - 1
    return range(first, np.searchsorted(offsets, stop, side="left"))


# The sums may be reordered ("reassoc") for the compiler to vectorise them; NaN and infinity keep their meaning.
@_compiled(nogil=True, fastmath={"reassoc"})
def _add_to(gradient, weight, residual, scale):  # type: ignore[no-untyped-def]
    zero = gradient.dtype.type(0)
    total = zero
    for i in range(gradient.size):
        gradient[i] = weight * gradient[i] + scale * residual[i]
        total += gradient[i] * zero
    return total


@_compiled(nogil=True, fastmath={"reassoc"})
def _add(gradient, weight, residual, scale, out):  # type: ignore[no-untyped-def]
    zero = gradient.dtype.type(0)
    total = zero
    for i in range(gradient.size):
        out[i] = weight * gradient[i] + scale * residual[i]
        total += out[i] * zero
    return total


@_compiled(nogil=True)
def _accumulate(start, stop, weights, scales, gradients, residuals, outs, offsets, like):  # type: ignore[no-untyped-def]
    total = like.dtype.type(0)
    for i in _pieces(start, stop, offsets):
        gradient, _ = _piece(i, start, stop, gradients, offsets, like)
        residual, _ = _piece(i, start, stop, residuals, offsets, like)
        # The compiler vectorises only loops whose arrays are known not to overlap.
        if gradients[i] == outs[i]:
            total += _add_to(gradient, weights[i], residual, scales[i])
        else:
            out, _ = _piece(i, start, stop, outs, offsets, like)
            total += _add(gradient, weights[i], residual, scales[i], out)
    return total


def accumulate(
    residual: FlatVector,
    gradient: FlatVector,
    out: Sequence[Values],
    weights: NDArray[np.float64],
    scales: NDArray[np.float64],
    layout: FlatLayout,
) -> tuple[FlatVector, float]:
    """weight * gradient + scale * residual, with both for each tensor; and 0.0, or NaN unless it is finite.

    The sum takes the memory of `out`, which may be the gradient's.
    """
    in_place = all(map(operator.is_, gradient.arrays, out))
    result = gradient if in_place else FlatVector(out)
    addresses = (vector.loop_arguments[0] for vector in (gradient, residual, result))
    factors = weights.astype(result.dtype), scales.astype(result.dtype)
    totals = _in_threads(_accumulate, result.numel, *factors, *addresses, *result.loop_arguments[1:])
    return result, float(sum(totals))


@_compiled(nogil=True, fastmath={"reassoc"})
def _nan_unless_finite(x):  # type: ignore[no-untyped-def]
    zero = x.dtype.type(0)
    total = zero
    for i in range(x.size):
        total += x[i] * zero
    return total


def all_finite(x: Values) -> bool:
    """Whether no element is NaN or infinite."""
    return not np.isnan(_nan_unless_finite(x))


@_compiled(nogil=True)
def _select_from(x, threshold, first, out, count):  # type: ignore[no-untyped-def]
    mask = np.empty(CHUNK, np.uint8)
    words = mask.view(np.uint64)
    for start in range(0, x.size - CHUNK + 1, CHUNK):
        chunk = x[start : start + CHUNK]
        for i in range(CHUNK):
            mask[i] = np.uint8(abs(chunk[i]) >= threshold)
        for i in range(words.size):
            if words[i] != 0:
                for j in range(8 * i, 8 * i + 8):
                    # Always written, kept by moving on: no branch to mispredict.
                    out[count] = first + start + j
                    count += mask[j]
    for i in range(x.size - x.size % CHUNK, x.size):
        out[count] = first + i
        count += abs(x[i]) >= threshold
    return count


@_compiled(nogil=True)
def _add_to_histogram(start, stop, step, magnitudes, histogram, addresses, offsets, like):  # type: ignore[no-untyped-def]
    """Returns how many elements it has looked at: of each `step`, a line."""
    reached = np.empty(LINE + 1, np.int64)
    seen = 0
    for i in _pieces(start, stop, offsets):
        x, first = _piece(i, start, stop, addresses, offsets, like)
        # Sampled lines are `step` elements apart in the flat vector, not in each piece: many pieces may be small.
        line = (first - start) // step * step + start - first
        while line < x.size:
            part = x[max(line, 0) : max(line + LINE, 0)]
            for j in reached[: _select_from(part, magnitudes[0], 0, reached, 0)]:
                histogram[np.searchsorted(magnitudes, abs(part[j]), side="right") - 1] += 1
            seen += part.size
            line += step
    return seen


def count_at_least(x: FlatVector, part: Partition, magnitudes: NDArray[np.float64], stride: int) -> Any:
    """For each magnitude (ascending), how many elements of x's `part` are at least as large.

    With a `stride` > 1 it is an estimate, from every `stride`-th line of 128 elements.
    """
    histogram = np.zeros(magnitudes.size, np.int64)
    if not magnitudes.size or part.start == part.stop:
        return histogram
    typed = magnitudes.astype(x.dtype)
    seen = _add_to_histogram(part.start, part.stop, stride * LINE, typed, histogram, *x.loop_arguments)
    return histogram[::-1].cumsum()[::-1] * ((part.stop - part.start) / seen)


@_compiled(nogil=True)
def _select(start, stop, begin, threshold, out, addresses, offsets, like):  # type: ignore[no-untyped-def]
    count = 0
    for i in _pieces(begin + start, begin + stop, offsets):
        x, first = _piece(i, begin + start, begin + stop, addresses, offsets, like)
        count = _select_from(x, threshold, first, out[start:], count)
    return out[start : start + count]


def select(x: FlatVector, part: Partition, threshold: float, dtype: str) -> Indices:
    """The positions in the flat vector, ascending, of the elements of x's `part` with |x| >= threshold."""
    size = part.stop - part.start
    out = np.empty(size + 1, dtype)  # memory that is never written is never really taken
    selected = _in_threads(_select, size, part.start, x.dtype.type(threshold), out, *x.loop_arguments)
    return np.concatenate(selected)


@intrinsic
def _prefetch(typing_context, address):  # type: ignore[no-untyped-def]
    """Have the memory at an address brought to the cache, to be written: the processor cannot foresee sparse ones."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function: Any = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, kind, "llvm.prefetch.p0"
        )
        builder.call(function, [pointer, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(address), generate


@_compiled(nogil=True)
def _take(start, stop, indices, values, addresses, offsets, like):  # type: ignore[no-untyped-def]
    zero = like.dtype.type(0)
    for i in _pieces(indices[start], indices[stop - 1] + 1, offsets):
        begin, end = offsets[i], offsets[i + 1]
        x, _ = _piece(i, begin, end, addresses, offsets, like)
        while start < stop and indices[start] < end:
            soon = min(start + AHEAD, stop - 1)
            _prefetch(addresses[i] + (indices[soon] - begin) * like.itemsize)  # type: ignore[call-arg]
            j = indices[start] - begin
            values[start] = x[j]
            x[j] = zero
            start += 1


def take(x: FlatVector, indices: Indices | None) -> Values:
    """The elements at ascending `indices`, or all, which are set to 0."""
    if indices is None:
        everything = join(x.arrays)
        put(x, None, 0.0)
        return everything
    values = np.empty(indices.size, x.dtype)
    if indices.size:
        _in_threads(_take, indices.size, indices, values, *x.loop_arguments, grain=GRAIN // 16)
    return values


def put(x: FlatVector, indices: Indices | None, values: Values | float) -> None:
    """x = values at ascending `indices`, or everywhere."""
    bounds = x.offsets if indices is None else np.searchsorted(indices, x.offsets)
    for array, offset, start, stop in zip(x.arrays, x.offsets, bounds, bounds[1:], strict=False):
        place = slice(None) if indices is None else indices[start:stop] - offset
        array[place] = values[start:stop] if isinstance(values, np.ndarray) else values


@_compiled(nogil=True)
def _write_sparse(start, stop, indices, values, addresses, offsets, like):  # type: ignore[no-untyped-def]
    k = np.searchsorted(indices, start)
    for i in _pieces(start, stop, offsets):
        x, first = _piece(i, start, stop, addresses, offsets, like)
        for low in range(0, x.size, 4 * CHUNK):
            high = min(low + 4 * CHUNK, x.size)
            x[low:high] = 0
            while k < indices.size and indices[k] < first + high:
                x[indices[k] - first] = values[k]
                k += 1


def write_sparse(x: FlatVector, indices: Indices | None, values: Values) -> None:
    """x = 0, except `values` at ascending `indices`; or all of `values`."""
    if indices is None:
        put(x, None, values)
    else:
        _in_threads(_write_sparse, x.numel, indices, values, *x.loop_arguments)


@_compiled(nogil=True)
def _encode_gaps(indices, start, largest, out):  # type: ignore[no-untyped-def]
    count = 0
    for index in indices:
        gap = index - start
        while gap >= largest:
            out[count] = largest
            count += 1
            gap -= largest
        out[count] = gap
        count += 1
        start = index + 1
    return count


def encode_gaps(indices: Indices, start: int, dtype: str) -> NDArray[np.uint8]:
    """The codes, as bytes, for ascending `indices` >= `start`: see `core.indices`."""
    largest = int(np.iinfo(dtype).max)
    span = int(indices[-1]) - start if indices.size else 0
    codes = np.empty(indices.size + span // largest, dtype)
    return bytes_of(codes[: _encode_gaps(indices, start, largest, codes)])


@_compiled(nogil=True)
def _decode_gaps(codes, start, largest, out):  # type: ignore[no-untyped-def]
    count = 0
    for code in codes:
        start += np.int64(code)
        out[count] = start
        more = np.int64(code != largest)
        count += more
        start += more
    return count


def decode_gaps(codes: NDArray[np.uint8], start: int, dtype: str, index_dtype: str) -> Indices:
    """The indices of which `encode_gaps` made `codes`; as `index_dtype`."""
    typed = bytes_as(codes, dtype)
    out = np.empty(typed.size + 1, index_dtype)
    return out[: _decode_gaps(typed, start, int(np.iinfo(dtype).max), out)]


def bytes_of(x: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes in the array's memory."""
    return x.view(np.uint8)


def bytes_as(x: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """The numbers of which `bytes_of` took the bytes."""
    return np.frombuffer(x, dtype)  # which need not be aligned


def round_to(values: Values, dtype: str, world_size: int) -> Values:
    """`values` in a narrower `dtype`, clipped so that their sum over the ranks stays finite, however it is rounded."""
    limit = float(np.finfo(dtype).max) / 2 / world_size
    return values.clip(-limit, limit).astype(dtype)


def to_bfloat16(values: Values) -> NDArray[np.uint16]:
    """The bits of `values` as bfloat16, rounded to nearest; what is too large becomes the largest that it can hold."""
    bits = values.clip(-BFLOAT16_MAX, BFLOAT16_MAX).astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[Any], dtype: str) -> Values:
    """The numbers whose bits as bfloat16 are given, as `dtype`."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(dtype)


@_compiled(nogil=True, fastmath={"reassoc"})
def _sign_sums_of(x):  # type: ignore[no-untyped-def]
    zero = x.dtype.type(0)
    positive = negative = 0.0
    positives = negatives = 0
    for i in range(x.size):
        value = np.float64(x[i])
        positive += value if x[i] >= zero else 0.0
        negative -= value if x[i] < zero else 0.0
        positives += np.int64(x[i] >= zero)
        negatives += np.int64(x[i] < zero)
    return positive, positives, negative, negatives


@_compiled(nogil=True)
def _sign_sums(start, stop, addresses, offsets, like):  # type: ignore[no-untyped-def]
    sums = np.zeros((offsets.size - 1, 4))
    for i in _pieces(start, stop, offsets):
        positive, positives, negative, negatives = _sign_sums_of(_piece(i, start, stop, addresses, offsets, like)[0])
        sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3] = positive, positives, negative, negatives
    return sums


def sign_sums(x: FlatVector, layout: FlatLayout) -> NDArray[np.float64]:
    """For each tensor: sum and count of the elements >= 0, sum of magnitudes and count of those < 0."""
    sums: NDArray[np.float64] = sum(_in_threads(_sign_sums, x.numel, *x.loop_arguments))
    return sums


@_compiled(nogil=True)
def _shift_in_place(x, up, down):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        x[i] += up if x[i] >= 0 else down


@_compiled(nogil=True)
def _shift(x, up, down, out):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        out[i] = x[i] + (up if x[i] >= 0 else down)


@_compiled(nogil=True)
def _shift_by_sign(start, stop, shifts, outs, addresses, offsets, like):  # type: ignore[no-untyped-def]
    for i in _pieces(start, stop, offsets):
        x, _ = _piece(i, start, stop, addresses, offsets, like)
        if addresses[i] == outs[i]:
            _shift_in_place(x, shifts[i, 0], -shifts[i, 1])
        else:
            _shift(x, shifts[i, 0], -shifts[i, 1], _piece(i, start, stop, outs, offsets, like)[0])


def shift_by_sign(x: FlatVector, shifts: NDArray[np.float64], out: Sequence[Values], layout: FlatLayout) -> FlatVector:
    """For each tensor, with (up, down) its shifts: x + up where x >= 0, x - down elsewhere, in `out`'s memory."""
    result = FlatVector(out)
    typed = shifts.astype(x.dtype)
    _in_threads(_shift_by_sign, x.numel, typed, result.loop_arguments[0], *x.loop_arguments)
    return result


# `top_k` guesses from each 61st element of a tensor: a prime number, which the rows of a matrix seldom line up with.
SAMPLED = 61


def top_k(x: FlatVector, k: int, dtype: str) -> tuple[Indices, float]:
    """The positions, ascending, of the k elements of largest |x|, the first ones of equal elements; and the least |x|.

    A sample tells from where on to look at elements at all; should it mislead, they are all looked at.
    """
    sample = np.abs(np.concatenate([array[::SAMPLED] for array in x.arrays]))
    expected = k * sample.size / max(x.numel, 1)
    rank = sample.size - 1 - int(expected + 4 * np.sqrt(expected) + 4)
    guess = float(np.partition(sample, rank)[rank]) if rank > 0 else 0.0
    whole = Partition(0, x.numel)
    positions = select(x, whole, guess, dtype)
    if positions.size < k:
        positions = select(x, whole, 0.0, dtype)
    bounds = np.searchsorted(positions, x.offsets)
    parts = zip(x.arrays, x.offsets, bounds, bounds[1:], strict=False)
    magnitudes = np.abs(np.concatenate([array[positions[i:j] - offset] for array, offset, i, j in parts]))
    surplus = positions.size - k
    if surplus:
        least = np.partition(magnitudes, surplus)[surplus]
        kept = magnitudes >= least
        equal = np.flatnonzero(magnitudes == least)
        kept[equal[equal.size - (np.count_nonzero(kept) - k) :]] = False
        positions, magnitudes = positions[kept], magnitudes[kept]
    return positions, float(magnitudes.min(initial=np.inf))


def sum_by_index(indices: Sequence[Indices], values: Sequence[Values]) -> tuple[Indices, Values]:
    """Of sparse vectors, with ascending `indices` each: where any has an entry, ascending, and the sums there."""
    joined = np.concatenate(indices)
    order = np.argsort(joined, kind="stable")  # which merges what is already sorted
    ascending = joined[order]
    first = np.flatnonzero(np.concatenate([[True], ascending[1:] != ascending[:-1]])[: ascending.size])
    return ascending[first], np.add.reduceat(np.concatenate(values)[order], first)


# QSGD


@_compiled(nogil=True, fastmath={"reassoc"})
def _sum_of_squares(x):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@_compiled(nogil=True)
def _round_at_random(x, norm, levels, first, key0, key1, codes):  # type: ignore[no-untyped-def]
    """codes = levels + |x| / norm * levels, with the sign of x, rounded up or down."""
    one, most, step = x.dtype.type(1), x.dtype.type(levels), x.dtype.type(2.0**-24)
    for i in range(x.size):
        # The finaliser of MurmurHash3, with half of the key added before it, half inside.
        bits = np.uint32(np.uint32(first + i) + key0)
        bits = np.uint32((bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B))
        bits = np.uint32(bits + key1)
        bits = np.uint32((bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35))
        bits = np.uint32((bits ^ (bits >> np.uint32(16))) >> np.uint32(8))
        exact = min(abs(x[i]) / norm, one) * most
        level = np.int32(exact)
        level += np.int32(x.dtype.type(np.int32(bits)) * step < exact - x.dtype.type(level))
        codes[i] = np.uint8(levels + level if x[i] >= 0 else levels - level)


@_compiled(nogil=True)
def _pack(codes, bits, out):  # type: ignore[no-untyped-def]
    if bits == 8:
        out[:] = codes[: out.size]
    elif bits == 4:
        pairs = codes.view(np.uint16)
        for i in range(out.size):
            out[i] = np.uint8(pairs[i] | pairs[i] >> 4)
    else:
        fours = codes.view(np.uint32)
        for i in range(out.size):
            out[i] = np.uint8(fours[i] | fours[i] >> 6 | fours[i] >> 12 | fours[i] >> 18)


@_compiled(nogil=True)
def _unpack(packed, bits, codes):  # type: ignore[no-untyped-def]
    if bits == 8:
        codes[: packed.size] = packed
    elif bits == 4:
        pairs = codes.view(np.uint16)
        for i in range(packed.size):
            byte = np.uint16(packed[i])
            pairs[i] = (byte | byte << 4) & np.uint16(0x0F0F)
    else:
        fours = codes.view(np.uint32)
        for i in range(packed.size):
            byte = np.uint32(packed[i])
            fours[i] = (byte | byte << 6 | byte << 12 | byte << 18) & np.uint32(0x03030303)


@_compiled(nogil=True)
def _quantise(start, stop, size, bits, key, norms, out, addresses, offsets, like):  # type: ignore[no-untyped-def]
    levels = 2 ** (bits - 1) - 1
    bucket = np.empty(size, like.dtype)
    codes = np.empty(size, np.uint8)
    largest = np.float64(np.finfo(like.dtype).max)
    for number in range(start, stop):
        low, high = number * size, min((number + 1) * size, offsets[-1])
        for i in _pieces(low, high, offsets):
            x, first = _piece(i, low, high, addresses, offsets, like)
            bucket[first - low : first - low + x.size] = x
        x = bucket[: high - low]
        norm = like.dtype.type(min(np.sqrt(_sum_of_squares(x)), largest)) + _nan_unless_finite(x)
        norms[number] = norm
        codes[high - low :] = levels
        _round_at_random(x, norm if norm > 0 else like.dtype.type(1), levels, low, key[0], key[1], codes)
        _pack(codes, bits, out[low * bits // 8 : (high * bits + 7) // 8])


def quantise(x: FlatVector, bits: int, bucket_size: int, key: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], float]:
    """The message with x in `bits` bits an element, and 0.0, or NaN unless x is finite.

    It begins with the buckets' norms, and goes on with an unsigned number for each element, the lowest bits of a byte
    first: s plus its level, or s minus it where x < 0, with s = 2**(bits - 1) - 1.
    """
    buckets = -(-x.numel // bucket_size)
    norms = np.empty(buckets, x.dtype)
    message = np.empty(norms.nbytes + -(-x.numel * bits // 8), np.uint8)
    arguments = (bucket_size, bits, key, norms, message[norms.nbytes :], *x.loop_arguments)
    _in_threads(_quantise, buckets, *arguments, grain=-(-GRAIN // bucket_size))
    message[: norms.nbytes] = bytes_of(norms)
    return message, _nan_unless_finite(norms)


@_compiled(nogil=True)
def _dequantised_mean(start, stop, size, bits, norms, messages, outs, offsets, like):  # type: ignore[no-untyped-def]
    levels = like.dtype.type(2 ** (bits - 1) - 1)
    total = np.empty(size, like.dtype)
    codes = np.empty(size, np.uint8)
    ranks = messages.shape[0]
    begin = norms[0].size * norms.itemsize
    for number in range(start, stop):
        low, high = number * size, min((number + 1) * size, offsets[-1])
        total[:] = 0
        for rank in range(ranks):
            _unpack(messages[rank, begin + low * bits // 8 : begin + (high * bits + 7) // 8], bits, codes)
            scale = norms[rank, number] / levels / like.dtype.type(ranks)
            for j in range(size):
                total[j] += (like.dtype.type(codes[j]) - levels) * scale
        for i in _pieces(low, high, offsets):
            x, first = _piece(i, low, high, outs, offsets, like)
            x[:] = total[first - low : first - low + x.size]


def dequantised_mean(
    messages: NDArray[np.uint8], bits: int, bucket_size: int, out: Sequence[Values], layout: FlatLayout
) -> FlatVector:
    """The mean of the vectors of which `quantise` made `messages`, one a row, in the memory of `out`."""
    result = FlatVector(out)
    buckets = -(-result.numel // bucket_size)
    norms = np.stack([bytes_as(m[: buckets * result.dtype.itemsize], result.dtype.name) for m in messages])
    arguments = (bucket_size, bits, norms, messages, *result.loop_arguments)
    _in_threads(_dequantised_mean, buckets, *arguments, grain=-(-GRAIN // bucket_size))
    return result
