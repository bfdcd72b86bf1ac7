"""MiCRO (arXiv 2310.00967): each rank selects by threshold from a partition of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.core.collectives import Allgather, Allreduce, Array
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.layout import FlatLayout
from horovod_sparse.core.partition import owned_partition
from horovod_sparse.core.step import SettingError, Step
from horovod_sparse.core.threshold import AdaptiveThreshold, Magnitudes, PaperThreshold, ThresholdEstimator

# Counts travel in the dtype of Horovod's tokens, so that Horovod may fuse them; their rounding, beyond 2**24 elements,
# is far below the estimators' own error.
COUNT_DTYPE = "float32"


def check_settings(density: float, threshold: str, value_dtype: str | None) -> None:
    """Raise SettingError unless MiCRO can work with these settings."""
    if (
        isinstance(density, bool)
        or not isinstance(density, int | float | np.integer | np.floating)
        or not 0 < density <= 1
    ):
        raise SettingError("density", density, "a number in (0, 1], the share of the gradient to send in a step")
    if not isinstance(threshold, str) or threshold not in ("adaptive", "paper"):
        raise SettingError("threshold", threshold, '"adaptive" or "paper"')
    if value_dtype is not None and (not isinstance(value_dtype, str) or value_dtype != "float16"):
        raise SettingError("value_dtype", value_dtype, 'None (as accumulated) or "float16"')


@dataclass(frozen=True)
class SparseUpdate:
    """The mean update: `values` at `indices`, ascending, of the flat vector, 0 elsewhere; indices None: everywhere."""

    indices: Array | None
    values: Array
    threshold: float
    """From what magnitude on elements were selected; 0.0 where all were."""

    def write(self, layout: FlatLayout, gradient: list[Array], out: list[Array] | None = None) -> None:
        """Write the update to `out`, by default over the flattened tensors of `gradient`."""
        targets = out or gradient
        if self.indices is None:
            for target, source in zip(targets, layout.split(self.values), strict=True):
                target[:] = source
            return
        kernels = kernels_for(self.values)
        bounds = kernels.bounds(self.indices, layout.offsets)
        for i, target in enumerate(targets):
            part = slice(bounds[i], bounds[i + 1])
            kernels.write_sparse(target, self.indices[part] - layout.offsets[i], self.values[part])


class MiCRO:
    """One rank's state: the residual, shape (d,), the threshold, and the step t.

    Args:
        layout: the flat vector of d elements.
        density: the share of the elements to send in a step, k / d, in (0, 1]; 1 sends all, without indices.
        threshold: the estimator, "adaptive" or "paper" (see `core.threshold`).
        value_dtype: "float16" halves the values' bytes, and what it rounds off stays in the residual; None sends
            them as accumulated.

    Raises:
        SettingError: a setting is none of these.
    """

    def __init__(
        self, layout: FlatLayout, density: float = 0.01, threshold: str = "adaptive", value_dtype: str | None = None
    ) -> None:
        check_settings(density, threshold, value_dtype)
        self.layout = layout
        self.density = density
        self.value_dtype = value_dtype
        self.estimator: ThresholdEstimator = (
            AdaptiveThreshold(layout.dtype) if threshold == "adaptive" else PaperThreshold()
        )
        self.residual: Array | None = None
        self.t = 0
        self.flushing = False
        """Set on all ranks, it makes the next step send everything, unrounded; that step clears it."""

    @property
    def k(self) -> float:
        """The number of elements to select in a step, over all ranks."""
        return max(self.density * self.layout.numel, 1.0)

    @property
    def first_round(self) -> tuple[int, str]:
        """Size and dtype of what a step's first round reduces."""
        return 1 + len(self.estimator.magnitudes(self.k)), COUNT_DTYPE

    def step(self, gradient: list[Array], rank: int, world_size: int) -> Step[SparseUpdate | None]:
        """One step on one rank (MiCRO, algorithm 1).

        Until the first round has shown that the gradients of all ranks are finite, the residual is not touched: a
        step that is skipped leaves it as it was, to the bit. If a later round fails, the residual holds
        acc_i: nothing is lost.

        Args:
            gradient: g_i, the flattened tensors of `layout`, of a floating dtype; not modified.
            rank, world_size: i and n.

        Returns:
            The mean update, the same on all ranks; None if the gradient of some rank was not finite.
        """
        kernels = kernels_for(gradient[0])
        gradient = [kernels.cast(g, self.layout.dtype) for g in gradient]
        if self.residual is None:
            self.residual = kernels.zeros(gradient[0], self.layout.numel, self.layout.dtype)
        residual, k = self.residual, self.k
        owned = owned_partition(self.layout.numel, world_size, rank, self.t)
        owned_pairs = [(residual[p.flat], gradient[p.tensor][p.within]) for p in self.layout.pieces(owned)]

        def count(magnitudes: Magnitudes) -> Array:
            return kernels.numbers(kernels.count_at_least(owned_pairs, magnitudes), residual, COUNT_DTYPE)

        # Is every gradient finite, and how many elements reach the magnitudes that the estimator asks for?
        finite = all(kernels.all_finite(g) for g in gradient)
        magnitudes = self.estimator.magnitudes(k)
        flag = kernels.numbers([0.0 if finite else np.nan], residual, COUNT_DTYPE)
        counts = yield Allreduce(kernels.join([flag, count(magnitudes)]))
        self.t += 1
        if not kernels.all_finite(counts):
            return None

        everything = self.density == 1 or self.flushing
        threshold = 0.0
        if not everything:
            threshold = yield from self.estimator.estimate(magnitudes, counts[1:], k, count)

        for part, g in zip(self.layout.split(residual), gradient, strict=True):
            kernels.accumulate(part, g)  # acc_i = residual_i + g_i, in the residual's place

        if everything:
            indices, values = None, residual
        else:
            own = kernels.select(residual[owned.start : owned.stop], threshold, owned.start, self._index_dtype)
            indices = kernels.in_ascending_order((yield Allgather(own)))
            values = kernels.gather(residual, indices)
            self.estimator.observe(len(indices), k)
        if self.value_dtype is None or self.flushing:
            sent, kept = values, 0.0
        else:
            sent = kernels.round_to(values, self.value_dtype, world_size)
            kept = values - kernels.cast(sent, self.layout.dtype)
        summed = yield Allreduce(sent)
        mean = kernels.cast(summed, self.layout.dtype) / world_size

        kernels.put(residual, indices, kept)
        self.flushing = False
        return SparseUpdate(indices, mean, threshold)

    @property
    def _index_dtype(self) -> str:
        return "int32" if self.layout.numel < 2**31 else "int64"
