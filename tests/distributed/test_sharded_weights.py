"""What each kind of model tells megatron-core's checkpoints: which rank has which slice; elements are stored once."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dbsp_megatron.models.axial import AxialConfig
from dbsp_megatron.models.build import build_model
from dbsp_megatron.models.dit import VideoDiT
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.lora import LoraConfig
from dbsp_megatron.models.dit.lora_layers import add_lora
from tests.distributed.axial_models import tiny
from tests.harness import run_ranks
from tests.unit.models.cores import MODES, tiny_config

LORA = LoraConfig(rank=3, targets=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
CONFIGS: list[DiTConfig] = [
    *(tiny_config(text) for text in MODES),
    tiny_config("none", coarse_branch=True, qk_norm="none"),
    tiny_config("dual_stream", coarse_branch=True),
    tiny_config("cross", image_dim=9, norm_affine=True, modulation="linear"),
    tiny_config("joint", position_embedding="learned", position_grid=(2, 2, 2)),
]
Slice = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, bool]


def _whole(config: DiTConfig, lora: LoraConfig) -> VideoDiT:
    model = build_model(config, pg_collection=ProcessGroupCollection(tp=None, cp=None, pp=None))
    add_lora(model, lora)
    return model


def _value(name: str, shape: tuple[int, ...]) -> Tensor:
    """Different in every element, and from name to name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def _shapes(config: DiTConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in _whole(config, lora).named_parameters()}


def _slices(
    rank: int,
    world_size: int,
    sizes: dict[str, int],
    cases: list[tuple[DiTConfig, LoraConfig]],
    whole_shapes: list[dict[str, tuple[int, ...]]],
) -> list[list[Slice]]:
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    found: list[list[Slice]] = []
    for (config, lora), shapes in zip(cases, whole_shapes, strict=True):
        model = build_model(config, vp_size=sizes.get("virtual_pipeline_model_parallel_size", 1))
        add_lora(model, lora)
        for local, parameter in model.named_parameters():
            name = model.global_name(local)
            value = _value(name, shapes[name])
            if getattr(parameter, "tensor_model_parallel", False):
                dim: int = parameter.partition_dim  # type: ignore[attr-defined]
                value = value.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim)[tp_rank]
            parameter.data.copy_(value)
        mine: list[Slice] = []
        for entry in model.sharded_state_dict().values():
            if not isinstance(entry, ShardedTensor):  # Megatron's "_extra_state", which is empty here
                assert entry.data is None, entry
                continue
            whole = _value(entry.key, entry.global_shape)
            right = torch.equal(entry.data.detach(), whole[entry.global_slice()])
            place = (entry.global_shape, entry.global_offset, entry.local_shape)
            mine.append((entry.key, *place, is_main_replica(entry.replica_id), right))
        found.append(mine)
    return found


def _check(sizes: dict[str, int], cases: list[tuple[DiTConfig, LoraConfig]]) -> None:
    whole = [_shapes(config, lora) for config, lora in cases]
    ranks = run_ranks(_slices, 4, sizes, cases, whole, timeout_s=100)
    for index, expected in enumerate(whole):
        stored = {name: torch.zeros(shape, dtype=torch.int) for name, shape in expected.items()}
        for rank in ranks:
            for key, shape, offset, local, is_main, right in rank[index]:
                assert right, f"{key} is not the slice it says"
                assert shape == expected[key], key
                if is_main:
                    stored[key][tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))] += 1
        wrong = [name for name, count in stored.items() if not torch.all(count == 1)]
        assert not wrong, f"{sizes}: not stored once: {wrong} of {cases[index]}"


def test_tensor_and_data_parallel_ranks_store_each_element_once() -> None:
    cases = [(config, LoraConfig()) for config in CONFIGS] + [(tiny_config(text), LORA) for text in ("none", "cross")]
    _check({"tensor_model_parallel_size": 2}, cases)


def test_sequence_and_data_parallel_ranks_store_each_element_once() -> None:
    axial = tiny("stdit3_xl_2")
    assert isinstance(axial, AxialConfig)
    _check({"context_parallel_size": 2}, [(tiny_config("cross"), LoraConfig()), (axial, LoraConfig())])


def test_pipeline_stages_store_each_element_once() -> None:
    """The timestep embedding and projections of contexts exist on every stage."""
    cases = [(config, LoraConfig()) for config in CONFIGS] + [(tiny_config("cross"), LORA)]
    _check({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, cases)


def test_interleaved_stages_store_each_element_once() -> None:
    cases = [(tiny_config(text, num_layers=4), LoraConfig()) for text in ("none", "cross", "joint")]
    cases += [(tiny_config("dual_stream", num_layers=3), LoraConfig()), (tiny_config("cross", num_layers=4), LORA)]
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    _check(sizes | {"tensor_model_parallel_size": 2}, cases)
