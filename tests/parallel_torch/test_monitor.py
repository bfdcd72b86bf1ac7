"""Monitors at work. What becomes of the figures: tests/unit/test_monitor.py."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from training import backward_with, distributed, known_gradients, mlp

from horovod_sparse.monitor import JSONLines, Monitor
from horovod_sparse.torch import (
    A2SGDCompressor,
    MiCROCompressor,
    QSGDCompressor,
    StepStats,
    TopKCompressor,
    get_compressor,
)

STEPS = 6


class Kept:
    """A sink of a user's own."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.closed = False

    def write(self, record: Any) -> None:
        self.records.append(dict(record))

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("compression", [MiCROCompressor, TopKCompressor, A2SGDCompressor, QSGDCompressor])
def test_rank_0_writes_the_figures_of_each_step(compression: Any, every: int, tmp_path: Path) -> None:
    model = mlp()
    optimizer = distributed(model, compression)
    compressor = get_compressor(optimizer)
    kept, path = Kept(), tmp_path / "run.jsonl"
    expected: list[tuple[StepStats, float | None]] = []
    with Monitor(compressor, kept, JSONLines(path), every=every) as monitor:
        monitor.step()  # before the first step, there is nothing to write
        for step in range(STEPS):
            optimizer.zero_grad()
            backward_with(model, known_gradients(model, hvd.rank(), step))
            optimizer.step()
            monitor.step()
            monitor.step()  # none was taken since
            residual = compressor.state_dict().get("residual")
            norm = None
            if residual is not None:
                norm = float(torch.cat([part.reshape(-1).double() for part in residual.values()]).norm())
            if step % every == 0:
                expected.append((compressor.stats, norm))
    assert kept.closed
    if hvd.rank() > 0:
        assert not kept.records
        assert not path.exists()
        return
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept.records
    assert len(kept.records) == len(expected) == STEPS // every
    numel = sum(p.numel() for p in model.parameters())
    for i, (record, (stats, norm)) in enumerate(zip(kept.records, expected, strict=True)):
        assert {name: record[name] for name in StepStats._fields} == stats._asdict()
        assert record["dense_bytes"] == 4 * numel
        assert record["bytes_saved"] == 4 * numel - stats.bytes_sent
        assert record["world_size"] == hvd.size()
        assert record["residual_norm"] == (None if norm is None else pytest.approx(norm, rel=1e-5))
        assert record["selection_s"] > 0
        assert record["exchange_s"] > 0
        assert (record["step_s"] is None) == (i == 0)
        if i:
            assert every * record["step_s"] == pytest.approx(record["time"] - kept.records[i - 1]["time"])
    assert len({record["method"] for record in kept.records}) == 1


def test_a_monitor_goes_on_after_a_reset() -> None:
    model = mlp()
    optimizer = distributed(model, MiCROCompressor)
    kept = Kept()
    monitor = Monitor(get_compressor(optimizer), kept)
    for step in range(4):
        if step == 2:
            get_compressor(optimizer).reset()
        optimizer.zero_grad()
        backward_with(model, known_gradients(model, hvd.rank(), step))
        optimizer.step()
        monitor.step()
    assert [record["step"] for record in kept.records] == ([1, 2, 1, 2] if hvd.rank() == 0 else [])
    assert [record["step_s"] is None for record in kept.records] == ([True, False] * 2 if hvd.rank() == 0 else [])


class Full:
    """A sink whose disk is full."""

    def write(self, record: Any) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_sink_that_fails_does_not_end_the_training() -> None:
    model = mlp()
    optimizer = distributed(model, MiCROCompressor)
    kept = Kept()
    monitor = Monitor(get_compressor(optimizer), Full(), kept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            backward_with(model, known_gradients(model, hvd.rank(), step))
            optimizer.step()
            monitor.step()
    texts = [str(warning.message) for warning in caught]
    expected = "Full: [Errno 28] No space left on device: no more figures go there"
    assert texts == ([expected] if hvd.rank() == 0 else [])
    assert len(kept.records) == (3 if hvd.rank() == 0 else 0)
    if hvd.rank() == 0:
        monitor.close()  # no error: the sink that failed is gone
        assert kept.closed
