"""Traps of a single process: no process group is needed, nothing is sent, the result is plain attention bitwise."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron import SequenceParallel, SequenceParallelConfig, block_sparse_attention
from tests.distributed.sharded import (
    is_equal,
    make_sp,
    random_problem,
    recorded_collectives,
    refusal,
    sharded_gradients,
)
from tests.harness import run_ranks
from tests.reference import Gradients

STRATEGIES = ("none", "ulysses", "ring", "usp", "dbsp")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _plain(rank: int, world_size: int) -> None:
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    inputs, mask, _ = random_problem(3, 37, 6, 8, batch=2, num_kv_heads=2)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, _ = block_sparse_attention(*leaves, mask)
    want = Gradients(out.detach(), *torch.autograd.grad((out * inputs[3]).sum(), leaves))
    for strategy in STRATEGIES:
        with recorded_collectives() as log:
            sp = make_sp(strategy)
            sp.begin_step(0)
            got = sharded_gradients(sp, inputs, mask, 8)
            stats = sp.stats()
            sp.layer_stats()
            sp.layer_mask(0)
            sp.destroy()
        assert log == [], (strategy, log)
        assert is_equal(got, want), f"{strategy} differs from plain attention"
        assert (sp.rank, sp.size, sp.ulysses_degree, sp.ring_degree) == (0, 1, 1, 1)
        assert stats["sp/bytes_sent"] == 0
        assert stats["sp/strategy"] == strategy


@pytest.mark.parametrize("backend", [None, "gloo"], ids=["no-process-group", "group-of-one"])
def test_one_rank_needs_and_sends_nothing(backend: str | None) -> None:
    """Every strategy on one rank equals plain attention bitwise and issues no collective (Trap B121)."""
    run_ranks(_plain, 1, backend=backend)


def _import_only(rank: int, world_size: int) -> bool:
    import importlib
    import pkgutil

    import dbsp_megatron

    for name in dbsp_megatron.__all__:
        getattr(dbsp_megatron, name)
    for package in ("attention", "comm", "masks", "plan", "strategy"):
        parent = importlib.import_module(f"dbsp_megatron.{package}")
        for module in pkgutil.iter_modules(parent.__path__):
            importlib.import_module(f"dbsp_megatron.{package}.{module.name}")
    return dist.is_initialized()


def test_import_starts_no_process_group() -> None:
    """Importing every module needs neither a process group nor a launcher's variables (Trap B121)."""
    assert run_ranks(_import_only, 1, backend=None) == [False]


def _none_of_two(rank: int, world_size: int) -> str:
    return refusal(lambda: SequenceParallel(SequenceParallelConfig(strategy="none"), group=dist.group.WORLD))


def test_strategy_none_needs_a_group_of_one() -> None:
    """Two ranks under `none` would each compute the whole sequence unknowingly: refused on both (Trap B37)."""
    for message in run_ranks(_none_of_two, 2):
        assert message.startswith("ValueError")
        assert "none" in message
        assert "2" in message


def _own_group(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    inputs, mask, _ = random_problem(rank, 20, 2, 8)
    with recorded_collectives() as log:
        sp = SequenceParallel(SequenceParallelConfig(strategy="none"), group=groups[rank])
        got = sharded_gradients(sp, inputs, mask, 8)
    assert log == []
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, _ = block_sparse_attention(*leaves, mask)
    assert torch.equal(got.out, out)


def test_group_of_one_inside_a_larger_world() -> None:
    """Data parallelism alone: each rank is its own sequence-parallel group and waits for nobody (Trap B121)."""
    run_ranks(_own_group, 2)
