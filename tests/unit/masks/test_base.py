"""MaskMethod: nothing is read back from tensors once a method has run; what all methods have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dbsp_megatron import BlockMask, MaskConfig, build_mask_method
from dbsp_megatron.kernels.probe_attention import naive
from dbsp_megatron.masks import (
    METHODS,
    MaskMethod,
    RadialMask,
    SpargeMask,
    SparseVideoGenMask,
    TokenGrid,
    TopKMask,
    TopPMask,
    pooled,
    write_masks,
)
from tests.reference import random_blocks, random_qkv

GRID = TokenGrid(5, 3, 7, (2, 2, 2))
SEQLEN, BLOCK, HEADS = 112, 8, 4
NUM = -(-SEQLEN // BLOCK)
# What makes the host wait for a device: numbers read back, and results whose size depends on values.
HOST_METHODS = ("tolist", "cpu", "numpy")
READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "item"}


class _NoReads(TorchDispatchMode):
    """Refuses operators that would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in READS or by_mask:
            raise AssertionError(f"{func} reads values back")
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_copies() -> Iterator[None]:
    """Refuses copies between tensors and host data."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("host data is copied")

    with ExitStack() as stack:
        for owner, name in (*((torch, n) for n in ("tensor", "from_numpy")), *((Tensor, n) for n in HOST_METHODS)):
            stack.enter_context(patch.object(owner, name, refuse))
        yield


def _method(name: str, folder: Path) -> MaskMethod:
    options: dict[str, Any] = {}
    if name in ("file", "paro"):
        options["path"] = str(folder / "masks.safetensors")
        masks = {2: random_blocks(0, 1, HEADS, NUM, NUM)[0]}
        orders = {2: (1, 1, 5, 5)} if name == "paro" else None
        write_masks(options["path"], masks, seqlen=SEQLEN, block_size=BLOCK, grid=GRID, orders=orders)
    return build_mask_method(MaskConfig(method=name, **options, dense_steps=1))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ramp", [False, True])
def test_methods_read_nothing_back(tmp_path: Path, name: str, ramp: bool) -> None:
    """The first call of a layer may copy what it keeps; later ones neither read nor copy: a GPU would wait."""
    q, k, v, _ = random_qkv(0, 2, SEQLEN, HEADS, 8, num_kv_heads=2)
    method = _method(name, tmp_path)
    if ramp:
        if not METHODS[name].ramp_key:
            pytest.skip("the method has no density")
        method = build_mask_method(MaskConfig(method=name, ramp="linear", ramp_steps=20))
    first = method.mask(q, k, 2, 3, GRID, BLOCK, v=v).blocks
    with _NoReads(), _no_copies():
        again = method.mask(q, k, 2, 3, GRID, BLOCK, v=v).blocks
        other = method.mask(q * 2, k, 2, 9, GRID, BLOCK, v=v).blocks
    assert torch.equal(again, first)
    assert other.shape == first.shape


def test_no_reads_sees_reads() -> None:
    """The check above must be able to fail."""
    x = torch.randn(4)
    for read in (lambda: x[0].item(), lambda: bool(x.sum() > 0), lambda: x[x > 0], lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="reads values back"), _NoReads():
            read()
    for copy in (lambda: torch.tensor([1]), lambda: x.tolist(), lambda: x.cpu(), lambda: x.numpy()):
        with pytest.raises(AssertionError, match="host data is copied"), _no_copies():
            copy()


@pytest.mark.parametrize("name", METHODS)
def test_masks_have_a_block_in_every_row_unless_the_method_says_so(tmp_path: Path, name: str) -> None:
    q, k, v, _ = random_qkv(1, 2, SEQLEN, HEADS, 8, num_kv_heads=1)
    method = _method(name, tmp_path)
    mask = method.mask(q * 5, k, 2, 3, GRID, BLOCK, v=v)
    assert isinstance(mask, BlockMask)
    assert (mask.block_size_q, mask.block_size_k, mask.seqlen_q, mask.seqlen_k) == (BLOCK, BLOCK, SEQLEN, SEQLEN)
    assert bool(mask.blocks.any(-1).all()) or METHODS[name].may_leave_rows_empty
    # BlockMask hashes and plans on the host, which an expanded view would make many times as large as it is.
    assert mask.blocks.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mask_is_made_outside_autocast_and_without_gradient(dtype: torch.dtype) -> None:
    q, k, _, _ = random_qkv(2, 1, SEQLEN, HEADS, 8)
    q, k = (x.to(dtype).requires_grad_() for x in (q, k))
    plain = TopPMask(0.5).mask(q, k, block_size=BLOCK).blocks
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(TopPMask(0.5).mask(q, k, block_size=BLOCK).blocks, plain)


def test_mask_refuses_other_lengths_of_keys() -> None:
    q, k = torch.randn(1, 20, 2, 8), torch.randn(1, 21, 2, 8)
    with pytest.raises(ValueError, match="q has 20 tokens and k 21"):
        TopPMask().mask(q, k)


def test_describe_of_a_dataclass_has_all_settings() -> None:
    assert RadialMask(0.5).describe() == "radial(width=0.5, sink_frames=1)"


@pytest.mark.parametrize(
    "method",
    [
        TopPMask(0.6),
        TopKMask(0.3),
        SpargeMask((0.2, 0.9, 0.5, 0.3, 1.0, 0.7), 0.12),
        SparseVideoGenMask(0.2, 16),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("kv_heads", [3, 6])
def test_masks_do_not_depend_on_how_many_heads_are_made_at_a_time(method: MaskMethod, kv_heads: int) -> None:
    """Large sequences go head by head."""
    q, k, v, _ = random_qkv(4, 2, SEQLEN, 6, 8, num_kv_heads=kv_heads)
    q = q * torch.linspace(0.5, 5, 6)[:, None]
    whole = method.mask(q, k, 2, 3, GRID, BLOCK, v=v).blocks
    assert len({int(blocks.sum()) for blocks in whole[0]}) > 1 or method.name == "topk"
    with patch.object(pooled, "_SCORES_AT_ONCE", 1), patch.object(naive, "_WORKING_ELEMENTS", 1):
        assert torch.equal(method.mask(q, k, 2, 3, GRID, BLOCK, v=v).blocks, whole)


class _Plain(MaskMethod):
    name = "plain"

    def predict(self, *args: Any) -> Tensor:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def test_methods_that_are_no_dataclass_go_by_name() -> None:
    assert _Plain().describe() == "plain"
    assert _Plain().needs(0, 0).k == ("means",)
    assert _Plain().head_orders(0, 0, 4, 4, 60, None) is None
    with pytest.raises(NotImplementedError, match="plain asks for a probe"):
        _Plain().candidates(None, None, 0, 0)
