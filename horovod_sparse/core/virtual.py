"""Drive the steps of many ranks in one process: for tests and studies, without MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from horovod_sparse.core.collectives import Allgather, Alltoall, Array, Collective
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
            answers = _answers(requests)
    return results, rounds


def _answers(requests: Sequence[Collective]) -> list[Array]:
    arrays = [request.array for request in requests]
    ranks = len(arrays)
    if len({type(request) for request in requests}) > 1 or len({array.dtype for array in arrays}) > 1:
        raise RuntimeError(f"the ranks ask for different collectives: {requests}")
    if isinstance(requests[0], Allgather):
        return [kernels_for(arrays[0]).join(arrays)] * ranks
    if len({array.shape for array in arrays}) > 1:
        raise RuntimeError(f"the ranks exchange arrays of different shapes: {[array.shape for array in arrays]}")
    if isinstance(requests[0], Alltoall):
        if len(arrays[0]) % ranks:
            raise RuntimeError(f"{len(arrays[0])} elements are not to be had in {ranks} equal parts")
        parts = [array.reshape(ranks, -1) for array in arrays]
        return [kernels_for(arrays[0]).join([part[rank] for part in parts]) for rank in range(ranks)]
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return [total] * ranks
