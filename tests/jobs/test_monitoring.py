"""Figures of whole jobs: through Hugging Face's trainer, and in Horovod's own timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job


@pytest.mark.parametrize(("compression", "density"), [("none", 1.0), ("micro", 1.0), ("micro", 0.1)])
def test_hugging_face_trainer(compression: str, density: float, tmp_path: Path) -> None:
    settings = {"compression": compression, "density": density}
    with Job(tmp_path, "huggingface_trainer.py", settings).start(2) as job:
        assert job.wait_for_exits(2) == [0, 0], job.report()
        ends = job.lines("end")
    assert len(ends) == 2
    assert ends[0]["parameters"] == ends[1]["parameters"]
    if density == 1.0:
        assert all(end["away"] < 1e-5 < 0.1 < end["moved"] for end in ends), ends
    if compression == "micro":
        records = [json.loads(line) for line in (tmp_path / "monitor.log").read_text().splitlines()]
        assert [record["step"] for record in records] == [1, 2, 3, 4]
        assert all(record["world_size"] == 2 for record in records)


def test_rounds_are_spans_of_horovods_timeline(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    with Job(tmp_path, "timeline_trainer.py", {}, {"HOROVOD_TIMELINE": str(timeline)}).start(2) as job:
        assert job.wait_for_exits(2) == [0, 0], job.report()
    events = json.loads(timeline.read_text())
    names = {event["pid"]: event["args"].get("name", "") for event in events if event.get("name") == "process_name"}
    ours = {pid: name for pid, name in names.items() if ".horovod_sparse.micro." in name}
    assert {name.rpartition(".")[2] for name in ours.values()} >= {"first_round", "allgather", "allreduce"}
    for pid in ours:
        phases = {event["ph"] for event in events if event.get("pid") == pid}
        assert phases >= {"B", "E"}  # not as many: a busy Horovod leaves some events out
