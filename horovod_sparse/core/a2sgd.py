"""A2SGD (arXiv 2006.07405): each rank sends the means of its positive and of its negative gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core.collectives import Allreduce, Array
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.layout import FlatLayout
from horovod_sparse.core.step import SettingError, Step, Update


def check_settings(granularity: str, sync_every: int | None) -> None:
    """Raise SettingError unless A2SGD can work with these settings."""
    if not isinstance(granularity, str) or granularity not in ("model", "tensor"):
        raise SettingError("granularity", granularity, '"model" or "tensor"')
    whole = isinstance(sync_every, int | np.integer) and not isinstance(sync_every, bool)
    if sync_every is not None and not (whole and sync_every >= 1):
        raise SettingError("sync_every", sync_every, "a number of steps >= 1, or None to never average the parameters")


class A2SGD:
    """One rank's A2SGD. Its only state is the step t: the local error is used in the step that made it.

    Args:
        layout: the flat vector of d elements.
        granularity: "model" takes the two means over the whole model, "tensor" over each tensor.

    Raises:
        SettingError: granularity is neither.
    """

    def __init__(self, layout: FlatLayout, granularity: str = "model") -> None:
        check_settings(granularity, None)
        self.layout = layout
        self.granularity = granularity
        self.t = 0

    @property
    def first_round(self) -> tuple[int, str]:
        """Size and dtype of what a step's first round reduces."""
        return 2 if self.granularity == "model" else 2 * len(self.layout.tensors), self.layout.dtype

    def step(
        self, gradient: list[Array], rank: int, world_size: int, out: list[Array] | None = None
    ) -> Step[Update | None]:
        """One step on one rank (A2SGD, algorithm 1).

        With mu+ the mean of g_i over its elements >= 0, mu- the mean of |g_i| over the others,
        enc(g_i) = mu+ [g_i >= 0] - mu- [g_i < 0], and the local error e_i = g_i - enc(g_i), the gradient to apply is
        e_i + Mu+ [g_i >= 0] - Mu- [g_i < 0], where Mu are the means of mu over the ranks: g_i, shifted by two
        constants.

        Args:
            gradient: g_i, the flattened tensors of `layout`, of a floating dtype.
            rank, world_size: i and n.
            out: memory for as many elements, in the layout's dtype, which is the step's from now on; it may be that of
                `gradient`. None: new memory; `gradient` is not modified.

        Returns:
            This rank's gradient, shifted; None if the gradient of some rank was not finite.
        """
        kernels = kernels_for(gradient[0])
        vector = kernels.flat_vector(gradient, self.layout.dtype)
        sums = kernels.sign_sums(vector, self.layout)
        if self.granularity == "model":
            sums = sums.sum(axis=0, keepdims=True)
        means = _means(sums, self._numels())
        total = yield Allreduce(kernels.numbers(means.ravel(), gradient[0], self.layout.dtype))
        self.t += 1
        if not kernels.all_finite(total):
            return None
        global_means = np.array(total.tolist()).reshape(means.shape) / world_size
        shifts = np.broadcast_to(global_means - means, (len(gradient), 2))
        shifted = kernels.shift_by_sign(vector, shifts, out or kernels.empty_like(vector), self.layout)
        return Update(kernels.split(shifted, self.layout))

    def _numels(self) -> NDArray[np.int64]:
        numels = np.array([tensor.numel for tensor in self.layout.tensors])
        return numels.sum(keepdims=True) if self.granularity == "model" else numels


def _means(sums: Any, numels: NDArray[np.int64]) -> NDArray[np.float64]:
    """(mu+, mu-) from rows of `kernels.sign_sums`; NaN where an element is NaN, and so has no sign."""
    positive, positives, negative, negatives = sums.T
    means = np.stack([positive / np.maximum(positives, 1), negative / np.maximum(negatives, 1)], axis=1)
    means[positives + negatives != numels] = np.nan
    return means
