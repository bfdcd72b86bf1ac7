"""Partitions of the flat vector."""

from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.core import owned_partition, partition

numels = st.one_of(st.integers(0, 50), st.integers(0, 10**12))
world_sizes = st.integers(1, 300)


@given(numels, world_sizes)
def test_partitions_are_contiguous_exclusive_and_cover_the_vector(numel, world_size):
    stop = 0
    for index in range(world_size):
        part = partition(numel, world_size, index)
        assert part.start == stop <= part.stop
        stop = part.stop
    assert stop == numel


@given(numels, world_sizes)
def test_sizes_of_partitions_differ_by_at_most_1(numel, world_size):
    sizes = {b - a for a, b in (partition(numel, world_size, index) for index in range(world_size))}
    assert max(sizes) - min(sizes) <= 1


@given(numels, world_sizes, st.integers(0, 10**9))
def test_in_every_step_the_ranks_own_all_partitions(numel, world_size, step):
    owned = sorted(owned_partition(numel, world_size, rank, step) for rank in range(world_size))
    assert owned == [partition(numel, world_size, index) for index in range(world_size)]


@given(numels, world_sizes, st.integers(0, 10**9), st.data())
def test_ownership_moves_to_the_next_partition_in_every_step(numel, world_size, step, data):
    rank = data.draw(st.integers(0, world_size - 1))
    for t in (step, step + 1, step + world_size):
        assert owned_partition(numel, world_size, rank, t) == partition(numel, world_size, (rank + t) % world_size)
