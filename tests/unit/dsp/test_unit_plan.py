"""Plans of units from masks: loads are the dense blocks that ranks compute, and are even where frames are not."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.dsp.unit_attention import unit_plan_of
from dbsp_megatron.dsp.unit_plan import UnitHistory, plans
from dbsp_megatron.plan.unit_balance import utilisation

FRAMES, HEADS, BLOCKS = 6, 4, 12


def _mask(batch: int) -> BlockMask:
    """Heads and, with a batch, frames of unequal density; not symmetric."""
    generator = torch.Generator().manual_seed(0)
    density = torch.rand(batch, HEADS, 1, 1, generator=generator) ** 2
    blocks = torch.rand(batch, HEADS, BLOCKS, BLOCKS, generator=generator) < density
    return BlockMask(blocks, 4, 4, 4 * BLOCKS - 1, 4 * BLOCKS - 1)


@pytest.mark.parametrize("batch", [1, FRAMES])
@pytest.mark.parametrize("tolerance", [0.0, 0.1])
def test_loads_are_dense_blocks_and_even(batch: int, tolerance: float) -> None:
    mask = _mask(batch)
    plan = unit_plan_of((FRAMES, mask.seqlen_q), 1, 4, HEADS, mask=mask, tolerance=tolerance)
    counted = torch.zeros(4, dtype=torch.int64)
    for unit, begin, end, rank in plan.items.tolist():
        frame, head = divmod(unit, HEADS)
        counted[rank] += mask.blocks[frame if batch > 1 else 0, head, begin:end].sum()
    assert counted.tolist() == plan.loads.tolist()
    assert plan.utilisation >= 1 / (1 + max(tolerance, 0.03))
    # Whole frames, two on the first ranks, whatever their masks hold.
    of_frame = mask.blocks.sum((1, 2, 3)).expand(FRAMES)
    by_rank = torch.stack([of_frame[[0, 1]].sum(), of_frame[[2, 3]].sum(), of_frame[4], of_frame[5]])
    assert utilisation(by_rank.numpy()) < 0.8


def test_masks_of_calls_are_those_of_their_units() -> None:
    """On the first rank, in the order of the rows of q; what no rank has is missing nowhere."""
    mask = _mask(FRAMES)
    plan = unit_plan_of((FRAMES, mask.seqlen_q), 1, 4, HEADS, kv_heads=2, mask=mask, tolerance=0.0)
    seen = 0
    for call, part, _ in plan.calls:
        assert part.seqlen_k == mask.seqlen_k
        assert part.seqlen_q == min(4 * call.end, mask.seqlen_q) - 4 * call.begin
        for at, unit in enumerate(call.units.tolist()):
            expected = mask.blocks[unit // HEADS, unit % HEADS, call.begin : call.end]
            assert torch.equal(part.blocks[0, at], expected)
            seen += int(expected.sum())
    assert seen == plan.loads[0]


def test_a_dense_mask_is_not_written_out() -> None:
    plan = unit_plan_of((15, 405), 1, 64, 16)
    assert plan.utilisation == pytest.approx(0.9375)
    assert all(part.made_dense for _, part, _ in plan.calls)


def test_plans_are_kept_by_content() -> None:
    shape = unit_plan_of((2, 8), 1, 2, HEADS).shape
    device = torch.device("cpu")
    masks = [BlockMask(torch.ones(1, HEADS, 2, 2, dtype=torch.bool), 4, 4) for _ in range(2)]
    first, again = (plans.find(shape, mask, 0.1, 0, device) for mask in masks)
    assert first is again
    masks[0].blocks[0, 0] = False
    assert plans.find(shape, masks[0], 0.1, 0, device) is not first
    assert plans.find(shape, masks[1], 0.2, 0, device) is not first
    assert plans.find(shape, BlockMask.dense(HEADS, 8, block_size_q=4, block_size_k=4), 0.1, 0, device) is not first
    assert plans.find(shape, masks[1], 0.1, 1, device) is not first


def test_a_site_keeps_its_units_and_tables_while_they_balance() -> None:
    shape = unit_plan_of((FRAMES, 47), 1, 4, HEADS, mask=_mask(FRAMES), tolerance=0.1).shape
    device, mask = torch.device("cpu"), _mask(FRAMES)
    history: UnitHistory = OrderedDict()
    first = plans.find(shape, mask, 0.1, 1, device, history, "here")
    blocks = mask.blocks.clone()
    blocks[0, 0, 0, 0] ^= True
    near = BlockMask(blocks, 4, 4, 47, 47)
    second = plans.find(shape, near, 0.1, 1, device, history, "here")
    assert second is not first
    assert second.items is first.items
    assert second.routes is first.routes
    # Its loads are those of its own mask, and its calls hold it.
    assert int(second.loads.sum()) == int(blocks.sum())
    assert sum(int(part.blocks.sum()) for _, part, _ in second.calls) == second.loads[1]
    # Another mask altogether moves units, and another place never saw the first.
    other = BlockMask(mask.blocks.flip(0), 4, 4, 47, 47)
    assert plans.find(shape, other, 0.1, 1, device, history, "here").items is not first.items
    assert plans.find(shape, other, 0.1, 1, device, history, "there").utilisation >= 1 / 1.1
