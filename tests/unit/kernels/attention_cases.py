"""Cases of block-sparse attention kernels and their fp64 reference, for the interpreter and for a card."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference import attention_reference, expand_blocks, random_blocks, random_qkv


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Shapes, mask and memory layout of one attention call."""

    name: str
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    head_dim: int
    block_size_q: int
    block_size_k: int
    num_kv_heads: int | None = None
    """None: one per query head."""
    kv_index: tuple[int, ...] | None = None
    batch: int = 1
    dtype: torch.dtype = torch.float16
    mask: str = "per head"
    """per head, per sample, shared (by heads and batch), shared by heads, dense, empty."""
    strides: str = "contiguous"
    """contiguous, fused (q, k, v of one buffer), heads first, padded rows."""
    scale: float | None = None

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def tolerance(self) -> float:
        """Largest allowed error relative to the largest value."""
        return 1e-5 if self.dtype == torch.float32 else 3e-3


@dataclass(frozen=True, kw_only=True)
class AttentionData:
    """Inputs of a case on its device."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    blocks: Tensor
    kv_index: Tensor | None


def make_data(case: AttentionCase, device: str = "cpu", seed: int = 3) -> AttentionData:
    """Random inputs of a case."""
    kv_heads = case.num_kv_heads or case.num_heads
    inputs = random_qkv(
        seed,
        case.batch,
        case.seqlen_q,
        case.num_heads,
        case.head_dim,
        num_kv_heads=kv_heads,
        seqlen_k=case.seqlen_k,
        dtype=case.dtype,
    )
    q, k, v, dout = (_laid_out(x.to(device), case.strides) for x in inputs)
    num_q, num_k = -(-case.seqlen_q // case.block_size_q), -(-case.seqlen_k // case.block_size_k)
    mask_batch = case.batch if case.mask in ("per sample", "shared by heads") else 1
    mask_heads = 1 if case.mask.startswith("shared") else case.num_heads
    # Seed 1 makes the only head of a shared mask one with empty rows.
    blocks = random_blocks(seed + (1 if mask_heads > 1 else 3), mask_batch, mask_heads, num_q, num_k)
    if case.mask in ("dense", "empty"):
        blocks[:] = case.mask == "dense"
    generator = torch.Generator().manual_seed(seed)
    dlse = torch.randn((case.batch, case.num_heads, case.seqlen_q), generator=generator)
    kv_index = None if case.kv_index is None else torch.tensor(case.kv_index, device=device)
    return AttentionData(q=q, k=k, v=v, dout=dout, dlse=dlse.to(device), blocks=blocks.to(device), kv_index=kv_index)


def _laid_out(x: Tensor, strides: str) -> Tensor:
    """The same values in another memory layout; what lies between them is NaN."""
    if strides == "contiguous":
        return x
    batch, seqlen, heads, dim = x.shape
    if strides == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "fused":
        buffer = x.new_full((batch, seqlen, 3, heads, dim), float("nan"))
        buffer[:, :, 1] = x
        return buffer[:, :, 1]
    buffer = x.new_full((batch, seqlen + 3, heads, dim + 8), float("nan"))
    buffer[:, :seqlen, :, :dim] = x
    return buffer[:, :seqlen, :, :dim]


def reference(case: AttentionCase, data: AttentionData) -> tuple[Tensor, ...]:
    """fp64 out, lse, dq, dk, dv; the loss is (out * dout).sum() + (lse * dlse).sum() over rows that have keys."""
    q, k, v = (x.detach().double().requires_grad_() for x in (data.q, data.k, data.v))
    heads = case.num_heads
    kv_index = data.kv_index
    if kv_index is None:
        kv_index = torch.arange(heads, device=q.device) // (heads // k.shape[2])
    blocks = data.blocks.expand(-1, heads, -1, -1)
    allowed = expand_blocks(blocks, case.block_size_q, case.block_size_k, case.seqlen_q, case.seqlen_k)
    out, lse = attention_reference(q, k[:, :, kv_index], v[:, :, kv_index], allowed, case.softmax_scale)
    known = ~torch.isneginf(lse)
    loss = (out * data.dout.double()).sum() + torch.where(known, lse * data.dlse.double(), 0.0).sum()
    return (out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v)))


def delta_of(data: AttentionData, out: Tensor, lse: Tensor) -> Tensor:
    """fp32 [B, H, Sq], as a backward pass gets it: NaN in rows without keys."""
    delta = (data.dout.double() * out.double()).sum(-1).transpose(1, 2) - data.dlse.double()
    return delta.masked_fill(torch.isneginf(lse), float("nan")).float()


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest finite value; NaN and infinity in the wrong place count as infinite."""
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    difference = torch.where(got == want, 0.0, (got - want).abs())
    difference = torch.nan_to_num(difference, nan=float("inf"), posinf=float("inf")).max()
    largest = torch.nan_to_num(want, posinf=0.0, neginf=0.0).abs().max()
    return float(difference / largest.clamp(min=1e-6))


SMALL_CASES = [
    AttentionCase(
        name="fp32, batch, per-sample masks",
        seqlen_q=70,
        seqlen_k=53,
        num_heads=5,
        head_dim=64,
        block_size_q=16,
        block_size_k=16,
        batch=2,
        dtype=torch.float32,
        mask="per sample",
    ),
    AttentionCase(
        name="padded head dim, GQA, fused buffer",
        seqlen_q=75,
        seqlen_k=101,
        num_heads=4,
        num_kv_heads=2,
        head_dim=96,
        block_size_q=32,
        block_size_k=32,
        batch=2,
        strides="fused",
    ),
    AttentionCase(
        name="MQA, one mask for all heads, heads first",
        seqlen_q=150,
        seqlen_k=100,
        num_heads=3,
        num_kv_heads=1,
        head_dim=128,
        block_size_q=64,
        block_size_k=64,
        batch=2,
        mask="shared",
        strides="heads first",
    ),
    AttentionCase(
        name="blocks of 128",
        seqlen_q=300,
        seqlen_k=200,
        num_heads=5,
        head_dim=64,
        block_size_q=128,
        block_size_k=128,
    ),
    AttentionCase(
        name="blocks of 128 x 64, padded rows, mask per sample",
        seqlen_q=290,
        seqlen_k=97,
        num_heads=2,
        head_dim=96,
        block_size_q=128,
        block_size_k=64,
        batch=2,
        mask="shared by heads",
        strides="padded rows",
    ),
    AttentionCase(
        name="any kv head for any query head, fp32",
        seqlen_q=64,
        seqlen_k=96,
        num_heads=5,
        num_kv_heads=4,
        kv_index=(3, 0, 0, 1, 3),
        head_dim=64,
        block_size_q=32,
        block_size_k=16,
        batch=2,
        dtype=torch.float32,
        mask="per sample",
    ),
    AttentionCase(
        name="more kv heads than heads, one mask",
        seqlen_q=40,
        seqlen_k=45,
        num_heads=2,
        num_kv_heads=3,
        kv_index=(2, 0),
        head_dim=32,
        block_size_q=16,
        block_size_k=16,
        mask="shared",
    ),
    AttentionCase(
        name="odd block sizes and head dim",
        seqlen_q=131,
        seqlen_k=170,
        num_heads=3,
        head_dim=80,
        block_size_q=48,
        block_size_k=80,
        dtype=torch.float32,
        scale=0.31,
    ),
    AttentionCase(
        name="less than a block",
        seqlen_q=5,
        seqlen_k=3,
        num_heads=2,
        head_dim=64,
        block_size_q=64,
        block_size_k=64,
        mask="dense",
    ),
    AttentionCase(
        name="no blocks at all",
        seqlen_q=40,
        seqlen_k=33,
        num_heads=2,
        head_dim=64,
        block_size_q=16,
        block_size_k=16,
        mask="empty",
    ),
    AttentionCase(
        name="bf16",
        seqlen_q=70,
        seqlen_k=53,
        num_heads=5,
        num_kv_heads=1,
        head_dim=64,
        block_size_q=32,
        block_size_k=32,
        dtype=torch.bfloat16,
    ),
    AttentionCase(
        name="head dim 72",
        seqlen_q=75,
        seqlen_k=53,
        num_heads=2,
        num_kv_heads=1,
        head_dim=72,
        block_size_q=32,
        block_size_k=16,
        strides="fused",
    ),
    AttentionCase(
        name="head dim 40, fp32, one kv head",
        seqlen_q=33,
        seqlen_k=50,
        num_heads=3,
        num_kv_heads=1,
        head_dim=40,
        block_size_q=16,
        block_size_k=32,
        batch=2,
        dtype=torch.float32,
        strides="heads first",
    ),
]
