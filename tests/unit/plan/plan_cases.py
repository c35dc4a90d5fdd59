"""Masks and slow twins that the tests of planning share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import PartitionPlan, Workload, block_homes

REPO_ROOT = Path(__file__).resolve().parents[3]
DEGREES = st.integers(1, 7)


def random_mask(
    seed: int, num_heads: int, num_q_blocks: int, num_k_blocks: int, *, batch: int = 1, spread: float = 1.0
) -> BlockMask:
    """Mask whose density differs by head and by row, lognormal with `spread`."""
    rng = np.random.default_rng(seed)
    head = rng.lognormal(-1.2, spread, (1, num_heads, 1, 1))
    row = rng.lognormal(0.0, spread / 2, (1, num_heads, num_q_blocks, 1))
    draws = rng.random((batch, num_heads, num_q_blocks, num_k_blocks))
    return BlockMask(torch.from_numpy(draws < head * row))


def workload_in(mask: BlockMask, ulysses_degree: int, ring_degree: int, layout: str = "stripe") -> Workload:
    """Counts of a mask in a layout."""
    return Workload.from_mask(
        mask,
        block_homes(mask.num_q_blocks, ulysses_degree, ring_degree, layout),
        block_homes(mask.num_k_blocks, ulysses_degree, ring_degree, layout),
        ulysses_degree * ring_degree,
    )


def without_blocks(workload: Workload) -> Workload:
    """The sums alone, of which nothing can be cut or moved."""
    return Workload(
        workload.row_blocks,
        workload.tile_blocks,
        None,
        workload.q_home,
        workload.k_home,
        workload.num_ranks,
    )


def sliced_loads(mask: BlockMask, plan: PartitionPlan) -> NDArray[np.int64]:
    """Loads by cutting the mask into what each rank computes at each step, the slow twin of all counting."""
    blocks = mask.blocks.numpy()
    ulysses, ring = plan.ulysses_degree, plan.ring_degree
    loads = np.zeros((ulysses, ring, ring), dtype=np.int64)
    for head, begin, end, u in plan.head_items.tolist():
        owner = plan.q_block_owner.copy()
        for rank, block, target in plan.q_moves.tolist():
            if rank == u:
                owner[block] = target
        for row in range(begin, end):
            for step in range(ring):
                served = plan.kv_block_owner == (owner[row] - step) % ring
                loads[u, owner[row], step] += blocks[:, head, row, served].sum()
    return loads


def run_module(name: str, hash_seed: str) -> str:
    """Standard output of a module run in a fresh interpreter with its own hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(REPO_ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", name],
        cwd=REPO_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout
