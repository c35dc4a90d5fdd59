"""The model that a description is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
) -> VideoDiT:
    """An `AxialDiT` for a description with `attention_dims`, else a `VideoDiT`; arguments are theirs.

    Raises:
        ValueError: As they do.
    """
    # Imports megatron-core, which reading a description need not.
    if isinstance(config, AxialConfig):
        from dbsp_megatron.models.axial.model import AxialDiT

        return AxialDiT(config, sp=sp, pg_collection=pg_collection, sequence_parallel=sequence_parallel)
    from dbsp_megatron.models.dit.model import VideoDiT

    return VideoDiT(config, sp=sp, pg_collection=pg_collection, sequence_parallel=sequence_parallel)
