"""Chooses the engine that a configuration names."""

from __future__ import annotations

from torch import nn

from dbsp_megatron.config.schema import TrainConfig
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.engines.base import Engine
from dbsp_megatron.train.engines.native import NativeEngine
from dbsp_megatron.train.mesh import Mesh


def build_engine(module: nn.Module, config: TrainConfig, world: World, mesh: Mesh) -> Engine:
    """The engine `config.train.engine`; collective.

    Args:
        module: a VideoDiT on `world.device`, built with `mesh.model_groups`.
        config: the run.
        world: all ranks.
        mesh: the groups.

    Raises:
        ValueError: the engine's packages are missing, or it cannot do what the configuration asks for.
    """
    common = (module, config.optim, config.train, config.parallel, world, mesh)
    if config.train.engine == "megatron":
        # Imported on demand: megatron.core's training parts and DeepSpeed take seconds to import.
        from dbsp_megatron.train.engines.megatron import MegatronEngine

        return MegatronEngine(*common)
    if config.train.engine == "deepspeed":
        from dbsp_megatron.train.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(*common)
    return NativeEngine(*common)
