"""Elastic training: what `horovod.tensorflow.elastic` offers, with states that work on today's TensorFlow.

Horovod's own states broadcast the variables of TensorFlow 2 when they are made, where a rank that is new would wait for
ever, and not in `sync()`; and they do not know the optimizers of Keras 3. The compressors follow any state, ours or
Horovod's: see `horovod_sparse._elastic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compressor import tf_variable

run = hvd.elastic.run


class TensorFlowState(hvd.elastic.ObjectState):  # type: ignore[misc]
    """Variables, and other things.

    Args:
        variables: those to save, to restore, and to have from rank 0 in a new world.
        kwargs: what else the ranks shall have in common; each becomes an attribute.
    """

    def __init__(self, variables: Sequence[Any], **kwargs: Any) -> None:
        self.variables = [tf_variable(v) for v in variables]
        self._save_values()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Keep a copy of everything."""
        self._save_values()
        super().save()

    def restore(self) -> None:
        """Go back to the copy."""
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Have everything from rank 0."""
        hvd.broadcast_variables(self.variables, root_rank=0)
        self._save_values()
        super().sync()

    def _save_values(self) -> None:
        self._values = [variable.numpy() for variable in self.variables]


class TensorFlowKerasState(TensorFlowState):
    """A model of any Keras, its optimizer, and other things.

    Args:
        model: a model that has been built.
        optimizer: by default, that of the model.
        kwargs: what else the ranks shall have in common; each becomes an attribute.

    Raises:
        ValueError: the model has not been built, or there is no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("the model has no variables yet: call model.build(input_shape) first")
        optimizer = optimizer or getattr(model, "optimizer", None)
        if optimizer is None:
            raise ValueError("the model has no optimizer yet: call model.compile(optimizer, ...) first")
        if hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
            optimizer.build(model.trainable_variables)
        self.model = model
        self.optimizer = optimizer
        of_optimizer = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        super().__init__([*model.variables, *of_optimizer], **kwargs)


__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]
