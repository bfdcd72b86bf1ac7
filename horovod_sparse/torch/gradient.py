"""A parameter's gradient as the core sees it: a flat array."""

from __future__ import annotations

from zlib import crc32

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


def _use_count(tensor: torch.Tensor) -> float:
    """How many tensors share this one's memory, and the object that tells; infinity where torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count(tensor.untyped_storage()._cdata) if count else float("inf")


def _count_alone() -> float:
    """`_use_count` of a gradient that nobody else has: the parameter's tensor and ours, a detached one."""
    of_parameter = torch.zeros(1)
    ours = of_parameter.detach()
    return _use_count(ours)


_ALONE = _count_alone()


class FlatGradient:
    """A gradient, and the flat array by which the core knows it.

    Attributes:
        tensor: the gradient; after `store`, the one to apply.
        out: memory for a step to use; see `core.MiCRO.step`.
    """

    def __init__(self, tensor: torch.Tensor, usable: bool) -> None:
        self.tensor = tensor
        self._usable = usable
        self._version = tensor._version

    def flatten(self, dtype: str, device: torch.device, given: Array | None) -> Array:
        """The gradient as a flat array of `dtype`: a numpy array if it is to be in host memory, else a torch tensor.

        It shares the gradient's memory where that is laid out so; otherwise it is a copy. A gradient that is not
        usable is empty.

        Args:
            dtype, device: those of the exchange.
            given: what `store` has made the gradient's memory in an earlier step.
        """
        if not self._usable:
            self._handing_over = False
            self.out: Array = as_array(torch.zeros(0))
            return self.out
        alone = self._is_alone(given)  # before there are more that know the memory
        flat = self.tensor.reshape(-1).contiguous().to(device, getattr(torch, dtype))
        array = as_array(flat)
        self._handing_over = alone and self.tensor.is_contiguous() and self.tensor.dtype == flat.dtype
        self._handing_over &= self.tensor.device == flat.device
        copied = flat.data_ptr() != self.tensor.data_ptr()
        self.out = array if copied or self._handing_over else as_array(torch.empty_like(flat))
        return array

    @property
    def changed(self) -> bool:
        """Whether somebody has written to the gradient since Horovod has handed it over."""
        return self._usable and self.tensor._version != self._version

    def _is_alone(self, given: Array | None) -> bool:
        """Whether nobody else knows the gradient's memory, which a step may then have.

        That is, no other gradient, no buffer that its owner sets to 0, no numpy array: for one, torch marks memory as
        not resizable.
        """
        storage = self.tensor.untyped_storage()
        if storage.nbytes() != self.tensor.nbytes or _use_count(self.tensor) > _ALONE:
            return False
        return storage.resizable() or (given is not None and given.ctypes.data == self.tensor.data_ptr())

    def store(self, array: Array, scale: int) -> Array | None:
        """Let `tensor` be what `array` holds, times `scale`; returns `array` if it is now the gradient's memory.

        A value that the gradient's dtype cannot hold becomes the largest that it can.
        """
        flat = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        if scale != 1:
            flat.mul_(scale)
        if self._handing_over:
            self.tensor = flat.view(self.tensor.shape)  # no copy: Horovod makes it the memory of the gradient
            return array
        limits = torch.finfo(self.tensor.dtype)
        self.tensor.copy_(flat.clamp_(limits.min, limits.max).view(self.tensor.shape))
        return None


def digest(tensor: torch.Tensor) -> int:
    """A number that differs, in all likelihood, for tensors that differ in a bit; computed where the tensor lies."""
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    if data.device.type == "cpu":
        return crc32(data.numpy().data)
    return int((data.long() * (torch.arange(data.numel(), device=data.device) * 2654435761 + 1)).sum())


def as_array(tensor: torch.Tensor) -> Array:
    """The tensor as the core takes it: as a numpy array if it lies in host memory."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
