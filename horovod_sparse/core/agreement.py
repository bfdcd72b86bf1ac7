"""Do the ranks agree? Each writes down what matters, and all read the same notes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.core.collectives import Allgather
from horovod_sparse.core.layout import TensorSpec, first_difference
from horovod_sparse.core.step import Step

# `problem` (a text, or None), `method`, `settings`, `tensors` (rows of TensorSpec), and, once there is a state, `step`
# and `threshold`. Plain enough for JSON.
Notes = dict[str, Any]


def agree(notes: Notes) -> Step[list[Notes]]:
    """Exchange notes with all ranks; return everyone's, in rank order.

    Raises:
        RuntimeError: some rank has a problem, or the notes do not match; the same error on all ranks.
    """
    text = np.frombuffer(json.dumps(notes).encode(), np.uint8).copy()
    sizes = yield Allgather(np.array([text.size], np.int64))
    texts = yield Allgather(text)
    all_notes = [json.loads(part.tobytes()) for part in np.split(texts, np.cumsum(sizes)[:-1])]
    problem = disagreement(all_notes)
    if problem:
        raise RuntimeError(problem)
    return all_notes


def disagreement(notes: Sequence[Notes]) -> str | None:
    """What is wrong, given the notes of all ranks; None if nothing is."""
    for rank, note in enumerate(notes):
        if note["problem"]:
            return f"rank {rank}: {note['problem']}"
    for rank, note in enumerate(notes):
        difference = _difference(notes[0], note)
        if difference:
            subject, ours, theirs, remedy = difference
            return f"the ranks disagree: {subject} is {ours} on rank 0, but {theirs} on rank {rank}. {remedy}"
    return None


def _difference(first: Notes, other: Notes) -> tuple[str, object, object, str] | None:
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
            remedy = "Call reset() and load_state_dict() on all ranks, or on none."
            return f"the {state}", first.get(state), other.get(state), remedy
    return None


def _specs(note: Notes) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in note["tensors"]]
