"""The coarse branch of a self-attention: attention of block means, added to that of tokens through learned gates."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from dbsp_megatron.attention.coarse import coarse_attention
from dbsp_megatron.comm.reshard import RowMap
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.init_weights import mark_init, zero_init
from dbsp_megatron.models.dit.linear import ColumnLinear
from dbsp_megatron.models.dit.tokens import LocalTokens
from dbsp_megatron.parallel_state import get_sequence_parallel

if TYPE_CHECKING:
    from dbsp_megatron.strategy import SequenceParallel, TokenLayout

COARSE_BRANCH = "coarse_branch"
"""Name of the module in a self-attention, and so of its part of parameter names."""

_block_rows: weakref.WeakKeyDictionary[TokenLayout, RowMap] = weakref.WeakKeyDictionary()


def in_coarse_branch(name: str) -> bool:
    """Whether a parameter (or what belongs to it) is one that a model without coarse branch lacks."""
    return f".{COARSE_BRANCH}." in name


class BranchGates(MegatronModule):
    """Two factors for each token and channel, linear in its hidden state: at first 0 and 1, whatever the token.

    Args:
        config: Megatron's config.
        dit: The model description.
        tp_group: Tensor-parallel group, None for one rank.
    """

    def __init__(self, config: TransformerConfig, *, dit: DiTConfig, tp_group: ProcessGroup | None) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        channels = dit.num_heads * dit.heads_dim
        self.coarse, self.fine = (
            ColumnLinear(config.hidden_size, channels, config=config, init_method=config.init_method, tp_group=tp_group)
            for _ in range(2)
        )
        zero_init(self)
        mark_init(self.fine.bias, "one")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [s, b, hidden] to the factors of the coarse and the fine branch, [s, b, heads * d] of this rank."""
        return self.coarse(x)[0], self.fine(x)[0]


class CoarseBranch(MegatronModule):
    """gate_coarse * coarse + gate_fine * fine, for the output `fine` of the attention of tokens.

    Gates start so that the sum is `fine`, exactly: a model trained without the branch goes on unchanged. Blocks are
    those of the token layout of `sp.use`, whatever mask the fine branch has.

    Args:
        config: Megatron's config.
        dit: The model description.
        dual_stream: Gates of their own for text and video tokens.
        sp: The SequenceParallel to use, default the registered one.
        tp_group: Tensor-parallel group, None for one rank.

    Source:
        VSA (arXiv:2505.13389), which trains from a dense model without a fine gate; here that gate starts at 1.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        dit: DiTConfig,
        dual_stream: bool,
        sp: SequenceParallel | None,
        tp_group: ProcessGroup | None,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.gates = BranchGates(config, dit=dit, tp_group=tp_group)
        self.text_gates = BranchGates(config, dit=dit, tp_group=tp_group) if dual_stream else None
        self._sp = (sp,)  # a tuple keeps the object out of the module tree and of state dicts

    def forward(self, fine: Tensor, q: Tensor, k: Tensor, v: Tensor, x: Tensor, tokens: LocalTokens) -> Tensor:
        """Adds the branch; collective.

        Args:
            fine: [s, b, heads * d].
            q: [s, b, heads, d], as the attention of tokens got it.
            k: [s, b, kv_heads, d].
            v: [s, b, kv_heads, d].
            x: [s, b, hidden], what queries were projected from.
            tokens: This rank's tokens.

        Returns:
            [s, b, heads * d] in the dtype of `fine`.
        """
        sp = get_sequence_parallel() if self._sp[0] is None else self._sp[0]
        layout = sp.context_layout
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        coarse = coarse_attention(q, k, v, _rows_of(layout, sp), layout.block_size).transpose(0, 1).flatten(2)
        gate_coarse, gate_fine = self._gates(x, tokens)
        return (gate_coarse * coarse + gate_fine * fine).to(fine.dtype)

    def _gates(self, x: Tensor, tokens: LocalTokens) -> tuple[Tensor, Tensor]:
        if self.text_gates is None:
            gates: tuple[Tensor, Tensor] = self.gates(x)
            return gates
        text, video = tokens.split(x)
        of_text, of_video = self.text_gates(text), self.gates(video)
        return tokens.merge(of_text[0], of_video[0]), tokens.merge(of_text[1], of_video[1])


def _rows_of(layout: TokenLayout, sp: SequenceParallel) -> RowMap:
    """Which blocks of a layout each rank holds; made once for a layout."""
    if layout not in _block_rows:
        homes = torch.from_numpy(layout.homes)
        _block_rows[layout] = RowMap([(homes == rank).nonzero()[:, 0] for rank in range(sp.size)], sp.rank, sp.group)
    return _block_rows[layout]
