"""Random histories of exchanges against a plain model: see `fuzz`. More of them: `python tests/fuzz.py FIRST COUNT`."""

from __future__ import annotations

import pytest
from fuzz import failure

# Seeds that have failed, and what it was.
REGRESSIONS = {
    10: "ranks that came back took over the step of one that had left before others",
    94: "the same, with more ranks",
    3: "the states of all ranks, saved before the first step, could not be loaded",
    577: "the states of all ranks, saved right after that of rank 0 was loaded everywhere, could not be loaded",
    59: "a flush that was put off by a skipped step was forgotten when the world changed",
    206: "A2SGD's first round had another size on a rank whose model had grown alone",
    91: "the same, in the step after",
    371: "a world in which some ranks were new, and its states",
}


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_has_failed_once(seed: int) -> None:
    _, what = failure(seed)
    assert not what, what


@pytest.mark.parametrize("first", range(0, 150, 25))
def test_histories(first: int) -> None:
    for seed in range(first, first + 25):
        _, what = failure(seed)
        assert not what, f"seed {seed}: {what}"
