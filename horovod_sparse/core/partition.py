"""Exclusive partitions of the flat vector (MiCRO, section IV-A)."""

from __future__ import annotations

from typing import NamedTuple


class Partition(NamedTuple):
    """Elements `start` to `stop` (exclusive) of the flat vector."""

    start: int
    stop: int


def partition(numel: int, world_size: int, index: int) -> Partition:
    """The `index`-th of `world_size` contiguous partitions of `numel` elements; their sizes differ by at most 1."""
    return Partition(index * numel // world_size, (index + 1) * numel // world_size)


def owned_partition(numel: int, world_size: int, rank: int, step: int) -> Partition:
    """The partition that `rank` owns in `step`: number (rank + step) mod world_size.

    Ownership rotates, so that over `world_size` steps each rank selects once from every part of the model.
    """
    return partition(numel, world_size, (rank + step) % world_size)
