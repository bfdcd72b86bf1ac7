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
    """A tensor flattened, in `dtype`: a numpy array if it lies in host memory, else a torch tensor.

    `array` shares the tensor's memory where that is laid out so; otherwise it is a copy.
    """

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        self._tensor = tensor
        self._flat = tensor.reshape(-1).to(getattr(torch, dtype))
        self.array: Array = self._flat.numpy() if tensor.device.type == "cpu" else self._flat

    def store(self, scale: int) -> None:
        """Multiply what `array` holds by `scale`, and see that the tensor holds it.

        A value that the tensor's dtype cannot hold becomes the largest that it can.
        """
        if scale != 1:
            self._flat.mul_(scale)
        if self._flat.data_ptr() != self._tensor.data_ptr():
            limits = torch.finfo(self._tensor.dtype)
            self._tensor.copy_(self._flat.clamp_(limits.min, limits.max).view(self._tensor.shape))
