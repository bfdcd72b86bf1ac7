"""A parameter's gradient as the core sees it: a flat array."""

from __future__ import annotations

import torch

from horovod_sparse.core import TensorSpec
from horovod_sparse.core.collectives import Array

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The tensor's entry in a layout."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class FlatGradient:
    """A gradient, and the flat array by which the core knows it."""

    def __init__(self, tensor: torch.Tensor, usable: bool) -> None:
        self.tensor = tensor
        self._usable = usable

    def flatten(self, dtype: str) -> Array:
        """The gradient as a flat array of `dtype`: a numpy array if it lies in host memory, else a torch tensor.

        It shares the gradient's memory where that is laid out so; otherwise it is a copy. A gradient that is not
        usable is empty.
        """
        flat = self.tensor.reshape(-1).to(getattr(torch, dtype)) if self._usable else torch.zeros(0)
        self._flat = flat
        self.array: Array = flat.numpy() if flat.device.type == "cpu" else flat
        return self.array

    def store(self, scale: int) -> None:
        """Multiply what `array` holds by `scale`, and see that the gradient holds it.

        A value that the gradient's dtype cannot hold becomes the largest that it can.
        """
        if scale != 1:
            self._flat.mul_(scale)
        if self._flat.data_ptr() != self.tensor.data_ptr():
            limits = torch.finfo(self.tensor.dtype)
            self.tensor.copy_(self._flat.clamp_(limits.min, limits.max).view(self.tensor.shape))
