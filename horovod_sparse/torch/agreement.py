"""Do the ranks agree? Each writes down what matters, and all read the same notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_sparse.core import TensorSpec
from horovod_sparse.core.layout import first_difference


def disagreement(notes: Sequence[dict[str, Any]]) -> str | None:
    """What is wrong, the same text on all ranks, given the ranks' notes; None if nothing is.

    A note holds `problem` (a text or None), `method`, `settings`, `tensors` (rows of TensorSpec) and, once a step has
    been taken, `step` and `threshold`.
    """
    for rank, note in enumerate(notes):
        if note["problem"]:
            return f"rank {rank}: {note['problem']}"
    for rank, note in enumerate(notes):
        difference = _difference(notes[0], note)
        if difference:
            subject, ours, theirs, remedy = difference
            return f"the ranks disagree: {subject} is {ours} on rank 0, but {theirs} on rank {rank}. {remedy}"
    return None


def _difference(first: dict[str, Any], other: dict[str, Any]) -> tuple[str, object, object, str] | None:
    if first["method"] != other["method"]:
        return "the method", first["method"], other["method"], "Give all ranks the same compression."
    for name, value in first["settings"].items():
        if value != other["settings"][name]:
            return name, repr(value), repr(other["settings"][name]), "Give all ranks the same settings."
    tensors = first_difference(_specs(first), _specs(other))
    if tensors:
        return "the next parameter", *tensors, "Build the same model, with the same frozen parameters, on all ranks."
    for state in ("step", "threshold"):
        if first.get(state) != other.get(state):
            remedy = "Call reset(), load_state_dict() and flush() on all ranks, or on none."
            return f"the {state}", first.get(state), other.get(state), remedy
    return None


def _specs(note: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in note["tensors"]]
