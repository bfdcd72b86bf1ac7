"""The drop-in tape: all gradients of the model in one exchange, with variables of any Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compressor import working
from horovod_sparse.tensorflow.gradients import Reducer, trainable_weights_of
from horovod_sparse.tensorflow.loss_scale import scale_of


class _DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]
    """Goes before the class of the tape that it takes the place of."""

    _reducer: Reducer
    _local_sources: dict[int, Any]

    def register_local_source(self, source: Any) -> None:
        """Let each rank keep its own gradients of this source."""
        self._local_sources[id(source)] = source

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        *,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The reduced gradients; else like `tf.GradientTape.gradient`."""
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(gradients)
        flat = self._reducer(
            flat, tf.nest.flatten(sources), self._local_sources, use_generic_names, loss_scale=scale_of(target)
        )
        return tf.nest.pack_sequence_as(gradients, flat)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs of (source, gradient): those of local sources, and the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if id(pair[0]) in self._local_sources]
        return local, [pair for pair in pairs if id(pair[0]) not in self._local_sources]

    @property
    def _compression(self) -> Any:
        return self._reducer.compression


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Like Horovod's: a tape whose `gradient` reduces the gradients. Ours reduces the whole model in one exchange.

    The parameters mean what they mean in Horovod; with `compression=` one of ours, `groups` changes nothing.

    Raises:
        ValueError, TypeError: a setting is wrong.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"DistributedGradientTape takes a tf.GradientTape, not {gradtape!r}")
    tape: Any = object.__new__(type(type(gradtape).__name__, (_DistributedGradientTape, type(gradtape)), {}))
    vars(tape).update(vars(gradtape))
    tape._local_sources = {}
    tape._reducer = Reducer(
        "DistributedGradientTape",
        working(compression),
        device_dense,
        device_sparse,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups or None if groups is None else groups,
        process_set,
        scale_local_gradients,
    )
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """A `DistributedGradientTape` that leaves the gradients of `local_layers`, a layer or several, to each rank."""
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in trainable_weights_of(local_layers):
        tape.register_local_source(variable)
    return tape
