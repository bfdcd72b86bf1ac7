"""Indices on the wire: the gaps between them, in one or two bytes each.

A rank's message begins with its length in bytes, in 4 bytes, and goes on with codes: unsigned integers of 1, 2 or 4
bytes, all in the byte order of the machine. A code is the number of elements between an index and the one before. The
largest code stands for that many elements, and no index: so a long gap takes several codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1

from horovod_sparse.core.collectives import Array
from horovod_sparse.core.kernels import kernels_for

HEADER = 4


def code_dtype(density: float) -> str:
    """The codes that take the fewest bytes, if indices fall anywhere with the same probability, `density`."""

    def expected_bytes(width: int) -> float:
        return width * (1 + 1 / expm1(min((2 ** (8 * width) - 1) * density, 700.0)))

    return f"uint{8 * min((1, 2, 4), key=expected_bytes)}"


def encode(indices: Array, start: int, dtype: str) -> Array:
    """The message for ascending `indices` >= `start`: an array of bytes."""
    kernels = kernels_for(indices)
    codes = kernels.encode_gaps(indices, start, dtype)
    return kernels.join([kernels.bytes_of(kernels.numbers([len(codes)], indices, "int32")), codes])


def decode(messages: Array, starts: Sequence[int], first: int, dtype: str, index_dtype: str) -> Array:
    """The indices, ascending, of all ranks' messages, joined in rank order.

    Args:
        messages: what `encode` made on each rank.
        starts: the `start` of each rank.
        first: the rank with the smallest; the others follow in turn.
        dtype, index_dtype: of the codes, and of the result.
    """
    kernels = kernels_for(messages)
    parts = []
    begin = 0
    for start in starts:
        end = begin + HEADER + int(kernels.bytes_as(messages[begin : begin + HEADER], "int32")[0])
        parts.append((messages[begin + HEADER : end], start))
        begin = end
    ascending = parts[first:] + parts[:first]
    return kernels.join([kernels.decode_gaps(codes, start, dtype, index_dtype) for codes, start in ascending])
