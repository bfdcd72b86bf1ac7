"""`horovodrun -np 2 horovod-sparse advise`, with scripts of users, and without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import HOROVODRUN

BIN = Path(sys.executable).parent

TORCH = """
import sys, time
import torch
{imports}
assert sys.argv[1:] == ["--fast", "3"], sys.argv
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 10, bias=False))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(){options})
{more}
try:
    for step in range(10**9):
        optimizer.zero_grad()
        model(torch.randn(8, 100)).square().mean().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        time.sleep(0.03)
finally:
    hvd.shutdown()
"""
KERAS = """
import numpy as np, tensorflow as tf, time
import horovod_sparse.tensorflow.keras as hvd
hvd.init()
layers = tf.keras.layers
model = tf.keras.Sequential([layers.Input((100,)), layers.Dense(300), layers.Dense(10, use_bias=False)])
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=hvd.MiCROCompressor)
model.compile(optimizer, "mse", jit_compile=False)
pause = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.03))
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MonitorCallback(), pause]
model.fit(np.ones((320, 100)), np.ones((320, 10)), batch_size=8, epochs=10**6, verbose=0, callbacks=callbacks)
"""
TAPE = """
import tensorflow as tf, time
import horovod.tensorflow as hvd
hvd.init()
w, b, v = (tf.Variable(tf.ones(shape)) for shape in ((100, 300), (300,), (300, 10)))
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(((x @ w + b) @ v) ** 2)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    for p, g in zip((w, b, v), tape.gradient(loss, (w, b, v))):
        p.assign_sub(1e-6 * g)
while True:
    step(tf.ones((8, 100)))
    time.sleep(0.03)
"""
STOCK = {"imports": "import horovod.torch as hvd", "options": "", "more": ""}
OURS = {
    "imports": "import horovod_sparse.torch as hvd",
    "options": ", compression=hvd.MiCROCompressor",
    "more": "assert hvd.get_compressor(optimizer).stats is None",
}
SCRIPTS = {
    "stock PyTorch": TORCH.format(**STOCK),
    "ours in PyTorch": TORCH.format(**OURS),
    "Keras": KERAS,
    "a stock tape": TAPE,
}


def advise(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HOROVODRUN, "--gloo", "-np", str(ranks), BIN / "horovod-sparse", "advise"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=110, env=environment)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    done = advise("--seconds", "1", "--json", str(tmp_path / "a.json"), str(tmp_path / "train.py"), "--fast", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    advice = json.loads((tmp_path / "a.json").read_text())
    assert advice["numel"] == 100 * 300 + 300 + 300 * 10
    assert advice["ranks"] == 2
    assert advice["compute_s"] >= 0.03
    assert all(candidate["step_s"] >= advice["compute_s"] for candidate in advice["candidates"])
    sent = {candidate["setting"]: candidate["bytes_sent"] for candidate in advice["candidates"]}
    assert sent["Compression.none"] == 4 * advice["numel"] == 2 * sent["Compression.fp16"]
    assert sent["MiCROCompressor(density=0.1)"] < sent["Compression.fp16"]
    assert f"{advice['numel']:,} parameters" in done.stdout
    assert done.stdout.count("MiCROCompressor(density=0.01)") in (1, 2), "rank 0 alone prints"


JOINS = """
import os, time
import {framework} as hvd
{imports}
hvd.init()
os.chdir("/")
{model}
for step in range(8 if hvd.rank() == 0 else 12):
    {step}
    time.sleep(0.03)
    hvd.allreduce({ones}, name="loss")
hvd.join()
"""
IN_TORCH = {
    "framework": "horovod.torch",
    "imports": "import torch",
    "model": "w = torch.nn.Parameter(torch.ones(500)); "
    "optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=0.1), [('w', w)])",
    "step": "(w * w).sum().backward(); optimizer.step()",
    "ones": "torch.ones(1)",
}
IN_TENSORFLOW = {
    "framework": "horovod.tensorflow",
    "imports": "import tensorflow as tf",
    "model": "w = tf.Variable(tf.ones(500))",
    "step": "\n    ".join(
        [
            "with tf.GradientTape() as tape:",
            "    loss = tf.reduce_sum(w * w)",
            "hvd.DistributedGradientTape(tape).gradient(loss, [w])",
        ]
    ),
    "ones": "tf.ones(1)",
}


@pytest.mark.parametrize("framework", [IN_TORCH, IN_TENSORFLOW], ids=["torch", "tensorflow"])
def test_ranks_that_have_not_as_many_steps(framework: dict[str, str], tmp_path: Path) -> None:
    """They need one another in each, until they join; and the script goes into another directory."""
    (tmp_path / "train.py").write_text(JOINS.format(**framework))
    out = os.path.relpath(tmp_path / "a.json")
    done = advise("--seconds", "1", "--json", out, str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    advice = json.loads((tmp_path / "a.json").read_text())
    assert advice["numel"] == 500
    assert advice["compute_s"] >= 0.03


def test_a_model_size() -> None:
    done = advise("--parameters", "2e5", "--compute-ms", "5", "--seconds", "1", ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 ranks; 200,000 parameters; 5.0 ms a step without exchange" in done.stdout
    verdicts = ("does not pay", "pays here", "is enough", "vary too much")
    assert any(verdict in done.stdout for verdict in verdicts), done.stdout
    assert "All ranks are on one host" in done.stdout


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import horovod.torch as hvd; hvd.init(); hvd.join()", "took 0 steps"),
        ("import horovod.torch as hvd, sys; hvd.init(); sys.exit('no data')", "it ended with sys.exit('no data')"),
        (
            "import horovod.torch as hvd; hvd.init(); assert hvd.rank() == 0, 'no data'; hvd.broadcast_object(0)",
            "train.py, rank 1: AssertionError: no data",
        ),
    ],
)
def test_a_script_that_does_not_train(script: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    done = advise(str(path))
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "a.json"
    done = advise("--parameters", "1e3", "--json", str(out))
    assert done.returncode != 0
    assert f"--json {out}: " in done.stderr
    assert "horovod_sparse/advisor" not in done.stderr  # no traceback of ours


def test_interruption_shows_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    options = ["--parameters", "1e5", "--seconds", "100", "--json", str(out)]
    job = subprocess.Popen(
        [BIN / "mpirun", "--oversubscribe", "-np", "2", BIN / "horovod-sparse", "advise", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_text().endswith("}\n")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGINT)
    output, _ = job.communicate(timeout=30)
    assert job.returncode != 0
    assert "interrupted; what was measured so far" in output
    assert "MiCROCompressor(density=0.01)" in output
    assert json.loads(out.read_text())["ranks"] == 2
