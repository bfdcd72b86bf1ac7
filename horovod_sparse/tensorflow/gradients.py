"""All gradients of a model, reduced together: what the drop-in tape and optimizers do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse._compressor import follows_learning_rate, is_or_makes, operation
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compressor import SparseCompressor, tf_variable


class Reducer:
    """Reduces gradients with any compression, ours or Horovod's.

    Args:
        name: prefix of the names of Horovod's operations.
        compression: a compressor. It must be an instance, if it is one of ours.
        device_dense, device_sparse, sparse_as_dense, op, gradient_predivide_factor, groups, process_set,
            scale_local_gradients: as in Horovod.

    Raises:
        ValueError: a setting is none of those that Horovod, or our compression, works with.
    """

    def __init__(
        self,
        name: str,
        compression: Any,
        device_dense: str = "",
        device_sparse: str = "",
        sparse_as_dense: bool = False,
        op: Any = hvd.Average,
        gradient_predivide_factor: float = 1.0,
        groups: Any = None,
        process_set: Any = hvd.global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        if not (isinstance(gradient_predivide_factor, int | float | np.number) and gradient_predivide_factor > 0):
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor!r}: it must be a number > 0")
        if gradient_predivide_factor != 1.0 and op != hvd.Average:
            raise ValueError(
                f"gradient_predivide_factor={gradient_predivide_factor}: it works with op=hvd.Average only, not with "
                f"op={operation(hvd, op)}: leave one of the two out"
            )
        if not (groups is None or isinstance(groups, list) or (isinstance(groups, int | np.integer) and groups > 0)):
            raise ValueError(f"groups={groups!r}: it must be a whole number > 0, or a list of lists of variables")
        self.compression = compression
        self._ours = is_or_makes(compression, SparseCompressor)
        if self._ours and op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                f"{type(compression).__name__} does not work with op={operation(hvd, op)}: use op=hvd.Average or "
                "op=hvd.Sum, or compression=hvd.Compression.fp16"
            )
        self._sparse_as_dense = sparse_as_dense
        self._op = op
        self.process_set = process_set
        self._scale_local_gradients = scale_local_gradients
        if isinstance(groups, list):
            groups = [[tf_variable(v) for v in group] for group in groups]
        # What we leave to Horovod: with compressions of its own everything, with ours what is sparse.
        self._stock: Callable[..., list[Any]] = hvd._make_allreduce_grads_fn(
            *(name, device_dense, device_sparse, hvd.Compression.none if self._ours else compression, sparse_as_dense),
            *(op, gradient_predivide_factor, None if self._ours else groups, process_set),
        )

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        local: Collection[int] = (),
        generic: bool = False,
        learning_rate: Any = None,
        loss_scale: Any = None,
    ) -> list[Any]:
        """The reduced gradients; None stays None.

        Args:
            gradients, variables: as many of the ones as of the others.
            local: the `id` of those variables that each rank keeps to itself.
            generic: name Horovod's operations by position alone.
            learning_rate: a scalar tensor, if what is held back is to follow it.
            loss_scale: a scalar tensor, if the loss was multiplied by it.
        """
        reduced = list(gradients)
        ours: list[int] = []
        stock: list[int] = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if id(variable) in local:
                reduced[i] = self._local(gradient)
            elif gradient is not None:
                reduced[i] = self.densified(gradient)
                dense = not isinstance(reduced[i], tf.IndexedSlices)
                (ours if self._ours and dense else stock).append(i)
        if stock:
            chosen = [reduced[i] for i in stock], [tf_variable(variables[i]) for i in stock]
            for i, gradient in zip(stock, self._stock(*chosen, generic), strict=True):
                reduced[i] = gradient
        if ours:
            chosen = [reduced[i] for i in ours], [variables[i] for i in ours]
            results = self.compression.reduce(*chosen, self._op, self.process_set, learning_rate, loss_scale)
            for i, gradient in zip(ours, results, strict=True):
                reduced[i] = gradient
        return reduced

    def follows_learning_rate(self, plain_sgd: bool) -> bool:
        """Whether what is held back is to follow the learning rate of the optimizer."""
        return self._ours and follows_learning_rate(self.compression.settings, plain_sgd)

    def applied(self, reduced: Sequence[Any], variables: Sequence[Any], local: Collection[int] = ()) -> None:
        """The reduced gradients have been applied: average the variables over the ranks, if it is time to."""
        if self._ours:
            pairs = [(g, v) for g, v in zip(reduced, variables, strict=True) if g is not None and id(v) not in local]
            self.compression.average_if_due([v for g, v in pairs if not isinstance(g, tf.IndexedSlices)])

    def densified(self, gradient: Any) -> Any:
        """The gradient, dense if it is to be."""
        sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if sparse and self._sparse_as_dense else gradient

    def _local(self, gradient: Any) -> Any:
        """A gradient that is not reduced. Horovod scales it to the weight that it would have in an average."""
        if gradient is None or not self._scale_local_gradients:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._local(gradient.values), gradient.indices, gradient.dense_shape)
        return gradient / self.process_set.size()


def trainable_weights_of(layers: Any) -> list[Any]:
    """Those of a layer, or of several, or of None."""
    if layers is None:
        return []
    every = layers if isinstance(layers, Iterable) else [layers]
    return [weight for layer in every for weight in layer.trainable_weights]
