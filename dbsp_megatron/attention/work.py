"""WorkIndex: which tokens and heads a plan sends where, as index tensors. Built once per plan, no communication.

Dims: U/R degrees, P = U * R ranks, H/Hkv heads, h/hkv heads computed here, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_megatron.block_mask import num_blocks
from dbsp_megatron.plan import PartitionPlan


@dataclass(frozen=True)
class Geometry:
    """What a WorkIndex depends on beside the plan.

    `token_homes` int64 [S] is the sp rank of each token; block sizes are the mask's.
    """

    rank: int
    seqlen: int
    num_heads: int
    num_kv_heads: int
    block_size_q: int
    block_size_k: int
    token_homes: np.ndarray


@dataclass(frozen=True)
class Side:
    """Traffic of the q (and out) or of the k, v tensors between homes and owners, in group rank order.

    `send_tokens[d]` are local token rows and `send_heads[d]` head numbers for destination d. `recv_counts[s]` is the
    number of tokens from source s, all with `heads`. `order` sorts the received rows by global position; `inverse`
    undoes it.
    """

    send_tokens: list[torch.Tensor]
    send_heads: list[torch.Tensor]
    recv_counts: list[int]
    heads: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank works on."""
        return sum(self.recv_counts)

    def to(self, device: torch.device) -> Side:
        """The same indices on a device."""
        return Side(
            [x.to(device) for x in self.send_tokens],
            [x.to(device) for x in self.send_heads],
            self.recv_counts,
            self.heads.to(device),
            self.order.to(device),
            self.inverse.to(device),
        )


def _token_owners(
    plan_owner: np.ndarray, block_size: int, geometry: Geometry, ulysses_degree: int, ring_degree: int
) -> np.ndarray:
    """Ring rank of each token; with R = 1 blocks need not end where shards end."""
    if ring_degree == 1:
        return np.zeros(geometry.seqlen, dtype=np.int64)
    return np.repeat(plan_owner, block_size)[: geometry.seqlen]


class WorkIndex:
    """Index tensors of one plan on one rank.

    Attributes:
        peers: sp ranks that take part in the exchange, ascending: the Ulysses group if no block moves, else all.
        q_side: traffic of q and out.
        kv_side: traffic of k and v.
        q_blocks: int64, mask q-blocks computed here, ascending.
        kv_chunks: per ring rank int64, mask k-blocks of its chunk, ascending.
        chunk_tokens: tokens of each ring rank's K/V chunk.
        kv_index: int64 [h], local kv head of each local query head.
        moves: a block is computed away from its home's ring rank.
    """

    def __init__(self, plan: PartitionPlan, geometry: Geometry) -> None:
        if plan.num_split_heads or plan.q_moves.size:
            raise NotImplementedError(
                f"a plan with {plan.num_split_heads} cut heads and {len(plan.q_moves)} q-blocks moved in single ring "
                "groups cannot be executed in this version: plan with head_policy='lpt_swap', block_policy='home'"
            )
        u_degree, r_degree = plan.ulysses_degree, plan.ring_degree
        size = u_degree * r_degree
        me = geometry.rank
        my_u, my_r = me % u_degree, me // u_degree
        homes = geometry.token_homes
        owners = {
            "q": _token_owners(plan.q_block_owner, geometry.block_size_q, geometry, u_degree, r_degree),
            "kv": _token_owners(plan.kv_block_owner, geometry.block_size_k, geometry, u_degree, r_degree),
        }
        self.moves = any(bool((owner != homes // u_degree).any()) for owner in owners.values())
        self.peers = list(range(size)) if self.moves else list(range(my_r * u_degree, (my_r + 1) * u_degree))

        groups = geometry.num_heads // geometry.num_kv_heads
        q_heads = [np.flatnonzero(plan.head_owner == u) for u in range(u_degree)]
        kv_heads = [np.unique(heads // groups) for heads in q_heads]
        self.kv_index = torch.from_numpy(np.searchsorted(kv_heads[my_u], q_heads[my_u] // groups))

        self.q_side = self._side(owners["q"], homes, q_heads, my_u, my_r, me, u_degree)
        self.kv_side = self._side(owners["kv"], homes, kv_heads, my_u, my_r, me, u_degree)
        num_q = num_blocks(geometry.seqlen, geometry.block_size_q)
        num_k = num_blocks(geometry.seqlen, geometry.block_size_k)
        if r_degree == 1:
            self.q_blocks = torch.arange(num_q)
            self.kv_chunks = [torch.arange(num_k)]
        else:
            self.q_blocks = torch.from_numpy(np.flatnonzero(plan.q_block_owner == my_r))
            self.kv_chunks = [torch.from_numpy(np.flatnonzero(plan.kv_block_owner == r)) for r in range(r_degree)]
        self.chunk_tokens = [int((owners["kv"] == r).sum()) for r in range(r_degree)]

    def _side(
        self,
        owners: np.ndarray,
        homes: np.ndarray,
        heads: list[np.ndarray],
        my_u: int,
        my_r: int,
        me: int,
        u_degree: int,
    ) -> Side:
        local = owners[homes == me]
        sources = [np.flatnonzero((homes == p) & (owners == my_r)) for p in self.peers]
        order = np.argsort(np.concatenate(sources), kind="stable")
        return Side(
            send_tokens=[torch.from_numpy(np.flatnonzero(local == p // u_degree)) for p in self.peers],
            send_heads=[torch.from_numpy(heads[p % u_degree]) for p in self.peers],
            recv_counts=[len(source) for source in sources],
            heads=torch.from_numpy(heads[my_u]),
            order=torch.from_numpy(order),
            inverse=torch.from_numpy(np.argsort(order, kind="stable")),
        )

    def on(self, device: torch.device) -> WorkIndex:
        """This index with its tensors on `device` (itself for the host)."""
        if device.type == "cpu":
            return self
        moved = object.__new__(WorkIndex)
        moved.moves, moved.peers, moved.chunk_tokens = self.moves, self.peers, self.chunk_tokens
        moved.q_side, moved.kv_side = self.q_side.to(device), self.kv_side.to(device)
        moved.kv_index, moved.q_blocks = self.kv_index.to(device), self.q_blocks.to(device)
        moved.kv_chunks = [chunk.to(device) for chunk in self.kv_chunks]
        return moved
