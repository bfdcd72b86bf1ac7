"""Random-k with error feedback, a method of its own: all ranks send the same elements, drawn anew in each step.

Since the ranks draw the same numbers, no index has to travel, and the values can be added up on the way.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from horovod_sparse._compressor import Flushing
from horovod_sparse.core import Allreduce, FlatLayout, Update
from horovod_sparse.core.exchange import ResidualExchange
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.residual import Residual
from horovod_sparse.torch.compressor import SparseCompressor


class RandomK:
    """One rank's state, and its step: nothing here knows of Horovod, nor of PyTorch."""

    first_round = 1, "float32"  # the size and dtype of what the first round reduces

    def __init__(self, layout: FlatLayout, density: float) -> None:
        self.layout = layout
        self.density = density
        self.residual = Residual(layout)
        self.t = 0  # steps taken
        self.loss_scale = 1.0  # of the next step
        self.dense = False  # whether the next step is to send everything, on all ranks

    def draw(self) -> np.ndarray:
        """The elements of this step, ascending: the same on all ranks."""
        d = self.layout.numel
        k = max(round(self.density * d), 1)
        return np.sort(np.random.default_rng(self.t).choice(d, k, replace=False))

    def step(self, gradient, rank, world_size, out=None, rates=None):
        kernels = kernels_for(gradient[0])
        accumulated, nan_unless_finite = self.residual.accumulated(gradient, out, rates, self.loss_scale)
        flag = yield Allreduce(kernels.numbers([nan_unless_finite], gradient[0], "float32"))
        self.t += 1
        if not kernels.all_finite(flag):
            return None  # a skipped step, on all ranks
        indices = None if self.dense else kernels.beside(self.draw(), gradient[0], "int64")
        update = self.residual.replace(accumulated, rates)  # which returns the memory of the old residual
        values = kernels.take(accumulated, indices)  # which leaves zeros behind
        try:
            summed = yield Allreduce(values)
        except BaseException:
            kernels.put(accumulated, indices, values)  # nothing is lost if the network fails
            raise
        self.dense = False
        kernels.write_sparse(update, indices, summed / (world_size / self.loss_scale))
        return Update(kernels.split(update, self.layout), indices)


class RandomKExchange(ResidualExchange):
    """What the ranks have to agree on, checkpoints, flushes, warm-up, `hvd.join()`: all of it is inherited."""

    method = "random-k"

    def __init__(self, density: float) -> None:
        super().__init__(density, density_schedule=None, follow_learning_rate=False, verify_every=None)

    def make_algorithm(self, layout: FlatLayout) -> RandomK:
        return RandomK(layout, self.settings["density"])


class RandomKCompressor(Flushing, SparseCompressor):
    """For `hvd.DistributedOptimizer(..., compression=RandomKCompressor())`."""

    def __init__(self, density: float = 0.01) -> None:
        super().__init__(partial(RandomKExchange, density))
