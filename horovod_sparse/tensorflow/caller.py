"""What is Horovod about to reduce? It hands a compressor a tensor, and nothing else.

Horovod 0.28.1 calls `compress` from `allreduce(tensor, ...)` and from `grouped_allreduce(tensors, ...)`. Their local
variables tell how it will reduce the tensor. Where a tape or an optimizer asked for it, a caller further up is
`allreduce_grads(grads, vars, ...)`, which tells whose gradient it is; and for a tape, `gradient(target, ...)`, which
tells of what. TensorFlow may have converted these functions, and then calls them tf__allreduce, and so on. This is the
only place that relies on these names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_sparse.tensorflow.loss_scale import scale_of

# Horovod's functions, each with an argument that tells it from a function of the user's with the same name.
ARGUMENTS = {
    "allreduce": "postscale_factor",
    "grouped_allreduce": "postscale_factor",
    "allreduce_grads": "use_generic_names",
    "gradient": "output_gradients",
}


class Call(NamedTuple):
    """What is to be reduced, and how."""

    tensors: Sequence[Any]
    """What is reduced together: a tensor, a group of them, or all of a model's."""
    variables: Sequence[Any]
    """Whose gradients they are; None for a tensor of which that is not known."""
    op: Any
    process_set: Any
    factor: float = 1.0
    """What Horovod would multiply the mean by, or the sum."""
    name: str | None = None
    """What the user calls the tensors."""
    place: str = ""
    """Where the user called Horovod, and with what kind of tensors."""
    learning_rate: Any = None
    """A scalar tensor, if what is held back is to follow it."""
    loss_scale: Any = None
    """A scalar tensor, if the loss was multiplied by it."""
    graph: Any = None
    """The graph in which Horovod reduces all gradients of a model, one after the other; None if it does not."""


def find_call(tensor: Any) -> Call:
    """How Horovod is about to reduce `tensor`.

    Raises:
        ValueError: `compress` was not called by one of Horovod's allreduce functions.
    """
    frames = [(frame, frame.f_code.co_name.removeprefix("tf__")) for frame in _frames()]
    frames = [(frame, function) for frame, function in frames if ARGUMENTS.get(function, ...) in frame.f_locals]
    allreduce = next((f for f, function in frames if function in ("allreduce", "grouped_allreduce")), None)
    if allreduce is None:
        raise ValueError(
            "the compressors of horovod_sparse reduce gradients: pass them as compression= to DistributedOptimizer, to "
            "DistributedGradientTape, or to hvd.allreduce; for other operations use compression=hvd.Compression.fp16"
        )
    how = allreduce.f_locals
    tensors = [t for t in how.get("tensors", [tensor]) if not isinstance(t, tf.IndexedSlices)]
    gradients = next((f.f_locals for f, function in frames if function == "allreduce_grads"), None)
    if gradients and gradients["vars"]:
        pairs = list(zip(gradients["grads"], gradients["vars"], strict=True))
        variables = [next((v for g, v in pairs if g is t), None) for t in tensors]
    else:
        variables = [t if hasattr(t, "handle") else None for t in tensors]
    graph = None
    if gradients:
        graph = next((getattr(g, "graph", None) for g in gradients["grads"] if tf.is_tensor(g)), None)
    target = next((f.f_locals.get("target") for f, function in frames if function == "gradient"), None)
    graph_name = "" if tf.is_tensor(tensor) and hasattr(tensor, "numpy") else tensor.name
    place = f"{_place(allreduce)} {graph_name} {[(t.shape, t.dtype) for t in tensors]}"
    factor = how["prescale_factor"] * how["postscale_factor"]
    where = {"place": place, "loss_scale": scale_of(target), "graph": graph}
    return Call(tensors, variables, how["op"], how["process_set"], factor, how["name"], **where)


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _place(frame: FrameType | None) -> str:
    """The first place above `frame` that is neither in Horovod nor in TensorFlow."""
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in ("horovod", "tensorflow"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
