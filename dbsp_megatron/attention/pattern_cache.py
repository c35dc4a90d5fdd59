"""Block patterns that are kept from call to call, so that their index lists are made once."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from dbsp_megatron.attention.engines import BlockPattern

_MAX_BLOCKS = 1 << 28
"""Blocks of all kept patterns; the lists of both directions take 4 bytes a block, 1 GiB in all."""


class Sized(Protocol):
    """What holds patterns."""

    @property
    def num_blocks(self) -> int:
        """Blocks of their masks."""


_Kept = TypeVar("_Kept", bound=Sized)


class PatternCache:
    """Patterns, or what holds some, by key; those unused for longest go when all together exceed a number of blocks.

    Safe to use from several threads.
    """

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._entries: OrderedDict[Hashable, Sized] = OrderedDict()
        # Weak references of masks may call `drop` while this thread is inside.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable) -> Sized | None:
        """What is kept under a key."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def keep(self, key: Hashable, patterns: Sized) -> None:
        """Keep patterns; a single entry is kept whatever its size."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = patterns
            while len(self._entries) > 1 and sum(x.num_blocks for x in self._entries.values()) > self._max_blocks:
                self._entries.popitem(last=False)

    def find_or_make(self, key: Hashable, device: torch.device, make: Callable[[], _Kept]) -> _Kept:
        """Patterns for the current stream of a device, made and kept under a key if there are none."""
        stream = _stream(device)
        if stream is None:
            return make()
        found = self.find((key, device, stream))
        if found is not None:
            return cast(_Kept, found)
        made = make()
        self.keep((key, device, stream), made)
        return made

    def drop(self, key: Hashable) -> None:
        """Forget a key, if it is there."""
        with self._lock:
            self._entries.pop(key, None)


def _stream(device: torch.device) -> int | None:
    """The stream that owns what is made now, as no other stream waits for it.

    None under graph capture: what is "made" then comes into being on replay.
    """
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return int(torch.cuda.current_stream(device).cuda_stream)


@dataclass(eq=False)
class _MaskPattern(BlockPattern):
    """Pattern of a mask tensor as it was at one version; holds its memory, not the tensor."""

    mask: weakref.ref[Tensor] = field(kw_only=True)
    version: int = field(kw_only=True)


class MaskPatterns:
    """Patterns of mask tensors, made by each forward pass and found again by the backward pass.

    A later forward pass does not find them: PyTorch counts writes, but not those through NumPy, `.data` or other
    libraries' kernels, and lists of a mask as it was before would give a finite wrong answer.
    """

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._cache = PatternCache(max_blocks)

    def __len__(self) -> int:
        return len(self._cache)

    def pattern(
        self, blocks: Tensor, block_size_q: int, block_size_k: int, *, fresh: bool, dense: bool = False
    ) -> BlockPattern:
        """Pattern of a mask for a call on the current stream.

        Args:
            blocks: bool [B or 1, H, Nq, Nk]. An inference tensor is new every time, as nothing tells that it was
                written to.
            block_size_q: tokens per q-block.
            block_size_k: tokens per k-block.
            fresh: make a new one, for a forward pass.
            dense: every block is dense, so that there is nothing to list or to keep.
        """
        stream = _stream(blocks.device)
        if stream is None or dense or blocks.is_inference():
            return BlockPattern(blocks, block_size_q, block_size_k, dense)
        key = (id(blocks), block_size_q, block_size_k, stream)
        found = None if fresh else self._cache.find(key)
        if isinstance(found, _MaskPattern) and found.mask() is blocks and found.version == blocks._version:
            return found
        pattern = _MaskPattern(
            # An alias, or the cache would keep the tensor alive that its reference waits to see die.
            blocks.detach(),
            block_size_q,
            block_size_k,
            mask=weakref.ref(blocks, lambda _: self._cache.drop(key)),
            version=blocks._version,
        )
        self._cache.keep(key, pattern)
        return pattern
