"""Mask methods on one CUDA device: the masks of the CPU, nothing that waits, rows that do not depend on one another."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dbsp_megatron import MaskConfig, SequenceParallel, SequenceParallelConfig, build_mask_method
from dbsp_megatron.kernels.block_select import naive_select_largest, naive_select_mass, select_largest, select_mass
from dbsp_megatron.masks import METHODS, BlockSummary, MaskMethod, TokenGrid, write_masks
from dbsp_megatron.masks.summary import summarize
from tests.reference import nan_filled_memory, random_blocks

pytestmark = pytest.mark.gpu

GRID = TokenGrid(9, 20, 30, (2, 8, 8))
NUM_TEXT, BLOCK, HEADS, KV_HEADS, DIM = 77, 64, 6, 3, 64
SEQLEN = NUM_TEXT + GRID.num_tokens
NUM = -(-SEQLEN // BLOCK)
OPTIONS: dict[str, dict[str, Any]] = {
    "sparse_videogen": {"density": 0.2, "sample_rows": 32},
    "duo": {"global_heads": (1, 4), "sink_tokens": 64, "window_tokens": 300},
    "sparge": {"top_p": 0.8, "similarity": 0.3},
    "sliding_tile": {"tile": (2, 8, 8), "window": (3, 1, 3)},
}


def _method(name: str, folder: Path) -> MaskMethod:
    options = dict(OPTIONS.get(name, {}))
    if name in ("file", "paro"):
        options["path"] = str(folder / f"{name}.safetensors")
        masks = {2: random_blocks(3, 1, HEADS, NUM, NUM)[0]}
        orders = {2: (5, 5, 0, 0, 2, 2)} if name == "paro" else None
        write_masks(options["path"], masks, seqlen=SEQLEN, block_size=BLOCK, grid=GRID, orders=orders)
    return build_mask_method(MaskConfig(method=name, **options))


def _inputs(dtype: torch.dtype = torch.bfloat16, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks alike inside by different amounts, heads more and less peaked."""
    generator = torch.Generator("cuda").manual_seed(1)
    made = []
    for heads in (HEADS, KV_HEADS, KV_HEADS):
        shape = (batch, NUM, heads, DIM)
        centre = torch.randn(shape, device="cuda", generator=generator)
        centre *= torch.rand((batch, NUM, heads, 1), device="cuda", generator=generator) * 3
        x = centre.repeat_interleave(BLOCK, 1)[:, :SEQLEN]
        made.append((x + torch.randn(x.shape, device="cuda", generator=generator)).to(dtype))
    return made[0], made[1], made[2]


@pytest.mark.parametrize("name", METHODS)
def test_masks_equal_those_of_the_cpu(tmp_path: Path, name: str) -> None:
    """But for scores so close that sums in another order change their order, which is one block in many thousands."""
    q, k, v = _inputs()
    method = _method(name, tmp_path)
    with nan_filled_memory():
        got = method.mask(q, k, 2, 1, GRID, BLOCK, v=v).blocks
    want = method.mask(q.cpu().double(), k.cpu().double(), 2, 1, GRID, BLOCK, v=v.cpu().double()).blocks
    assert got.device.type == "cuda"
    differing = (got.cpu() != want).double().mean()
    assert float(differing) <= (2e-4 if METHODS[name].ramp_key else 0)
    assert torch.equal(method.mask(q, k, 2, 1, GRID, BLOCK, v=v).blocks, got)


def _summary(x: Tensor, rows: list[int], fields: tuple[str, ...], whole: BlockSummary | None = None) -> BlockSummary:
    if whole is None:
        blocks = torch.arange(NUM, device="cuda")
        return summarize(x, fields, blocks=blocks, host_blocks=np.arange(NUM), seqlen=SEQLEN, block_size=BLOCK)
    index = torch.tensor(rows, device="cuda")
    return replace(
        whole,
        blocks=index,
        host_blocks=np.array(rows),
        means=None if whole.means is None else whole.means[:, index],
        similarity=None if whole.similarity is None else whole.similarity[:, index],
    )


@pytest.mark.parametrize("name", [name for name in METHODS if name != "sparse_videogen"])
def test_rows_made_apart_equal_rows_made_together(tmp_path: Path, name: str) -> None:
    """Also a single row, which other matrix products make: masks do not depend on the number of ranks."""
    q, k, _ = _inputs()
    method = _method(name, tmp_path)
    needs = method.needs(2, 1)
    q_summary, k_summary = _summary(q, [], needs.q), _summary(k, [], needs.k)
    whole = method.predict(q_summary, k_summary, 2, 1, GRID)
    for rows in ([0], [NUM - 1], list(range(0, NUM, 2)), list(range(3, NUM, 8))):
        part = method.predict(_summary(q, rows, needs.q, q_summary), k_summary, 2, 1, GRID)
        assert torch.equal(part, whole[:, :, rows]), rows


@pytest.mark.parametrize("name", METHODS)
def test_layers_with_a_method_never_wait(tmp_path: Path, name: str) -> None:
    """From the third step on, forward and backward; the first two keep patterns and compile."""
    method = _method(name, tmp_path)
    sp = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=BLOCK, engine="triton"))
    layout = sp.layout(SEQLEN)
    for step in range(5):
        leaves = [x.requires_grad_() for x in _inputs(batch=1)]
        sp.begin_step(step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            out = sp.attention(*leaves, mask=method, layer=2, layout=layout, grid=GRID)
            out.backward(torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(x.grad is not None and bool(torch.isfinite(x.grad).all()) for x in leaves)
    sp.destroy()


@pytest.mark.parametrize("name", ["topk", "topp", "sparge", "vsa", "sparse_videogen"])
def test_a_ramp_never_waits(name: str) -> None:
    """Each step has a density of its own, and patterns that are made anew.

    Heads of `sparse_videogen` choose between two patterns anew in each step, whose blocks differ in number, so that
    only its first and last step compare.
    """
    q, k, v = _inputs()
    method = build_mask_method(MaskConfig(method=name, ramp="cosine", ramp_steps=9))
    method.mask(q, k, 2, 1, GRID, BLOCK, v=v)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = [method.mask(q, k, 2, step, GRID, BLOCK, v=v).blocks for step in range(2, 9)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    densities = [float(x.double().mean()) for x in rows]
    assert densities[-1] < densities[0], densities
    if name != "sparse_videogen":
        assert all(later <= earlier for earlier, later in pairwise(densities)), densities


@pytest.mark.parametrize("num_k", [1, 7, 64, 591, 1182, 5000, 16384, 16385])
@pytest.mark.parametrize("kind", ["spread", "sharp", "tied", "masked"])
def test_select_equals_twin(num_k: int, kind: str) -> None:
    """Sums in another order may end one block earlier or later, in few rows; ties and counts are exact.

    The more blocks, the smaller the weight of one beside the rounding of the sum, and the more rows end elsewhere.
    """
    scores = torch.randn((2, 3, 37, num_k), device="cuda")
    if kind == "sharp":
        scores *= 20
    if kind == "tied":
        scores = (scores * 2).round()
    if kind == "masked":
        scores.masked_fill_(torch.rand(scores.shape, device="cuda") < 0.5, float("-inf"))
        scores[:, :, 0] = float("-inf")
    for count in (1, 5, max(1, num_k // 3)):
        with nan_filled_memory():
            assert torch.equal(select_largest(scores, count), naive_select_largest(scores, count))
    shares = torch.tensor([0.3, 0.9, 1.0], device="cuda")
    for share, least in ((0.5, 1), (0.95, 1), (0.1, 4), (1.0, 1), (shares, 2)):
        with nan_filled_memory():
            got = select_mass(scores, share, least)
        want = naive_select_mass(scores.double(), share, least)
        uneven = (got != want).sum(-1)
        assert int(uneven.max()) <= 1
        assert float((uneven > 0).double().mean()) <= max(0.01, 2e-6 * num_k)
        assert torch.equal(select_mass(scores[:, :, 5:6], share, least), got[:, :, 5:6])
