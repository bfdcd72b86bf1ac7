"""Elastic jobs: a rank is killed, a host is added, both. The job goes on, and the compressors with it.

Each rank has logged each of its steps, the state at each commit, and the state with which it began in each world.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from jobs import HOSTS, Job, Line

BATCHES = 40
FIRST_STEPS = 3
"""In a new world, it takes so many steps until the density is met and the ranks hold back something of their own."""


@dataclass
class World:
    """What the ranks of one world have logged, from one change of hosts to the next."""

    starts: list[Line] = field(default_factory=list)
    commits: list[Line] = field(default_factory=list)
    steps: dict[int, list[Line]] = field(default_factory=lambda: defaultdict(list))
    """By batch."""

    @property
    def size(self) -> int:
        [size] = {line["size"] for line in self.starts}
        return int(size)


def worlds_of(job: Job) -> list[World]:
    worlds: dict[int, World] = defaultdict(World)
    for line in job.lines("start"):
        worlds[line["world"]].starts.append(line)
    for line in job.lines("commit"):
        worlds[line["world"]].commits.append(line)
    for line in job.lines("step"):
        worlds[line["world"]].steps[line["batch"]].append(line)
    return [worlds[number] for number in sorted(worlds)]


def run(
    folder: Path,
    trainer: str,
    compression: str,
    sizes: list[int],
    kill_rank: int | None = 1,
    environment: dict[str, str] | None = None,
    model: str = "plain",
) -> list[World]:
    """The worlds of a job that has changed its size as told: one rank is killed, or a host added."""
    settings: dict[str, Any] = {"compression": compression, "model": model, "elastic": True, "batches": BATCHES}
    for world, (size, next_size) in enumerate(pairwise(sizes), start=1):
        if next_size < size:  # in a step after which there is no commit
            settings["kill"] = {"when": "before step", "world": world, "rank": kill_rank, "after": 21}
        else:
            settings["add"] = {"world": world, "after": 5, "host": HOSTS[2]}
    with Job(folder, trainer, {**settings, "worlds": len(sizes)}, environment) as job:
        exit_code = job.start_elastic(sizes[0], patience_s=60 if "add" in settings else 10).wait()
        assert exit_code == 0, job.report()
        worlds = worlds_of(job)
        assert [world.size for world in worlds] == sizes, job.report()
        return worlds


def assert_trained_all_batches(worlds: list[World]) -> None:
    """Each world goes on where the one before has last committed, and all ranks take part in each of its batches."""
    begin = 0
    for world in worlds:
        assert {start["batch"] for start in world.starts} == {begin}
        assert sorted(start["rank"] for start in world.starts) == list(range(world.size))
        complete = [batch for batch, lines in world.steps.items() if len(lines) == world.size]
        assert sorted(complete) == list(range(begin, begin + len(complete)))
        begin = max([begin, *(commit["batch"] for commit in world.commits)])
    assert max(worlds[-1].steps) >= BATCHES - 1


def assert_replicas_are_equal(worlds: list[World], after: str) -> None:
    """All ranks of a world have bitwise the same parameters, after each step or at each commit."""
    for world in worlds:
        lines = list(chain.from_iterable(world.steps.values())) if after == "step" else world.commits
        digests = defaultdict(set)
        for line in lines:
            digests[line["batch"]].add(line["digest"])
        assert all(len(of_batch) == 1 for of_batch in digests.values()), digests
        assert len(set.union(*digests.values())) == len(digests), "nothing was trained"


def assert_steps_go_on(worlds: list[World]) -> None:
    """The compressors of all ranks count the steps together, and go back to a commit together with the model."""
    for world in worlds:
        for batch, lines in world.steps.items():
            if world.size > 1:
                assert len({line["step"] for line in lines}) == 1, lines
                previous = world.steps.get(batch - 1)
                assert not previous or lines[0]["step"] == previous[0]["step"] + 1, lines
    if all(world.size > 1 for world in worlds):  # a rank that is alone exchanges nothing
        for world in worlds:
            for batch, lines in world.steps.items():
                assert lines[0]["step"] == batch + 1, lines


def assert_survivors_are_back_at_their_commit(worlds: list[World]) -> None:
    """A process begins in a new world with its own state of the last commit: the model's, and the compressor's.

    One that is new holds back nothing.
    """
    for world, next_world in pairwise(worlds):
        committed = {commit["pid"]: commit for commit in world.commits}  # the last one of each process
        survived = 0
        for start in next_world.starts:
            if start["pid"] in committed:
                commit = committed[start["pid"]]
                for figure in ("batch", "digest", "saved_step", "residual"):
                    assert start[figure] == commit[figure], (figure, start, commit)
                survived += 1
            else:
                assert start["residual"] == 0
        assert survived == min(world.size, next_world.size)


def assert_sparse(worlds: list[World]) -> None:
    """The density is met, and each rank holds back something of its own."""
    for world in [world for world in worlds if world.size > 1]:
        first = min(world.steps)
        for batch, lines in world.steps.items():
            if batch < first + FIRST_STEPS:
                continue
            assert len({line["selected"] for line in lines}) == 1
            for line in lines:
                assert line["density"] == pytest.approx(line["target_density"], rel=0.5), line
            residuals = [line["residual"] for line in lines]
            assert len(set(residuals)) == len(residuals), lines
            assert all(math.isfinite(residual) and residual != 0 for residual in residuals)


KILLED = [3, 2]
ADDED = [2, 3]
KILLED_THEN_ADDED = [2, 1, 2]


@pytest.mark.parametrize(("sizes", "kill_rank"), [(KILLED, 0), (ADDED, None), (KILLED_THEN_ADDED, 1)], ids=str)
def test_micro_in_torch(tmp_path: Path, sizes: list[int], kill_rank: int | None) -> None:
    worlds = run(tmp_path, "torch_trainer.py", "micro", sizes, kill_rank)
    assert_trained_all_batches(worlds)
    assert_replicas_are_equal(worlds, after="step")
    assert_steps_go_on(worlds)
    assert_survivors_are_back_at_their_commit(worlds)
    assert_sparse(worlds)


def test_a2sgd_in_torch(tmp_path: Path) -> None:
    worlds = run(tmp_path, "torch_trainer.py", "a2sgd", KILLED_THEN_ADDED)
    assert_trained_all_batches(worlds)
    assert_replicas_are_equal(worlds, after="commit")
    assert_steps_go_on(worlds)
    assert_survivors_are_back_at_their_commit(worlds)


@pytest.mark.parametrize(
    ("model", "legacy_keras", "sizes"),
    [("plain", "0", KILLED), ("keras", "0", KILLED_THEN_ADDED), ("keras", "1", KILLED_THEN_ADDED)],
    ids=["tape", "keras", "legacy-keras"],
)
def test_micro_in_tensorflow(tmp_path: Path, model: str, legacy_keras: str, sizes: list[int]) -> None:
    environment = {"TF_USE_LEGACY_KERAS": legacy_keras}
    worlds = run(tmp_path, "tensorflow_trainer.py", "micro", sizes, environment=environment, model=model)
    assert_trained_all_batches(worlds)
    assert_replicas_are_equal(worlds, after="step")
    assert_steps_go_on(worlds)
    assert_survivors_are_back_at_their_commit(worlds)
    assert_sparse(worlds)
