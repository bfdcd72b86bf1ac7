"""Loading models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.keras.optimizer import distribute, make_distribution


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """A saved model, with its optimizer, in the state that was saved, made a `DistributedOptimizer`.

    Args:
        filepath: what `tf.keras.models.load_model` takes.
        custom_optimizers: classes of optimizers that are not Keras's own.
        custom_objects: other classes and functions of the model's, by name.
        compression: a compressor.
        legacy_opts: changes nothing: optimizers of all Keras are found.
        options: of `DistributedOptimizer`.

    Raises:
        ValueError, TypeError: an option is wrong.
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        distribute(model.optimizer, make_distribution(model.optimizer, compression=compression, **options))
    return model
