"""to_owners and to_homes against indexing whole tensors: values bit by bit, order of additions, bytes counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.attention.exchange import Exchange, ToHomes, ToOwners, Traffic, to_homes, to_owners
from dbsp_megatron.attention.work import Geometry, WorkIndex
from dbsp_megatron.plan import PartitionPlan
from tests.harness import run_ranks

BATCH, SEQLEN, BLOCK, NUM_HEADS, DIMS = 2, 45, 8, 6, (5, 5, 3)
NUM_BLOCKS = -(-SEQLEN // BLOCK)


@dataclass(frozen=True)
class Case:
    """A mesh, the kv heads, and whether blocks are computed away from home."""

    ulysses: int
    ring: int
    num_kv_heads: int
    moves: bool
    idle_rank: bool = False
    """The last rank is home to no token."""


CASES = [
    Case(2, 2, 2, moves=False),
    Case(2, 2, 1, moves=True),
    Case(4, 1, 2, moves=False),
    Case(4, 1, 6, moves=False, idle_rank=True),
    Case(1, 4, 3, moves=True, idle_rank=True),
]


class Setting:
    """What every rank can work out by itself of a case."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.num_kv_heads)
        size = case.ulysses * case.ring
        homes = rng.integers(size - int(case.idle_rank), size=NUM_BLOCKS)
        owners = {
            name: rng.integers(case.ring, size=NUM_BLOCKS) if case.moves else homes // case.ulysses
            for name in ("q", "kv")
        }
        # Every Ulysses rank computes a head or more, unequal numbers, not in runs.
        others = rng.integers(case.ulysses, size=NUM_HEADS - case.ulysses)
        head_owner = rng.permutation(np.concatenate([np.arange(case.ulysses), others]))
        items = [(head, 0, NUM_BLOCKS, owner) for head, owner in enumerate(head_owner)]
        self.case, self.size = case, size
        self.plan = PartitionPlan(
            ulysses_degree=case.ulysses,
            ring_degree=case.ring,
            head_policy="test",
            block_policy="home",
            head_items=np.array(items),
            q_block_owner=owners["q"],
            kv_block_owner=owners["kv"],
            q_block_home=homes,
            kv_block_home=homes,
            loads=np.zeros((case.ulysses, case.ring, case.ring), dtype=np.int64),
        )
        self.homes = np.repeat(homes, BLOCK)[:SEQLEN]
        self.owners = {name: np.repeat(owner, BLOCK)[:SEQLEN] for name, owner in owners.items()}
        self.num_heads = (NUM_HEADS, case.num_kv_heads, case.num_kv_heads)

    def index(self, rank: int) -> WorkIndex:
        return WorkIndex(self.plan, Geometry(rank, SEQLEN, NUM_HEADS, self.case.num_kv_heads, BLOCK, BLOCK, self.homes))

    def tokens(self, which: int, rank: int) -> Tensor:
        """Tokens that a rank works on."""
        return torch.from_numpy(np.flatnonzero(self.owners["kv" if which else "q"] == rank // self.case.ulysses))

    def heads(self, which: int, rank: int) -> Tensor:
        """Heads that a rank works on."""
        mine = np.flatnonzero(self.plan.head_owner == rank % self.case.ulysses)
        return torch.from_numpy(np.unique(mine // (NUM_HEADS // self.case.num_kv_heads)) if which else mine)

    def whole(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        shapes = [(BATCH, SEQLEN, heads, dim) for heads, dim in zip(self.num_heads, DIMS, strict=True)]
        return [(torch.randn(shape, generator=generator) * 30).to(dtype) for shape in shapes]

    def at_owner(self, which: int, rank: int, dtype: torch.dtype) -> Tensor:
        """What a rank sends home: no two ranks have the same."""
        shape = (BATCH, len(self.tokens(which, rank)), len(self.heads(which, rank)), DIMS[which])
        generator = torch.Generator().manual_seed(100 * rank + which)
        return (torch.randn(shape, generator=generator) * 30).to(dtype)

    def summed_at_home(self, which: int, rank: int, dtype: torch.dtype) -> Tensor:
        """Contributions of all owners, added one rank after another in the tensors' dtype."""
        total = torch.zeros((BATCH, SEQLEN, self.num_heads[which], DIMS[which]), dtype=dtype)
        for other in range(self.size):
            tokens, heads = self.tokens(which, other), self.heads(which, other)
            total[:, tokens[:, None], heads[None, :]] += self.at_owner(which, other, dtype)
        return total[:, self.homes == rank]


def _exchange(index: WorkIndex, rank: int) -> Exchange:
    group = dist.new_group(index.peers, use_local_synchronization=True) if len(index.peers) > 1 else None
    return Exchange(group, index.peers.index(rank), Traffic())


def _run(rank: int, world_size: int, case: Case, dtype: torch.dtype) -> list[str]:
    setting = Setting(case)
    index = setting.index(rank)
    exchange = _exchange(index, rank)
    sides = (index.q_side, index.kv_side, index.kv_side)
    whole = setting.whole(dtype)
    # Views of wider storage, as slices of a fused projection are.
    local = [torch.cat([x, x], 3)[:, setting.homes == rank][..., : x.shape[3]] for x in whole]
    faults = []
    num_bytes = 0
    for turn in range(2):
        for which, got in enumerate(to_owners(local, sides, exchange)):
            tokens, heads = setting.tokens(which, rank), setting.heads(which, rank)
            adjacent = got.stride(3) == 1 if index.q_side.identity else got.is_contiguous()
            if not torch.equal(got, whole[which][:, tokens][:, :, heads]) or not adjacent:
                faults.append(f"to_owners, tensor {which}, turn {turn}")
        if turn == 0:
            for which in range(3):
                for other in index.peers:
                    owned = np.isin(np.flatnonzero(setting.homes == rank), setting.tokens(which, other).numpy()).sum()
                    rows = 0 if other == rank else int(owned) * len(setting.heads(which, other))
                    num_bytes += BATCH * rows * DIMS[which] * dtype.itemsize
            if exchange.traffic.bytes_sent != num_bytes:
                faults.append(f"{exchange.traffic.bytes_sent} bytes counted, {num_bytes} sent")
        sent = [setting.at_owner(which, rank, dtype) for which in range(3)]
        for which, got in enumerate(to_homes(sent, sides, [x.shape for x in local], exchange)):
            if not torch.equal(got, setting.summed_at_home(which, rank, dtype)):
                faults.append(f"to_homes, tensor {which}, turn {turn}")
    return faults


def _run_backward(rank: int, world_size: int, case: Case) -> list[str]:
    setting = Setting(case)
    index = setting.index(rank)
    exchange = _exchange(index, rank)
    dtype = torch.float64
    local = [x[:, setting.homes == rank].requires_grad_() for x in setting.whole(dtype)]
    q, k, v = local
    moved = ToOwners.apply(q, k, v, index.q_side, index.kv_side, exchange)
    torch.autograd.backward(moved, [setting.at_owner(which, rank, dtype) for which in range(3)])
    faults = [
        f"gradient of tensor {which}"
        for which, x in enumerate(local)
        if x.grad is None or not torch.equal(x.grad, setting.summed_at_home(which, rank, dtype))
    ]
    out = setting.at_owner(0, rank, dtype).requires_grad_()
    home = ToHomes.apply(out, index.q_side, q.shape[1], NUM_HEADS, exchange)
    if not torch.equal(home, setting.summed_at_home(0, rank, dtype)):
        faults.append("output at home")
    gradient = setting.whole(dtype)[0]
    home.backward(gradient[:, setting.homes == rank])
    wanted = gradient[:, setting.tokens(0, rank)][:, :, setting.heads(0, rank)]
    if out.grad is None or not torch.equal(out.grad, wanted):
        faults.append("gradient of the output")
    return faults


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exchange_equals_indexing_of_whole_tensors(case: Case, dtype: torch.dtype) -> None:
    """Copies of a kv head are added in rank order, each sum rounded; the index tables serve a second turn as well."""
    for rank, faults in enumerate(run_ranks(_run, 4, case, dtype)):
        assert not faults, (rank, faults)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_exchange_functions_have_exact_adjoints(case: Case) -> None:
    for rank, faults in enumerate(run_ranks(_run_backward, 4, case)):
        assert not faults, (rank, faults)


def test_exchange_of_one_rank_needs_no_process_group() -> None:
    case = Case(1, 1, 2, moves=False)
    assert not _run(0, 1, case, torch.bfloat16)
    assert not _run_backward(0, 1, case)
