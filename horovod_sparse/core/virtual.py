"""Drive the steps of many ranks in one process: for tests and studies, without MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from horovod_sparse.core.collectives import Allgather, Allreduce, Array, Collective
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.step import Step

Result = TypeVar("Result")


def run(steps: Sequence[Step[Result]]) -> tuple[list[Result], list[list[Collective]]]:
    """Drive one step of each virtual rank to its end, all in lockstep.

    Args:
        steps: one step a rank, not begun yet, in rank order.

    Returns:
        What each rank's step returned, and the rounds: for each, the ranks' requests.

    Raises:
        RuntimeError: the ranks asked for different collectives, on which real ranks would hang or fail.
    """
    results: list[Result] = []
    rounds: list[list[Collective]] = []
    answers: list[Any] = [None] * len(steps)
    while not results:
        requests: list[Collective] = []
        for step, answer in zip(steps, answers, strict=True):
            try:
                requests.append(step.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results and requests:
            raise RuntimeError(f"{len(results)} ranks ended their step while {len(requests)} go on")
        if requests:
            rounds.append(requests)
            answers = [_answer(requests)] * len(steps)
    return results, rounds


def _answer(requests: Sequence[Collective]) -> Array:
    arrays = [request.array for request in requests]
    if len({type(request) for request in requests}) > 1 or len({array.dtype for array in arrays}) > 1:
        raise RuntimeError(f"the ranks ask for different collectives: {requests}")
    if isinstance(requests[0], Allgather):
        return kernels_for(arrays[0]).join(arrays)
    assert isinstance(requests[0], Allreduce)
    if len({array.shape for array in arrays}) > 1:
        raise RuntimeError(f"the ranks reduce arrays of different shapes: {[array.shape for array in arrays]}")
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total
