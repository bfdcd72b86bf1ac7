"""Whose gradient is it? Horovod hands a compressor a tensor, and nothing else. And whose does it not hand over?

Horovod 0.28.1 calls `compress` from two methods of its optimizer: `_allreduce_grad_async(self, p)` and, with groups,
`_grouped_allreduce_grad_async(self, ps)`. Their local variables tell the optimizer and the parameter. They are called
by the hook of a parameter during the backward pass or, for what the backward pass left out, by `synchronize`. This is
the only place that relies on these names; the compressor also reads the optimizer's `_parameter_names`,
`_requires_update`, `_handles` and `_compression`.

It gives hooks to the parameters that need a gradient when it is made, and leaves alone what is added, or unfrozen,
later. `enlist` does for these what its constructor does.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

# `compress` is two frames below one of Horovod's methods, or three where a list comprehension is a frame of its own.
DEPTH = 6


class Caller(NamedTuple):
    optimizer: Any
    """The `horovod.torch.DistributedOptimizer` that asks for the compression."""
    parameter: torch.nn.Parameter
    synchronizing: bool
    """Called from `optimizer.synchronize()`, not from a hook in the backward pass."""


def unlisted(optimizer: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that need a gradient of which Horovod does not know, by the names that it would give them."""
    return {
        optimizer._parameter_names.get(p, f"allreduce.noname.{i}.{j}"): p
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if p.requires_grad and p not in optimizer._requires_update
    }


def enlist(optimizer: Any, name: str, parameter: torch.nn.Parameter) -> None:
    """From the next step on, Horovod reduces the gradient of this parameter, too."""
    optimizer._parameter_names[parameter] = name
    optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
    optimizer._requires_update.add(parameter)
    if optimizer._groups is not None:
        optimizer._p_to_group[parameter] = (parameter,)
        optimizer._group_counts[parameter,] = 0
    accumulator: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulator.register_hook(optimizer._make_hook(parameter))
    optimizer._grad_accs.append(accumulator)


def find_caller(tensor: torch.Tensor) -> Caller:
    """The optimizer and the parameter whose gradient Horovod is about to reduce.

    Raises:
        ValueError: the call does not come from a Horovod optimizer, or no parameter of it has this gradient.
    """
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        method = frame.f_code.co_name
        if method == "_allreduce_grad_async":
            parameter = frame.f_locals["p"]
        elif method == "_grouped_allreduce_grad_async":
            parameter = next((p for p in frame.f_locals["ps"] if p.grad is tensor), None)
        else:
            if frame.f_back is None:
                break
            frame = frame.f_back
            continue
        if parameter is None:
            break
        synchronizing = frame.f_back is not None and frame.f_back.f_code.co_name == "synchronize"
        return Caller(frame.f_locals["self"], parameter, synchronizing)
    raise ValueError(
        f"a tensor of shape {tuple(tensor.shape)} was given to compress that is not the gradient of a parameter of a "
        "horovod.torch.DistributedOptimizer. The compressors of horovod_sparse compress the gradient of a whole model: "
        "pass them to hvd.DistributedOptimizer(..., compression=...); for a single tensor use hvd.allreduce(tensor, "
        "compression=hvd.Compression.fp16)"
    )
