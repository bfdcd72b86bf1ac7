"""A parameter's gradient as the core sees it: a flat array."""

from __future__ import annotations

import numpy as np
import torch

from horovod_sparse.core import TensorSpec
from horovod_sparse.core.collectives import Array
from horovod_sparse.core.kernels import host

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


host.thread_count = torch.get_num_threads


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The tensor's entry in a layout."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class FlatGradient:
    """A gradient, and the flat array by which the core knows it.

    Attributes:
        tensor: the gradient; after `store`, the one to apply.
        out: memory for a step to use; see `core.MiCRO.step`.
    """

    def __init__(self, tensor: torch.Tensor, usable: bool) -> None:
        self.tensor = tensor
        self._usable = usable

    def flatten(self, dtype: str) -> Array:
        """The gradient as a flat array of `dtype`: a numpy array if it lies in host memory, else a torch tensor.

        It shares the gradient's memory where that is laid out so; otherwise it is a copy. A gradient that is not
        usable is empty.
        """
        gradient = self.tensor.reshape(-1).contiguous() if self._usable else torch.zeros(0)
        flat = gradient.to(getattr(torch, dtype))
        # A gradient that is part of something larger, say of a buffer that its owner sets to 0, stays there.
        own = flat.untyped_storage().nbytes() == flat.nbytes
        array = as_array(flat)
        self.out: Array = array if own else as_array(torch.empty_like(flat))
        return array

    def store(self, array: Array, scale: int) -> None:
        """Let `tensor` be what `array` holds, times `scale`.

        A value that the gradient's dtype cannot hold becomes the largest that it can.
        """
        flat = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        if scale != 1:
            flat.mul_(scale)
        own = self.tensor.untyped_storage().nbytes() == self.tensor.nbytes
        if own and self.tensor.is_contiguous() and self.tensor.dtype == flat.dtype:
            self.tensor = flat.view(self.tensor.shape)  # no copy: Horovod makes it the memory of the gradient
        else:
            limits = torch.finfo(self.tensor.dtype)
            self.tensor.copy_(flat.clamp_(limits.min, limits.max).view(self.tensor.shape))


def as_array(tensor: torch.Tensor) -> Array:
    """The tensor as the core takes it: as a numpy array if it lies in host memory."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
