"""How ranks find out that they disagree: fingerprints that are summed over the ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.core.agreement import all_the_same, fingerprint

SUBJECTS = st.one_of(st.integers(), st.text(), st.tuples(st.floats(allow_nan=False), st.booleans()))


def summed(subjects, world_size):
    return sum(np.array(fingerprint(s, world_size), np.float32) for s in subjects).tolist()


@given(subject=SUBJECTS, present=st.integers(1, 60), joined=st.integers(0, 3))
def test_ranks_that_are_there_agree(subject, present, joined):
    world_size = present + joined
    assert all_the_same(summed([subject] * present, world_size), present, world_size)


@given(subject=SUBJECTS, other=SUBJECTS, rank=st.integers(0, 59), world_size=st.integers(2, 60))
def test_one_rank_that_differs_is_noticed(subject, other, rank, world_size):
    subjects = [subject] * world_size
    subjects[rank % world_size] = other
    differ = fingerprint(subject, world_size) != fingerprint(other, world_size)  # all but 1 in 65,536 do
    assert all_the_same(summed(subjects, world_size), world_size, world_size) != differ


def test_different_subjects_have_different_fingerprints():
    assert len({tuple(fingerprint(("step", i), 2)) for i in range(1000)}) > 985


@given(subject=SUBJECTS, world_size=st.integers(1, 5000))
def test_sums_are_exact_in_float32_at_any_number_of_ranks(subject, world_size):
    numbers = fingerprint(subject, world_size)
    assert all(world_size * number <= 2**24 for number in numbers)
    assert all_the_same([float(world_size * number) for number in numbers], world_size, world_size)
