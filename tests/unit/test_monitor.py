"""Where the figures of steps go, and what is made of them afterwards. Monitors at work: tests/parallel_*."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from horovod_sparse.cli import app
from horovod_sparse.core import TensorSpec, virtual
from horovod_sparse.core.exchange import A2SGDExchange, Exchange, MiCROExchange, TopKExchange
from horovod_sparse.core.step import SettingError
from horovod_sparse.monitor import JSONLines, LiveView, Monitor, TensorBoard, describe
from horovod_sparse.report import Log, curve


def a_record(step: int = 1, **figures: Any) -> dict[str, Any]:
    return {
        "time": 1000.0 + step,
        "method": "micro",
        "world_size": 4,
        "step": step,
        "numel": 1000,
        "target_density": 0.01,
        "density": 0.012,
        "selected": 12,
        "threshold": 0.5,
        "bytes_sent": 100,
        "skipped": False,
        "dense_bytes": 4000,
        "selection_s": 0.002,
        "exchange_s": 0.003,
        "bytes_saved": 3900,
        "residual_norm": 7.5,
        "step_s": None if step == 1 else 0.25,
        **figures,
    }


WITHOUT_SELECTION = dict.fromkeys(["target_density", "density", "selected", "threshold", "residual_norm"])


def test_json_lines_keeps_what_is_there_and_writes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    for step in (1, 2):
        sink = JSONLines(path)
        assert path.exists() == (step == 2), "nothing is made before there is something to write"
        sink.write(a_record(step))
        assert [json.loads(line) for line in path.read_text().splitlines()] == [a_record(s) for s in range(1, step + 1)]
        sink.close()


def test_tensorboard_has_each_figure(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    sink.write(a_record(1))
    sink.write(a_record(2, **WITHOUT_SELECTION))
    sink.close()
    reading = (
        "import json, sys; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as E\n"
        "a = E(sys.argv[1]); a.Reload()\n"
        "print(json.dumps({t: [(s.step, s.value) for s in a.Scalars(t)] for t in a.Tags()['scalars']}))"
    )
    command = [sys.executable, "-c", reading, str(tmp_path / "run")]
    scalars = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout)
    assert scalars["horovod_sparse/density"] == [[1, pytest.approx(0.012)]]
    assert scalars["horovod_sparse/bytes_sent"] == [[1, 100.0], [2, 100.0]]
    assert scalars["horovod_sparse/skipped"] == [[1, 0.0], [2, 0.0]]
    assert scalars["horovod_sparse/step_s"] == [[2, 0.25]]
    assert "horovod_sparse/method" not in scalars


def test_live_view_without_a_terminal_prints_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    view = LiveView(line_every=10)
    for step in (1, 2, 12, 13):
        view.write(a_record(step))
    view.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("micro step 1 on 4 ranks, density 1.200% (target 1.000%), threshold 0.5, ")
    assert "bytes sent 100 (97.50% saved), residual norm 7.5, selection 2.00 ms, exchange 3.00 ms" in lines[0]
    assert "step 12 on 4 ranks, 250.0 ms a step" in lines[1]


def test_live_view_in_a_terminal_shows_the_last_record_and_gives_the_cursor_back() -> None:
    script = (
        "from horovod_sparse.monitor import LiveView; import json, sys\n"
        "view = LiveView()\n"
        "for line in sys.stdin: view.write(json.loads(line))\n"  # and ends without close(), as an interrupted script
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input="".join(json.dumps(a_record(step)) + "\n" for step in (1, 77)),
        env={**os.environ, "TTY_COMPATIBLE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "step 77 on 4 ranks" in done.stdout
    assert done.stdout.rindex("\x1b[?25h") > done.stdout.rindex("\x1b[?25l")


def test_figures_that_a_method_does_not_have_are_left_out() -> None:
    names = [name for name, _ in describe(a_record(1, **WITHOUT_SELECTION, method="a2sgd"))]
    assert names == ["a2sgd", "bytes sent", "selection", "exchange"]
    assert ("skipped", "a gradient is not finite") in describe(a_record(1, skipped=True))


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "3", None])
def test_every_is_a_number_of_steps(every: Any) -> None:
    with pytest.raises(SettingError, match="every="):
        Monitor(None, every=every)


def test_what_json_does_not_know_is_null(tmp_path: Path) -> None:
    sink = JSONLines(tmp_path / "run.jsonl")
    sink.write(a_record(1, residual_norm=float("inf"), threshold=float("nan")))
    text = (tmp_path / "run.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == a_record(1, residual_norm=None, threshold=None)


# What the figures are

SPECS = (TensorSpec("a", (300,), "float32"), TensorSpec("b", (10, 20), "float16"))


def steps_of(exchanges: list[Exchange]) -> list[Any]:
    gradients = [{s: np.random.default_rng(i).normal(size=s.numel).astype("f4") for s in SPECS} for i in range(2)]
    return [
        exchange.step(gradient, i, 2) for i, (exchange, gradient) in enumerate(zip(exchanges, gradients, strict=True))
    ]


@pytest.mark.parametrize("make", [lambda: MiCROExchange(0.1, "adaptive", None), lambda: TopKExchange(0.1)])
def test_residual_norm_and_dense_bytes(make: Any) -> None:
    exchanges = [make(), make()]
    assert exchanges[0].residual_norm() == 0
    for _ in range(3):
        virtual.run(steps_of(exchanges))
        for exchange in exchanges:
            residual = np.concatenate([part.ravel() for part in exchange.state()["residual"].values()])
            assert exchange.residual_norm() == pytest.approx(np.linalg.norm(residual.astype("f8")), rel=1e-5)
            assert exchange.stats.dense_bytes == 300 * 4 + 200 * 2
    loaded = make()
    loaded.place = (1, 2)
    loaded.load(exchanges[1].state())
    assert loaded.residual_norm() == exchanges[1].residual_norm() > 0


def test_a_method_that_holds_nothing_back_has_no_residual_norm() -> None:
    exchanges: list[Exchange] = [A2SGDExchange("model", None), A2SGDExchange("model", None)]
    virtual.run(steps_of(exchanges))
    assert exchanges[0].residual_norm() is None


def test_times_of_a_step_are_where_they_were_spent() -> None:
    exchanges: list[Exchange] = [MiCROExchange(0.1, "adaptive", None), MiCROExchange(0.1, "adaptive", None)]
    virtual.run(steps_of(exchanges))  # which compiles

    def slow(step: Any) -> Any:
        answer, rounds = None, 0
        while True:
            try:
                request = step.send(answer)
            except StopIteration as stop:
                waits.append(rounds * 0.02)
                return stop.value
            time.sleep(0.02)
            rounds += 1
            answer = yield request

    waits: list[float] = []
    begin = time.perf_counter()
    virtual.run([slow(step) for step in steps_of(exchanges)])
    elapsed = time.perf_counter() - begin
    for exchange, waited in zip(exchanges, waits, strict=True):
        assert exchange.stats
        assert exchange.stats.exchange_s >= waited > 0
        assert exchange.stats.selection_s > 0
        assert exchange.stats.exchange_s + exchange.stats.selection_s <= elapsed


def test_a_monitor_of_something_else() -> None:
    with pytest.raises(TypeError, match=r"not an object of str: pass get_compressor\(optimizer\)"):
        Monitor("run.jsonl")


# Reports

run = CliRunner().invoke


def write_log(path: Path, records: list[dict[str, Any]], end: str = "") -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return str(path)


def rows_of(output: str) -> dict[str, list[str]]:
    rows = (line.strip("│").split("│") for line in output.splitlines() if line.startswith("│"))
    return {name.strip(): [value.strip() for value in values] for name, *values in rows}


def test_report_shows_and_plots_all_logs(tmp_path: Path) -> None:
    skipped = a_record(3, density=0.0, bytes_sent=8, skipped=True)
    ours = write_log(tmp_path / "a", [a_record(1, density=0.01), a_record(2, density=0.02), skipped])
    other = write_log(tmp_path / "b", [a_record(5, method="a2sgd", bytes_sent=1000, **WITHOUT_SELECTION)])
    result = run(app, ["report", ours, other, "--plot", str(tmp_path / "out.png")])
    assert result.exit_code == 0, result.output
    rows = rows_of(result.output)
    assert rows["method"] == ["micro", "a2sgd"]
    assert rows["last step"] == ["3", "5"]
    assert rows["skipped steps"] == ["1", "0"]
    assert rows["density"] == ["1.500%", ""]
    assert rows["saved"] == ["97.50%", "75.00%"]
    assert rows["step"] == ["250.00 ms", "250.00 ms"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_log_that_was_appended_to_is_drawn_as_two_curves() -> None:
    steps, values = curve(Log("a", [a_record(step, density=step / 10) for step in (1, 2, 1, 2)]), "density")
    assert steps == [1, 2, pytest.approx(float("nan"), nan_ok=True), 1, 2]
    assert values == [0.1, 0.2, pytest.approx(float("nan"), nan_ok=True), 0.1, 0.2]


def test_names_of_logs_are_shown_as_they_are(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a[bold]b[", [a_record(1)])
    result = run(app, ["report", log, "--plot", str(tmp_path / "out.png")])
    assert result.exit_code == 0, result.output
    assert "a[bold]b[" in result.output.replace("\n", "").replace(" ", "").replace("┃", "")


def test_report_of_a_run_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a", [a_record(1)], end='{"time": 3, "st')
    result = run(app, ["report", log, "--plot", str(tmp_path / "out.svg")])
    assert result.exit_code == 0, result.output
    assert rows_of(result.output)["last step"] == ["1"]


def test_report_of_odd_lines_and_names(tmp_path: Path) -> None:
    lines = [json.dumps(a_record(1)), "", json.dumps(a_record(2, method="[/red] \u2028"), ensure_ascii=False), ""]
    (tmp_path / "log").write_text("\n".join(lines), encoding="utf-8")
    result = run(app, ["report", str(tmp_path / "log"), "--plot", str(tmp_path / "out.png")])
    assert result.exit_code == 0, result.output
    assert "[/red]" in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no records"),
        ('{"time": 3, "st', "has no records"),
        ("hello\n", "line 1"),
        (json.dumps(a_record(1)) + "\n[1]\n" + json.dumps(a_record(2)) + "\n", "line 2"),
        ('{"time": 3}\n', "line 1: figures are missing"),
        (json.dumps(a_record(1, density="x")) + "\n", "line 1: density is 'x'"),
        (json.dumps(a_record(1, bytes_sent=None)) + "\n", "line 1: bytes_sent is None"),
        (json.dumps(a_record(1, residual_norm="x")) + "\n", "line 1: residual_norm is 'x'"),
        (json.dumps(a_record(1, selected=10**400)) + "\n", "line 1: selected is 1"),
        ("[" * 100_000 + "\n", "line 1"),
    ],
)
def test_report_says_what_is_no_log(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(content)
    result = run(app, ["report", str(tmp_path / "log"), "--plot", str(tmp_path / "out.png")])
    assert result.exit_code == 1
    assert str(tmp_path / "log") in result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("plot", ["missing/out.png", "out.docx", "out"])
def test_report_that_cannot_be_written(plot: str, tmp_path: Path) -> None:
    log = write_log(tmp_path / "a", [a_record(1)])
    result = run(app, ["report", log, "--plot", str(tmp_path / plot)])
    assert result.exit_code == 1
    assert result.output.startswith(f"horovod-sparse: --plot {tmp_path / plot}: ")
    assert run(app, ["report", str(tmp_path / "nothing"), "--plot", str(tmp_path / "out.png")]).exit_code == 1
