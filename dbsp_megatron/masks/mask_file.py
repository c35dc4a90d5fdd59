"""Files of block masks: one bit a block, per layer and head, with what they were made for.

Dims: H heads, N blocks of the sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dbsp_megatron.block_mask import num_blocks
from dbsp_megatron.masks.head_order import AXES
from dbsp_megatron.masks.tile_order import TokenGrid
from dbsp_megatron.observability.atomic_file import atomic_path

FORMAT = "dbsp_megatron.block_masks"
VERSION = 1


def write_masks(
    path: str | Path,
    masks: Mapping[int, Tensor],
    *,
    seqlen: int,
    block_size: int,
    grid: Sequence[int] | None = None,
    orders: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Write masks of some layers; the file is complete or absent.

    Args:
        path: file to write, by custom with the suffix .safetensors.
        masks: layer index to bool [H, N, N], any device.
        seqlen: tokens of the sequence that the masks are for.
        block_size: tokens per block.
        grid: (frames, rows, columns) of the video, perhaps a `TokenGrid`, whose cube is kept; None if unknown.
        orders: for PAROAttention, layer index to the order of axes of each head, an index of `head_order.AXES`; masks
            are then those of places in the order of each head.

    Raises:
        ValueError: shapes, lengths or orders do not fit together.
    """
    if not masks:
        raise ValueError("masks must hold at least one layer, got none")
    tensors: dict[str, Tensor] = {}
    num, heads = num_blocks(seqlen, block_size), next(iter(masks.values())).shape[0]
    for layer, mask in masks.items():
        if mask.dtype != torch.bool or tuple(mask.shape) != (heads, num, num):
            raise ValueError(
                f"masks[{layer}] must be bool [H, N, N] = {[heads, num, num]} for seqlen={seqlen} and block_size="
                f"{block_size}, got {mask.dtype} {list(mask.shape)}"
            )
        tensors[f"mask.{layer}"] = pack_bits(mask).cpu()
    if orders is not None:
        for layer in masks:
            given = list(orders.get(layer, ()))
            if len(given) != heads or not all(0 <= order < len(AXES) for order in given):
                raise ValueError(f"orders[{layer}] must be {heads} numbers in 0 .. {len(AXES) - 1}, got {given}")
            tensors[f"order.{layer}"] = torch.tensor(given, dtype=torch.uint8)
    known = None if grid is None else TokenGrid.of(grid)
    facts = {
        "version": VERSION,
        "heads": heads,
        "seqlen": seqlen,
        "block_size": block_size,
        "grid": None if known is None else known.sizes,
        "cube": None if known is None else known.cube,
    }
    with atomic_path(path) as temporary:
        # One entry: the order of several is not the same in every file.
        save_file(tensors, temporary, metadata={FORMAT: json.dumps(facts)})


class MaskFile:
    """A file of masks, opened; a layer is read when it is asked for.

    Args:
        path: file that `write_masks` made.

    Attributes:
        num_heads: heads H.
        seqlen: tokens.
        block_size: tokens per block.
        grid: sizes and order of the video's tokens, if the file tells.
        has_orders: whether heads have orders of their own.
        layers: layers that it has masks for.
        digest: hash of the content.

    Raises:
        ValueError: it cannot be read, or is not such a file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.digest = hashlib.blake2b(self.path.read_bytes(), digest_size=8).hexdigest()
            with safe_open(str(self.path), framework="pt") as opened:
                metadata = opened.metadata() or {}
                names = list(opened.keys())
            facts = json.loads(metadata.get(FORMAT, "{}"))
            if not isinstance(facts, dict) or facts.get("version") != VERSION:
                raise ValueError(f"it has no masks of version {VERSION}; metadata: {sorted(metadata)}")
            self.num_heads, self.seqlen, self.block_size = (
                _positive(facts, key) for key in ("heads", "seqlen", "block_size")
            )
            self.grid = _grid_of(facts)
            self.layers, ordered = (_layers_of(names, kind) for kind in ("mask", "order"))
            if not self.layers or (ordered and ordered != self.layers):
                raise ValueError(f"it has masks of layers {sorted(self.layers)} and orders of {sorted(ordered)}")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"path={self.path} must be a file of block masks; it cannot be used: {error}") from error
        self.has_orders = bool(ordered)

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence, N."""
        return num_blocks(self.seqlen, self.block_size)

    def packed(self, layer: int) -> Tensor:
        """Masks of a layer as bits: uint8 [H, N, ceil(N / 8)] on the host."""
        return self._read(f"mask.{layer}", (self.num_heads, self.num_blocks, -(-self.num_blocks // 8)))

    def orders(self, layer: int) -> Tensor:
        """Orders of axes of the heads of a layer, uint8 [H] on the host."""
        orders = self._read(f"order.{layer}", (self.num_heads,))
        if int(orders.max()) >= len(AXES):
            raise ValueError(f"path={self.path}: order.{layer} must be in 0 .. {len(AXES) - 1}, got {orders.tolist()}")
        return orders

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        layer = name.split(".")[1]
        if int(layer) not in self.layers:
            raise ValueError(f"path={self.path} has no masks for layer {layer}: make them, or let the layer stay dense")
        try:
            with safe_open(str(self.path), framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"path={self.path}: {name} cannot be read any more: {error}") from error
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape:
            raise ValueError(f"path={self.path}: {name} must be uint8 {shape}, got {tensor.dtype} {list(tensor.shape)}")
        return tensor


def _positive(facts: dict[str, Any], key: str) -> int:
    value = facts[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"its {key} must be an integer >= 1, got {value!r}")
    return value


def _layers_of(names: list[str], kind: str) -> frozenset[int]:
    return frozenset(int(name.partition(".")[2]) for name in names if name.startswith(f"{kind}."))


def _grid_of(facts: dict[str, Any]) -> TokenGrid | None:
    if not facts["grid"]:
        return None
    frames, rows, columns = facts["grid"]
    return TokenGrid(frames, rows, columns, facts["cube"])


def pack_bits(mask: Tensor) -> Tensor:
    """Bool [..., N] as bits, uint8 [..., ceil(N / 8)], the first in the lowest place."""
    length = mask.shape[-1]
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -length % 8)).unflatten(-1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded << places).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, length: int) -> Tensor:
    """The inverse of `pack_bits`, on any device."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> places & 1).bool().flatten(-2)[..., :length]
