"""Loss scaling: by what was the loss multiplied whose backward pass is running?

`torch.amp.GradScaler.scale` multiplies a loss, and so all gradients. Who keeps gradients for later steps, when the
scale may be another one, has to know it; but a gradient does not tell, nor does Horovod. So, once this module is
imported, what `scale` returns has a hook, which its backward pass runs before it comes to any parameter. And before
`unscale_` changes the gradients of an optimizer, it asks whether they are still being exchanged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

before_unscaling: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()
"""For an optimizer: what `unscale_` is to call first, which may raise an error."""


class Pass(NamedTuple):
    """A backward pass of a scaled loss."""

    scaler: torch.amp.GradScaler
    thread: int
    depth: int
    """How many passes run in that thread, each inside the one before: reentrant checkpointing does so."""
    order: int
    """Among all passes of scaled losses, from 1."""


# Those under way, by autograd's numbers. One that fails stays, until its thread begins another.
_passes: dict[int, Pass] = {}
_latest: Pass | None = None


def current_scaler() -> torch.amp.GradScaler | None:
    """Whoever has scaled the loss of the backward pass that calls this; None if nobody has."""
    number = torch._C._current_graph_task_id()
    if number in _passes:
        return _passes[number].scaler
    if not _passes:
        return None
    thread, depth = threading.get_ident(), _depth()
    outer = [p for p in _passes.values() if p.thread == thread and p.depth < depth]
    return max(outer, key=lambda p: p.order).scaler if outer else None


def passes_so_far() -> int:
    """How many backward passes of scaled losses have begun."""
    return _latest.order if _latest else 0


def scaler_since(passes: int) -> torch.amp.GradScaler | None:
    """Whoever has scaled the loss of the last backward pass, if there was one after so many."""
    return _latest.scaler if _latest and _latest.order > passes else None


def _depth() -> int:
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return depth


def _begin(scaler: torch.amp.GradScaler, gradient: torch.Tensor) -> None:
    global _latest
    number = torch._C._current_graph_task_id()
    if number not in _passes:
        this = _latest = Pass(scaler, threading.get_ident(), _depth(), passes_so_far() + 1)
        for failed in [n for n, p in _passes.items() if p.thread == this.thread and p.depth >= this.depth]:
            del _passes[failed]
        _passes[number] = this
        torch.autograd.Variable._execution_engine.queue_callback(partial(_end, number))


def _end(number: int) -> None:
    _passes.pop(number, None)


def _with_hooks(outputs: Any, scaler: torch.amp.GradScaler) -> Any:
    if isinstance(outputs, torch.Tensor):
        if outputs.requires_grad:
            outputs.register_hook(partial(_begin, scaler))  # type: ignore[no-untyped-call]
        return outputs
    each = (_with_hooks(output, scaler) for output in outputs)
    return type(outputs)(each) if isinstance(outputs, list | tuple) else each  # as `scale` does


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
