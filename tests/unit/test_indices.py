"""Indices on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import BACKENDS, plain_decode, to_backend, to_numpy

from horovod_sparse.core import partition
from horovod_sparse.core.indices import code_dtype, decode, encode

both_backends = pytest.mark.parametrize("backend", BACKENDS)
CODES = ("uint8", "uint16", "uint32")


@both_backends
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@given(data=st.data())
def test_what_is_encoded_on_all_ranks_is_decoded_in_ascending_order(backend, code, index_dtype, data):
    ranks = data.draw(st.integers(1, 5))
    numel = data.draw(st.sampled_from([10, 300, 1000, 140_000]))
    step = data.draw(st.integers(0, 7))
    chosen = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=30)))
    starts, messages = [], []
    for rank in range(ranks):
        part = partition(numel, ranks, (rank + step) % ranks)
        own = [i for i in chosen if part.start <= i < part.stop]
        message = encode(to_backend(np.array(own, index_dtype), backend), part.start, code)
        assert plain_decode(to_numpy(message), part.start, code) == own
        starts.append(part.start)
        messages.append(to_numpy(message))
    first = starts.index(0)
    if 0 in [partition(numel, ranks, i).stop for i in range(ranks)]:
        return  # fewer elements than ranks: several start at 0
    decoded = decode(to_backend(np.concatenate(messages), backend), starts, first, code, index_dtype)
    assert to_numpy(decoded).dtype == index_dtype
    assert to_numpy(decoded).tolist() == chosen


@both_backends
@pytest.mark.parametrize(("code", "largest"), [("uint8", 255), ("uint16", 65535)])
def test_gaps_around_the_largest_code(backend, code, largest):
    gaps = [0, 1, largest - 1, largest, largest + 1, 2 * largest - 1, 2 * largest, 3 * largest + 7, 0]
    indices = np.cumsum([gap + 1 for gap in gaps]) + 99
    message = encode(to_backend(indices, backend), 100, code)
    assert plain_decode(to_numpy(message), 100, code) == indices.tolist()
    assert to_numpy(decode(message, [100], 0, code, "int64")).tolist() == indices.tolist()


@pytest.mark.parametrize(("density", "limit"), [(0.1, 1.01), (0.01, 1.3), (0.001, 2.1), (0.0001, 2.1), (1e-6, 4.1)])
def test_bytes_an_index_takes(density, limit):
    """With indices that fall anywhere with the same probability."""
    numel = int(20_000 / density)
    rng = np.random.default_rng(0)
    indices = np.unique(rng.integers(0, numel, 20_000))
    assert len(encode(indices, 0, code_dtype(density))) / len(indices) <= limit


@pytest.mark.parametrize("density", [1.0, 0.5, 0.01, 0.0027, 0.0026, 1e-3, 1e-5, 1e-7])
def test_code_is_the_one_that_takes_the_fewest_bytes(density):
    rng = np.random.default_rng(0)
    gaps = rng.geometric(density, 3000)
    indices = np.cumsum(gaps)
    sizes = {code: len(encode(indices, 0, code)) for code in CODES}
    assert sizes[code_dtype(density)] <= 1.02 * min(sizes.values())
