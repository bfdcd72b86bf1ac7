"""Horovod's optimizers in the `Trainer` of Hugging Face transformers, and live figures from it.

    optimizer = hvd.DistributedOptimizer(..., compression=MiCROCompressor)
    trainer = HorovodTrainer(model, arguments, train_dataset=own_shard, optimizers=(optimizer, scheduler),
                             callbacks=[MonitorCallback(JSONLines("run.jsonl"))])

Start it with `horovodrun --gloo`: accelerate takes a job of `mpirun` for one of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from horovod_sparse.monitor import Monitor, Sink, check_every
from horovod_sparse.torch.compressor import get_compressor

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "horovod_sparse.torch.huggingface needs transformers: pip install 'horovod_sparse[huggingface]'"
    ) from error


class HorovodTrainer(Trainer):
    """A `Trainer` whose optimizer is Horovod's: it clips gradients after they have been reduced, not before.

    Each rank trains on the data that it is given. With `gradient_accumulation_steps`, give Horovod's optimizer as many
    `backward_passes_per_step`. It works with any `compression`.
    """

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As of `Trainer`; after a step's last backward pass, reduce the gradients, which the step then does not."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            optimizer = _unwrapped(self.optimizer)
            optimizer.synchronize()
            self._until_stepped.enter_context(optimizer.skip_synchronize())
        return loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As of `Trainer`.

        Raises:
            TypeError: the trainer was not given an optimizer of Horovod.
        """
        optimizer = _unwrapped(super().create_optimizer(*args, **kwargs))
        if not hasattr(optimizer, "skip_synchronize"):
            raise TypeError(
                f"optimizers=({type(optimizer).__name__}, ...): HorovodTrainer needs an optimizer made by "
                "hvd.DistributedOptimizer: pass optimizers=(hvd.DistributedOptimizer(...), scheduler)"
            )
        self._until_stepped = ExitStack()
        optimizer.register_step_post_hook(lambda *_: self._until_stepped.close())
        return self.optimizer


class MonitorCallback(TrainerCallback):
    """Sends the compressor's figures to sinks, on rank 0: see `horovod_sparse.monitor`.

    Args:
        sinks, every: as for `Monitor`.

    Raises:
        SettingError: `every` is not a whole number >= 1.
    """

    def __init__(self, *sinks: Sink, every: int = 1) -> None:
        self._sinks = sinks
        self._every = check_every(every)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Find the compressor.

        Raises:
            TypeError: the optimizer has none.
        """
        self._monitor = Monitor(get_compressor(_unwrapped(optimizer)), *self._sinks, every=self._every)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.close()


def _unwrapped(optimizer: Any) -> Any:
    """Horovod's optimizer, where accelerate has put one of its own around it."""
    return getattr(optimizer, "optimizer", optimizer)
