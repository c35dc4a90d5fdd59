"""A track: the stream of sequences or of pairs, whole on one rank or cut as the stage planner says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dbsp_megatron.dsp import DspRun

MSA_DIMS = ("s", "r")
"""Sequences and residues."""
PAIR_DIMS = ("i", "j")
"""Residue and residue."""


@dataclass(frozen=True, eq=False)
class Track:
    """One pass over a track [B, dim, dim, C]."""

    run: DspRun | None
    """The pass that switches; None where one rank holds everything."""
    dims: tuple[str, str]
    """Names of the two dims."""
    lengths: Mapping[str, int]
    """Whole length of each dim."""

    @property
    def pattern(self) -> str:
        """Names of the dims of the stream."""
        return f"B {' '.join(self.dims)} C"

    def enter(self, stage: str, x: Tensor, needs: str) -> Tensor:
        """The stream with a dim whole; "" where any layout will do."""
        return x if self.run is None else self.run.stage(stage, x, self.pattern, needs={needs} if needs else ())

    def whole(self, stage: str, x: Tensor) -> Tensor:
        """What a stage made of its part, of few channels, put together on every rank; each uses it for its own part."""
        return x if self.run is None else self.run.leave(x, self.pattern, grad="partial", stage=stage)

    def part(self, stage: str, mask: Tensor | None) -> Tensor | None:
        """This rank's part of a whole mask [B, dim, dim] in a stage."""
        if mask is None or self.run is None:
            return mask
        return self.run.slice(mask, f"B {' '.join(self.dims)}", stage=stage)
