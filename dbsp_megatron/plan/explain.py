"""A partition plan in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dbsp_megatron.plan.items import HEAD, RANK, cut_items

if TYPE_CHECKING:
    from dbsp_megatron.plan.partition import PartitionPlan

_HEAD_REASONS = {
    "contiguous": "consecutive heads, as no other placement was asked for or was better",
    "paper": "heaviest head first to the least loaded rank, equal counts",
    "lpt_swap": "heaviest head first to the least loaded rank, then swaps and moves off the heaviest rank",
    "split": "placed as whole heads, then only the surplus of a full rank is cut off, at a q-block",
}
_BLOCK_REASONS = {
    "home": "every block is computed by the ring rank that already holds it",
    "contiguous": "runs of consecutive blocks, made once at the model input",
    "stripe": "every R-th block, made once at the model input, so that hot regions spread over all ring ranks",
    "hot_stripe": "every R-th block, exchanged within small windows until rows and columns are even on all ring ranks",
    "minimal_move": "blocks stay at home but for few that leave the fullest ring ranks",
    "step_aware": "blocks leave their home where that evens out single ring steps",
    "paper": "heaviest block first to the least loaded ring rank, its home favoured",
}
_MAX_LISTED = 12


def explain_plan(plan: PartitionPlan) -> str:
    """Says who got what and why, the loads per rank and what moves.

    Args:
        plan: Any valid plan.

    Returns:
        Text of several lines without a final newline.
    """
    ulysses, ring = plan.ulysses_degree, plan.ring_degree
    totals = plan.loads.sum(axis=2)
    total = int(totals.sum())
    mean = total / (ulysses * ring)
    lines = [
        f"Mesh: {ulysses} Ulysses x {ring} Ring = {ulysses * ring} ranks; {plan.num_heads} heads, {plan.num_q_blocks} "
        f"q-blocks, {plan.num_kv_blocks} k-blocks, {total} dense blocks ({mean:.1f} per rank if perfect).",
        f"Heads by {plan.head_policy} ({_HEAD_REASONS.get(plan.head_policy, 'given by the caller')}):",
    ]
    for u in range(ulysses):
        mine = plan.head_items[plan.head_items[:, RANK] == u]
        cut = cut_items(mine, plan.num_q_blocks)
        pieces = [f"{h} q-blocks {begin}..{end - 1}" for h, begin, end, _ in mine[cut].tolist()]
        number = len(mine) - len(pieces)
        words = f"{number} {'head' if number == 1 else 'heads'} ({_listing(mine[~cut, HEAD].tolist())})"
        if pieces:
            words += f" and {len(pieces)} {'piece' if len(pieces) == 1 else 'pieces'} (head {_listing(pieces)})"
        lines.append(f"  Ulysses rank {u}: {words}, {int(totals[u].sum())} dense blocks.")
    if plan.num_split_heads:
        lines.append(
            f"  Cut heads: {plan.num_split_heads}, which puts {plan.extra_kv_copies()} more K/V heads on the wire than "
            "whole heads would."
        )
    lines.append(f"Blocks by {plan.block_policy} ({_BLOCK_REASONS.get(plan.block_policy, 'given by the caller')}):")
    rows = plan.rows.sum(axis=0)
    num_kv = np.bincount(plan.kv_block_owner, minlength=ring)
    for r in range(ring):
        load = int(totals[:, r].sum())
        lines.append(f"  Ring rank {r}: {int(rows[r])} rows, {int(num_kv[r])} k-blocks, {load} dense blocks.")
    lines.append(
        f"Moved from their home: {int(plan.moved_q_rows.sum())} (head, q-block) rows ({plan.moved_q_fraction:.2%}), "
        f"{plan.moved_kv_blocks.size} k-blocks ({plan.moved_kv_fraction:.1%})."
    )
    lines.append("Dense blocks by Ulysses rank (line) and ring rank (column):")
    lines.extend("  " + " ".join(str(load) for load in row) for row in totals.tolist())
    heavy, light = (divmod(int(i), ring) for i in (totals.argmax(), totals.argmin()))
    lines.append(
        f"Heaviest: Ulysses rank {heavy[0]}, ring rank {heavy[1]} with {int(totals[heavy])}; lightest: Ulysses rank "
        f"{light[0]}, ring rank {light[1]} with {int(totals[light])}."
    )
    lines.append(
        f"Imbalance {plan.imbalance:.4f} (waiting inside rings), {plan.imbalance_gpu:.4f} (rank totals), "
        f"{plan.imbalance_paper:.4f} (waiting over all ranks); 1 is perfect."
    )
    return "\n".join(lines)


def _listing(items: Sequence[object]) -> str:
    if not items:
        return "none"
    shown = ", ".join(str(item) for item in items[:_MAX_LISTED])
    return shown if len(items) <= _MAX_LISTED else f"{shown}, ... {items[-1]}"
