"""Stand-ins for the libraries behind external engines: they compute in fp64 from lists, and check their arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dbsp_megatron.attention.engines.base import BlockPattern
from dbsp_megatron.attention.engines.cudnn_bsa import CudnnBlockSparseEngine
from dbsp_megatron.attention.engines.external import ExternalEngine
from dbsp_megatron.attention.engines.flash_attn_4 import FlashAttention4Engine
from dbsp_megatron.attention.engines.flex import FlexEngine
from dbsp_megatron.attention.engines.torch_reference import TorchEngine
from tests.reference import attention_reference, expand_blocks, random_qkv

SEQLEN_Q, SEQLEN_K, HEADS, DIM = 256, 300, 4, 8
ATOL = 1e-4
ENGINES: dict[str, tuple[type[ExternalEngine], int]] = {
    "flash_attn_4": (FlashAttention4Engine, 128),
    "cudnn blocks of 128": (CudnnBlockSparseEngine, 128),
    "cudnn blocks of 64": (CudnnBlockSparseEngine, 64),
    "flex": (FlexEngine, 128),
}


class SparseTensors(NamedTuple):
    """Stand-in for `BlockSparseTensorsTorch`."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


class Libraries:
    """Stand-ins for three libraries, and the calls that they got."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arguments: dict[str, Any] = {}

    def flash_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, block_sparse_tensors: SparseTensors,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor, None, None, None]:  # fmt: skip
        assert return_lse
        blocks = self._flash_blocks(block_sparse_tensors, SEQLEN_K, q.shape[2])
        self._got("flash forward", q=q, tensors=block_sparse_tensors)
        return (*_attend(q, k, v, blocks, 128, softmax_scale), None, None, None)

    def flash_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, softmax_scale: float,
        block_sparse_tensors: SparseTensors,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        blocks = self._flash_blocks(block_sparse_tensors, SEQLEN_Q, q.shape[2]).transpose(2, 3)
        self._got("flash backward", out=out, dout=dout, tensors=block_sparse_tensors)
        return _differentiate(q, k, v, out, dout, lse, blocks, 128, softmax_scale)

    @staticmethod
    def _flash_blocks(tensors: SparseTensors, seqlen: int, heads: int) -> Tensor:
        assert tensors.block_size == (128, 128)
        assert not tensors.mask_block_cnt.any()
        assert tensors.mask_block_cnt.dtype == tensors.mask_block_idx.dtype == torch.int32
        assert tensors.full_block_cnt.shape[1] == heads
        return _blocks_of(tensors.full_block_cnt, tensors.full_block_idx, -(-seqlen // 128))

    def cudnn_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, allow_empty_block_nums: bool, **lists: Any
    ) -> dict[str, Tensor]:
        assert allow_empty_block_nums
        blocks = self._cudnn_blocks(q, k, **lists)
        self._got("cudnn forward", q=q, **lists)
        out, lse = _attend(q, k, v, blocks, lists["sparse_block_size"], lists["softmax_scale"])
        return {"o_tensor": out, "lse_tensor": lse}

    def cudnn_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **lists: Any
    ) -> dict[str, Tensor]:
        assert q.shape[2] == k.shape[2]
        blocks = self._cudnn_blocks(q, k, **lists)
        self._got("cudnn backward", out=out, dout=dout, **lists)
        size, scale = lists["sparse_block_size"], lists["softmax_scale"]
        found = _differentiate(q, k, v, out, dout, lse, blocks, size, scale)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), found, strict=True))

    @staticmethod
    def _cudnn_blocks(
        q: Tensor, k: Tensor, *, q2k_block_index: Tensor, q2k_block_nums: Tensor, block_sizes: Tensor | None,
        sparse_block_size: int, softmax_scale: float, layout: str,
    ) -> Tensor:  # fmt: skip
        assert layout == "bshd"
        assert softmax_scale > 0
        num_q, num_k = -(-q.shape[1] // sparse_block_size), -(-k.shape[1] // sparse_block_size)
        assert q2k_block_nums.shape == (q.shape[0], q.shape[2], num_q) == q2k_block_index.shape[:3]
        # Without lengths every k-block is taken to be whole.
        lengths = [sparse_block_size] * num_k if block_sizes is None else block_sizes.tolist()
        assert sum(lengths) == k.shape[1]
        return _blocks_of(q2k_block_nums, q2k_block_index, num_k)

    def flex(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool, return_aux: Any
    ) -> tuple[Tensor, Any]:
        assert enable_gqa == (q.shape[1] != k.shape[1])
        assert return_aux.lse
        assert block_mask.BLOCK_SIZE == (128, 128)
        assert tuple(block_mask.shape[-2:]) == (q.shape[2], k.shape[2])
        assert not block_mask.kv_num_blocks.any()
        self._got("flex", mask=block_mask)
        blocks = _blocks_of(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, -(-k.shape[2] // 128))
        out, lse = _attend(*(x.transpose(1, 2) for x in (q, k, v)), blocks, 128, scale)
        return out.transpose(1, 2), SimpleNamespace(lse=lse)

    def _got(self, call: str, **arguments: Any) -> None:
        self.calls.append(call)
        self.arguments = arguments


class RecordingTorch(TorchEngine):
    """What calls go to that a library cannot run."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        return super().forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("backward")
        return super().backward(*args, **kwargs)


def _blocks_of(count: Tensor, index: Tensor, num: int) -> Tensor:
    """Mask [B, H, N, num], bool, of lists that ascend and end in zeros."""
    assert count.dtype == index.dtype == torch.int32
    assert index.is_contiguous()
    assert index.shape[:3] == count.shape
    blocks = torch.zeros(*count.shape, num, dtype=torch.bool)
    for at in torch.cartesian_prod(*(torch.arange(size) for size in count.shape)).tolist():
        listed, rest = index[tuple(at)].split([int(count[tuple(at)]), index.shape[3] - int(count[tuple(at)])])
        assert (listed.diff() > 0).all()
        assert not rest.any()
        blocks[tuple(at)][listed.long()] = True
    return blocks


def _allowed(blocks: Tensor, size: int, q: Tensor, k: Tensor) -> Tensor:
    return expand_blocks(blocks, size, size, q.shape[1], k.shape[1])


def _attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = attention_reference(q, k, v, _allowed(blocks, size, q, k), scale)
    return out.to(q.dtype), lse.float()


def _differentiate(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, blocks: Tensor, size: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as the libraries make them: of the out and lse that they are given."""
    assert out.dtype == dout.dtype == q.dtype
    assert out.shape == dout.shape == q.shape
    assert out.stride(-1) == dout.stride(-1) == 1
    assert min(dout.stride()) > 0
    assert lse.is_contiguous()
    group = q.shape[2] // k.shape[2]
    q, k, v, out, dout = (x.double().transpose(1, 2) for x in (q, k, v, out, dout))
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    allowed = expand_blocks(blocks, size, size, q.shape[2], k.shape[2])
    weights = torch.exp((q @ keys.transpose(2, 3)) * scale - lse.double()[..., None])
    weights = torch.where(allowed, weights, 0.0)
    dscores = weights * (dout @ values.transpose(2, 3) - (dout * out).sum(-1, keepdim=True)) * scale
    dk, dv = dscores.transpose(2, 3) @ q, weights.transpose(2, 3) @ dout
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return tuple(x.transpose(1, 2).float() for x in (dscores @ keys, dk, dv))  # type: ignore[return-value]


def make_pattern(size: int, mask_batch: int, seed: int = 0, heads: int = HEADS) -> BlockPattern:
    """Another mask for every head and sample; some rows and columns are empty, one head is dense."""
    generator = torch.Generator().manual_seed(seed)
    shape = (mask_batch, heads, -(-SEQLEN_Q // size), -(-SEQLEN_K // size))
    blocks = torch.rand(shape, generator=generator) < 0.5
    blocks[:, 0] = True
    blocks[:, 1, 0] = False
    blocks[:, 2:, :, 1] = False
    blocks[:, 2, 1, -1] = True
    return BlockPattern(blocks, size, size)


def make_inputs(batch: int, kv_heads: int = HEADS) -> list[Tensor]:
    return list(
        random_qkv(
            1, batch, SEQLEN_Q, HEADS, DIM, num_kv_heads=kv_heads, seqlen_k=SEQLEN_K, dtype=torch.float32
        )
    )  # fmt: skip


def expected_results(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, pattern: BlockPattern, scale: float
) -> tuple[Tensor, ...]:
    """fp64 out, lse, dq, dk, dv."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out, lse = attention_reference(q, k, v, _allowed(pattern.blocks, pattern.block_size_q, q, k), scale)
    return (out.detach(), lse.detach(), *torch.autograd.grad((out * dout.double()).sum(), (q, k, v)))


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=ATOL, rtol=0)
