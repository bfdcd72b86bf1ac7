"""Loss scaling: by what was the loss multiplied whose backward pass is running?

`torch.amp.GradScaler.scale` multiplies a loss, and so all gradients. Who keeps gradients for later steps, when the
scale may be another one, has to know it; but a gradient does not tell, nor does Horovod. So, once this module is
imported, what `scale` returns has a hook, which its backward pass runs before it comes to any parameter. And before
`unscale_` changes the gradients of an optimizer, it asks whether they are still being exchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch

before_unscaling: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()
"""For an optimizer: what `unscale_` is to call first, which may raise an error."""

# The scalers of the backward passes under way, by their numbers, and in which threads they began.
_passes: dict[int, tuple[int, torch.amp.GradScaler]] = {}


def current_scaler() -> torch.amp.GradScaler | None:
    """Whoever has scaled the loss of the backward pass that calls this; None if nobody has."""
    number, thread = torch._C._current_graph_task_id(), threading.get_ident()
    if number in _passes:
        return _passes[number][1]
    # A pass inside another, as of reentrant checkpointing, has a number of its own.
    return next((scaler for ident, scaler in reversed(_passes.values()) if ident == thread), None)


def _begin(scaler: torch.amp.GradScaler, gradient: torch.Tensor) -> None:
    number = torch._C._current_graph_task_id()
    if number not in _passes:
        _passes[number] = threading.get_ident(), scaler
        torch.autograd.Variable._execution_engine.queue_callback(partial(_end, number))


def _end(number: int) -> None:
    del _passes[number]


def _with_hooks(outputs: Any, scaler: torch.amp.GradScaler) -> Any:
    if isinstance(outputs, torch.Tensor):
        if outputs.requires_grad:
            outputs.register_hook(partial(_begin, scaler))  # type: ignore[no-untyped-call]
        return outputs
    return type(outputs)(_with_hooks(output, scaler) for output in outputs)


_scale, _unscale_ = torch.amp.GradScaler.scale, torch.amp.GradScaler.unscale_


@wraps(_scale)
def _scale_and_tell(self: torch.amp.GradScaler, outputs: Any) -> Any:
    scaled = _scale(self, outputs)
    return _with_hooks(scaled, self) if self.is_enabled() else scaled


@wraps(_unscale_)
def _ask_and_unscale_(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    if self.is_enabled() and optimizer in before_unscaling:
        before_unscaling[optimizer]()
    _unscale_(self, optimizer)


torch.amp.GradScaler.scale = _scale_and_tell  # type: ignore[method-assign]
torch.amp.GradScaler.unscale_ = _ask_and_unscale_  # type: ignore[method-assign]
