"""How ranks find out that they reduce different tensors: bits that are summed over the ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.tensorflow.reduction import IDENTITY_BITS, _pack, _unpack

BITS = st.lists(st.integers(0, 1), min_size=IDENTITY_BITS, max_size=IDENTITY_BITS)


@given(rows=st.lists(BITS, min_size=1, max_size=60))
def test_sums_of_packed_bits_count_the_ranks_that_have_each(rows):
    total = sum(np.array(_pack(row, len(rows)), np.float32) for row in rows)
    counts = _unpack(total.tolist(), len(rows))
    assert counts[:IDENTITY_BITS] == np.sum(rows, axis=0).tolist()
    assert not any(counts[IDENTITY_BITS:])


@given(bits=BITS, ranks=st.integers(1, 5000))
def test_sums_are_exact_at_any_number_of_ranks(bits, ranks):
    packed = _pack(bits, ranks)
    assert all(ranks * number <= 2**24 for number in packed)
    counts = _unpack([float(ranks * number) for number in packed], ranks)
    assert counts[:IDENTITY_BITS] == [ranks * bit for bit in bits]
