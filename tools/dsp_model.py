"""The model that sequence parallelism over two dims is measured on: blocks over space and time, as plain functions.

Dims: B samples, T frames, S places of a frame, C = H * D channels, F channels of the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from dbsp_megatron import BlockMask
from dbsp_megatron.attention.api import block_sparse_attention
from dbsp_megatron.attention.dense import dense_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Parameters = dict[str, Tensor]
ATTENTIONS = ("blocks", "sdpa")
"""The block-sparse engine with every block dense, or PyTorch's own attention."""
DIMS = {"S": 2, "T": 1}
"""Attended dim of each kind of block, in the order of a pair."""
HEAD_DIMS = {"qkv.weight": 1, "qkv.bias": 1, "out.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1}
"""The dim of a parameter that tensor parallelism cuts: heads, or channels of the MLP."""
_MLP = 4


@dataclass(frozen=True, kw_only=True)
class DspShape:
    """Latent video of one resolution, and the width of the model."""

    name: str
    frames: int
    places: int
    heads: int = 16
    head_dim: int = 72
    batch: int = 1
    pairs: int = 2
    """(spatial, temporal) pairs of blocks."""
    attention: str = "blocks"
    """Of ATTENTIONS."""

    @property
    def channels(self) -> int:
        """C."""
        return self.heads * self.head_dim

    @property
    def lengths(self) -> tuple[int, int, int]:
        """(B, T, S)."""
        return self.batch, self.frames, self.places

    @property
    def elements(self) -> int:
        """Entries of the stream: M over the bytes of one."""
        return math.prod(self.lengths) * self.channels

    def blocks(self) -> Iterator[tuple[str, str]]:
        """(name, attended dim) of each block."""
        for pair in range(self.pairs):
            for dim in DIMS:
                yield f"{pair}.{dim}", dim


SHAPES = {
    shape.name: shape
    for shape in (
        DspShape(name="240p_2s", frames=15, places=405),
        DspShape(name="480p_2s", frames=15, places=1590),
        DspShape(name="480p_8s", frames=60, places=1590),
        DspShape(name="720p_16s", frames=120, places=3600),
        DspShape(name="64x4096", frames=64, places=4096),
        DspShape(name="tiny", frames=5, places=7, heads=4, head_dim=8),
    )
}
"""Latent tokens of STDiT3 (Open-Sora 1.2) by resolution and seconds, and a shape of the DSP paper."""


def find_shape(
    text: str, *, head_dim: int | None = None, batch: int = 1, pairs: int = 2, attention: str = "blocks"
) -> DspShape:
    """A shape by name, or `TxSxH`.

    Raises:
        ValueError: it is neither, or a number is below 1.
    """
    parts = text.split("x")
    if text in SHAPES:
        found = SHAPES[text]
    elif len(parts) == 3 and all(part.isdigit() and int(part) for part in parts):
        found = DspShape(name=text, frames=int(parts[0]), places=int(parts[1]), heads=int(parts[2]))
    else:
        raise ValueError(f"--shape must be of {', '.join(SHAPES)}, or FRAMESxPLACESxHEADS, got {text!r}: use one")
    found = replace(found, batch=batch, pairs=pairs, attention=attention)
    found = found if head_dim is None else replace(found, head_dim=head_dim)
    for flag, value in (("head-dim", found.head_dim), ("batch", batch), ("pairs", pairs)):
        if value < 1:
            raise ValueError(f"--{flag} must be at least 1, got {value}: raise it")
    return found


def make_parameters(shape: DspShape, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
    """Random weights by name, on the generator's device; equal on all ranks of one kind of device."""
    heads, width, channels = shape.heads, shape.head_dim, shape.channels
    sizes = {
        "norm1.weight": (channels,), "norm1.bias": (channels,), "qkv.weight": (3, heads, width, channels),
        "qkv.bias": (3, heads, width), "out.weight": (channels, heads, width), "out.bias": (channels,),
        "norm2.weight": (channels,), "norm2.bias": (channels,), "up.weight": (_MLP * channels, channels),
        "up.bias": (_MLP * channels,), "down.weight": (channels, _MLP * channels), "down.bias": (channels,),
    }  # fmt: skip
    found = {}
    for block, _ in shape.blocks():
        for name, size in sizes.items():
            values = torch.randn(size, generator=generator, device=generator.device)
            if len(size) > 1:
                values *= (_MLP * channels if name == "down.weight" else channels) ** -0.5
            found[f"{block}.{name}"] = (values + ("norm" in name and "weight" in name)).to(dtype)
    return found


def _same(x: Tensor) -> Tensor:
    return x


def run_block(
    parameters: Mapping[str, Tensor],
    block: str,
    x: Tensor,
    attend: Attend,
    head_dim: int,
    enter: Callable[[Tensor], Tensor] = _same,
    leave: Callable[[Tensor], Tensor] = _same,
) -> Tensor:
    """One block.

    Args:
        parameters: by name, whole or this rank's heads and channels of the MLP.
        block: its name.
        x: [..., C].
        attend: attention of q, k, v [..., h, D].
        head_dim: D.
        enter: applied before column-parallel projections.
        leave: applied after row-parallel ones, before their bias.
    """

    def p(name: str) -> Tensor:
        return parameters[f"{block}.{name}"]

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], p(f"{name}.weight"), p(f"{name}.bias"))

    weight, bias = p("qkv.weight"), p("qkv.bias")
    qkv = functional.linear(enter(norm("norm1", x)), weight.flatten(0, 2), bias.flatten())
    q, k, v = qkv.unflatten(-1, (3, weight.shape[1], head_dim)).unbind(-3)
    attended = attend(q, k, v).flatten(-2)
    x = x + leave(functional.linear(attended, p("out.weight").flatten(1))) + p("out.bias")
    hidden = functional.gelu(functional.linear(enter(norm("norm2", x)), p("up.weight"), p("up.bias")))
    return x + leave(functional.linear(hidden, p("down.weight"))) + p("down.bias")


def attend_whole(qkv: Sequence[Tensor], dim: int, attention: str) -> Tensor:
    """Dense attention over a dim that is whole; [B, T, S, h, D], all other dims are batch."""
    if not qkv[0].numel():
        return qkv[0]
    moved = [x.movedim(dim, -3) for x in qkv]
    others = moved[0].shape[:2]
    q, k, v = (x.flatten(0, 1) for x in moved)
    if attention == "sdpa":
        out = dense_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    else:
        mask = BlockMask.dense(q.shape[2], q.shape[1], device=q.device)
        out = cast(Tensor, block_sparse_attention(q, k, v, mask, return_lse=False))
    return out.unflatten(0, others).movedim(-3, dim)


def attention_over(dim: str, attention: str) -> Attend:
    """`attend_whole` over the dim of a kind of block."""
    return lambda *qkv: attend_whole(qkv, DIMS[dim], attention)


def run_whole(parameters: Mapping[str, Tensor], shape: DspShape, x: Tensor) -> Tensor:
    """The model in one process, [B, T, S, C]."""
    for block, dim in shape.blocks():
        x = run_block(parameters, block, x, attention_over(dim, shape.attention), shape.head_dim)
    return x
