"""MaskMethod: a published way to choose dense blocks.

Dims: B batch, H/Hkv heads, D head dim, nq query blocks at hand, Nk key blocks of the whole sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from dbsp_megatron.block_mask import BlockMask, num_blocks
from dbsp_megatron.kernels.block_pool import block_means
from dbsp_megatron.kernels.probe_attention import probe_attention
from dbsp_megatron.masks.head_order import HeadOrders
from dbsp_megatron.masks.probe import merge_probes, probe_places
from dbsp_megatron.masks.summary import BlockSummary, Needs, summarize
from dbsp_megatron.masks.tile_order import TokenGrid, Tokens

MethodT = TypeVar("MethodT", bound="MaskMethod")


class MaskMethod(ABC):
    """Predicts the mask rows of some query blocks; each row is made on one rank only, so ranks cannot differ.

    A row depends on its own query block alone (and on what all ranks know alike): `predict` on a part of the query
    blocks equals that part of `predict` on all. Nothing in it waits for the device.
    """

    name: ClassVar[str] = ""
    ramp_key: ClassVar[str] = ""
    """The setting that a density ramp moves from 1 to its value, if the method has such a one."""
    may_leave_rows_empty: ClassVar[bool] = False
    """Whether a row may have no dense block; its output is then 0."""

    def needs(self, layer: int, step: int) -> Needs:
        """What `predict` reads in this layer and step, alike on all ranks."""
        return Needs(q=("means",), k=("means",))

    @abstractmethod
    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """Choose the key blocks of each query block.

        Args:
            q_summary: the query blocks at hand, any number of them (0 too), with the fields that `needs` names.
            k_summary: all key blocks, ascending; Hkv divides H.
            layer: layer index.
            step: training or denoising step.
            grid: (frames, rows, columns) of tokens if the sequence is [text ; video], perhaps a `TokenGrid`, which
                tells the order of the tokens.

        Returns:
            bool [B, H, nq, Nk] on the summaries' device; may be an expanded view.
        """

    def candidates(self, q: Tokens, k: Tokens, layer: int, step: int) -> Tensor:
        """Token masks that the probe compares, for methods whose `needs` ask for one.

        Args:
            q: probe tokens, shape [m, 1].
            k: key tokens at hand, shape [1, s].
            layer: layer index.
            step: step.

        Returns:
            bool [C, m, s].
        """
        raise NotImplementedError(f"mask method {self.name} asks for a probe and has no candidates")

    def check_model(self, num_heads: int, num_layers: int) -> None:
        """Refuse a model that the settings do not fit, before anything runs.

        Raises:
            ValueError: settings name heads or layers that there are not.
        """
        return None

    def head_orders(
        self, layer: int, step: int, num_heads: int, num_kv_heads: int, seqlen: int, grid: tuple[int, int, int] | None
    ) -> HeadOrders | None:
        """Orders in which heads see the tokens; None if that is the order of the sequence.

        Masks are then those of places in the order of each head. Alike on all ranks.
        """
        return None

    def describe(self) -> str:
        """Name and settings, equal on ranks that use equal methods."""
        if not is_dataclass(self):
            return self.name
        settings = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
        return f"{self.name}({settings})"

    def at_density(self: MethodT, value: float) -> MethodT:
        """The method with another value of its `ramp_key`."""
        return replace(self, **{self.ramp_key: value})  # type: ignore[type-var]

    @torch.no_grad()
    def mask(
        self,
        q: Tensor,
        k: Tensor,
        layer: int = 0,
        step: int = 0,
        grid: tuple[int, int, int] | None = None,
        block_size: int = 64,
        *,
        v: Tensor | None = None,
        scale: float | None = None,
    ) -> BlockMask:
        """The mask of a whole sequence, in one process.

        Args:
            q: [B, S, H, D].
            k: [B, S, Hkv, D].
            layer: layer index.
            step: step.
            grid: see `predict`.
            block_size: tokens per block.
            v: [B, S, Hkv, Dv], for methods that probe attention.
            scale: softmax scale, default D ** -0.5.

        Raises:
            ValueError: q and k differ in length, or v is missing.
        """
        batch, seqlen, heads = q.shape[:3]
        if k.shape[1] != seqlen:
            raise ValueError(f"q has {seqlen} tokens and k {k.shape[1]}: mask methods are for self-attention")
        needs = self.needs(layer, step)
        blocks = torch.arange(num_blocks(seqlen, block_size), device=q.device)
        host_blocks = np.arange(len(blocks))
        with torch.autocast(q.device.type, enabled=False):
            q_summary, k_summary = (
                summarize(x, wanted, blocks=blocks, host_blocks=host_blocks, seqlen=seqlen, block_size=block_size)
                for x, wanted in ((q, needs.q), (k, needs.k))
            )
            if needs.probe_rows:
                if v is None:
                    raise ValueError(f"mask method {self.name} probes attention: pass v=")
                places = probe_places(needs.probe_rows, seqlen, layer, step, q.device)
                tokens = probe_tokens(places, torch.arange(seqlen, device=q.device), seqlen, grid)
                allowed = self.candidates(*tokens, layer, step)
                part = probe_attention(q[:, places], k, v, allowed, scale)
                q_summary = replace(q_summary, probe_errors=merge_probes(part[None], (batch, heads), needs, v.shape[3]))
            rows = self.predict(q_summary, k_summary, layer, step, grid)
        return BlockMask(rows.contiguous(), block_size, block_size, seqlen, seqlen)


def probe_tokens(places: Tensor, keys: Tensor, seqlen: int, grid: tuple[int, int, int] | None) -> tuple[Tokens, Tokens]:
    """Probe tokens [m, 1] and key tokens [1, s], from their indices in the sequence.

    Raises:
        ValueError: there is no grid.
    """
    known = require_grid(grid)
    num_text = known.num_text(seqlen)
    return known.locate(places, num_text).view(-1, 1), known.locate(keys, num_text).view(1, -1)


def require_grid(grid: tuple[int, int, int] | None) -> TokenGrid:
    """The grid of a method that cannot do without.

    Raises:
        ValueError: there is none.
    """
    if grid is None:
        raise ValueError("this method needs the token grid: pass grid=(frames, rows, columns)")
    return TokenGrid.of(grid)


def pool_blocks(x: Tensor, block_size: int) -> Tensor:
    """Mean of each block of tokens, the last of which may be short.

    Args:
        x: [B, s, H, D].
        block_size: tokens per block.

    Returns:
        [B, ceil(s / block_size), H, D] in fp32 (fp64 for fp64 inputs), without gradient.
    """
    return block_means(x, block_size)
