"""What an attention engine is: one meaning, raw tensors, and the reason why it cannot run a call.

Dims: B batch, Sq/Sk tokens, H query heads, Hkv key/value heads, D/Dv head dims, Nq/Nk blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.lists import BlockLists, build_lists, dense_lists


@dataclass(eq=False)
class BlockPattern:
    """A block mask as kernels want it: the mask, its block sizes, and its index lists, made once when first asked for.

    Whoever makes a pattern does not write to `blocks` afterwards: forward and backward read the same lists.
    """

    blocks: Tensor
    """bool [B or 1, H, Nq, Nk] on the device of q."""
    block_size_q: int
    """Tokens per q-block; the last one may be short."""
    block_size_k: int
    """Tokens per k-block."""
    dense: bool = False
    """Every block is dense: nothing is listed."""
    share: float = 1.0
    """Of the heads of a call that is made in parts."""
    _lists: BlockLists | None = field(default=None, repr=False)
    _parts: dict[tuple[int, int], BlockPattern] = field(default_factory=dict, repr=False)

    @property
    def num_blocks(self) -> int:
        """Blocks of the mask, dense or not."""
        return self.blocks.numel()

    def of_heads(self, begin: int, end: int) -> BlockPattern:
        """The pattern of some of the heads; made once."""
        if (begin, end) not in self._parts:
            blocks, share = self.blocks[:, begin:end].contiguous(), (end - begin) / self.blocks.shape[1]
            part = BlockPattern(blocks, self.block_size_q, self.block_size_k, self.dense, self.share * share)
            self._parts[begin, end] = part
        return self._parts[begin, end]

    def lists(self, *, transpose: bool) -> BlockLists:
        """Index lists of the rows and, if asked, of the columns; nothing waits for the device."""
        if self._lists is None and self.dense:
            num_heads, num_q, num_k = self.blocks.shape[1:]
            self._lists = dense_lists(1, num_heads, num_q, num_k, self.blocks.device)
        elif self._lists is None:
            self._lists = build_lists(self.blocks, transpose=transpose)
        elif transpose:
            self._lists = self._lists.with_transpose(self.blocks)
        return self._lists


@dataclass(frozen=True, kw_only=True)
class AttentionClass:
    """What a choice of engine depends on; never on lengths, so that it is made once for a model.

    Two calls of one class get one engine: forward and backward of a layer, all its steps, all ranks.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    block_size_q: int
    block_size_k: int
    grouped: bool
    """Several query heads share a kv head, or a table says which one they read."""
    batch_masks: bool
    """Samples have masks of their own."""
    backward: bool
    """Gradients will be asked for."""
    deterministic: bool
    """Gradients must repeat bitwise."""
    resume: bool
    """Parts of K and V are added to one state (a ring)."""


class Engine(Protocol):
    """An implementation of block-sparse attention. All engines agree to rounding, in every corner case."""

    name: str

    def refusal(self, call: AttentionClass) -> str | None:
        """Why no call of this class can run here (software, device, dtype, sizes), in words; None if they can.

        Never imports anything heavy twice, never waits for the device.
        """

    def refuses_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why these tensors cannot be read (strides, alignment), though their class could; None if they can."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: BlockPattern,
        scale: float,
        *,
        kv_index: Tensor | None = None,
        state: tuple[Tensor, Tensor] | None = None,
        q_range: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of q over the dense blocks of k, v.

        Args:
            q: [B, Sq, H, D].
            k: [B, Sk, Hkv, D].
            v: [B, Sk, Hkv, Dv].
            pattern: the mask.
            scale: softmax scale.
            kv_index: int64 [H], kv head of each query head; default h // (H / Hkv).
            state: out and lse (accumulation dtype, [B, Sq, H, Dv] and [B, H, Sq]) of other keys: these keys are added
                to them, in place where the engine can; a row whose lse is -inf has nothing yet, whatever its out holds.
            q_range: int32 [H, 2], q-blocks [begin, end) computed of each head; other rows have out 0, lse -inf (or keep
                their state).

        Returns:
            out [B, Sq, H, Dv], in q's dtype or the accumulation dtype, and lse [B, H, Sq] in the accumulation dtype,
            natural log. With `state` both in the accumulation dtype. A row without keys has out 0 and lse -inf.
        """

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        pattern: BlockPattern,
        scale: float,
        *,
        kv_index: Tensor | None = None,
        out: Tensor | None = None,
        deterministic: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v of (a part of) an attention whose global lse and delta are known.

        Args:
            q: [B, Sq, H, D].
            k: [B, Sk, Hkv, D].
            v: [B, Sk, Hkv, Dv].
            dout: gradient of out, [B, Sq, H, Dv].
            lse: [B, H, Sq], natural log, over all keys of a row.
            delta: [B, H, Sq], sum of dout * out over Dv, minus the gradient of lse; may be NaN in a row without keys.
            pattern: the mask.
            scale: softmax scale.
            kv_index: int64 [H], kv head of each query head.
            out: [B, Sq, H, Dv] over all keys, given if `delta` holds no gradient of lse; some engines need it.
            deterministic: the result must repeat bitwise.
            dtype: of the results; default the accumulation dtype.

        Returns:
            dq, dk, dv shaped as q, k, v. A row without keys has gradient 0 and gives none.
        """
