"""The parts of a model that one rank of an interleaved pipeline holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.model import VideoDiT

if TYPE_CHECKING:
    from dbsp_megatron.strategy import SequenceParallel


class ChunkedDiT(MegatronModule):
    """Several `VideoDiT` on one pipeline rank, each with layers of its own, which a micro-batch visits in turns.

    Of P ranks with V chunks, chunk v of rank p is stage v * P + p. What every stage has a copy of (the timestep
    embedding, projections of contexts) exists once on a rank, so that its chunks add up their gradients.

    Args:
        config: The model description.
        vp_size: V, at least 2.
        sp: As of `VideoDiT`.
        pg_collection: As of `VideoDiT`.
        sequence_parallel: As of `VideoDiT`.

    Attributes:
        chunks: The models, for Megatron's schedules.
        active: Number of the one that `forward` runs.

    Raises:
        ValueError: If the layers cannot be split so.
    """

    def __init__(
        self,
        config: DiTConfig,
        *,
        vp_size: int,
        sp: SequenceParallel | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        first, *others = (
            VideoDiT(
                config,
                sp=sp,
                pg_collection=pg_collection,
                sequence_parallel=sequence_parallel,
                vp_stage=stage,
                vp_size=vp_size,
            )
            for stage in range(vp_size)
        )
        super().__init__(config=first.config)
        for other in others:
            other.share_copies(first)
        self.chunks = nn.ModuleList([first, *others])
        self.active = 0
        self.dit_config, self.pg_collection, self.tp_group = first.dit_config, first.pg_collection, first.tp_group
        self.model_type = first.model_type
        self.share_embeddings_and_output_weights = False
        self.pre_process, self.post_process = first.pre_process, others[-1].post_process

    def global_name(self, name: str) -> str:
        """Name of a parameter, or module, in a model that is not cut into pipeline stages."""
        _, number, rest = name.split(".", 2)
        chunk: Any = self.chunks[int(number)]
        whole: str = chunk.global_name(rest)
        return whole

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the active chunk; see `VideoDiT.forward`."""
        out: Tensor = self.chunks[self.active](*args, **kwargs)
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's checkpoint view, that of all chunks."""
        sharded: dict[str, Any] = {}
        for number, chunk in enumerate(self.chunks):
            part = chunk.sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[operator]
            sharded |= {f"{prefix}chunks.{number}.{name.removeprefix(prefix)}": entry for name, entry in part.items()}
        return sharded
