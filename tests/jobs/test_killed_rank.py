"""A rank is killed in a job that is not elastic: the others get Horovod's error at once, and end; none hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Job

HOROVOD_ERROR = "horovod.common.exceptions.HorovodInternalError"
TENSORFLOW_ERROR = "tensorflow.python.framework.errors_impl.UnknownError"  # TensorFlow's name for an operation's error


@pytest.mark.parametrize(
    ("trainer", "compression", "when"),
    [
        ("torch_trainer.py", "micro", "before step"),
        ("torch_trainer.py", "a2sgd", "anywhere"),
        ("tensorflow_trainer.py", "micro", "anywhere"),
    ],
)
def test_the_others_end_with_an_error(tmp_path: Path, trainer: str, compression: str, when: str) -> None:
    kill = {"when": when, "world": 1, "rank": 1, "after": 20}
    settings: dict[str, Any] = {"compression": compression, "kill": kill, "elastic": False, "model": "plain"}
    with Job(tmp_path, trainer, {**settings, "worlds": 1, "batches": 300}) as job:
        exit_codes = job.start(ranks=3).wait_for_exits(ranks=3)
        assert exit_codes == [3, 128 + 9, 3], job.report()
        [killed] = job.lines("killed")
        errors = job.lines("error")
        assert sorted(error["rank"] for error in errors) == [0, 2]
        for error in errors:
            assert error["time"] - killed["time"] < 10
            if trainer == "torch_trainer.py":
                assert error["kind"] == HOROVOD_ERROR, error
            else:
                assert error["kind"] in (HOROVOD_ERROR, TENSORFLOW_ERROR), error
                assert "horovod" in error["text"].lower()
        trained = {rank: max(step["batch"] for step in job.lines("step") if step["rank"] == rank) for rank in range(3)}
        assert all(19 <= batch < 299 for batch in trained.values()), trained
