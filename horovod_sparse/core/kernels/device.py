"""Kernels over torch tensors on any device: the twins of those in `host`, which documents them.

A flat vector is one tensor. Of a vector, nothing leaves the device; a few numbers do, where a step depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_sparse.core.layout import FlatLayout
from horovod_sparse.core.partition import Partition

LINE = 128


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def zeros(layout: FlatLayout, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(layout.numel, dtype=_dtype(layout.dtype), device=like.device)


def flat_vector(arrays: Sequence[torch.Tensor], dtype: str) -> torch.Tensor:
    return torch.cat([array.reshape(-1).to(_dtype(dtype)) for array in arrays])


def empty_like(vector: torch.Tensor) -> list[torch.Tensor]:
    return []  # these kernels bring their own memory


def split(vector: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    return list(torch.split(vector, [tensor.numel for tensor in layout.tensors]))


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(_dtype(dtype))


def beside(x: Any, like: torch.Tensor, dtype: str) -> torch.Tensor:
    return torch.as_tensor(x).to(like.device, _dtype(dtype), copy=True)


def numbers(values: Any, like: torch.Tensor, dtype: str) -> torch.Tensor:
    return torch.as_tensor(values, dtype=_dtype(dtype), device=like.device)


def join(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(arrays))


def all_finite(x: torch.Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def accumulate(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    out: Sequence[torch.Tensor],
    weights: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    layout: FlatLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    if (weights == 1).all() and (scales == 1).all():
        gradient += residual  # `flat_vector` has made it
    else:
        parts = zip(split(gradient, layout), split(residual, layout), strict=True)
        for (part, held_back), weight, scale in zip(parts, weights.tolist(), scales.tolist(), strict=True):
            part.mul_(weight).add_(held_back, alpha=scale)
    return gradient, (gradient * 0).sum()


def count_at_least(x: torch.Tensor, part: Partition, magnitudes: Any, stride: int) -> torch.Tensor:
    owned = x[part.start : part.stop]
    if not magnitudes.size or not owned.numel():
        return torch.zeros(magnitudes.size, device=x.device)
    whole = owned.numel() // (stride * LINE) * stride * LINE
    lines = owned[:whole].view(-1, stride * LINE)[:, :LINE].reshape(-1)
    sample = torch.cat([lines, owned[whole:][:LINE] if stride > 1 else owned[whole:]])
    edges = numbers(magnitudes, x, str(x.dtype).removeprefix("torch."))
    # right=True: an element as large as a magnitude counts for it.
    position = torch.bucketize(sample.abs_(), edges, right=True)
    counts = torch.bincount(position, minlength=magnitudes.size + 1)[1:]
    return counts.flip(0).cumsum(0).flip(0) * (owned.numel() / sample.numel())


def select(x: torch.Tensor, part: Partition, threshold: float, dtype: str) -> torch.Tensor:
    positions = (x[part.start : part.stop].abs() >= threshold).nonzero().view(-1)
    return positions.add_(part.start).to(_dtype(dtype))


def take(x: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    values = x.clone() if indices is None else x[indices.long()]
    put(x, indices, 0.0)
    return values


def put(x: torch.Tensor, indices: torch.Tensor | None, values: torch.Tensor | float) -> None:
    x[... if indices is None else indices.long()] = values


def write_sparse(x: torch.Tensor, indices: torch.Tensor | None, values: torch.Tensor) -> None:
    x.zero_()
    put(x, indices, values)


def encode_gaps(indices: torch.Tensor, start: int, dtype: str) -> torch.Tensor:
    largest = int(np.iinfo(dtype).max)
    indices = indices.long()
    gaps = indices.diff(prepend=indices.new_tensor([start - 1])) - 1
    ends = (gaps // largest + 1).cumsum(0)
    codes = indices.new_full((int(ends[-1]) if len(ends) else 0,), largest)
    codes[ends - 1] = gaps % largest
    width = np.dtype(dtype).itemsize
    return bytes_of(codes).view(-1, 8)[:, :width].reshape(-1)  # little-endian, as all devices are


def decode_gaps(codes: torch.Tensor, start: int, dtype: str, index_dtype: str) -> torch.Tensor:
    width = np.dtype(dtype).itemsize
    wide = codes.new_zeros(len(codes) // width, 8)
    wide[:, :width] = codes.view(-1, width)
    gaps = wide.view(torch.int64).view(-1)
    ends = gaps != int(np.iinfo(dtype).max)
    return ((gaps + ends).cumsum(0)[ends] + (start - 1)).to(_dtype(index_dtype))


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def bytes_as(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.clone().view(_dtype(dtype))  # which has to be aligned


def to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(torch.bfloat16).max
    return values.clamp(-limit, limit).float().bfloat16().view(torch.int16)


def from_bfloat16(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    return bits.view(torch.bfloat16).to(_dtype(dtype))


def round_to(values: torch.Tensor, dtype: str, world_size: int) -> torch.Tensor:
    limit = torch.finfo(_dtype(dtype)).max / 2 / world_size
    return values.clamp(-limit, limit).to(_dtype(dtype))


def sign_sums(x: torch.Tensor, layout: FlatLayout) -> Any:
    sums = []
    for part in split(x, layout):
        wide = part.double()
        above, below = wide >= 0, wide < 0
        sums.append(torch.stack([wide.clamp(min=0).sum(), above.sum(), -wide.clamp(max=0).sum(), below.sum()]))
    return torch.stack(sums).cpu().numpy()


def shift_by_sign(
    x: torch.Tensor, shifts: np.ndarray[Any, Any], out: Sequence[torch.Tensor], layout: FlatLayout
) -> torch.Tensor:
    for part, (up, down) in zip(split(x, layout), shifts.tolist(), strict=True):
        part.copy_(torch.where(part >= 0, part + up, part - down))
    return x


def top_k(x: torch.Tensor, k: int, dtype: str) -> tuple[torch.Tensor, float]:
    magnitudes = x.abs()
    least = magnitudes.topk(k, sorted=False).values.amin() if k else magnitudes.new_tensor(np.inf)
    kept = magnitudes >= least
    equal = (magnitudes == least).nonzero().view(-1)
    kept[equal[len(equal) - (int(kept.sum()) - k) :]] = False
    return kept.nonzero().view(-1).to(_dtype(dtype)), float(least)


def sum_by_index(indices: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    union, places = torch.unique(torch.cat(list(indices)), return_inverse=True)
    total = values[0].new_zeros(len(union))
    # One vector after the other, for the sum not to depend on the order in which threads get to add.
    for place, part in zip(places.split([len(part) for part in indices]), values, strict=True):
        total[place] += part
    return union, total


def quantise(
    x: torch.Tensor, bits: int, bucket_size: int, key: np.ndarray[Any, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    levels, mask = 2 ** (bits - 1) - 1, 0xFFFFFFFF
    buckets = torch.nn.functional.pad(x, (0, -len(x) % bucket_size)).view(-1, bucket_size)
    norms = buckets.double().square().sum(1).sqrt().clamp(max=torch.finfo(x.dtype).max).to(x.dtype)
    norms += (buckets * 0).sum(1)
    random = torch.arange(buckets.numel(), device=x.device).view(buckets.shape) + int(key[0]) & mask
    random = (random ^ random >> 16) * 0x85EBCA6B + int(key[1]) & mask
    random = (random ^ random >> 13) * 0xC2B2AE35 & mask
    random = (random ^ random >> 16) >> 8
    exact = (buckets.abs() / torch.where(norms > 0, norms, 1)[:, None]).clamp(max=1) * levels
    level = exact.floor() + (random.to(x.dtype) * 2.0**-24 < exact - exact.floor())
    codes = (levels + torch.where(buckets >= 0, level, -level)).to(torch.uint8)
    shifted = codes.view(-1, 8 // bits) << torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)
    packed = shifted.sum(1, dtype=torch.uint8)[: -(-len(x) * bits // 8)]
    return torch.cat([bytes_of(norms), packed]), (norms * 0).sum()


def dequantised_mean(
    messages: torch.Tensor, bits: int, bucket_size: int, out: Sequence[torch.Tensor], layout: FlatLayout
) -> torch.Tensor:
    levels = 2 ** (bits - 1) - 1
    split_at = -(-layout.numel // bucket_size) * np.dtype(layout.dtype).itemsize
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=messages.device)
    mean = torch.zeros(layout.numel, dtype=_dtype(layout.dtype), device=messages.device)
    for message in messages:
        scales = bytes_as(message[:split_at], layout.dtype) / levels / len(messages)
        codes = (message[split_at:, None] >> shifts & 2**bits - 1).view(-1)[: layout.numel]
        mean += (codes.to(mean.dtype) - levels) * scales.repeat_interleave(bucket_size)[: layout.numel]
    return mean
