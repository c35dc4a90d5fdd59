"""Plans that cut heads and move single q-blocks, and K/V that stay home where nobody reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron import BlockMask
from dbsp_megatron.masks import BlockSummary, MaskMethod
from tests.distributed.sharded import make_sp, sharded_gradients
from tests.harness import run_ranks
from tests.reference import FP32_ATOL, Gradients, attention_gradients, expand_blocks, max_error, random_qkv

SEQLEN, BLOCK, HEADS = 117, 8, 5
NUM = -(-SEQLEN // BLOCK)


def _skewed(batch: int = 1, step: int = 0) -> Tensor:
    """One head is dense, the others nearly empty; some rows are hot: whole heads and whole stripes cannot be even."""
    generator = torch.Generator().manual_seed(7 + step)
    density = torch.tensor([0.05, 0.95, 0.1, 0.2, 0.05])[:, None, None]
    blocks = torch.rand((batch, HEADS, NUM, NUM), generator=generator) < density
    blocks[:, :, ::4] |= torch.rand((batch, HEADS, -(-NUM // 4), NUM), generator=generator) < 0.5
    blocks[:, 3, 2] = False
    return blocks


@dataclass(frozen=True)
class _Given(MaskMethod):
    """Rows of a mask that is known, for the blocks whose means are the given ones: block i has means i."""

    name = "given"

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        blocks = _skewed(q_summary.batch)
        return blocks[:, :, q_summary.field("means")[0, :, 0, 0].round().long()]


def _worst(got: Gradients, want: Gradients) -> float:
    return max(max_error(getattr(got, name), getattr(want, name)) for name in ("out", "dq", "dk", "dv"))


def _run(
    rank: int, world_size: int, mesh: tuple[int, int], policies: tuple[str, str], kv_heads: int, options: dict[str, Any]
) -> tuple[float, int, int, int]:
    sp = make_sp("dbsp", *mesh, head_policy=policies[0], block_policy=policies[1], block_size=BLOCK, **options)
    inputs = random_qkv(3, 2, SEQLEN, HEADS, 8, num_kv_heads=kv_heads)
    worst, cut, moved = 0.0, 0, 0
    for step in range(2):
        blocks = _skewed(2, step)
        sp.begin_step(step)
        mask = BlockMask(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN)
        got = sharded_gradients(sp, inputs, mask, BLOCK)
        want = attention_gradients(*inputs[:3], expand_blocks(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), inputs[3])
        plan = sp.layer_mask(0)[1]
        worst, cut, moved = max(worst, _worst(got, want)), cut + plan.num_split_heads, moved + len(plan.q_moves)
    return worst, cut, moved, int(sp.stats()["sp/bytes_sent"])


@pytest.mark.parametrize(
    ("mesh", "policies", "options"),
    [
        ((2, 1), ("split", "stripe"), {}),
        ((3, 1), ("auto", "auto"), {}),
        ((4, 1), ("split", "auto"), {}),
        ((2, 2), ("split", "minimal_move"), {}),
        ((2, 2), ("split", "step_aware"), {"kv_gather_mib": 0}),
        ((1, 3), ("contiguous", "minimal_move"), {"kv_gather_mib": 0, "kv_prefetch": 1}),
        ((2, 3), ("split", "minimal_move"), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [5, 1])
def test_attention_of_cut_heads_and_moved_blocks_equals_reference(
    mesh: tuple[int, int], policies: tuple[str, str], options: dict[str, Any], kv_heads: int
) -> None:
    results = run_ranks(_run, mesh[0] * mesh[1], mesh, policies, kv_heads, options)
    assert max(worst for worst, *_ in results) <= FP32_ATOL
    _, cut, moved, _ = results[0]
    assert cut > 0 or policies[0] == "contiguous"
    assert moved > 0 or policies[1] not in ("minimal_move", "step_aware")


def _run_predicted(
    rank: int, world_size: int, mesh: tuple[int, int], block_policy: str, counts: str
) -> tuple[float, int]:
    sp = make_sp("dbsp", *mesh, head_policy="split", block_policy=block_policy, block_size=BLOCK, plan_counts=counts)
    q, k, v, dout = random_qkv(3, 2, SEQLEN, HEADS, 8)
    # The method tells a q-block by the mean of its first entry.
    q[:, :, 0, 0] = (torch.arange(SEQLEN) // BLOCK).to(q.dtype)
    want = attention_gradients(q, k, v, expand_blocks(_skewed(2), BLOCK, BLOCK, SEQLEN, SEQLEN), dout)
    worst = 0.0
    for step in range(2):
        sp.begin_step(step)
        worst = max(worst, _worst(sharded_gradients(sp, (q, k, v, dout), _Given(), BLOCK), want))
    return worst, sp.layer_mask(0)[1].num_split_heads


@pytest.mark.parametrize("counts", ["current", "previous"])
@pytest.mark.parametrize(("mesh", "block_policy"), [((3, 1), "auto"), ((2, 2), "minimal_move")], ids=str)
def test_predicted_masks_may_cut_heads(mesh: tuple[int, int], block_policy: str, counts: str) -> None:
    """Mask rows travel with the rows that they belong to; those of a cut head that are computed elsewhere are empty."""
    results = run_ranks(_run_predicted, mesh[0] * mesh[1], mesh, block_policy, counts)
    assert max(worst for worst, _ in results) <= 2 * FP32_ATOL
    assert results[0][1] > 0


def _run_band(rank: int, world_size: int, width: int, gather: int) -> tuple[float, int]:
    """Bytes that a ring sends for a band of blocks around the diagonal, contiguous blocks."""
    place = torch.arange(NUM)
    blocks = ((place[:, None] - place[None, :]).abs() <= width).expand(1, HEADS, NUM, NUM).contiguous()
    sp = make_sp("dbsp", 1, world_size, block_policy="contiguous", block_size=BLOCK, kv_gather_mib=gather)
    inputs = random_qkv(5, 1, SEQLEN, HEADS, 8, num_kv_heads=1)
    sp.begin_step(0)
    got = sharded_gradients(sp, inputs, BlockMask(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), BLOCK)
    want = attention_gradients(*inputs[:3], expand_blocks(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), inputs[3])
    return _worst(got, want), int(sp.stats()["sp/bytes_sent"])


@pytest.mark.parametrize("gather", [0, 64])
def test_key_blocks_that_nobody_reads_are_not_sent(gather: int) -> None:
    """Of a band one block wide each rank needs one block of each neighbour, there and back."""
    narrow, whole = (run_ranks(_run_band, 4, width, gather) for width in (1, NUM))
    assert max(worst for worst, _ in (*narrow, *whole)) <= FP32_ATOL
    # K and V of a block of one head in the forward pass and again in the backward pass, and their gradients.
    block = 3 * 2 * BLOCK * 8 * 4
    sent = [num_bytes for _, num_bytes in narrow]
    assert sent == [block, 2 * block, 2 * block, block]
    tokens = [32, 32, 32, SEQLEN - 96]
    assert [num_bytes for _, num_bytes in whole] == [
        2 * 3 * own * 2 * 8 * 4 + (SEQLEN - own) * 2 * 8 * 4 for own in tokens
    ]
