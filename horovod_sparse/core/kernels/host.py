"""Kernels over one-dimensional numpy arrays of float32 or float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Vector = NDArray[np.floating[Any]]
Indices = NDArray[np.integer[Any]]


def zeros(like: Vector, numel: int, dtype: str) -> Vector:
    """A vector of zeros, in the memory where `like` lies."""
    return np.zeros(numel, dtype)


def cast(x: Vector, dtype: str) -> Vector:
    """`x` as `dtype`; `x` itself if it is."""
    return np.asarray(x, dtype)


def beside(x: Vector, like: Vector, dtype: str) -> Vector:
    """`x` as `dtype`, in the memory where `like` lies."""
    return np.asarray(x, dtype)


def numbers(values: Sequence[float], like: Vector, dtype: str) -> Vector:
    """A few numbers as a vector, in the memory where `like` lies."""
    return np.asarray(values, dtype)


def join(vectors: list[Vector]) -> Vector:
    """The vectors end to end."""
    return np.concatenate(vectors)


# The sums may be reordered ("reassoc") for the compiler to vectorise them; NaN and infinity keep their meaning. It
# vectorises loops over an index, and only those, with all operands of one dtype.
@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _nan_unless_finite(x):  # type: ignore[no-untyped-def]
    zero = x.dtype.type(0)
    total = zero
    for i in range(x.size):
        total += x[i] * zero
    return total


def all_finite(x: Vector) -> bool:
    """Whether no element is NaN or infinite."""
    return not np.isnan(_nan_unless_finite(x))


def accumulate(residual: Vector, gradient: Vector) -> None:
    """residual += gradient."""
    np.add(residual, gradient, out=residual)


@njit(cache=True, nogil=True)
def _add_histogram(residual, gradient, magnitudes, histogram):  # type: ignore[no-untyped-def]
    lowest = magnitudes[0]
    for i in range(residual.size):
        magnitude = abs(residual[i] + gradient[i])
        if magnitude >= lowest:
            low, high = 1, magnitudes.size
            while low < high:
                middle = (low + high) // 2
                if magnitude >= magnitudes[middle]:
                    low = middle + 1
                else:
                    high = middle
            histogram[low - 1] += 1


def count_at_least(pairs: list[tuple[Vector, Vector]], magnitudes: Vector) -> NDArray[np.int64]:
    """For each magnitude (ascending), how many elements of all residual + gradient pairs are at least as large."""
    histogram = np.zeros(magnitudes.size, np.int64)
    if magnitudes.size:
        for residual, gradient in pairs:
            _add_histogram(residual, gradient, magnitudes.astype(residual.dtype), histogram)
    return histogram[::-1].cumsum()[::-1]


@njit(cache=True, nogil=True)
def _append_selected(x, threshold, first, out):  # type: ignore[no-untyped-def]
    # Always written, kept by moving on: no branch to mispredict.
    count = 0
    for i in range(x.size):
        out[count] = first + i
        count += abs(x[i]) >= threshold
    return count


def select(x: Vector, threshold: float, first: int, dtype: str) -> Indices:
    """`first` + the positions, ascending, of the elements with |x| >= threshold; as integers of `dtype`."""
    out = np.empty(x.size + 1, dtype)  # memory that is never written is never really taken
    count = _append_selected(x, x.dtype.type(threshold), out.dtype.type(first), out)
    selected: Indices = out[:count].copy()
    return selected


def in_ascending_order(indices: Indices) -> Indices:
    """Sort indices that are an ascending sequence up to a rotation."""
    return np.roll(indices, -int(np.argmin(indices))) if indices.size else indices


def gather(x: Vector, indices: Indices) -> Vector:
    """x at `indices`."""
    return x[indices]


def put(x: Vector, indices: Indices | None, values: Vector | float) -> None:
    """x = values at `indices`, or everywhere."""
    x[... if indices is None else indices] = values


def round_to(values: Vector, dtype: str, world_size: int) -> Vector:
    """`values` in a narrower `dtype`, clipped so that their sum over the ranks stays finite, however it is rounded."""
    limit = float(np.finfo(dtype).max) / 2 / world_size
    return values.clip(-limit, limit).astype(dtype)


def write_sparse(gradient: Vector, positions: Indices, values: Vector) -> None:
    """gradient = 0, except `values` at `positions`."""
    gradient.fill(0)
    gradient[positions] = values


def bounds(indices: Indices, offsets: tuple[int, ...]) -> list[int]:
    """Where each tensor's part of ascending `indices` begins, given the tensors' offsets; and the end."""
    starts: list[int] = np.searchsorted(indices, np.asarray(offsets, indices.dtype)).tolist()
    return starts


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sign_sums(x):  # type: ignore[no-untyped-def]
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


def sign_sums(x: Vector) -> tuple[float, int, float, int]:
    """Sum and count of the elements >= 0, sum of magnitudes and count of the elements < 0; sums in float64."""
    sums: tuple[float, int, float, int] = _sign_sums(x)
    return sums


@njit(cache=True, nogil=True)
def _shift(x, up, down, out):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        out[i] = x[i] + (up if x[i] >= 0 else -down)


def shift_by_sign(x: Vector, up: float, down: float, out: Vector) -> None:
    """out = x + up where x >= 0, x - down elsewhere; `out` may be `x`."""
    if x.itemsize < 4:  # numba has no arithmetic for these
        out[:] = np.where(x >= 0, x.astype(np.float32) + up, x.astype(np.float32) - down)
        return
    kind = x.dtype.type
    _shift(x, kind(up), kind(down), out)
