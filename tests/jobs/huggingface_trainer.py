"""A rank that trains with Hugging Face's Trainer: huggingface_trainer.py FOLDER, with settings.json in it.

Each batch is all of a rank's data, so that it is known what each step does. `expected` are the parameters that plain
training in one process ends with, on the mean of all ranks' gradients, clipped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from transformers import TrainingArguments

from horovod_sparse.monitor import JSONLines
from horovod_sparse.torch import Compression, MiCROCompressor
from horovod_sparse.torch.huggingface import HorovodTrainer, MonitorCallback

STEPS, PASSES, CLIP = 4, 2, 0.5
folder = Path(sys.argv[1])
settings = json.loads((folder / "settings.json").read_text())


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def data(rank: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {"x": torch.randn(6, generator=generator), "labels": torch.randint(3, (), generator=generator)}
        for _ in range(8)
    ]


def sgd(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def expected(ranks: int) -> list[torch.Tensor]:
    model = Model()
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            examples = data(rank)
            batch = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
            (model(**batch)["loss"] / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def main() -> None:
    hvd.init()
    compression = {"none": Compression.none, "micro": MiCROCompressor(density=settings["density"])}
    compression = compression[settings["compression"]]
    model = Model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression=compression, backward_passes_per_step=PASSES
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    arguments = TrainingArguments(
        output_dir=str(folder / "output"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=PASSES,
        max_grad_norm=CLIP,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    monitored = settings["compression"] != "none"
    callbacks = [MonitorCallback(JSONLines(folder / "monitor.log"))] if monitored else []
    HorovodTrainer(
        model, arguments, train_dataset=data(hvd.rank()), optimizers=(optimizer, scheduler), callbacks=callbacks
    ).train()
    wanted = expected(hvd.size())
    away = max(float((p.detach() - q).abs().max()) for p, q in zip(model.parameters(), wanted, strict=True))
    moved = max(float((p - q).abs().max()) for p, q in zip(Model().parameters(), wanted, strict=True))
    parameters = [p.detach().double().sum().item() for p in model.parameters()]
    line = {"event": "end", "away": away, "moved": moved, "parameters": parameters}
    (folder / f"{hvd.rank()}.jsonl").write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
