"""The laws of docs/examples/random_k.py, over virtual ranks. That it trains on real ranks, test_snippets shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_k import RandomK, RandomKExchange

from horovod_sparse.core import Allreduce, FlatLayout, TensorSpec, virtual

RANKS = 3
LAYOUT = FlatLayout([TensorSpec("a", (40,), "float32"), TensorSpec("b", (6, 10), "float32")])
both_backends = pytest.mark.parametrize("to_array", [np.array, torch.from_numpy], ids=["numpy", "torch"])


def gradients(seed):
    """Of all ranks: shape (RANKS, d)."""
    return np.random.default_rng(seed).normal(size=(RANKS, LAYOUT.numel)).astype(np.float32)


def parts(vector, to_array):
    return [to_array(part.copy()) for part in np.split(vector, LAYOUT.offsets[1:-1])]


def flat(arrays):
    return np.concatenate([np.asarray(array) for array in arrays])


def step(ranks, vectors, to_array):
    """The updates of all ranks, and the rounds."""
    given = enumerate(zip(ranks, vectors, strict=True))
    return virtual.run([rank.step(parts(vector, to_array), i, RANKS) for i, (rank, vector) in given])


def held_back(rank):
    vector = rank.residual.vector
    return flat(getattr(vector, "arrays", None) or [vector])


@both_backends
def test_what_is_sent_and_what_is_held_back_are_what_came_in(to_array):
    ranks = [RandomK(LAYOUT, 0.1) for _ in range(RANKS)]
    accumulated = np.zeros((RANKS, LAYOUT.numel))
    for t in range(20):
        accumulated += gradients(t)
        updates, rounds = step(ranks, gradients(t), to_array)
        chosen = np.asarray(updates[0].indices)
        assert len(set(chosen.tolist())) == 10
        expected = np.zeros(LAYOUT.numel)
        expected[chosen] = accumulated[:, chosen].mean(axis=0)
        accumulated[:, chosen] = 0
        for rank, update in enumerate(updates):
            np.testing.assert_allclose(flat(update.gradient), expected, rtol=1e-4, atol=1e-5)
            assert np.array_equal(flat(update.gradient), flat(updates[0].gradient))
            np.testing.assert_allclose(held_back(ranks[rank]), accumulated[rank], rtol=1e-4, atol=1e-5)
        assert [[type(request) for request in requests] for requests in rounds] == [[Allreduce] * RANKS] * 2
        assert {len(request.array) for request in rounds[1]} == {10}


@both_backends
def test_each_element_is_sent_some_day(to_array):
    ranks = [RandomK(LAYOUT, 0.1) for _ in range(RANKS)]
    sent = set()
    for t in range(100):
        updates, _ = step(ranks, gradients(t), to_array)
        sent |= set(np.asarray(updates[0].indices).tolist())
    assert sent == set(range(LAYOUT.numel))


@both_backends
@pytest.mark.parametrize("harm", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_makes_all_ranks_skip_the_step(to_array, harm):
    ranks = [RandomK(LAYOUT, 0.1) for _ in range(RANKS)]
    step(ranks, gradients(0), to_array)
    before = [held_back(rank).copy() for rank in ranks]
    bad = gradients(1)
    bad[1, 50] = harm
    updates, rounds = step(ranks, bad, to_array)
    assert updates == [None] * RANKS
    assert len(rounds) == 1
    for rank, held in zip(ranks, before, strict=True):
        assert np.array_equal(held_back(rank), held)


@both_backends
def test_nothing_is_lost_if_the_network_fails(to_array):
    ranks = [RandomK(LAYOUT, 0.1) for _ in range(RANKS)]
    step(ranks, gradients(0), to_array)
    expected = held_back(ranks[0]) + gradients(1)[0]
    failing = ranks[0].step(parts(gradients(1)[0], to_array), 0, RANKS)
    failing.send(next(failing).array)
    with pytest.raises(ConnectionError):
        failing.throw(ConnectionError())
    np.testing.assert_allclose(held_back(ranks[0]), expected, rtol=1e-6)


def test_the_exchange_around_it_saves_its_state_and_flushes():
    def exchanged(exchanges, t):
        named = [dict(zip(LAYOUT.tensors, parts(vector, np.array), strict=True)) for vector in gradients(t)]
        updates, _ = virtual.run([ex.step(g, i, RANKS) for i, (ex, g) in enumerate(zip(exchanges, named, strict=True))])
        return flat(updates[0].gradient)

    first = [RandomKExchange(0.1) for _ in range(RANKS)]
    for t in range(3):
        exchanged(first, t)
    second = [RandomKExchange(0.1) for _ in range(RANKS)]
    for old, new in zip(first, second, strict=True):
        new.load(old.state())
    assert np.array_equal(exchanged(first, 3), exchanged(second, 3))
    assert (second[0].stats.step, second[0].stats.selected) == (4, 10)
    held = np.mean([held_back(exchange.algorithm) for exchange in second], axis=0)
    second[1].flush()
    np.testing.assert_allclose(exchanged(second, 4), held + gradients(4).mean(axis=0), rtol=1e-4, atol=1e-5)
    assert second[0].stats.selected == LAYOUT.numel
    assert not held_back(second[0].algorithm).any()
    exchanged(second, 5)
    assert second[0].stats.selected == 10
