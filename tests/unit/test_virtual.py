"""The driver of virtual ranks."""

import numpy as np
import pytest
from worlds import BACKENDS, to_backend, to_numpy

from horovod_sparse.core import Allgather, Allreduce, Alltoall, virtual


def script(*requests, result=None):
    """A step that asks for `requests` in turn, and returns the answers with `result`."""
    answers = []
    for request in requests:
        answers.append((yield request))
    return result, answers


def vector(*values, dtype="float32", backend="numpy"):
    return to_backend(np.array(values, dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_is_sent_the_sum_and_the_arrays_joined_in_rank_order(backend):
    parts = [(), (3.0, 4.0), (5.0,)]
    steps = [
        script(
            Allreduce(vector(rank, 10 * rank, backend=backend)),
            Allgather(vector(*parts[rank], backend=backend)),
            result=rank,
        )
        for rank in range(3)
    ]
    results, rounds = virtual.run(steps)
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, (total, joined) in results:
        assert to_numpy(total).tolist() == [3.0, 30.0]
        assert to_numpy(joined).tolist() == [3.0, 4.0, 5.0]
    assert [[type(request) for request in requests] for requests in rounds] == [[Allreduce] * 3, [Allgather] * 3]
    assert [to_numpy(request.array).tolist() for request in rounds[1]] == [[], [3.0, 4.0], [5.0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_an_alltoall_every_rank_is_sent_the_parts_that_are_for_it(backend):
    steps = [script(Alltoall(vector(*(100 * rank + i for i in range(6)), backend=backend))) for rank in range(3)]
    results, _ = virtual.run(steps)
    for rank, (_, (received,)) in enumerate(results):
        assert to_numpy(received).tolist() == [100 * sender + 2 * rank + i for sender in range(3) for i in (0, 1)]


def test_an_alltoall_that_cannot_be_cut_equally_is_an_error():
    with pytest.raises(RuntimeError, match="equal parts"):
        virtual.run([script(Alltoall(vector(1.0, 2.0, 3.0))) for _ in range(2)])


def test_steps_that_ask_for_nothing_return_at_once():
    results, rounds = virtual.run([script(result="a"), script(result="b")])
    assert results == [("a", []), ("b", [])]
    assert rounds == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((Allreduce, (1.0,), "float32"), (Allgather, (1.0,), "float32")),
        ((Allreduce, (1.0,), "float32"), (Allreduce, (1.0, 2.0), "float32")),
        ((Allreduce, (1.0,), "float32"), (Allreduce, (1.0,), "float64")),
        ((Allgather, (1.0,), "float32"), (Allgather, (1.0,), "float64")),
        ((Alltoall, (1.0, 2.0), "float32"), (Alltoall, (1.0, 2.0, 3.0, 4.0), "float32")),
    ],
    ids=["kinds", "shapes", "dtypes to reduce", "dtypes to gather", "shapes to scatter"],
)
def test_ranks_that_ask_for_different_collectives_are_an_error(backend, first, second):
    steps = [script(kind(vector(*values, dtype=dtype, backend=backend))) for kind, values, dtype in (first, second)]
    with pytest.raises(RuntimeError, match="rank"):
        virtual.run(steps)


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_ends_its_step_before_the_others_is_an_error(early):
    steps = [script(Allreduce(vector(1.0))), script(Allreduce(vector(1.0)))]
    steps[early] = script()
    with pytest.raises(RuntimeError, match="1 ranks ended their step while 1 go on"):
        virtual.run(steps)


def test_the_error_of_a_step_is_raised():
    def failing():
        yield Allreduce(vector(1.0))
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        virtual.run([failing(), failing()])
