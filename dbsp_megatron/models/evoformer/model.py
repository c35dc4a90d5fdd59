"""Evoformer: blocks over a track of sequences and a track of pairs, on one rank or on parts that are switched."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor, nn

from dbsp_megatron.dsp import DspMesh, DspSession, Stage
from dbsp_megatron.models.dit.init_weights import init_weights
from dbsp_megatron.models.dit.recompute import recomputed
from dbsp_megatron.models.evoformer.attention import Transition
from dbsp_megatron.models.evoformer.config import EvoformerConfig
from dbsp_megatron.models.evoformer.sublayers import (
    ColumnAttention,
    OuterProductMean,
    RowAttention,
    TriangleAttention,
    TriangleMultiplication,
)
from dbsp_megatron.models.evoformer.track import MSA_DIMS, PAIR_DIMS, Track

# What each stage of a block reads as a whole, in order; a stage without needs says where a track is read from outside.
_MSA_STAGES = (("row", "r"), ("column", "s"), ("outer", "s"))
_PAIR_STAGES = (("bias", ""), ("outer", "j"), ("outgoing", "j"), ("incoming", "i"), ("starting", "j"), ("ending", "i"))


def _stages(config: EvoformerConfig, kinds: tuple[tuple[str, str], ...]) -> list[Stage]:
    return [
        Stage(name=f"{block}.{name}", needs=frozenset({needs} if needs else ()))
        for block in range(config.num_blocks)
        for name, needs in kinds
    ]


class EvoformerBlock(nn.Module):
    """All sublayers once.

    Args:
        config: The description.
        index: Number of the block, from 0.
    """

    def __init__(self, config: EvoformerConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.row, self.column = RowAttention(config), ColumnAttention(config)
        self.msa_transition = Transition(config.msa_channels, config.transition_factor)
        self.outer = OuterProductMean(config)
        self.outgoing = TriangleMultiplication(config, outgoing=True)
        self.incoming = TriangleMultiplication(config, outgoing=False)
        self.starting = TriangleAttention(config, starting=True)
        self.ending = TriangleAttention(config, starting=False)
        self.pair_transition = Transition(config.pair_channels, config.transition_factor)

    def forward(
        self,
        m: Tensor,
        z: Tensor,
        sequences: Track,
        pairs: Track,
        msa_mask: Tensor | None,
        pair_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Maps [B, s, r, msa_channels] and [B, i, j, pair_channels], this rank's parts, to the same of other parts.

        Args:
            m: the sequences.
            z: the pairs.
            sequences: the track of m.
            pairs: the track of z.
            msa_mask: [B, s, r], whole, or None.
            pair_mask: [B, i, j], whole, or None.
        """
        name = f"{self.index}.{{}}".format
        z = pairs.enter(name("bias"), z, "")
        bias = self.row.bias(z, pairs, name("bias"))
        m = sequences.enter(name("row"), m, "r")
        m = m + self.row(m, bias, sequences.part(name("row"), msa_mask))
        m = sequences.enter(name("column"), m, "s")
        m = m + self.column(m, sequences.part(name("column"), msa_mask))
        m = m + self.msa_transition(m)
        m, z = sequences.enter(name("outer"), m, "s"), pairs.enter(name("outer"), z, "j")
        z = z + self.outer(m, msa_mask, sequences, name("outer"))
        for kind, needs, sublayer in (
            ("outgoing", "j", self.outgoing),
            ("incoming", "i", self.incoming),
            ("starting", "j", self.starting),
            ("ending", "i", self.ending),
        ):
            z = pairs.enter(name(kind), z, needs)
            z = z + sublayer(z, pair_mask, pairs, name(kind))
        return m, z + self.pair_transition(z)


class Evoformer(nn.Module):
    """The trunk of AlphaFold 2 without dropout.

    With a mesh, a rank holds the parts that `cut` gives at the "start", and gets those at the "end". A loss summed over
    parts gives parameter gradients that are to be summed over the ranks.

    Args:
        config: The description.
        mesh: The ranks that share an input; None for one rank.

    Attributes:
        msa_session: Stages and plans of the sequences, for `dsp.explain`; None on one rank.
        pair_session: Those of the pairs.

    Source: Jumper et al., Highly accurate protein structure prediction with AlphaFold (Nature 596, 2021). Each track is
    cut along one dim, as in FastFold (arXiv:2203.00854); here the planner says which, and lengths need not divide.
    """

    def __init__(self, config: EvoformerConfig, *, mesh: DspMesh | None = None) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(EvoformerBlock(config, index) for index in range(config.num_blocks))
        self.msa_session: DspSession | None = None
        self.pair_session: DspSession | None = None
        if mesh is not None:
            self.msa_session = DspSession(mesh, MSA_DIMS, stages=_stages(config, _MSA_STAGES))
            self.pair_session = DspSession(mesh, PAIR_DIMS, stages=_stages(config, _PAIR_STAGES))
        init_weights(dict(self.named_parameters()), config.init_seed, None)

    def cut(
        self, x: Tensor, track: Literal["msa", "pair"], at: Literal["start", "end"], size: tuple[int, int]
    ) -> Tensor:
        """This rank's part of a whole tensor [B, s, r, ...] or [B, i, j, ...].

        Args:
            x: equal on all ranks.
            track: which track it belongs to.
            at: before the first or after the last block.
            size: numbers of sequences and residues.
        """
        session = self.msa_session if track == "msa" else self.pair_session
        if session is None:
            return x
        plan = session.plan(self._lengths(size)[track == "pair"])
        if plan is not None:
            layout = plan.start if at == "start" else plan.end
            for dim in (0, 1):
                where = layout.positions(dim, session.mesh.coords)
                x = x.narrow(dim + 1, where.start, len(where))
        return x

    @staticmethod
    def _lengths(size: tuple[int, int]) -> tuple[dict[str, int], dict[str, int]]:
        return dict(zip(MSA_DIMS, size, strict=True)), dict.fromkeys(PAIR_DIMS, size[1])

    def _check_residues(self, size: tuple[int, int]) -> None:
        """Refuse plans, alike on all ranks, under which outer products would meet residues of other pairs."""
        if self.msa_session is None or self.pair_session is None:
            return
        of_msa, of_pair = self._lengths(size)
        sequences, pairs = self.msa_session.plan(of_msa), self.pair_session.plan(of_pair)
        for index in range(len(self.blocks)):
            name = f"{index}.outer"
            if sequences is None or pairs is None:
                return
            of_r = sequences.by_name[name].compute.shards[MSA_DIMS.index("r")]
            of_i = pairs.by_name[name].compute.shards[PAIR_DIMS.index("i")]
            if [axis for axis in of_r if axis.size > 1] != [axis for axis in of_i if axis.size > 1]:
                raise ValueError(
                    f"the plans of sequences and pairs of size {size} cut residues by other mesh axes in block "
                    f"{index}: use a mesh of one axis"
                )

    def _problem(
        self, msa: Tensor, pair: Tensor, size: tuple[int, int], masks: tuple[Tensor | None, Tensor | None]
    ) -> str | None:
        """What is wrong with the arguments of this rank."""
        if not isinstance(size, tuple | list) or len(size) != 2 or not all(isinstance(n, int) and n >= 1 for n in size):
            return f"size must be two integers >= 1, sequences and residues; got {size!r}"
        for name, x in (("msa", msa), ("pair", pair), ("msa_mask", masks[0]), ("pair_mask", masks[1])):
            if not isinstance(x, Tensor) and (x is not None or name in ("msa", "pair")):
                return f"{name} must be a tensor; got {type(x).__name__}"
        whole = (size, (size[1], size[1]))
        try:
            for name, x, (track, channels), lengths in (
                ("msa", msa, ("msa", self.config.msa_channels), whole[0]),
                ("pair", pair, ("pair", self.config.pair_channels), whole[1]),
            ):
                blank = torch.empty(1, device="meta").expand(msa.shape[0], *lengths)
                part = self.cut(blank, "msa" if track == "msa" else "pair", "start", size)
                if x.shape != (*part.shape, channels):
                    return f"{name} must be {[*part.shape, channels]} on this rank; got {list(x.shape)}: use cut()"
            self._check_residues(size)
        except ValueError as error:
            return str(error)
        for name, mask, lengths in (("msa_mask", masks[0], whole[0]), ("pair_mask", masks[1], whole[1])):
            if mask is not None and mask.shape != (msa.shape[0], *lengths):
                return f"{name} must be whole, {[msa.shape[0], *lengths]}; got {list(mask.shape)}"
        return None

    def forward(
        self,
        msa: Tensor,
        pair: Tensor,
        size: tuple[int, int],
        *,
        msa_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs all blocks.

        Args:
            msa: [B, s, r, msa_channels], this rank's part at the start.
            pair: [B, i, j, pair_channels], this rank's part at the start.
            size: numbers of sequences and residues of the whole.
            msa_mask: [B, s, r] of the dtype of `msa`, whole on every rank: 1 where an entry counts, else 0.
            pair_mask: [B, i, j], whole on every rank.

        Returns:
            Both tracks, this rank's parts at the end.

        Raises:
            ValueError: On every rank: shapes do not fit, or ranks call with different ones.
        """
        problem = self._problem(msa, pair, size, (msa_mask, pair_mask))
        of_msa, of_pair = ({}, {}) if problem is not None else self._lengths(size)
        with ExitStack() as passes:
            if self.msa_session is None or self.pair_session is None:
                if problem is not None:
                    raise ValueError(problem)
                tracks = Track(None, MSA_DIMS, of_msa), Track(None, PAIR_DIMS, of_pair)
            else:
                batch, facts = {}, {}
                if problem is None:
                    batch = {"B": msa.shape[0]}
                    facts = {"dtypes": (msa.dtype, pair.dtype), "masks": (msa_mask is None, pair_mask is None)}
                # The second agreement is not reached where the first one raises, on all ranks.
                first = passes.enter_context(self.msa_session.run(of_msa, batch, problem=problem, facts=facts))
                second = passes.enter_context(self.pair_session.run(of_pair, batch))
                tracks = Track(first, MSA_DIMS, of_msa), Track(second, PAIR_DIMS, of_pair)
            for block in self.blocks:
                given = (msa, pair, *tracks, msa_mask, pair_mask)
                if self.config.recompute == "none" or not (self.training and torch.is_grad_enabled()):
                    msa, pair = block(*given)
                    continue
                msa, pair = recomputed(block, *given)
        return msa, pair
