"""FSDP2 (`fully_shard`) of a VideoDiT: one unit for each layer, one for the rest."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dbsp_megatron.train.mesh import Mesh


def shard_module(module: nn.Module, mesh: Mesh, device: torch.device, *, precision: str, offload: bool) -> None:
    """Split weights over data and sequence ranks, in place.

    Layers gather their weights in bf16 where the model computes in it; embeddings and the output layer stay in fp32.
    Gradients are reduced in fp32.

    Args:
        module: a VideoDiT; its parameters become DTensors.
        mesh: the groups.
        device: where the model computes.
        precision: of the loop, "fp32" or "bf16".
        offload: keep weights, gradients and optimizer state in host memory.

    Raises:
        ValueError: there is no process group to shard over.
    """
    if mesh.data_group is None:
        raise ValueError(
            "parallel.data_parallel=fsdp splits weights over data and sequence ranks and needs at least two of them, "
            "got 1; use parallel.data_parallel=ddp, or start more processes"
        )
    ranks = DeviceMesh.from_group(mesh.data_group, device.type)
    policy: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    layer_dtype = torch.bfloat16 if precision == "bf16" else None
    in_layers = MixedPrecisionPolicy(layer_dtype, torch.float32, cast_forward_inputs=False)
    elsewhere = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layer in module.block.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=ranks, mp_policy=in_layers, offload_policy=policy)
    fully_shard(module, mesh=ranks, mp_policy=elsewhere, offload_policy=policy)
