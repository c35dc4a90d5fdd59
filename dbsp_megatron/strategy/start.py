"""What a SequenceParallel does before it makes process groups: find its ranks and its strategy, and compare both."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist

from dbsp_megatron.attention.engines import check_engine
from dbsp_megatron.comm.agree import Belief, agree
from dbsp_megatron.parallel_state import context_parallel_group
from dbsp_megatron.strategy.base import SequenceParallelStrategy, get_strategy
from dbsp_megatron.strategy.config import SequenceParallelConfig


def ranks_to_use(group: dist.ProcessGroup | None, pg_collection: Any) -> dist.ProcessGroup | None:
    """Ranks that share a sequence; None for a single one, so that nothing is ever sent there.

    Args:
        group: as given; None takes the world.
        pg_collection: Megatron's collection, whose context-parallel group is taken instead.

    Raises:
        ValueError: this rank is in no such group. The others cannot be told of it.
    """
    if pg_collection is not None:
        group = context_parallel_group(pg_collection)
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a process group that this rank is a member of, got {type(group).__name__}: pass the one of "
            "this rank"
        )
    return None if group is None or group.size() == 1 else group


def agreed_strategy(config: object, group: dist.ProcessGroup | None) -> SequenceParallelStrategy:
    """The strategy of a configuration, once all ranks have the same one that can run; collective.

    Args:
        config: a SequenceParallelConfig.
        group: ranks that share a sequence.

    Raises:
        ValueError: on every rank: one of them has no valid configuration or cannot run it, or they differ.
    """
    strategy: SequenceParallelStrategy | None = None
    problem: str | None = None
    files = 0
    try:
        if not isinstance(config, SequenceParallelConfig):
            raise ValueError(f"config must be a SequenceParallelConfig, got {type(config).__name__}: make one")
        strategy = get_strategy(config.strategy)(config, 1 if group is None else group.size())
        files = strategy.prepare([0] if group is None else dist.get_process_group_ranks(group))
        check_engine(config.engine)
    except ValueError as error:
        problem = str(error)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = f"{type(error).__name__}: {error}"
    valid = config if isinstance(config, SequenceParallelConfig) else None
    beliefs = {
        "sequence-parallel configuration": Belief(
            valid.digest if valid else 0,
            lambda: valid.described if valid else "none",
            "give every rank the same SequenceParallelConfig",
        ),
        "latency calibration (sp.calibration)": Belief(
            files,
            lambda: f"{valid.calibration if valid else None}, ranks of a node {strategy and strategy.ranks_per_node}",
            "give every rank the same file, and start as many ranks on every node",
        ),
    }
    agree("making SequenceParallel", problem, beliefs, group)
    return cast(SequenceParallelStrategy, strategy)
