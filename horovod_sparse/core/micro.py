"""MiCRO (arXiv 2310.00967): each rank selects by threshold from a partition of its own."""

from __future__ import annotations

from horovod_sparse.core.collectives import Allgather, Allreduce, Alltoall, Array
from horovod_sparse.core.indices import code_dtype, decode, encode
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.layout import FlatLayout
from horovod_sparse.core.partition import owned_partition
from horovod_sparse.core.residual import Residual
from horovod_sparse.core.step import SettingError, Step, Update, check_density
from horovod_sparse.core.threshold import AdaptiveThreshold, Magnitudes, PaperThreshold, ThresholdEstimator

# Counts travel in the dtype of Horovod's tokens, so that Horovod may fuse them; their rounding, beyond 2**24 elements,
# is far below the estimators' own error.
COUNT_DTYPE = "float32"
# A rank that owns more selected elements than this counts a sample of what it owns.
ENOUGH_COUNTED = 2048


def check_settings(density: float, threshold: str, value_dtype: str | None) -> None:
    """Raise SettingError unless MiCRO can work with these settings."""
    check_density(density)
    if not isinstance(threshold, str) or threshold not in ("adaptive", "paper"):
        raise SettingError("threshold", threshold, '"adaptive" or "paper"')
    if value_dtype is not None and (not isinstance(value_dtype, str) or value_dtype not in ("float16", "bfloat16")):
        raise SettingError("value_dtype", value_dtype, 'None (as accumulated), "float16" or "bfloat16"')


class MiCRO:
    """One rank's state: the residual, a flat vector of d elements, the threshold, and the step t.

    Args:
        layout: the flat vector of d elements.
        density: the share of the elements to send in a step, k / d, in (0, 1]; 1 sends all, without indices.
        threshold: the estimator, "adaptive" or "paper" (see `core.threshold`).
        value_dtype: "float16" or "bfloat16" halves the values' bytes, and what it rounds off stays in the residual;
            None sends them as accumulated.

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
        self.residual = Residual(layout)
        self.t = 0
        self.loss_scale = 1.0
        """By what the loss of the next step is multiplied, and so its gradient, and its update."""
        self.dense = False
        """Set on all ranks, it makes the next step send everything, unrounded, by allreduce; that step clears it."""

    @property
    def k(self) -> float:
        """The number of elements to select in a step, over all ranks."""
        return max(self.density * self.layout.numel, 1.0)

    @property
    def first_round(self) -> tuple[int, str]:
        """Size and dtype of what a step's first round reduces."""
        return 1 + len(self.estimator.magnitudes(self.k)), COUNT_DTYPE

    def step(
        self,
        gradient: list[Array],
        rank: int,
        world_size: int,
        out: list[Array] | None = None,
        rates: list[float] | None = None,
    ) -> Step[Update | None]:
        """One step on one rank (MiCRO, algorithm 1).

        acc_i takes the memory of `out` and becomes the residual; the old residual's memory becomes the update. So d is
        touched as seldom as can be, and a step that is skipped leaves the residual as it was, to the bit. If a later
        round fails, the residual holds acc_i: nothing is lost.

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

        # Is acc_i finite on all ranks, and how many elements reach the magnitudes that the estimator asks for?
        owned = owned_partition(layout.numel, world_size, rank, self.t)
        stride = max(int(k / world_size / ENOUGH_COUNTED), 1)

        def count(magnitudes: Magnitudes) -> Array:
            counts = kernels.count_at_least(acc, owned, magnitudes, stride)
            return kernels.numbers(counts, gradient[0], COUNT_DTYPE)

        magnitudes = self.estimator.magnitudes(k)
        flag = kernels.numbers([nan_unless_finite], gradient[0], COUNT_DTYPE)
        counts = yield Allreduce(kernels.join([flag, count(magnitudes)]))
        self.t += 1
        if not kernels.all_finite(counts):
            return None

        everything = self.density == 1 or self.dense
        threshold = 0.0
        if not everything:
            threshold = yield from self.estimator.estimate(magnitudes, counts[1:], k, count)
        update = self.residual.replace(acc, rates)
        at_rest = self.residual.at_rest(rates)

        indices = None
        if not everything:
            own = kernels.select(acc, owned, threshold, self._index_dtype)
            messages = yield Allgather(encode(own, owned.start, self._code_dtype))
            starts = [owned_partition(layout.numel, world_size, i, self.t - 1).start for i in range(world_size)]
            indices = decode(messages, starts, (1 - self.t) % world_size, self._code_dtype, self._index_dtype)
            self.estimator.observe(len(indices), k)
        values = kernels.take(acc, indices)  # residual_i = acc_i, set to 0 at all selected indices
        try:
            value_dtype = None if self.dense else self.value_dtype
            summed, rounding = yield from sum_rounded(values, value_dtype, rank, world_size)
        except BaseException:
            kernels.put(acc, indices, values)
            raise
        if rounding is not None:
            kernels.put(acc, indices, rounding)
        self.residual.put_back(at_rest)
        kernels.write_sparse(update, indices, summed / (world_size / self.loss_scale))
        self.dense = False
        return Update(kernels.split(update, layout), indices, threshold)

    @property
    def _index_dtype(self) -> str:
        return "int32" if self.layout.numel < 2**31 else "int64"

    @property
    def _code_dtype(self) -> str:
        return code_dtype(self.density)


def sum_rounded(values: Array, dtype: str | None, rank: int, world_size: int) -> Step[tuple[Array, Array | None]]:
    """The sum of `values` over the ranks, sent as `dtype`, and what this rank has rounded off; None if nothing.

    Horovod adds no bfloat16: each rank adds up a part of the values, which costs as many bytes as Horovod's allreduce.
    """
    kernels = kernels_for(values)
    own_dtype = str(values.dtype).removeprefix("torch.")
    if dtype is None:
        return (yield Allreduce(values)), None
    if dtype == "float16":
        sent = kernels.round_to(values, dtype, world_size)
        summed = yield Allreduce(sent)
        return kernels.cast(summed, own_dtype), values - kernels.cast(sent, own_dtype)

    def sent_as(values: Array) -> tuple[Array, Array]:
        bits = kernels.to_bfloat16(values)
        return kernels.bytes_of(bits), values - kernels.from_bfloat16(bits, own_dtype)

    def received(message: Array) -> Array:
        return kernels.from_bfloat16(kernels.bytes_as(message, "int16"), own_dtype)

    size = -(-len(values) // world_size)  # of a rank's part
    padding = kernels.numbers([0.0] * (size * world_size - len(values)), values, own_dtype)
    message, rounding = sent_as(kernels.join([values, padding]))
    part = sum(received((yield Alltoall(message))).reshape(world_size, size))
    message, rounding_of_part = sent_as(part)
    rounding[rank * size : (rank + 1) * size] += rounding_of_part
    summed = received((yield Allgather(message)))
    return summed[: len(values)], rounding[: len(values)]
