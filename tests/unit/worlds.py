"""Worlds of virtual ranks for the tests: their layouts, their gradients, and a reference to compare with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st

from horovod_sparse.core import Allgather, FlatLayout, TensorSpec, virtual
from horovod_sparse.core.kernels import kernels_for

BACKENDS = ("numpy", "torch")
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1, 1, 9), (40,), (4, 3, 6)]
KINDS = ("normal", "heavy", "mixed", "zeros", "equal", "denormal", "one rank", "one corner")
# Most steps take three rounds. The longest search for a threshold, among all float64 numbers for one that many elements
# are equal to, takes a few more. A step that takes as many as this does not end.
MAX_ROUNDS = 14

Gradient = list[np.ndarray]
"""The flattened tensors of one rank."""


class Scenario(NamedTuple):
    layout: FlatLayout
    ranks: int
    steps: list[list[Gradient]]
    """For each step, the ranks' gradients."""


def to_backend(array: np.ndarray, backend: str) -> Any:
    """A copy of `array`, as a numpy array or as a torch tensor of the same dtype."""
    if backend == "numpy":
        return array.copy()
    return torch.from_numpy(array.astype(np.float64)).to(getattr(torch, array.dtype.name))


def to_numpy(array: Any) -> np.ndarray:
    """A numpy array with the values of `array`; bfloat16, which numpy lacks, becomes float32."""
    if isinstance(array, np.ndarray):
        return array
    return array.float().numpy() if array.dtype == torch.bfloat16 else array.numpy()


def make_gradients(rng: np.random.Generator, kind: str, layout: FlatLayout, ranks: int) -> list[Gradient]:
    """Gradients of a `kind` for all ranks, each tensor in its own dtype."""
    d = layout.numel
    vectors = rng.standard_normal((ranks, d))
    if kind == "heavy":
        vectors = rng.standard_t(1.5, (ranks, d))
    elif kind == "mixed":
        vectors *= 10 ** rng.uniform(-20, 20, (ranks, d))
    elif kind == "zeros":
        vectors *= 0.0  # of either sign
    elif kind == "equal":
        vectors = np.full((ranks, d), vectors[0, :1])
    elif kind == "denormal":
        vectors = rng.integers(-100, 101, (ranks, d)) * float(np.finfo(layout.dtype).smallest_subnormal)
    elif kind == "one rank":
        vectors[1:] = 0
    elif kind == "one corner":
        vectors[:, 3:] = 0
    return [split(layout, vector) for vector in vectors]


def split(layout: FlatLayout, vector: np.ndarray) -> Gradient:
    """`vector` cut into the tensors of `layout`, each in its own dtype."""
    parts = []
    stop = 0
    for spec in layout.tensors:
        start, stop = stop, stop + prod(spec.shape)
        largest = float(ml_dtypes.finfo(spec.dtype).max) / 100
        parts.append(vector[start:stop].clip(-largest, largest).astype(DTYPES[spec.dtype]))
    return parts


def flat(gradient: Gradient) -> np.ndarray:
    """The tensors end to end, in float64."""
    return np.concatenate([g.astype(np.float64) for g in gradient])


@st.composite
def layouts(draw: Callable[..., Any], dtypes: tuple[str, ...] = tuple(DTYPES)) -> FlatLayout:
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5).filter(lambda s: any(map(prod, s))))
    return FlatLayout(TensorSpec(f"layer{i}", s, draw(st.sampled_from(dtypes))) for i, s in enumerate(shapes))


@st.composite
def scenarios(
    draw: Callable[..., Any], kinds: tuple[str, ...] = KINDS, dtypes: tuple[str, ...] = tuple(DTYPES), steps: int = 5
) -> Scenario:
    """Up to `steps` steps on 1 to many ranks, often more than there are elements."""
    layout = draw(layouts(dtypes))
    ranks = draw(st.one_of(st.integers(1, 4), st.integers(5, 12), st.just(60)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=steps))
    return Scenario(layout, ranks, [make_gradients(rng, kind, layout, ranks) for kind in chosen])


def micro_options(**fixed: Any) -> st.SearchStrategy[dict[str, Any]]:
    options = {
        "density": st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.999, 1.0]),
        "threshold": st.sampled_from(["adaptive", "paper"]),
        "value_dtype": st.sampled_from([None, "float16", "bfloat16"]),
    }
    return st.fixed_dictionaries(options | {name: st.just(value) for name, value in fixed.items()})


def bounded(step: Any) -> Iterator[Any]:
    """`step`, which fails if it asks for more rounds than it may need, rather than run for ever."""
    answer = None
    for _ in range(MAX_ROUNDS):
        try:
            request = step.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield request
    raise AssertionError(f"the step has not ended after {MAX_ROUNDS} rounds")


def plain_decode(message: np.ndarray, start: int, dtype: str) -> list[int]:
    """The indices in one rank's message, as `core.indices` describes it."""
    codes = message[4:].tobytes()
    assert int.from_bytes(message[:4].tobytes(), sys.byteorder) == len(codes)
    width = np.dtype(dtype).itemsize
    indices = []
    for i in range(0, len(codes), width):
        code = int.from_bytes(codes[i : i + width], sys.byteorder)
        start += code
        if code != 256**width - 1:
            indices.append(start)
            start += 1
    return indices


@dataclass
class Outcome:
    """What one step did on all ranks."""

    layout: FlatLayout
    updates: list[Any]
    rounds: list[list[Any]]
    applied: list[np.ndarray]
    """For each rank, the gradient to apply: flat, in float64; empty if the step was skipped."""

    @property
    def messages(self) -> list[np.ndarray]:
        """What each rank gathered first: its indices; empty if everything was sent."""
        gathered = [requests for requests in self.rounds if isinstance(requests[0], Allgather)]
        return [to_numpy(request.array) for request in gathered[0]] if gathered else []

    @property
    def indices(self) -> np.ndarray:
        """The indices that were updated."""
        indices = self.updates[0].indices
        return np.arange(self.layout.numel) if indices is None else to_numpy(indices)


class World:
    """Ranks that take their steps together.

    Args:
        in_place: let the steps have the gradients' own memory, where it is of the layout's dtype.
    """

    def __init__(
        self, make: Callable[[FlatLayout], Any], layout: FlatLayout, ranks: int, backend: str = "numpy", in_place=False
    ):
        self.layout = layout
        self.ranks = [make(layout) for _ in range(ranks)]
        self.backend = backend
        self.in_place = in_place

    def step(self, gradients: list[Gradient], rates: list[float] | None = None) -> Outcome:
        given = [[to_backend(g, self.backend) for g in gradient] for gradient in gradients]
        outs: list[Any] = [None] * len(given)
        options = {} if rates is None else {"rates": rates}
        if self.in_place:
            given = [
                [to_backend(g.astype(self.layout.dtype), self.backend) for g in gradient] for gradient in gradients
            ]
            outs = given
        steps = [
            bounded(rank.step(g, i, len(given), out, **options))
            for i, (rank, g, out) in enumerate(zip(self.ranks, given, outs, strict=True))
        ]
        updates, rounds = virtual.run(steps)
        if not self.in_place:
            for before, after in zip(gradients, given, strict=True):
                unchanged = np.array_equal(flat([to_numpy(g) for g in after]), flat(before), equal_nan=True)
                assert unchanged, "the step changed the gradient"
        applied = [self._flat(update) for update in updates] if updates[0] else []
        return Outcome(self.layout, updates, rounds, applied)

    def _flat(self, update: Any) -> np.ndarray:
        arrays = [to_numpy(array) for array in update.gradient]
        assert [array.shape for array in arrays] == [(spec.numel,) for spec in self.layout.tensors]
        assert {array.dtype.name for array in arrays} == {self.layout.dtype}
        return flat(arrays)

    def residuals(self) -> np.ndarray:
        """Shape (ranks, d), a copy."""
        return np.stack([residual_of(rank) for rank in self.ranks])


def residual_of(rank: Any) -> np.ndarray:
    """What one rank holds back: shape (d,), a copy."""
    vector = rank.residual.vector
    parts = kernels_for(vector).split(vector, rank.layout)
    return np.concatenate([to_numpy(part) for part in parts])


class Reference:
    """MiCRO over plain numpy arrays, for given indices: the accumulators of all ranks, shape (ranks, d)."""

    def __init__(self, layout: FlatLayout, ranks: int):
        self.acc = np.zeros((ranks, layout.numel), layout.dtype)
        self.t = 0

    def accumulate(self, gradients: list[Gradient]) -> None:
        for acc, gradient in zip(self.acc, gradients, strict=True):
            acc += flat(gradient).astype(acc.dtype)

    def owned(self, rank: int) -> range:
        """The elements that `rank` owns in this step."""
        ranks, d = self.acc.shape
        number = (rank + self.t) % ranks
        return range(number * d // ranks, (number + 1) * d // ranks)

    def owners(self) -> np.ndarray:
        """For each element, its owner's accumulator: what the ranks select from."""
        values = np.empty_like(self.acc[0])
        for rank, acc in enumerate(self.acc):
            owned = self.owned(rank)
            values[owned.start : owned.stop] = acc[owned.start : owned.stop]
        return values

    def send(self, indices: np.ndarray) -> np.ndarray:
        """The mean update, in float64; afterwards the step is over."""
        update = np.zeros(self.acc.shape[1])
        update[indices] = self.acc[:, indices].astype(np.float64).mean(axis=0)
        self.acc[:, indices] = 0
        self.t += 1
        return update
