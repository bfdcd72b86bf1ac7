"""Kernels over one-dimensional torch tensors on any device: the twins of those in `host`, which documents them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Vector = torch.Tensor


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def zeros(like: Vector, numel: int, dtype: str) -> Vector:
    return torch.zeros(numel, dtype=_dtype(dtype), device=like.device)


def cast(x: Vector, dtype: str) -> Vector:
    return x.to(_dtype(dtype))


def beside(x: Any, like: Vector, dtype: str) -> Vector:
    return torch.as_tensor(x, dtype=_dtype(dtype), device=like.device)


def numbers(values: Any, like: Vector, dtype: str) -> Vector:
    return torch.tensor(values, dtype=_dtype(dtype), device=like.device)


def join(vectors: list[Vector]) -> Vector:
    return torch.cat(vectors)


def all_finite(x: Vector) -> bool:
    return bool(torch.isfinite(x).all())


def accumulate(residual: Vector, gradient: Vector) -> None:
    residual.add_(gradient)


def count_at_least(pairs: list[tuple[Vector, Vector]], magnitudes: Any) -> Any:
    counts = np.zeros(magnitudes.size, np.int64)
    if magnitudes.size:
        for residual, gradient in pairs:
            edges = torch.as_tensor(magnitudes, dtype=residual.dtype, device=residual.device)
            # right=True: an element as large as a magnitude counts for it.
            position = torch.bucketize((residual + gradient).abs_(), edges, right=True)
            counts += torch.bincount(position, minlength=magnitudes.size + 1)[1:].cpu().numpy()
    return counts[::-1].cumsum()[::-1].copy()  # torch takes no negative strides


def select(x: Vector, threshold: float, first: int, dtype: str) -> Vector:
    return (x.abs() >= threshold).nonzero().view(-1).to(_dtype(dtype)).add_(first)


def in_ascending_order(indices: Vector) -> Vector:
    return indices.sort().values


def gather(x: Vector, indices: Vector) -> Vector:
    return x[indices.long()]


def put(x: Vector, indices: Vector | None, values: Vector | float) -> None:
    x[... if indices is None else indices.long()] = values


def round_to(values: Vector, dtype: str, world_size: int) -> Vector:
    limit = torch.finfo(_dtype(dtype)).max / 2 / world_size
    return values.clamp(-limit, limit).to(_dtype(dtype))


def write_sparse(gradient: Vector, positions: Vector, values: Vector) -> None:
    gradient.zero_()
    gradient[positions.long()] = values.to(gradient.dtype)


def bounds(indices: Vector, offsets: tuple[int, ...]) -> list[int]:
    edges = torch.tensor(offsets, dtype=indices.dtype, device=indices.device)
    return torch.searchsorted(indices, edges).tolist()


def sign_sums(x: Vector) -> tuple[float, int, float, int]:
    wide = x.double()
    above = wide >= 0
    below = wide < 0
    return (float(wide[above].sum()), int(above.sum()), float(-wide[below].sum()), int(below.sum()))


def shift_by_sign(x: Vector, up: float, down: float, out: Vector) -> None:
    out.copy_(torch.where(x >= 0, x + up, x - down))
