"""Pack and unpack: rows of strided tensors in planned order straight into the flat buffer of an all-to-all, and back.

A flat buffer holds pieces, one for each peer, in their order. A piece holds the tensors of a call in their order, and
of each tensor the rows that its `PieceIndex` names, as contiguous [B, tokens of the piece, heads of the piece, D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .index import PieceIndex
from .naive import naive_pack, naive_unpack, naive_unpack_sum

__all__ = [
    "PieceIndex",
    "naive_pack",
    "naive_unpack",
    "naive_unpack_sum",
    "pack",
    "piece_sizes",
    "unpack",
    "unpack_sum",
]

_MOVED_SIZES = (1, 2, 4, 8)
_SUMMED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def piece_sizes(indices: Sequence[PieceIndex], batch: int, dims: Sequence[int]) -> list[int]:
    """Elements of each piece of a flat buffer.

    Args:
        indices: the rows of each tensor.
        batch: batch entries B of every tensor.
        dims: head dim D of each tensor.

    Returns:
        One number a piece; their sum is the length of the buffer.
    """
    rows = zip(*(index.num_rows for index in indices), strict=True)
    return [batch * sum(num * dim for num, dim in zip(piece, dims, strict=True)) for piece in rows]


def pack(xs: Sequence[Tensor], indices: Sequence[PieceIndex]) -> Tensor:
    """Copy the rows that the indices name into one flat buffer; no gradient.

    On CUDA one launch for all pieces and tensors reads each named row once, where it lies, and nothing waits for the
    device; on other devices `naive_pack` runs.

    Args:
        xs: tensors [B, n_i, H_i, D_i] of one dtype, device and B, any strides (D adjacent in memory is the fast case).
        indices: rows of each tensor, all of the same number of pieces.

    Returns:
        [sum of piece_sizes] in the dtype of xs, on their device.

    Raises:
        ValueError: tensors and indices do not fit one another.

    Memory: the buffer. Launch grid: see `triton_kernel`.
    """
    if not xs:
        raise ValueError("xs must hold at least one tensor, got none: pass the tensors to send")
    batch, dtype = xs[0].shape[0], xs[0].dtype
    for x in xs:
        if x.dim() != 4 or x.dtype != dtype or x.shape[0] != batch or x.device != xs[0].device:
            raise ValueError(
                f"xs must be [B, n, H, D] of one B, dtype and device, got {_kinds(xs)}: one buffer carries them all"
            )
    _check_fit([x.shape for x in xs], indices, xs[0].device)
    xs = [x.detach() for x in xs]
    if xs[0].is_cuda and xs[0].element_size() in _MOVED_SIZES:
        # Triton is imported where it runs only: the package works without it, and importing it takes a second.
        from .triton_kernel import triton_pack

        return triton_pack(xs, indices)
    return naive_pack(xs, indices)


def unpack(
    flat: Tensor,
    indices: Sequence[PieceIndex],
    batch: int,
    dims: Sequence[int],
    *,
    fill: bool = False,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Inverse of `pack` for indices that name every row at most once; no gradient.

    Rows that an index does not name stay uninitialised unless `fill` says otherwise, and of rows named twice one copy
    is kept, no matter which: use `unpack_sum` for such indices.

    Args:
        flat: [sum of piece_sizes], contiguous.
        indices: rows of each tensor, all of the same number of pieces.
        batch: batch entries B.
        dims: head dim D of each tensor.
        fill: set the rows that no piece names to 0.
        into: tensors to write to, in the dtype and on the device of flat, any strides; rows that no piece names are
            left as they are unless `fill` is set. Default new ones.

    Returns:
        `into`, or new contiguous tensors [B, n_i, H_i, D_i] in the dtype of flat, n_i and H_i as the indices say.

    Raises:
        ValueError: flat and indices do not fit one another.

    Memory: the results. Launch grid: see `triton_kernel`.
    """
    _check_flat(flat, indices, batch, dims)
    if into is not None:
        into = _checked_targets(into, flat, indices, batch, dims)
    flat = flat.detach()
    if flat.is_cuda and flat.element_size() in _MOVED_SIZES:
        from .triton_kernel import triton_unpack

        return triton_unpack(flat, indices, batch, dims, fill=fill, into=into)
    return naive_unpack(flat, indices, batch, dims, fill=fill, into=into)


def unpack_sum(
    flat: Tensor,
    indices: Sequence[PieceIndex],
    batch: int,
    dims: Sequence[int],
    *,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Adjoint of `pack`: each row is the sum of its copies in the pieces, 0 if it has none; no gradient.

    Copies are added in the order of the pieces and each partial sum is rounded to the dtype of flat, so that the result
    is that of adding piece after piece in place; a row with one copy is that copy. No atomics: the same launch gives
    the same bits.

    Args:
        flat: [sum of piece_sizes], contiguous.
        indices: rows of each tensor, all of the same number of pieces; a piece may name a row once.
        batch: batch entries B.
        dims: head dim D of each tensor.
        into: contiguous tensors to write to, in the dtype and on the device of flat; heads that no piece names are left
            as they are. Default new ones, in which they are 0.

    Returns:
        `into`, or new contiguous tensors [B, n_i, H_i, D_i] in the dtype of flat.

    Raises:
        ValueError: flat and indices do not fit one another.

    Memory: the results. Launch grid: see `triton_kernel`.
    """
    _check_flat(flat, indices, batch, dims)
    if into is not None:
        into = _checked_targets(into, flat, indices, batch, dims)
        if not all(x.is_contiguous() for x in into):
            raise ValueError(f"into must be contiguous, got strides {[x.stride() for x in into]}: make new tensors")
    flat = flat.detach()
    if flat.is_cuda and flat.dtype in _SUMMED_DTYPES:
        from .triton_kernel import triton_unpack_sum

        return triton_unpack_sum(flat, indices, batch, dims, into=into)
    return naive_unpack_sum(flat, indices, batch, dims, into=into)


def _checked_targets(
    into: Sequence[Tensor], flat: Tensor, indices: Sequence[PieceIndex], batch: int, dims: Sequence[int]
) -> list[Tensor]:
    shapes = [(batch, index.num_tokens, index.num_heads, dim) for index, dim in zip(indices, dims, strict=True)]
    if [tuple(x.shape) for x in into] != shapes or any((x.dtype, x.device) != (flat.dtype, flat.device) for x in into):
        raise ValueError(f"into must be {flat.dtype} {shapes} on {flat.device}, got {_kinds(into)}: make them so")
    return [x.detach() for x in into]


def _kinds(xs: Sequence[Tensor]) -> str:
    return "; ".join(f"{x.dtype} {list(x.shape)} on {x.device}" for x in xs)


def _check_fit(shapes: Sequence[Sequence[int]], indices: Sequence[PieceIndex], device: torch.device) -> None:
    if len(indices) != len(shapes):
        raise ValueError(f"indices must be one for each tensor, got {len(indices)} for {len(shapes)}: pass both")
    for shape, index in zip(shapes, indices, strict=True):
        if (index.num_tokens, index.num_heads) != tuple(shape[1:3]):
            raise ValueError(
                f"indices must be made for tensors of {shape[1]} tokens and {shape[2]} heads, got one for "
                f"{index.num_tokens} and {index.num_heads}: pass the index of this tensor"
            )
        if index.num_pieces != indices[0].num_pieces or index.tokens.device != device:
            raise ValueError(
                f"indices must all have {indices[0].num_pieces} pieces and be on {device}, got {index.num_pieces} on "
                f"{index.tokens.device}: make them for the same peers and device"
            )


def _check_flat(flat: Tensor, indices: Sequence[PieceIndex], batch: int, dims: Sequence[int]) -> None:
    if not indices:
        raise ValueError("indices must hold at least one index, got none: pass that of each tensor")
    if len(indices) != len(dims):
        raise ValueError(f"dims must hold one head dim for each index, got {len(dims)} and {len(indices)} indices")
    shapes = [(batch, index.num_tokens, index.num_heads, dim) for index, dim in zip(indices, dims, strict=True)]
    _check_fit(shapes, indices, flat.device)
    wanted = sum(piece_sizes(indices, batch, dims))
    if flat.shape != (wanted,) or not flat.is_contiguous():
        raise ValueError(
            f"flat must be contiguous [{wanted}] for these indices, got {list(flat.shape)}: pass what was received"
        )
