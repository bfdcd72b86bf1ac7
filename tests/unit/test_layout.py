"""The flat vector."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import DTYPES, SHAPES

from horovod_sparse.core import FlatLayout, TensorSpec
from horovod_sparse.core.layout import first_difference

A = TensorSpec("a", (2, 3), "float32")
B = TensorSpec("b", (), "float16")
C = TensorSpec("c", (0, 4), "float32")
specs = st.lists(
    st.builds(TensorSpec, st.text(max_size=6), st.sampled_from(SHAPES), st.sampled_from(list(DTYPES))),
    unique_by=lambda spec: spec.name,
    max_size=8,
)


@given(specs, st.randoms(use_true_random=False))
def test_layout_does_not_depend_on_the_order_in_which_tensors_are_registered(tensors, rng: random.Random):
    shuffled = list(tensors)
    rng.shuffle(shuffled)
    one, other = FlatLayout(tensors), FlatLayout(iter(shuffled))
    assert one.tensors == other.tensors
    assert one.offsets == other.offsets
    assert [t.name for t in one.tensors] == sorted(t.name for t in tensors)


@given(specs)
def test_tensors_lie_end_to_end(tensors):
    layout = FlatLayout(tensors)
    position = 0
    for i, spec in enumerate(layout.tensors):
        assert layout.offsets[i] == position
        assert spec.numel == np.empty(spec.shape).size
        position += np.empty(spec.shape).size
    assert layout.offsets[-1] == layout.numel == position
    assert len(layout.offsets) == len(tensors) + 1


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["float32"], "float32"),
        (["float16", "bfloat16"], "float32"),
        (["float16", "float64", "float32"], "float64"),
        ([], "float32"),
    ],
)
def test_vector_is_float64_if_any_tensor_is_and_else_float32(dtypes, expected):
    assert FlatLayout(TensorSpec(f"t{i}", (1,), dtype) for i, dtype in enumerate(dtypes)).dtype == expected


def test_flat_is_the_layout_of_one_vector():
    layout = FlatLayout.flat(5, "float64")
    assert (layout.numel, layout.offsets, layout.dtype) == (5, (0, 5), "float64")


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([A], [B], (["'a'", "float32", "[2, 3]"], ["'b'", "float16", "[]"])),
        ([A, B], [A, C], (["'b'"], ["'c'"])),
        ([A, B], [A], (["'b'"], ["no further tensor"])),
        ([], [C], (["no further tensor"], ["'c'", "[0, 4]"])),
        ([A], [A._replace(shape=(6,))], (["[2, 3]"], ["[6]"])),
        ([A], [A._replace(dtype="bfloat16")], (["float32"], ["bfloat16"])),
    ],
)
def test_first_difference_shows_what_either_has_at_the_first_difference(ours, theirs, words):
    difference = first_difference(ours, theirs)
    assert difference is not None
    for text, expected in zip(difference, words, strict=True):
        assert all(word in text for word in expected)


@given(specs)
def test_equal_lists_have_no_first_difference(tensors):
    assert first_difference(tensors, list(tensors)) is None
