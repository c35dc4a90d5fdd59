"""The model that a description is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbsp_megatron.models.axial.config import AxialConfig
from dbsp_megatron.models.dit.config import DiTConfig

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from dbsp_megatron.models.dit.model import VideoDiT
    from dbsp_megatron.strategy import SequenceParallel


def build_model(
    config: DiTConfig,
    *,
    sp: SequenceParallel | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    sequence_parallel: bool = False,
    vp_size: int = 1,
) -> VideoDiT:
    """An `AxialDiT` for a description with `attention_dims`, else a `VideoDiT`; arguments are theirs.

    Args:
        config: The model description.
        sp: As of `VideoDiT`.
        pg_collection: As of `VideoDiT`.
        sequence_parallel: As of `VideoDiT`.
        vp_size: Virtual stages of each pipeline rank; from 2 on a `ChunkedDiT` takes the place of the `VideoDiT`.

    Raises:
        ValueError: As they do.
    """
    # Imports megatron-core, which reading a description need not.
    if isinstance(config, AxialConfig):
        from dbsp_megatron.models.axial.model import AxialDiT

        return AxialDiT(config, sp=sp, pg_collection=pg_collection, sequence_parallel=sequence_parallel)
    if vp_size > 1:
        from dbsp_megatron.models.dit.chunks import ChunkedDiT

        chunked: Any = ChunkedDiT(
            config, vp_size=vp_size, sp=sp, pg_collection=pg_collection, sequence_parallel=sequence_parallel
        )
        return chunked
    from dbsp_megatron.models.dit.model import VideoDiT

    return VideoDiT(config, sp=sp, pg_collection=pg_collection, sequence_parallel=sequence_parallel)
