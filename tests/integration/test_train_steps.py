"""Losses, gradients, evaluation and draws of single steps, against one process."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.config.sections import OptimConfig
from dbsp_megatron.train import flow_matching
from dbsp_megatron.train.batches import DrawnBatch, MicroBatch
from dbsp_megatron.train.signals import StopRequest
from tests.harness import run_ranks
from tests.integration.training import make_config, make_trainer, this_world, weights, whole_state

SGD = OptimConfig(name="sgd", lr=1.0, schedule="constant")


def _unequal_batches() -> list[MicroBatch]:
    """Two micro-batches of 6 and 27 tokens."""
    generator = torch.Generator().manual_seed(1)
    grids = [(1, 2, 3), (3, 3, 3)]
    return [
        MicroBatch(
            samples=[index],
            tokens=torch.randn(1, math.prod(grid), 192, generator=generator),
            grid=grid,
            context=None,
        )
        for index, grid in enumerate(grids)
    ]


def _unequal_step(rank: int, world_size: int, root: Path, mesh: tuple[int, int]) -> tuple[float, Tensor]:
    trainer = make_trainer(make_config(root, ulysses=mesh[0], ring=mesh[1], optim=SGD, grad_clip=0.0))
    batches: list[DrawnBatch] = [trainer._batches.draw(batch, 0) for batch in _unequal_batches()]
    if trainer.mesh.dp_size == 2:
        batches = [batches[trainer.mesh.dp_rank]]
    row, _ = trainer._optimize(0, batches, StopRequest())
    return row["train/loss"], weights(trainer)


def test_tokens_weigh_the_same_in_unequal_micro_batches(tmp_path: Path) -> None:
    """Traps B59, B91, B117: 6 and 27 tokens one after the other, or on two data-parallel groups.

    Blocks of 5 leave some ranks of the short one without any token.
    """
    loss, final = _unequal_step(0, 1, tmp_path, (1, 1))
    for mesh in [(2, 2), (1, 4), (2, 1)]:
        for other_loss, other_final in run_ranks(_unequal_step, 4, tmp_path, mesh, timeout_s=200):
            assert math.isclose(loss, other_loss, rel_tol=1e-5)
            torch.testing.assert_close(other_final, final, rtol=0, atol=1e-5)


def _evaluate(rank: int, world_size: int, root: Path, mesh: tuple[int, int]) -> tuple[float, bool, bool]:
    config = make_config(root, ulysses=mesh[0], ring=mesh[1], eval_every=1, eval_samples=5)
    trainer = make_trainer(config, num_clips=7)
    loss = trainer.evaluate()
    has_grads = any(parameter.grad is not None for parameter in trainer.engine.module.parameters())
    return loss, trainer.engine.module.training, has_grads


def test_evaluation_counts_each_clip_once(tmp_path: Path) -> None:
    """Trap B69: 5 clips on 2 data-parallel groups: no deadlock, the mean over 5, training mode kept, no gradients."""
    alone = _evaluate(0, 1, tmp_path, (1, 1))
    for loss, training, has_grads in [alone, *run_ranks(_evaluate, 4, tmp_path, (2, 1), timeout_s=200)]:
        assert math.isclose(loss, alone[0], rel_tol=1e-5)
        assert training
        assert not has_grads


def _shards(rank: int, world_size: int, root: Path) -> tuple[int, Tensor, Tensor]:
    trainer = make_trainer(make_config(root, ulysses=2, ring=2, seed=-1))
    seed = trainer.config.train.seed
    noise = flow_matching.draw_noise(36, 192, seed=seed, samples=[4], step=2)
    grid = (4, 3, 3)
    return seed, trainer.sharded.video_positions(grid), trainer.sharded.shard(noise, grid)


def test_noise_of_ranks_are_parts_of_one_draw(tmp_path: Path) -> None:
    """Traps B77, B79: with a random seed, all ranks draw with the same one and keep different parts of one tensor."""
    shards = run_ranks(_shards, 4, tmp_path, timeout_s=200)
    seed = shards[0][0]
    assert {other for other, _, _ in shards} == {seed}
    whole = torch.empty(1, 36, 192)
    for _, positions, noise in shards:
        whole[:, positions] = noise
    assert torch.equal(whole, flow_matching.draw_noise(36, 192, seed=seed, samples=[4], step=2))
    rows = [tuple(row.tolist()) for row in whole[0, :, :4]]
    assert len(set(rows)) == 36


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    """Trap B121: without a launcher nothing is initialised, and strategy dbsp equals none bit for bit."""
    results = []
    for strategy in ("none", "dbsp"):
        trainer = make_trainer(make_config(tmp_path, strategy=strategy, steps=2))
        rows = [trainer.train_step(step) for step in range(2)]
        assert rows[-1]["sp/bytes_sent"] == 0
        results.append((rows[-1]["train/loss"], weights(trainer)))
    assert not torch.distributed.is_initialized()
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_bf16_keeps_fp32_weights(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=2)
    losses: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        loop = dataclasses.replace(config.train, precision=precision)  # type: ignore[arg-type]
        trainer = make_trainer(dataclasses.replace(config, train=loop))
        losses[precision] = [trainer.train_step(step)["train/loss"] for step in range(2)]
        assert {tensor.dtype for tensor in whole_state(trainer).values()} == {torch.float32}
    assert losses["fp32"] != losses["bf16"]
    torch.testing.assert_close(torch.tensor(losses["bf16"]), torch.tensor(losses["fp32"]), rtol=0.02, atol=0)


def test_world_without_group_is_one_rank() -> None:
    world = this_world()
    assert (world.size, world.gather("x"), world.broadcast("y")) == (1, ["x"], "y")
