"""What a step may ask of the other ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

# A numpy array, or a torch tensor where the gradient is one. Steps treat both alike, through `kernels`.
Array = Any


class Allreduce(NamedTuple):
    """Answered by the sum of `array` over the ranks: the same shape and dtype on every rank."""

    array: Array


class Allgather(NamedTuple):
    """Answered by the ranks' one-dimensional arrays, joined in rank order; their lengths may differ, or be 0."""

    array: Array


class Alltoall(NamedTuple):
    """Answered by what the ranks have for this one: the i-th of n equal parts of `array` is for rank i.

    The array is one-dimensional, of the same length on every rank, a multiple of n.
    """

    array: Array


Collective = Allreduce | Allgather | Alltoall
