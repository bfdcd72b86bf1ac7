"""QSGD (arXiv 1610.02132): each rank sends its gradient with every element rounded at random to a few levels."""

from __future__ import annotations

from itertools import pairwise
from zlib import crc32

import numpy as np

from horovod_sparse.core.collectives import Allgather, Allreduce, Array
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.layout import FlatLayout
from horovod_sparse.core.step import SettingError, Step, Update

# That of Horovod's tokens, so that Horovod may fuse them.
FLAG_DTYPE = "float32"


def check_settings(bits: int) -> None:
    """Raise SettingError unless QSGD can work with this number of bits."""
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer) or bits not in (2, 4, 8):
        raise SettingError("bits", bits, "2, 4 or 8, the bits that an element is sent in, its sign included")


class QSGD:
    """One rank's QSGD. Its only state is the step t: the rounding is right on average, and nothing is held back.

    Args:
        layout: the flat vector of d elements.
        bits: 2, 4 or 8, in which an element is sent: its sign, and one of the levels 0 to s = 2**(bits - 1) - 1.
        bucket_size: consecutive elements, a multiple of 4, that share a norm.

    Raises:
        SettingError: bits is none of these.
    """

    def __init__(self, layout: FlatLayout, bits: int = 4, bucket_size: int = 512) -> None:
        check_settings(bits)
        self.layout = layout
        self.bits = bits
        self.bucket_size = bucket_size
        self.t = 0
        self.dense = False
        """Set on all ranks, it makes the next step send everything, unrounded, by allreduce; that step clears it."""
        self._seed = crc32(repr(layout.tensors).encode())  # other models, other random numbers

    @property
    def first_round(self) -> tuple[int, str]:
        """Size and dtype of what a step's first round reduces."""
        return 1, FLAG_DTYPE

    def step(
        self, gradient: list[Array], rank: int, world_size: int, out: list[Array] | None = None
    ) -> Step[Update | None]:
        """One step on one rank (QSGD, section 3).

        With |g| the 2-norm of an element's bucket, the element x is sent as the integer sign(x) q, where q is
        s |x| / |g|, rounded up or down at random so that it is right on average; each bucket's norm is sent too.
        The gradient to apply is the mean of what the ranks have sent, |g| sign(x) q / s.

        Args:
            gradient: g_i, the flattened tensors of `layout`, of a floating dtype.
            rank, world_size: i and n.
            out: memory for as many elements, in the layout's dtype, which is the step's from now on; it may be that of
                `gradient`. None: new memory; `gradient` is not modified.

        Returns:
            The mean of the rounded gradients, the same on all ranks; None if the gradient of some rank was not finite.
        """
        kernels = kernels_for(gradient[0])
        vector = kernels.flat_vector(gradient, self.layout.dtype)
        key = np.random.SeedSequence([self._seed, self.t, rank]).generate_state(2)
        message, nan_unless_finite = kernels.quantise(vector, self.bits, self.bucket_size, key)
        flag = yield Allreduce(kernels.numbers([nan_unless_finite], gradient[0], FLAG_DTYPE))
        self.t += 1
        if not kernels.all_finite(flag):
            return None
        if self.dense:
            summed = yield Allreduce(kernels.join(kernels.split(vector, self.layout)))
            self.dense = False
            mean = summed / world_size
            return Update([mean[start:stop] for start, stop in pairwise(self.layout.offsets)])
        messages = (yield Allgather(message)).reshape(world_size, -1)
        out = out or kernels.empty_like(vector)
        mean = kernels.dequantised_mean(messages, self.bits, self.bucket_size, out, self.layout)
        return Update(kernels.split(mean, self.layout))
