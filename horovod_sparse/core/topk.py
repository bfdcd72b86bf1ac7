"""Top-k with error feedback: each rank sends the largest entries of its own accumulated gradient.

Aji and Heafield, "Sparse communication for distributed gradient descent" (arXiv 1704.05021); Stich et al., "Sparsified
SGD with memory" (arXiv 1809.07599). Indices travel as MiCRO's do, as gaps, in a quarter of the bytes that others send.
"""

from __future__ import annotations

from horovod_sparse.core.collectives import Allgather, Allreduce, Array
from horovod_sparse.core.indices import HEADER, code_dtype, encode
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.layout import FlatLayout
from horovod_sparse.core.residual import Residual
from horovod_sparse.core.step import Step, Update, check_density

# That of Horovod's tokens, so that Horovod may fuse them.
FLAG_DTYPE = "float32"


class TopK:
    """One rank's state: the residual, a flat vector of d elements, and the step t.

    Args:
        layout: the flat vector of d elements.
        density: the share of its elements that each rank sends in a step, k / d, in (0, 1].

    Raises:
        SettingError: the density is outside.
    """

    def __init__(self, layout: FlatLayout, density: float = 0.01) -> None:
        check_density(density)
        self.layout = layout
        self.density = density
        self.residual = Residual(layout)
        self.t = 0
        self.loss_scale = 1.0
        """By what the loss of the next step is multiplied, and so its gradient, and its update."""
        self.dense = False
        """Set on all ranks, it makes the next step send everything, by allreduce; that step clears it."""

    @property
    def k(self) -> int:
        """The number of elements that each rank selects in a step."""
        return min(max(round(self.density * self.layout.numel), 1), self.layout.numel)

    @property
    def first_round(self) -> tuple[int, str]:
        """Size and dtype of what a step's first round reduces."""
        return 1, FLAG_DTYPE

    def step(
        self,
        gradient: list[Array],
        rank: int,
        world_size: int,
        out: list[Array] | None = None,
        rates: list[float] | None = None,
    ) -> Step[Update | None]:
        """One step on one rank.

        With acc_i = residual_i + g_i, each rank sends its k elements of largest |acc_i|, the first ones of equal
        elements; the update is their sum over the ranks, over n, and residual_i is acc_i without them. Memory is used
        as by `MiCRO.step`, and nothing is lost if a round fails.

        Args:
            gradient: g_i, the flattened tensors of `layout`, of a floating dtype.
            rank, world_size: i and n.
            out: memory for as many elements, in the layout's dtype, which is the step's from now on; it may be that of
                `gradient`. None: new memory; `gradient` is not modified.
            rates: the learning rate of each tensor, for what is held back to follow: see `Residual`. None: it does not.

        Returns:
            The mean update, the same on all ranks; None if the gradient of some rank was not finite.
        """
        kernels = kernels_for(gradient[0])
        layout, k = self.layout, self.k
        acc, nan_unless_finite = self.residual.accumulated(gradient, out, rates, self.loss_scale)
        flag = yield Allreduce(kernels.numbers([nan_unless_finite], gradient[0], FLAG_DTYPE))
        self.t += 1
        if not kernels.all_finite(flag):
            return None

        update = self.residual.replace(acc, rates)
        at_rest = self.residual.at_rest(rates)
        index_dtype = "int32" if layout.numel < 2**31 else "int64"
        codes = code_dtype(self.density)
        own, threshold = (None, 0.0) if self.dense else kernels.top_k(acc, k, index_dtype)
        values = kernels.take(acc, own)
        try:
            if own is None:
                summed = yield Allreduce(values)
            else:
                messages = yield Allgather(kernels.join([encode(own, 0, codes), kernels.bytes_of(values)]))
        except BaseException:
            kernels.put(acc, own, values)
            raise
        self.residual.put_back(at_rest)
        if own is None:
            self.dense = False
            kernels.write_sparse(update, None, summed / (world_size / self.loss_scale))
            return Update(kernels.split(update, layout), None, threshold)
        all_indices, all_values = [], []
        begin = 0
        for _ in range(world_size):
            middle = begin + HEADER + int(kernels.bytes_as(messages[begin : begin + HEADER], "int32")[0])
            end = middle + values.nbytes
            all_indices.append(kernels.decode_gaps(messages[begin + HEADER : middle], 0, codes, index_dtype))
            all_values.append(kernels.bytes_as(messages[middle:end], layout.dtype))
            begin = end
        indices, summed = kernels.sum_by_index(all_indices, all_values)
        kernels.write_sparse(update, indices, summed / (world_size / self.loss_scale))
        return Update(kernels.split(update, layout), indices, threshold)
