"""How much memory an attention layer takes at a time, as its kernels would take it, measured on CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbsp_megatron import BlockMask, SequenceParallel
from dbsp_megatron.attention import chunks, exchange, ring
from dbsp_megatron.attention.engines import engine_named
from dbsp_megatron.kernels.block_sparse_attention import accumulate_dtype, output_delta
from dbsp_megatron.strategy import TokenLayout


class _Alive(TorchDispatchMode):
    """Most bytes alive at a time, of what operators returned inside; `quietly` leaves operators out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, Any] = {}
        self._quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        if not self._quiet:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in before:
                    self._take(leaf.untyped_storage())
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._drop(key, size))
        self.now += size
        self.most = max(self.most, self.now)

    def _drop(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size

    @contextmanager
    def quietly(self) -> Iterator[None]:
        self._quiet, before = True, self._quiet
        try:
            yield
        finally:
            self._quiet = before


class _Lean:
    """An engine that takes no memory but for its results, as kernels do; results are of no value.

    By its name a ring may compute parts of the heads, as with kernels.
    """

    name = "torch"

    def __init__(self) -> None:
        engine = engine_named("torch")
        self.refusal, self.refuses_tensors = engine.refusal, engine.refuses_tensors

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pattern: Any, scale: float, **options: Any) -> Any:
        if options.get("state") is not None:
            return options["state"]
        wide = accumulate_dtype(q.dtype)
        return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, dtype: torch.dtype, **options: Any) -> Any:
        return tuple(x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))


def _lean(alive: _Alive, function: Any) -> Any:
    """A function whose results alone count, as for a kernel of one launch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with alive.quietly():
            result = function(*args, **kwargs)
        if kwargs.get("into") is not None:
            return result
        if isinstance(result, Tensor):
            return result.clone()
        return [x.clone() for x in result]

    return call


def most_alive(sp: SequenceParallel, local: list[Tensor], mask: BlockMask, layout: TokenLayout, dout: Tensor) -> int:
    """Most bytes beside the inputs q, k, v of a forward pass, and of a backward pass if they require gradients."""
    alive = _Alive()
    lean = {name: _lean(alive, getattr(exchange, name)) for name in ("pack", "unpack", "unpack_sum")}
    with (
        patch.object(SequenceParallel, "_choose_engine", lambda *_: _Lean()),
        patch.multiple(exchange, **lean),
        patch.object(chunks, "pack", lean["pack"]),
        patch.object(ring, "output_delta", _lean(alive, output_delta)),
        alive,
    ):
        out = sp.attention(*local, mask=mask, layout=layout)
        if out.requires_grad:
            torch.autograd.grad(out, local, dout)
    return alive.most
