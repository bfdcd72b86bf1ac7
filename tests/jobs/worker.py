"""What a trainer does besides training: it keeps a log, and at the moment that the test chose, it does harm."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

COMMIT_EVERY = 8

folder = Path(sys.argv[1])
settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())


def log(event: str, **values: Any) -> None:
    """Append a line to this process' log, which outlives the process."""
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        print(json.dumps({"event": event, "pid": os.getpid(), "time": time.time(), **values}), file=file)


def digest(arrays: list[np.ndarray]) -> int:
    """Equal, in all likelihood, only for arrays that are bitwise equal."""
    crc = 0
    for array in arrays:
        crc = crc32(np.ascontiguousarray(array).tobytes(), crc)
    return crc


def held_back(compressor: Any) -> dict[str, Any]:
    """The step of a compressor's state, and the sum of its residual."""
    state = compressor.state_dict() if compressor else {}
    every = state.get("exchanges", [state])
    parts = [np.asarray(part) for one in every for part in one.get("residual", {}).values()]
    return {
        "saved_step": max(one.get("step", 0) for one in every) if every else 0,
        "residual": float(sum(part.sum(dtype=np.float64) for part in parts)),
    }


def figures(compressor: Any) -> dict[str, Any]:
    """Those of a compressor's last step, and what it has held back since."""
    stats = compressor.stats if compressor else None
    names = ("step", "selected", "density", "target_density")
    return {**{name: getattr(stats, name, None) for name in names}, **held_back(compressor)}


def batch_for(rank: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's inputs, and the outputs that the model is to learn."""
    random_numbers = np.random.default_rng([rank, batch])
    inputs = random_numbers.normal(size=(8, 16)).astype(np.float32)
    return inputs, np.tanh(inputs[:, :8] + inputs[:, 8:])


def harm(when: str, world: int, rank: int, trained: int) -> None:
    """Kill this process, or offer Horovod one more host, once, if this is the time and place for it.

    Args:
        when: "before step": between the backward pass and the optimizer's step; "anywhere": before both.
        world: the number of this world; the first is 1, and each change of hosts makes a new one.
        trained: the steps that it has taken.
    """
    kill, add = settings.get("kill"), settings.get("add")
    if kill == {"when": when, "world": world, "rank": rank, "after": trained} and _first("killed"):
        if when == "anywhere":
            threading.Timer(random.uniform(0, 0.05), _die).start()
        else:
            _die()
    if add and rank == 0 and (world, trained) == (add["world"], add["after"]) and _first("added"):
        new = folder / "hosts.new"
        new.write_text((folder / "hosts").read_text() + add["host"] + ":1\n")
        new.replace(folder / "hosts")


def finished(world: int, batch: int, trained: int) -> bool:
    """Whether to end: this is the last world that the test wants to see, and it has trained for a while."""
    time.sleep(0.02)  # leaves the cores to horovodrun, which may have to notice a new host
    return world == settings["worlds"] and batch >= settings["batches"] and trained >= COMMIT_EVERY + 3


def _first(event: str) -> bool:
    """Whether this is the first call for `event`, in all processes."""
    try:
        (folder / event).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _die() -> None:
    log("killed")
    os.kill(os.getpid(), signal.SIGKILL)
