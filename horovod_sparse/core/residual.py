"""What a rank holds back of its gradients: error feedback, in units that outlast loss scales and learning rates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core.collectives import Array
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.layout import FlatLayout

# A schedule does not divide the learning rate by more than this in a step; a residual that it multiplied by more could
# become infinite.
MOST = 1e4


class Residual:
    """The residual of one rank, and the learning rates at which its parts were held back.

    The optimizer multiplies what is sent by the learning rate of the day. What was held back under another one is
    multiplied by the ratio of the two, so that it has the effect that it would have had at once: acc_i = e_i + eta g_i
    in the papers, divided by eta. A tensor whose learning rate is 0 is at rest: its gradient is left out, and what is
    sent of it, which has no effect, stays.

    Where the loss is scaled, the gradients are too. They are divided by that scale as they come in, and what is sent is
    multiplied by it: so what is held back has the units of a loss that is not scaled, whatever the scale of the day.

    Attributes:
        vector: a flat vector of d elements; None before the first step.
        rates: of each tensor; 0 where it is not known.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self.vector: Array | None = None
        self.rates: NDArray[np.float64] = np.zeros(len(layout.tensors))

    def accumulated(
        self,
        gradient: Sequence[Array],
        out: Sequence[Array] | None,
        rates: Sequence[float] | None,
        loss_scale: float,
    ) -> tuple[Array, Array]:
        """acc_i, in the memory of `out` or in new one, and NaN unless it is finite; the residual stays as it is."""
        kernels = kernels_for(gradient[0])
        if self.vector is None:
            self.vector = kernels.zeros(self._layout, gradient[0])
        vector = kernels.flat_vector(gradient, self._layout.dtype)
        new = self._new(rates)
        scales = np.divide(self.rates, new, out=np.ones_like(new), where=(self.rates > 0) & (new > 0))
        weights = np.ones_like(new) if rates is None else np.divide(rates, new, out=np.zeros_like(new), where=new > 0)
        result: tuple[Array, Array] = kernels.accumulate(
            self.vector, vector, out or kernels.empty_like(vector), weights / loss_scale, scales, self._layout
        )
        return result

    def at_rest(self, rates: Sequence[float] | None) -> list[tuple[Array, Array]]:
        """The parts of the residual at rest, each with a copy, for `put_back`."""
        if rates is None or all(rates):
            return []
        parts = kernels_for(self.vector).split(self.vector, self._layout)
        return [(part, part + 0) for part, rate in zip(parts, rates, strict=True) if rate == 0]

    def put_back(self, at_rest: list[tuple[Array, Array]]) -> None:
        for part, copy in at_rest:
            part[...] = copy

    def replace(self, acc: Array, rates: Sequence[float] | None) -> Array:
        """Let the residual be `acc`; returns the memory of the old one."""
        old, self.vector = self.vector, acc
        self.rates = self._new(rates)
        return old

    def _new(self, rates: Sequence[float] | None) -> NDArray[np.float64]:
        """In which rates to count from now on: `rates`, where they are > 0 and not too small."""
        if rates is None:
            return self.rates
        new = np.asarray(rates, np.float64)
        return np.where(new > 0, np.maximum(new, self.rates / MOST), self.rates)
