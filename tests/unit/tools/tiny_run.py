"""A trained run of 36 tokens in blocks of 5, and dumps of q, k and v, for tests of tools that measure attention."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import save_file

from dbsp_megatron.config.sections import OptimConfig
from dbsp_megatron.data import VideoDataset
from dbsp_megatron.infer.video_file import write_mp4
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.trainer import Trainer
from tests.integration.training import make_config

SEQLEN, BLOCK_SIZE, GRID, NUM_HEADS, NUM_LAYERS = 36, 5, (4, 3, 3), 3, 2


def make_run(folder: Path) -> Path:
    """Train a few steps on five clips of a file of noise, of which two are held out; returns the run folder."""
    clip = folder / "clips" / "noise.mp4"
    generator = torch.Generator().manual_seed(1)
    write_mp4(torch.rand((3, 20, 24, 24), generator=generator) * 2 - 1, clip, 8)
    optim = OptimConfig(lr=2e-2, warmup_steps=1)
    config = make_config(folder, strategy="none", optim=optim, steps=6, eval_samples=2, ema_decay=0.5)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, paths=[str(clip)]))
    trainer = Trainer(config, World(), VideoDataset(config.data))
    for step in range(config.train.steps):
        trainer.train_step(step)
        trainer.steps_done += 1
    trainer.save()
    return folder / "run"


def write_dumps(folder: Path, *, num_files: int = 2, seqlen: int = SEQLEN, kv_heads: int = 2) -> list[Path]:
    """Files of four query heads in two layers, two samples each."""
    generator = torch.Generator().manual_seed(3)
    paths = []
    for step in range(num_files):
        tensors = {}
        for layer in range(NUM_LAYERS):
            for name, heads in (("q", 4), ("k", kv_heads), ("v", kv_heads)):
                x = torch.randn((2, seqlen, heads, 8), generator=generator)
                tensors[f"{name}.{layer}"] = x * (2 if name == "q" else 1)
        paths.append(folder / f"step_{step}.safetensors")
        save_file(tensors, paths[-1])
    return paths
