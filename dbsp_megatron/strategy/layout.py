"""TokenLayout: which rank holds which tokens between attention layers.

Dims: S tokens of the whole sequence, s tokens of this rank, N token blocks, P = U * R ranks.
"""

from __future__ import annotations

import hashlib
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.block_mask import num_blocks
from dbsp_megatron.comm.agree import Belief, agree, digest_int
from dbsp_megatron.comm.reshard import GatherRows, RowMap, ShardRows
from dbsp_megatron.plan import block_homes


class TokenLayout:
    """Whole token blocks on ranks, in ascending order inside each rank; only the sequence's last block may be short.

    Made by `SequenceParallel.layout`; with given `homes` where it was calibrated. Lengths differ between ranks; a rank
    may hold nothing.

    Attributes:
        seqlen: tokens of the whole sequence.
        block_size: tokens per block.
        homes: int64 [N] (NumPy), sp rank of each block.
        token_homes: int64 [S] (NumPy), sp rank of each token.
        positions: int64 [s], global token indices of this rank, on the host.
    """

    def __init__(
        self,
        seqlen: int,
        block_size: int,
        policy: str,
        ulysses_degree: int,
        ring_degree: int,
        rank: int,
        group: dist.ProcessGroup | None,
        control_group: dist.ProcessGroup | None = None,
        homes: np.ndarray | None = None,
    ) -> None:
        for name, value in (("seqlen", seqlen), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.seqlen, self.block_size, self.policy, self.rank = seqlen, block_size, policy, rank
        self.num_blocks = num_blocks(seqlen, block_size)
        self.homes = block_homes(self.num_blocks, ulysses_degree, ring_degree, policy) if homes is None else homes
        self._version = "" if homes is None else hashlib.blake2b(homes.tobytes(), digest_size=8).hexdigest()
        self._contiguous = block_homes(self.num_blocks, ulysses_degree, ring_degree, "contiguous")
        self._homes_on: dict[torch.device, Tensor] = {}
        self._contiguous_on: dict[torch.device, tuple[Tensor, Tensor]] = {}
        # Every attention call asks for it, so it is made once.
        self.token_homes = np.repeat(self.homes, block_size)[:seqlen]
        size = ulysses_degree * ring_degree
        positions = [torch.from_numpy(np.flatnonzero(self.token_homes == p)) for p in range(size)]
        self._control_group = group if control_group is None else control_group
        self._rows = RowMap(positions, rank, group)
        blocks = [torch.from_numpy(np.flatnonzero(self.homes == p)) for p in range(size)]
        self._block_rows = RowMap(blocks, rank, group)
        self.positions: Tensor = positions[rank]

    def homes_on(self, device: torch.device) -> Tensor:
        """`homes` as a tensor, copied to a device once."""
        if device not in self._homes_on:
            self._homes_on[device] = torch.from_numpy(self.homes).to(device)
        return self._homes_on[device]

    def contiguous_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Homes that the blocks would have in the contiguous layout, [N], and those of the blocks here; copied once."""
        if device not in self._contiguous_on:
            homes = torch.from_numpy(self._contiguous)
            self._contiguous_on[device] = homes.to(device), homes[torch.from_numpy(self.local_blocks)].to(device)
        return self._contiguous_on[device]

    @property
    def most_blocks(self) -> int:
        """Blocks of the rank that holds most."""
        return int(np.bincount(self.homes).max())

    def homes_for(self, block_size: int) -> np.ndarray:
        """Sp rank of the first token of each block of another block size, int64 [ceil(S / block_size)]."""
        return self.token_homes[::block_size]

    @property
    def key(self) -> tuple[int, int, str, int, str]:
        """What distinguishes layouts of one SequenceParallel."""
        return self.seqlen, self.block_size, self.policy, len(self.counts), self._version

    @property
    def counts(self) -> list[int]:
        """Tokens per rank."""
        return self._rows.counts

    @property
    def num_local(self) -> int:
        """Tokens of this rank, s."""
        return self.counts[self.rank]

    @property
    def local_blocks(self) -> np.ndarray:
        """Block indices of this rank, ascending, int64."""
        return np.flatnonzero(self.homes == self.rank)

    def gather_blocks(self, x: Tensor, dim: int) -> Tensor:
        """What ranks hold per block (`local_blocks` along `dim`) as a whole, on every rank; collective, no gradient."""
        return self._block_rows.put_together(x, dim)

    def gather_parts(self, x: Tensor) -> Tensor:
        """Tensors of one shape from all ranks, stacked in rank order, on every rank; collective, no gradient."""
        return self._block_rows.stack(x)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole tensor.

        Args:
            x: any shape with `x.shape[dim] == seqlen`, equal on all ranks.
            dim: the token dim.

        Returns:
            The rows `positions` of x. The adjoint gathers the gradient rows of all ranks, unscaled.

        Raises:
            ValueError: x is not `seqlen` long.
        """
        if x.shape[dim] != self.seqlen:
            raise ValueError(f"shard: dim {dim} has {x.shape[dim]} tokens, the layout has seqlen={self.seqlen}")
        return cast(Tensor, ShardRows.apply(x, dim, self._rows))

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor in original token order, on every rank; collective.

        Args:
            x: any shape with `x.shape[dim] == num_local`.
            dim: the token dim.

        Returns:
            `seqlen` tokens along `dim`. The adjoint takes this rank's rows of the gradient, unscaled: compute the same
            loss on every rank.

        Raises:
            ValueError: on every rank: x is not `num_local` long on one of them.
        """
        problem, others = None, ""
        if not -x.dim() <= dim < x.dim():
            problem = f"gather: dim={dim} must be one of the {x.dim()} dims of x: pass the dim of the tokens"
        elif x.shape[dim] != self.num_local:
            problem = (
                f"gather: dim {dim} has {x.shape[dim]} tokens, rank {self.rank} holds {self.num_local} of "
                f"{self.seqlen}: pass this rank's tokens, as attention returns them"
            )
        else:
            sizes = ["s" if i == dim % x.dim() else n for i, n in enumerate(x.shape)]
            others = f"[{', '.join(map(str, sizes))}] in {str(x.dtype).removeprefix('torch.')}"
        alike = Belief(
            digest_int(others),
            lambda: others,
            "pass the same tensor of the model on every rank, its own tokens along one dim",
        )
        where = f"gather of the layout of {self.seqlen} tokens"
        agree(where, problem, {"shape (but for the tokens) and dtype": alike}, self._control_group)
        return cast(Tensor, GatherRows.apply(x, dim, self._rows))
