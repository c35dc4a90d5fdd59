"""BlockMask: which (q-block, k-block) pairs of an attention are computed.

Dims: B batch, H query heads, Nq/Nk number of q-/k-blocks, Sq/Sk tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


def num_blocks(seqlen: int, block_size: int) -> int:
    """Number of blocks that cover `seqlen` tokens (the last one may be short)."""
    return -(-seqlen // block_size)


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A block-sparse attention pattern, per head and optionally per sample.

    Every token pair of a dense block is attended; a pair outside is not. The last q-block and k-block may be short:
    tokens past `seqlen_q` / `seqlen_k` do not exist. A query row without a dense block yields output 0 and lse -inf.

    Args:
        blocks: bool [B or 1, H, Nq, Nk], any device. A leading 1 is shared by the whole batch.
        block_size_q: tokens per q-block.
        block_size_k: tokens per k-block.
        seqlen_q: number of query tokens, default `Nq * block_size_q`.
        seqlen_k: number of key tokens, default `Nk * block_size_k`.

    Digest and host copy are kept until PyTorch counts a write to `blocks`. Writes through NumPy, `.data` or kernels of
    other libraries it does not count: call `refresh` after one.

    Raises:
        ValueError: shape, dtype, block size and length do not fit together.
    """

    blocks: Tensor
    block_size_q: int = 64
    block_size_k: int = 64
    seqlen_q: int = -1
    seqlen_k: int = -1
    made_dense: bool = field(default=False, init=False, repr=False)
    """Made by `dense`, so that attention needs no index lists."""
    _cache: dict[str, object] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Tensor) or self.blocks.dtype != torch.bool:
            got = self.blocks.dtype if isinstance(self.blocks, Tensor) else type(self.blocks).__name__
            raise ValueError(f"blocks must be a bool tensor, got {got}: convert with blocks.bool()")
        if self.blocks.dim() != 4:
            raise ValueError(
                f"blocks must have 4 dims [B or 1, H, Nq, Nk], got shape {tuple(self.blocks.shape)}: "
                "add the missing ones with blocks[None]"
            )
        for side, count in (("q", self.num_q_blocks), ("k", self.num_k_blocks)):
            size = getattr(self, f"block_size_{side}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"block_size_{side} must be an integer >= 1, got {size!r}: convert it with int()")
            seqlen = getattr(self, f"seqlen_{side}")
            if seqlen is not None and (not isinstance(seqlen, int) or isinstance(seqlen, bool) or seqlen < -1):
                raise ValueError(f"seqlen_{side} must be an integer >= 0, got {seqlen!r}")
            if seqlen is None or seqlen == -1:
                object.__setattr__(self, f"seqlen_{side}", count * size)
            elif num_blocks(seqlen, size) != count:
                raise ValueError(
                    f"seqlen_{side}={seqlen} needs ceil({seqlen}/{size}) = {num_blocks(seqlen, size)} blocks of "
                    f"block_size_{side}={size}, but blocks has {count}: pass the matching seqlen_{side} or blocks"
                )

    @classmethod
    def dense(
        cls,
        num_heads: int,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        block_size_q: int = 64,
        block_size_k: int = 64,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Mask with every block on, one pattern for the whole batch."""
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        least = {"num_heads": 0, "seqlen_q": 0, "seqlen_k": 0, "block_size_q": 1, "block_size_k": 1}
        for name, value in zip(least, (num_heads, seqlen_q, seqlen_k, block_size_q, block_size_k), strict=True):
            if not isinstance(value, int) or isinstance(value, bool) or value < least[name]:
                raise ValueError(f"{name} must be an integer >= {least[name]}, got {value!r}: convert it with int()")
        shape = (1, num_heads, num_blocks(seqlen_q, block_size_q), num_blocks(seqlen_k, block_size_k))
        # One element seen from everywhere: it takes no memory, and PyTorch refuses to write to it in place.
        blocks = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device).expand(shape)
        mask = cls(blocks, block_size_q, block_size_k, seqlen_q, seqlen_k)
        object.__setattr__(mask, "made_dense", True)
        return mask

    @property
    def batch_size(self) -> int:
        """1 if shared by the batch, else the number of samples."""
        return int(self.blocks.shape[0])

    @property
    def num_heads(self) -> int:
        """Query heads H."""
        return int(self.blocks.shape[1])

    @property
    def num_q_blocks(self) -> int:
        """Query blocks Nq."""
        return int(self.blocks.shape[2])

    @property
    def num_k_blocks(self) -> int:
        """Key blocks Nk."""
        return int(self.blocks.shape[3])

    @property
    def device(self) -> torch.device:
        """Where `blocks` lives."""
        return self.blocks.device

    @property
    def density(self) -> float:
        """Share of blocks that are computed, in [0, 1] (0 for a mask without blocks)."""
        return float(self.blocks.float().mean()) if self.blocks.numel() else 0.0

    @property
    def digest(self) -> str:
        """Hash of pattern, sizes and lengths, equal on ranks with equal masks; cached until `blocks` is written."""
        array = self.numpy()
        if "digest" not in self._cache:
            state = hashlib.blake2b(digest_size=8)
            sizes = (*array.shape, self.block_size_q, self.block_size_k, self.seqlen_q, self.seqlen_k)
            state.update(repr(tuple(int(n) for n in sizes)).encode())
            state.update(np.packbits(array).tobytes())
            self._cache["digest"] = state.hexdigest()
        return str(self._cache["digest"])

    def numpy(self) -> np.ndarray:
        """`blocks` as a host bool array [B or 1, H, Nq, Nk]; copied again only when `blocks` was written in place."""
        version = None if self.blocks.is_inference() else self.blocks._version
        if version is None or self._cache.get("version") != version:
            self._cache.clear()
            # A copy also on CPU: a later in-place write must not change what was hashed and planned.
            self._cache.update(version=version, numpy=self.blocks.detach().cpu().numpy().copy())
        array = self._cache["numpy"]
        if not isinstance(array, np.ndarray):
            raise TypeError("the cached mask is not an array")
        return array

    def refresh(self) -> None:
        """Forget what was kept of `blocks`, after a write to it that PyTorch did not count."""
        self._cache.clear()

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device (itself if it is there already)."""
        if self.blocks.device == torch.device(device):
            return self
        if self.made_dense:
            sizes = {"block_size_q": self.block_size_q, "block_size_k": self.block_size_k}
            return BlockMask.dense(self.num_heads, self.seqlen_q, self.seqlen_k, device=device, **sizes)
        return BlockMask(self.blocks.to(device), self.block_size_q, self.block_size_k, self.seqlen_q, self.seqlen_k)

    def to_dense(self) -> Tensor:
        """Token mask, bool [B or 1, H, Sq, Sk]. Quadratic in memory: for tests and pictures."""
        rows = self.blocks.repeat_interleave(self.block_size_q, dim=2)[:, :, : self.seqlen_q]
        return rows.repeat_interleave(self.block_size_k, dim=3)[..., : self.seqlen_k]
