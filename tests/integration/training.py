"""Tiny training runs for the integration tests: clips in memory, a model of two layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.config import TrainConfig
from dbsp_megatron.config.sections import LoopConfig, OptimConfig, RunConfig
from dbsp_megatron.data import DataConfig
from dbsp_megatron.data.dataset import Clip
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.strategy import SequenceParallelConfig
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.state import gathered
from dbsp_megatron.train.trainer import Trainer

MODEL = """
hidden_size: 24
num_layers: 2
num_heads: 3
head_dim: 8
ffn_hidden_size: 32
patch_size: [1, 8, 8]
in_channels: 3
text: none
qk_norm: rms_head
modulation: linear
time_freq_dim: 16
"""


class MemoryClips:
    """Dataset of random clips, the same in every process."""

    digest = "memory"
    channels = 3
    condition_channels = 0
    origin: dict[str, Any] | None = None

    def __init__(self, num_clips: int, data: DataConfig) -> None:
        generator = torch.Generator().manual_seed(5)
        shape = (num_clips, 3, data.num_frames, data.height, data.width)
        self._videos = list(torch.rand(shape, generator=generator) * 2 - 1)
        self.skipped: list[tuple[str, str]] = []

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """T, H, W of every clip."""
        return [(video.shape[1], video.shape[2], video.shape[3]) for video in self._videos]

    @property
    def names(self) -> list[str]:
        """Name of every clip."""
        return [f"clip{index}.mp4@0" for index in range(len(self._videos))]

    def __len__(self) -> int:
        return len(self._videos)

    def __getitem__(self, index: int) -> Clip:
        return Clip(video=self._videos[index].clone(), name=self.names[index], index=index)


def make_config(
    root: Path,
    *,
    strategy: str = "dbsp",
    ulysses: int = 1,
    ring: int = 1,
    optim: OptimConfig | None = None,
    **loop: Any,
) -> TrainConfig:
    """A run of 36 tokens in blocks of 5 (the last block short), two clips per step."""
    model = root / "model.yaml"
    if not model.exists():
        # Several ranks may come here at once: the content is the same, and a rename is atomic.
        temporary = root / f"model_{dist.get_rank() if dist.is_initialized() else 0}.tmp"
        temporary.write_text(MODEL)
        temporary.replace(model)
    settings: dict[str, Any] = {"steps": 5, "global_batch_size": 2, "checkpoint_every": 0, "seed": 3, "device": "cpu"}
    return TrainConfig(
        model=str(model),
        data=DataConfig(height=24, width=24, num_frames=4, patch_size=(1, 8, 8)),
        sp=SequenceParallelConfig(strategy=strategy, ulysses_degree=ulysses, ring_degree=ring, block_size=5),
        mask=MaskConfig(top_p=0.5),
        optim=optim or OptimConfig(lr=3e-3, warmup_steps=1),
        train=LoopConfig(**(settings | loop)),
        run=RunConfig(root=str(root), name="run", plots=False),
    )


def this_world() -> World:
    """The process group of the test, on the CPU."""
    if not dist.is_initialized():
        return World()
    return World(rank=dist.get_rank(), size=dist.get_world_size())


def make_trainer(config: TrainConfig, num_clips: int = 5) -> Trainer:
    """Trainer on clips in memory."""
    return Trainer(config, this_world(), MemoryClips(num_clips, config.data))


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that a checkpoint holds; the live tensors, where they are not split over ranks."""
    return {name: gathered(tensor) for name, tensor in trainer.engine.state().items()}


def save_first_step(trainer: Trainer) -> None:
    """One step, saved; its averaged weights are then spread out, so that they say more than their initial zeros."""
    trainer.train_step(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in whole_state(trainer).items():
            if name.startswith("ema."):
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.05)
    trainer.steps_done = 1
    trainer.save()


def weights(trainer: Trainer) -> Tensor:
    """All weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.engine.module.parameters()])


def train(config: TrainConfig, num_clips: int = 5) -> tuple[list[float], Tensor]:
    """Losses of `config.train.steps` steps, and the weights after them; checks that ranks hold the same weights."""
    trainer = make_trainer(config, num_clips)
    losses = [trainer.train_step(step)["train/loss"] for step in range(config.train.steps)]
    final = weights(trainer)
    if trainer.world.size > 1:
        mine = final.double().sum().item()
        assert len(set(trainer.world.gather(mine))) == 1, "ranks ended with different weights"
    return losses, final


def with_run(config: TrainConfig, **changes: Any) -> TrainConfig:
    """`config` with fields of its `run` section replaced."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))
