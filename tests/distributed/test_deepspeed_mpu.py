"""Groups as DeepSpeed asks for them; what it makes of them is tested by the engine (integration/test_engines)."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dbsp_megatron.deepspeed_mpu import DeepSpeedMpu
from tests.distributed.sharded import refusal
from tests.harness import run_ranks

DATA, TENSOR = [[0, 2], [1, 3]], [[0, 1], [2, 3]]


def _facts(mpu: DeepSpeedMpu) -> dict[str, Any]:
    methods = [name for name in dir(mpu) if name.startswith("get_")]
    facts = {name: getattr(mpu, name)() for name in methods}
    return {name: value for name, value in facts.items() if not isinstance(value, dist.ProcessGroup)}


def _ask(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    whole = _facts(DeepSpeedMpu())
    data = [dist.new_group(ranks) for ranks in DATA]
    tensor = [dist.new_group(ranks) for ranks in TENSOR]
    own_tensor = tensor[rank // 2]
    split = _facts(DeepSpeedMpu(data[rank % 2], own_tensor))
    try:
        DeepSpeedMpu(tensor_group=own_tensor)
    except ValueError as error:
        return whole, split, str(error)
    return whole, split, ""


def test_ranks_of_a_sequence_count_as_data_parallel() -> None:
    """Traps B55, B123: the whole interface is there, and no sequence-parallel method."""
    for rank, (whole, split, error) in enumerate(run_ranks(_ask, 4)):
        assert whole["get_data_parallel_world_size"] == 4
        assert whole["get_data_parallel_rank"] == rank
        assert whole["get_data_parallel_group_ranks"] == [0, 1, 2, 3]
        assert whole["get_model_parallel_world_size"] == whole["get_tensor_model_parallel_world_size"] == 1
        assert whole["get_tensor_model_parallel_src_rank"] == rank
        assert split["get_data_parallel_group_ranks"] == DATA[rank % 2]
        assert (split["get_model_parallel_rank"], split["get_model_parallel_world_size"]) == (rank % 2, 2)
        assert split["get_tensor_model_parallel_src_rank"] == rank // 2 * 2
        assert not [name for name in dir(DeepSpeedMpu) if "sequence" in name]
        assert "data_group must be given" in error


def _one_sided(rank: int, world_size: int) -> list[str]:
    half, world = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    odd = rank == 1
    faults: list[tuple[Any, Any]] = [(None, world if odd else None), ("cp" if odd else None, None)]
    faults.append((half if odd else world, None))
    return [refusal(lambda: DeepSpeedMpu(*given)) for given in faults]  # noqa: B023


def test_a_mistake_of_one_rank_is_told_to_all() -> None:
    """Groups of single ranks are made by all ranks together, so that others would wait for the one that refuses."""
    heard = run_ranks(_one_sided, 3)
    assert heard[0] == heard[1] == heard[2]
    assert "data_group must be given beside" in heard[0][0]
    assert "got 'cp'" in heard[0][1]
    assert all("[making DeepSpeedMpu, rank 1]" in text for text in heard[0][:2])
    assert "(ranks 0, 2: data_group of 3 ranks, tensor_group none; rank 1: data_group of 2 ranks" in heard[0][2]


def test_it_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_distributed"):
        DeepSpeedMpu()
