"""WorkIndex: which tokens and heads a plan sends where, as index tensors. Built once per plan, no communication.

Dims: U/R degrees, P = U * R ranks, H/Hkv heads, h/hkv heads computed here, n tokens computed here, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dbsp_megatron.block_mask import num_blocks
from dbsp_megatron.comm.transfer import to_device
from dbsp_megatron.kernels.block_pack import PieceIndex
from dbsp_megatron.plan import PartitionPlan
from dbsp_megatron.plan.items import BEGIN, END, HEAD, RANK


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
class Pieces:
    """What is sent to (or comes from) each peer: pieces, each all pairs of its tokens and its heads.

    `per_peer[p]` pieces belong to peer p; `tokens` and `heads` (int64) name the rows and heads of all pieces in turn.
    """

    tokens: list[Tensor]
    heads: list[Tensor]
    per_peer: list[int]

    def to(self, device: torch.device) -> Pieces:
        """The same indices on a device."""
        return Pieces(
            [to_device(x, device) for x in self.tokens], [to_device(x, device) for x in self.heads], self.per_peer
        )

    def padded(self, per_peer: list[int]) -> Pieces:
        """As many pieces for each peer as `per_peer` says, the added ones empty."""
        if per_peer == self.per_peer:
            return self
        tokens, heads, at = [], [], 0
        for have, want in zip(self.per_peer, per_peer, strict=True):
            nothing = [self.tokens[0].new_empty(0)] * (want - have)
            tokens += [*self.tokens[at : at + have], *nothing]
            heads += [*self.heads[at : at + have], *nothing]
            at += have
        return Pieces(tokens, heads, list(per_peer))


@dataclass(frozen=True)
class Side:
    """Traffic of the q (and out) or of the k, v tensors between homes and owners, peers in group rank order."""

    send: Pieces
    """Rows [s] and heads [H] of the tensor at home that each peer computes with."""
    receive: Pieces
    """Rows [n] and heads [h] of the tensor here that come from each peer; rows are in ascending global position."""
    heads: Tensor
    """int64 [h], heads of the tensor here, ascending."""
    num_tokens: int
    """n."""
    identity: bool
    """The tensor here is the tensor at home: this rank talks to nobody and computes with all that it holds."""
    partial: bool
    """Some (row, head) of the tensor here comes from nobody: other ranks compute the other rows of a cut head."""
    once: bool
    """Each (row, head) of the heads that go anywhere goes to one owner: nothing has to be summed on the way back."""

    def to(self, device: torch.device) -> Side:
        """The same indices on a device."""
        heads = to_device(self.heads, device)
        return replace(self, send=self.send.to(device), receive=self.receive.to(device), heads=heads)

    def padded(self, send: list[int], receive: list[int]) -> Side:
        """As many pieces for each peer as said, so that this side shares a buffer with another one."""
        return replace(self, send=self.send.padded(send), receive=self.receive.padded(receive))

    @cached_property
    def at_owner(self) -> PieceIndex:
        """Rows of a tensor [B, n, h, D] at its owner, by source."""
        return PieceIndex.build(self.receive.tokens, self.receive.heads, self.num_tokens, self.heads.numel())

    def at_home(self, num_tokens: int, num_heads: int) -> PieceIndex:
        """Rows of a tensor [B, num_tokens, num_heads, D] at home, by destination."""
        # Kept in the instance, as functools.cached_property does: it lives as long as the plan's other index tensors.
        kept: PieceIndex | None = vars(self).get("_at_home")
        if kept is None:
            kept = vars(self)["_at_home"] = PieceIndex.build(self.send.tokens, self.send.heads, num_tokens, num_heads)
        return kept


@dataclass(frozen=True, eq=False)
class _Share:
    """What the ranks of one Ulysses rank compute: heads, and runs of heads that share a range of q-blocks."""

    heads: np.ndarray
    """int64 [h], ascending."""
    runs: list[tuple[int, int, np.ndarray]]
    """(first q-block, last excluded, heads) of each range, each head in as many as it has pieces here."""

    @classmethod
    def of(cls, items: np.ndarray) -> _Share:
        """Share of the items [n, 4] of one Ulysses rank."""
        # A rank without heads still takes part in the exchange: with one empty run.
        ranges = sorted({(int(begin), int(end)) for begin, end in items[:, [BEGIN, END]]}) or [(0, 0)]
        runs = [
            (begin, end, np.unique(items[(items[:, BEGIN] == begin) & (items[:, END] == end), HEAD]))
            for begin, end in ranges
        ]
        return cls(np.unique(items[:, HEAD]), runs)

    def covers(self, num_q: int) -> np.ndarray:
        """Rows of each head that are computed, bool [h, Nq]."""
        rows = np.zeros((len(self.heads), num_q), dtype=bool)
        for begin, end, heads in self.runs:
            rows[np.searchsorted(self.heads, heads), begin:end] = True
        return rows


def _tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


class WorkIndex:
    """Index tensors of one plan on one rank.

    Args:
        plan: what is computed where.
        geometry: what the index depends on beside it.
        chosen: int64, heads to index, all pieces of each; None: all heads.

    Attributes:
        peers: sp ranks that take part in the exchange, ascending: the Ulysses group if no block moves, else all.
        q_side: traffic of q and out.
        kv_side: traffic of k and v.
        q_blocks: int64, mask q-blocks computed here, ascending.
        q_rows: bool [h, q-blocks here], those of each head that are computed here; None if all are.
        kv_chunks: per ring rank int64 on the host, mask k-blocks of its chunk, ascending.
        kv_block_tokens: int64 [Nk], tokens of each k-block.
        kv_index: int64 [h], local kv head of each local query head.
        in_order: kv head j // (h / hkv) serves query head j, so that no table need say which.
        moves: a block is computed away from its home's ring rank.
    """

    def __init__(self, plan: PartitionPlan, geometry: Geometry, chosen: np.ndarray | None = None) -> None:
        u_degree, r_degree = plan.ulysses_degree, plan.ring_degree
        size = u_degree * r_degree
        me = geometry.rank
        my_u, my_r = me % u_degree, me // u_degree
        homes = geometry.token_homes
        num_q = num_blocks(geometry.seqlen, geometry.block_size_q)
        groups = geometry.num_heads // geometry.num_kv_heads
        items = plan.head_items if chosen is None else plan.head_items[np.isin(plan.head_items[:, HEAD], chosen)]
        shares = [_Share.of(items[items[:, RANK] == u]) for u in range(u_degree)]
        q_block = np.arange(geometry.seqlen) // geometry.block_size_q
        # With one ring rank blocks need not end where shards end, so that no block has one home.
        q_owners = [plan.q_owner_of(u) if r_degree > 1 else np.zeros(num_q, dtype=np.int64) for u in range(u_degree)]
        kv_owner = np.zeros(geometry.seqlen, dtype=np.int64)
        if r_degree > 1:
            kv_owner = np.repeat(plan.kv_block_owner, geometry.block_size_k)[: geometry.seqlen]

        # Tokens that the ranks of a Ulysses rank compute with, by run, and who computes them: -1 nobody of these ranks.
        q_token_owner = [
            [np.where((begin <= q_block) & (q_block < end), q_owners[u][q_block], -1) for begin, end, _ in share.runs]
            for u, share in enumerate(shares)
        ]
        away = [(owner >= 0) & (owner != homes // u_degree) for runs in q_token_owner for owner in runs]
        self.moves = any(bool(x.any()) for x in (*away, kv_owner != homes // u_degree))
        self.peers = list(range(size)) if self.moves else list(range(my_r * u_degree, (my_r + 1) * u_degree))

        mine = shares[my_u]
        rows = np.flatnonzero((q_owners[my_u] == my_r) & mine.covers(num_q).any(axis=0))
        covered = mine.covers(num_q)[:, rows]
        self.q_rows = None if covered.all() else _tensor(covered)
        self.q_blocks = _tensor(rows)
        kv_heads = [np.unique(share.heads // groups) for share in shares]
        kv_index = np.searchsorted(kv_heads[my_u], mine.heads // groups)
        self.kv_index = _tensor(kv_index)
        self.in_order = len(set(np.bincount(kv_index).tolist())) <= 1

        q_runs = [
            [(owner, heads) for owner, (_, _, heads) in zip(owners, share.runs, strict=True)]
            for owners, share in zip(q_token_owner, shares, strict=True)
        ]
        kv_runs = [[(kv_owner, heads)] for heads in kv_heads]
        q_here, kv_here = np.flatnonzero(np.isin(q_block, rows)), np.flatnonzero(kv_owner == my_r)
        q_side = self._side(
            q_runs,
            mine.heads,
            q_here,
            homes,
            me,
            u_degree,
            num_heads=geometry.num_heads,
            partial=self.q_rows is not None,
        )
        kv_side = self._side(
            kv_runs, kv_heads[my_u], kv_here, homes, me, u_degree, num_heads=geometry.num_kv_heads, partial=False
        )
        # k and v travel in the buffer of q, which has a piece or more for each peer.
        self.q_side, self.kv_side = q_side, kv_side.padded(q_side.send.per_peer, q_side.receive.per_peer)
        num_k = num_blocks(geometry.seqlen, geometry.block_size_k)
        if r_degree == 1:
            self.kv_chunks = [np.arange(num_k)]
        else:
            self.kv_chunks = [np.flatnonzero(plan.kv_block_owner == r) for r in range(r_degree)]
        self.kv_block_tokens = np.minimum(
            geometry.block_size_k, geometry.seqlen - geometry.block_size_k * np.arange(num_k)
        )
        self._share, self._q_owner = mine, q_owners[my_u]

    def _side(
        self,
        runs: list[list[tuple[np.ndarray, np.ndarray]]],
        heads: np.ndarray,
        tokens: np.ndarray,
        homes: np.ndarray,
        me: int,
        u_degree: int,
        *,
        num_heads: int,
        partial: bool,
    ) -> Side:
        """Traffic of tensors of which Ulysses rank u wants, in each of `runs[u]`, (owner of each token, heads).

        `heads` and `tokens` are those of this rank, ascending, of `num_heads` heads at home.
        """
        local = np.flatnonzero(homes == me)
        send = Pieces([], [], [])
        for peer in self.peers:
            for owner, wanted in runs[peer % u_degree]:
                send.tokens.append(_tensor(np.flatnonzero(owner[local] == peer // u_degree)))
                send.heads.append(_tensor(wanted))
            send.per_peer.append(len(runs[peer % u_degree]))
        receive = Pieces([], [], [])
        for peer in self.peers:
            for owner, wanted in runs[me % u_degree]:
                come = np.flatnonzero((homes == peer) & (owner == me // u_degree))
                receive.tokens.append(_tensor(np.searchsorted(tokens, come)))
                receive.heads.append(_tensor(np.searchsorted(heads, wanted)))
            receive.per_peer.append(len(runs[me % u_degree]))
        identity = (
            len(self.peers) == len(send.tokens) == 1
            and send.tokens[0].numel() == receive.tokens[0].numel() == len(local) == len(tokens)
            and len(heads) == num_heads == send.heads[0].numel()
        )
        num_heads_sent = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(x.numpy() for x in send.heads)])).size
        num_sent = sum(rows.numel() * those.numel() for rows, those in zip(send.tokens, send.heads, strict=True))
        return Side(
            send,
            receive,
            _tensor(heads),
            len(tokens),
            identity,
            partial,
            once=num_sent == len(local) * num_heads_sent,
        )

    def on(self, device: torch.device) -> WorkIndex:
        """This index with its tensors on `device` (itself for the host)."""
        if device.type == "cpu":
            return self
        moved = object.__new__(WorkIndex)
        vars(moved).update(vars(self))
        moved.q_side, moved.kv_side = self.q_side.to(device), self.kv_side.to(device)
        moved.kv_index, moved.q_blocks = (to_device(x, device) for x in (self.kv_index, self.q_blocks))
        moved.q_rows = None if self.q_rows is None else to_device(self.q_rows, device)
        return moved

    def mask_rows(self, blocks: Tensor) -> Tensor:
        """Mask of the heads and rows computed here, bool [B or 1, h, q-blocks here, Nk], of one [B or 1, H, Nq, Nk]."""
        mine = blocks.index_select(1, self.q_side.heads).index_select(2, self.q_blocks)
        return mine if self.q_rows is None else mine & self.q_rows[None, :, :, None]

    def needed_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """Which k-blocks each ring rank of this rank's ring reads.

        Args:
            blocks: bool [B or 1, H, Nq, Nk], the mask of all heads.

        Returns:
            bool [R, Nk].
        """
        needed = np.zeros((len(self.kv_chunks), blocks.shape[3]), dtype=bool)
        for begin, end, heads in self._share.runs:
            read = np.asarray(blocks[:, heads, begin:end].any(axis=(0, 1)))
            for ring_rank in range(len(needed)):
                needed[ring_rank] |= read[self._q_owner[begin:end] == ring_rank].any(axis=0)
        return needed
