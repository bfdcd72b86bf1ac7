"""Do the ranks agree? Each writes down what matters, and all read the same notes; or they compare a few bits of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import log2
from typing import Any
from zlib import crc32

import numpy as np

from horovod_sparse.core.collectives import Allgather
from horovod_sparse.core.layout import TensorSpec, first_difference
from horovod_sparse.core.step import Step

# `problem` (a text, or None), `method`, `settings`, `tensors` (rows of TensorSpec), and, once there is a state, what
# `_difference` compares. `leads` says that ranks which differ in that shall take it over. Plain enough for JSON.
Notes = dict[str, Any]

FINGERPRINT_BITS = 16


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
        difference = _difference(notes[0], note, ignore_state=any(n.get("leads") for n in notes))
        if difference:
            subject, ours, theirs, remedy = difference
            return f"the ranks disagree: {subject} is {ours} on rank 0, but {theirs} on rank {rank}. {remedy}"
    return None


def _difference(first: Notes, other: Notes, ignore_state: bool) -> tuple[str, object, object, str] | None:
    if first["method"] != other["method"]:
        return "the method", first["method"], other["method"], "Give all ranks the same compression."
    for name, value in first["settings"].items():
        if value != other["settings"][name]:
            return name, repr(value), repr(other["settings"][name]), "Give all ranks the same settings."
    tensors = first_difference(_specs(first), _specs(other))
    if tensors:
        return "the next parameter", *tensors, "Build the same model, with the same frozen parameters, on all ranks."
    if ignore_state:
        return None
    for state in ("step", "threshold"):
        if first.get(state) != other.get(state):
            remedy = "Call reset() and load_state_dict() on all ranks, or on none."
            return f"the {state}", first.get(state), other.get(state), remedy
    if first.get("density") != other.get("density"):
        remedy = "Give all ranks the same density_schedule."
        return f"the density of step {first['step']}", first["density"], other["density"], remedy
    scales = first.get("loss_scale"), other.get("loss_scale")
    if None not in scales and scales[0] != scales[1]:
        remedy = "Give the scalers of all ranks the same settings, and let them see the same steps."
        return "the loss scale", *scales, remedy
    ours, theirs = first.get("parameters") or {}, other.get("parameters") or {}
    for name in ours:
        if ours[name] != theirs.get(name):
            remedy = (
                "Give all ranks the same parameters before the first step (broadcast_parameters, broadcast_variables), "
                "and change them by the optimizer alone; or go back to a checkpoint."
            )
            return (
                f"after {first['step']} steps, the digest of parameter {name!r}",
                ours[name],
                theirs.get(name),
                remedy,
            )
    return None


def _specs(note: Notes) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in note["tensors"]]


def fingerprint(subject: object, world_size: int) -> list[int]:
    """A few numbers whose sums over the ranks tell whether `subject` has the same `repr` on all of them.

    Bit by bit, they count the ranks that have it: a sum has a digit of base world_size + 1 for each bit, and as many
    digits as a float32 holds. Different subjects have different bits, in all likelihood.
    """
    code = crc32(repr(subject).encode())
    bits = [code >> i & 1 for i in range(FINGERPRINT_BITS)]
    size, base = _bits_a_number(world_size), world_size + 1
    return [
        sum(bit * base**i for i, bit in enumerate(bits[start : start + size])) for start in range(0, len(bits), size)
    ]


def all_the_same(sums: Sequence[float], present: int, world_size: int) -> bool:
    """Whether these sums of fingerprints, of `present` of the ranks, are of equal ones."""
    size, base = _bits_a_number(world_size), world_size + 1
    return all(round(total) // base**i % base in (0, present) for total in sums for i in range(size))


def _bits_a_number(world_size: int) -> int:
    return int(24 / log2(world_size + 1))
