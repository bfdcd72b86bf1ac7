"""The blocks of code in the documentation, and what each page takes for granted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)

# Commands that no test runs, by how they begin, and why.
NOT_RUN = {
    "make demo": "two minutes each; `make demo` is for people, and `make test` runs this very test",
    "git clone": "it stands for the reader's own copy",
}

# In README.md, one compressor stands for those of all methods, and no single one has all that is shown.
REPLACED = {"compressor.synchronize_parameters()": "get_compressor(with_a2sgd).synchronize_parameters()"}

# Pages whose blocks are examples each of its own: what a page takes for granted is made anew for each block.
SEPARATE = {("README.md", "tensorflow"), ("docs/migration.md", "torch"), ("docs/troubleshooting.md", "torch")}

TORCH = """
import torch
from torch.nn.functional import cross_entropy

import horovod_sparse.torch as hvd
from horovod_sparse.torch import MiCROCompressor, get_compressor

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(32, 64), torch.randint(10, (32,))
batches = [(x, y)] * 3

def train_step():
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()

def distributed(optimizer, compression=MiCROCompressor):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
"""
DISTRIBUTED = "optimizer = distributed(optimizer)\nloss = cross_entropy(model(x), y)\n"

TENSORFLOW = """
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd

hvd.init()
tf.keras.utils.set_random_seed(0)
x, y = np.random.normal(size=(32, 64)).astype("float32"), np.random.randint(10, size=32)
model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10, "softmax")])
optimizer = tf.keras.optimizers.SGD(0.05)
"""

# What comes before a page's blocks, besides the above.
BEFORE = {
    ("README.md", "torch"): """
other = torch.nn.Linear(3, 3)
with_a2sgd = hvd.DistributedOptimizer(
    torch.optim.SGD(other.parameters(), 0.1), other.named_parameters(), compression=hvd.A2SGDCompressor
)
""",
    ("README.md", "tensorflow"): """
def load_shard(rank, size):
    return x, y

def loss_of(outputs, y):
    return tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(y, outputs))
""",
    ("docs/amp.md", "torch"): DISTRIBUTED,
    ("docs/checkpoints.md", "torch"): DISTRIBUTED + "train_step()\n",
    ("docs/checkpoints.md", "tensorflow"): """
optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.MiCROCompressor(density=0.01))
model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
model.fit(x, y, verbose=0)
""",
    ("docs/extending.md", "tensorflow"): "import horovod_sparse.tensorflow as hvd\n",
    ("docs/quickstart_pytorch.md", "torch"): DISTRIBUTED,
    ("docs/troubleshooting.md", "torch"): DISTRIBUTED,
}

# What comes after a page's blocks: that they have set up something that trains.
TRAIN = "train_step()\nassert get_compressor(optimizer).stats.selected\n"
FIT = """
model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
model.fit(x, y, verbose=0)
assert hvd.get_compressor(optimizer).stats.selected
"""
AFTER = {
    ("README.md", "torch"): TRAIN,
    ("README.md", "tensorflow"): """
if "step" in globals():
    step(tf.constant(x), tf.constant(y))
    assert compression.stats.selected
else:
    """
    + FIT.replace("\n", "\n    "),
    ("docs/amp.md", "torch"): "assert get_compressor(optimizer).stats.step == 6\n",
    ("docs/amp.md", "tensorflow"): "step(tf.constant(x), tf.constant(y))\nassert compression.stats.step == 1\n",
    ("docs/checkpoints.md", "torch"): TRAIN + "assert compressor.stats.step == 3\n",
    ("docs/checkpoints.md", "tensorflow"): """
model.fit(x, y, verbose=0)
assert hvd.get_compressor(model.optimizer).stats.step == 2
""",
    ("docs/choosing.md", "torch"): "optimizer = distributed(optimizer, compression)\n" + TRAIN,
    ("docs/elastic.md", "tensorflow"): "state.commit()\n",
    ("docs/extending.md", "torch"): """
assert loss < 0.3 * torch.nn.functional.mse_loss(torch.zeros(16, 8), x @ teacher)
weights = hvd.allgather(model.weight.detach()[None])
assert torch.equal(weights[0], weights[1])
stats = get_compressor(optimizer).stats
assert (stats.step, stats.selected) == (300, 26)  # a tenth of 32 * 8 + 8 parameters
""",
    ("docs/extending.md", "tensorflow"): """
compression = RandomKCompressor(density=0.1)
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(model(x))
tape = hvd.DistributedGradientTape(tape, compression=compression)
tape.gradient(loss, model.trainable_variables)
assert compression.stats.selected == 65  # a tenth of 64 * 10 + 10 parameters
""",
    ("docs/index.md", "torch"): TRAIN,
    ("docs/migration.md", "torch"): "optimizer.zero_grad()\ntrain_step()\n",
    ("docs/monitoring.md", "tensorflow"): "assert hvd.get_compressor(optimizer).stats.step == 1\n",
    ("docs/monitoring.md", "torch"): """
import json
if hvd.rank() == 0:
    with open("run.jsonl") as log:
        assert [json.loads(line)["step"] for line in log] == [1, 2, 3]
""",
}


class Block(NamedTuple):
    page: str
    line: int
    """Where its first line is on the page, from 1."""
    language: str
    text: str

    @property
    def framework(self) -> str:
        return "tensorflow" if re.search(r"tensorflow|keras|\btf\.", self.text) else "torch"

    @property
    def reason_not_to_run(self) -> str | None:
        return next((reason for start, reason in NOT_RUN.items() if self.text.startswith(start)), None)


def blocks(language: str) -> list[Block]:
    """Those of all pages, in order."""
    return [block for page in PAGES for block in _blocks_of(page) if block.language == language]


def scripts() -> list[tuple[Block, Block]]:
    """The Python blocks to be saved as train.py, each with the commands that run it."""
    pairs = []
    for page in PAGES:
        of_page = list(_blocks_of(page))
        for i, commands in enumerate(of_page):
            if commands.language == "sh" and "train.py" in commands.text:
                pairs.append((next(b for b in reversed(of_page[:i]) if b.language == "python"), commands))
    return pairs


def snippets(framework: str) -> dict[str, list[Block]]:
    """The other Python blocks that need this framework, by page."""
    in_scripts = {script for script, _ in scripts()}
    found: dict[str, list[Block]] = {}
    for block in blocks("python"):
        if block not in in_scripts and block.framework == framework:
            found.setdefault(block.page, []).append(block)
    if framework == "tensorflow":
        found["docs/extending.md"] = [_random_k_for_tensorflow()]
    return found


def _random_k_for_tensorflow() -> Block:
    """The method of one's own, with the change that its page names."""
    block = next(block for block in blocks("python") if "class RandomK:" in block.text)
    return block._replace(text=block.text.replace("horovod_sparse.torch.", "horovod_sparse.tensorflow."))


def _blocks_of(page: str) -> Iterator[Block]:
    content = (ROOT / page).read_text()
    for match in FENCE.finditer(content):
        text = dedent(match["text"])
        included = re.fullmatch(r'--8<-- "(.+)"\n', text)
        if included:
            text = (ROOT / included[1]).read_text()
        line = content.count("\n", 0, match.start("text")) + 1
        yield Block(page, line, match["language"], text)
