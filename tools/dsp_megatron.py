"""The model of `dsp_model` under tensor parallelism with tokens cut in between (Megatron-SP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from dbsp_megatron.comm.collectives import gather_rows
from dbsp_megatron.dsp import DspGroup
from dbsp_megatron.dsp.exchange import join_pieces, sum_pieces
from dbsp_megatron.dsp.layout import balanced_lengths
from tools.dsp_model import (
    DIMS,
    HEAD_DIMS,
    Attend,
    attend_whole,
    run_block,
)
from tools.dsp_parts import CutAlong
from tools.link_bytes import REDUCE_SCATTERS


class _Gathered(Function):
    """Parts of tokens -> all of them; the adjoint sums and keeps the own part. With `forward_sums` the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: DspGroup, lengths: tuple[int, ...], sums: bool) -> Tensor:
        ctx.where = (group, lengths, sums)
        if len(set(lengths)) > 1 or group.size == 1:
            if group.size == 1:
                return x.clone()
            return (sum_pieces if sums else join_pieces)(x, group, 0, lengths)
        rows = lengths[0] if sums else sum(lengths)
        out = x.new_empty(rows, *x.shape[1:])
        call: Callable[..., Any] = getattr(dist, REDUCE_SCATTERS[0]) if sums else dist.all_gather_into_tensor
        call(out, x.contiguous(), group=group.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, lengths, sums = ctx.where
        return _Gathered.apply(grad, group, lengths, not sums), None, None, None


class MegatronEntry(CutAlong):
    """Heads and channels of the MLP are cut, tokens between them: all-gather before, reduce-scatter after each."""

    name = "megatron"

    def part(self, x: Tensor) -> Tensor:
        """See `ModelEntry`."""
        return x.flatten(0, 2).split(self.lengths())[self.group.rank].detach().clone()

    def whole(self, x: Tensor) -> Tensor:
        """See `ModelEntry`."""
        tokens = x.detach()
        if self.ranks.group is not None:
            tokens = gather_rows(tokens, self.lengths(), 0, self.ranks.group)
        return tokens.unflatten(0, self.shape.lengths)

    def lengths(self) -> tuple[int, ...]:
        """Tokens on each rank."""
        return balanced_lengths(self.shape.elements // self.shape.channels, self.ranks.size)

    def _bounds(self, name: str, x: Tensor) -> tuple[int, int, int] | None:
        """(dim, first, number) of what this rank holds of a parameter; None: all."""
        dim = HEAD_DIMS.get(name.split(".", 2)[2])
        if dim is None:
            return None
        pieces = balanced_lengths(x.shape[dim], self.group.size)
        return dim, sum(pieces[: self.group.rank]), pieces[self.group.rank]

    def _own(self, name: str, x: Tensor) -> Tensor:
        self._sizes = {**getattr(self, "_sizes", {}), name: x.shape}
        bounds = self._bounds(name, x)
        return (x if bounds is None else x.narrow(*bounds)).detach().clone(memory_format=torch.contiguous_format)

    def whole_gradient(self, name: str, grad: Tensor) -> Tensor:
        """See `ModelEntry`."""
        whole = grad.new_zeros(self._sizes[name])
        bounds = self._bounds(name, whole)
        (whole if bounds is None else whole.narrow(*bounds)).copy_(grad)
        return super().whole_gradient(name, whole)

    def attend(self) -> Tensor:
        """See `ModelEntry`."""
        x, lengths = self.x, self.lengths()
        for block, dim in self.shape.blocks():
            x = run_block(
                self.parameters,
                block,
                x,
                self._attention(block, dim),
                self.shape.head_dim,
                lambda y: cast(Tensor, _Gathered.apply(y, self.group, lengths, False)),
                lambda y: cast(Tensor, _Gathered.apply(y, self.group, lengths, True)),
            )
        return x

    def _attention(self, block: str, dim: str) -> Attend:
        def attend(*qkv: Tensor) -> Tensor:
            return attend_whole(
                [x.unflatten(0, self.shape.lengths) for x in qkv], DIMS[dim], self.shape.attention
            ).flatten(0, 2)

        return attend

    def expected_bytes(self, backward: bool) -> list[int]:
        """Two gathers and two reductions in each block and pass: 8 M (N - 1)/N for a pair.

        Of unequal parts a gather sends all as long as the longest.
        """
        shape, lengths = self.shape, self.lengths()
        rest = shape.channels * self.size * 2 * 2 * shape.pairs
        return [rest * (max(lengths) * (self.ranks.size - 1) + sum(lengths) - own) for own in lengths]
