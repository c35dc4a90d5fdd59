"""Plans in plain words: every rank, every reason, every number once."""

from __future__ import annotations

import numpy as np
import torch

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import plan_partition
from tests.unit.plan.plan_cases import random_mask


def test_explain_says_who_got_what_and_why() -> None:
    plan = plan_partition(random_mask(3, 5, 9, 9), 2, 3, "lpt_swap", "paper")
    text = plan.explain()
    lines = text.splitlines()
    assert lines[0].startswith("Mesh: 2 Ulysses x 3 Ring = 6 ranks; 5 heads, 9 q-blocks, 9 k-blocks")
    assert "Heads by lpt_swap (heaviest head first" in text
    assert "Blocks by paper (heaviest block first" in text
    for u in range(2):
        heads = np.flatnonzero(plan.head_owner == u)
        listed = ", ".join(map(str, heads.tolist()))
        count = f"{heads.size} heads" if heads.size != 1 else "1 head"
        assert f"  Ulysses rank {u}: {count} ({listed}), {plan.loads[u].sum()} dense blocks." in lines
    for r in range(3):
        held = f"{5 * np.sum(plan.q_block_owner == r)} rows, {np.sum(plan.kv_block_owner == r)} k-blocks"
        assert f"  Ring rank {r}: {held}, {plan.loads[:, r].sum()} dense blocks." in lines
    moved = f"{5 * plan.moved_q_blocks.size} (head, q-block) rows ({plan.moved_q_fraction:.2%})"
    assert f"Moved from their home: {moved}" in text
    assert f"Imbalance {plan.imbalance:.4f} (waiting inside rings), {plan.imbalance_gpu:.4f}" in text


def test_explain_names_heaviest_and_lightest_rank() -> None:
    plan = plan_partition(random_mask(3, 5, 9, 9), 3, 2, "contiguous", "contiguous")
    totals = plan.loads.sum(axis=2)
    text = plan.explain()
    for word, index in (("Heaviest", totals.argmax()), ("lightest", totals.argmin())):
        u, r = divmod(int(index), 2)
        assert f"{word}: Ulysses rank {u}, ring rank {r} with {totals[u, r]}" in text


def test_explain_shortens_long_lists_and_says_none() -> None:
    text = plan_partition(random_mask(1, 30, 4, 4), 1, 1).explain()
    assert "30 heads (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... 29)" in text
    assert "0 heads (none), 0 dense blocks." in plan_partition(random_mask(1, 2, 4, 4), 3, 1, "contiguous").explain()


def test_explain_names_pieces_of_cut_heads() -> None:
    """One head on two ranks: both get a run of its rows, and one more copy of its K/V."""
    mask = BlockMask(torch.ones(1, 1, 6, 6, dtype=torch.bool))
    text = plan_partition(mask, 2, 1).explain()
    assert "Heads by split (placed as whole heads, then only the surplus" in text
    assert "Ulysses rank 0: 0 heads (none) and 1 piece (head 0 q-blocks 0..2), 18 dense blocks." in text
    assert "Ulysses rank 1: 0 heads (none) and 1 piece (head 0 q-blocks 3..5), 18 dense blocks." in text
    assert "Cut heads: 1, which puts 1 more K/V heads on the wire" in text
