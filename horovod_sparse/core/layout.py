"""The flat vector: which tensor lies where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from math import prod
from typing import NamedTuple

ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # of the dtypes that gradients may have


class TensorSpec(NamedTuple):
    """A tensor's name, shape and dtype (as the frameworks spell it: "float32", "bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name!r} ({self.dtype}{list(self.shape)})"


def accumulator_dtype(tensors: Iterable[TensorSpec]) -> str:
    """In what dtype gradients are accumulated: "float64" if any tensor has it, else "float32"."""
    return "float64" if any(tensor.dtype == "float64" for tensor in tensors) else "float32"


class FlatLayout:
    """Tensors laid end to end in one vector of `numel` elements, in the order of their names.

    The order is the same on all ranks, in whatever order a rank registers its modules. The vector's own `dtype` is
    `accumulator_dtype` of the tensors.
    """

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        self.tensors: tuple[TensorSpec, ...] = tuple(sorted(tensors))
        self.offsets: tuple[int, ...] = tuple(accumulate((t.numel for t in self.tensors), initial=0))
        self.numel: int = self.offsets[-1]
        self.dtype = accumulator_dtype(self.tensors)

    @classmethod
    def flat(cls, numel: int, dtype: str = "float32") -> FlatLayout:
        """The layout of a single vector."""
        return cls([TensorSpec("flat", (numel,), dtype)])


def first_difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> tuple[str, str] | None:
    """How two lists of tensors differ first: what either has there; None if they are equal."""
    for a, b in zip_longest(ours, theirs):
        if a != b:
            return str(a) if a else "no further tensor", str(b) if b else "no further tensor"
    return None
