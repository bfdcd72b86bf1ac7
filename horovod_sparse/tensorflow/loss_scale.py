"""Loss scaling: by what was a loss multiplied?

A `LossScaleOptimizer` multiplies a loss, and so all gradients that a tape takes of it. Who keeps gradients for later
steps, when the scale may be another one, has to know it. So, once this module is imported, the loss tells.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import tensorflow as tf


def scale_of(loss: Any) -> Any:
    """A scalar tensor; None if the loss is as it was computed, or is no single tensor."""
    return getattr(loss, "_horovod_sparse_scale", None)


def _tell(loss_scale_optimizer: type, method: str) -> None:
    original = getattr(loss_scale_optimizer, method)

    @wraps(original)
    def telling(self: Any, loss: Any) -> Any:
        scaled = original(self, loss)
        if tf.is_tensor(scaled):
            scaled._horovod_sparse_scale = original(self, tf.ones([], scaled.dtype))
        return scaled

    setattr(loss_scale_optimizer, method, telling)


if tf.keras.__name__.startswith("tf_keras"):
    from tf_keras.src.mixed_precision import loss_scale_optimizer as _legacy

    _tell(_legacy.LossScaleOptimizer, "get_scaled_loss")
    _tell(_legacy.LossScaleOptimizerV3, "get_scaled_loss")
else:
    _tell(tf.keras.optimizers.LossScaleOptimizer, "scale_loss")
