"""Loads a checkpoint under any number of ranks and samples videos that do not depend on how many there are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.config.generate import with_all_counts
from dbsp_megatron.config.resolve import with_degrees
from dbsp_megatron.config.schema import InferConfig
from dbsp_megatron.data import PixelPatchEncoder
from dbsp_megatron.infer.balance import BalanceLog, reuse_comparison
from dbsp_megatron.infer.cfg import guided_velocity
from dbsp_megatron.infer.outputs import with_suffix, write_settings
from dbsp_megatron.infer.sampler import build_sampler, timestep_schedule
from dbsp_megatron.infer.seeds import shared_seed
from dbsp_megatron.infer.video_file import write_mp4
from dbsp_megatron.models.build import build_model
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.models.dit.config import model_from_fields
from dbsp_megatron.observability import ProgressBar, get_logger
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.plan import reuse_table
from dbsp_megatron.strategy import SequenceParallel
from dbsp_megatron.train.batches import load_context
from dbsp_megatron.train.checkpoint import open_checkpoint
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.flow_matching import draw_noise
from dbsp_megatron.train.mesh import build_mesh
from dbsp_megatron.train.sharding import shard_model
from dbsp_megatron.train.trained_weights import load_trained

logger = get_logger(__name__)


class SamplingPipeline:
    """The model of a checkpoint, split over `world`; every rank makes one and calls `run`.

    Raises:
        ValueError: no intact checkpoint, or settings that do not fit its model.
    """

    def __init__(self, config: InferConfig, world: World) -> None:
        self.world = world
        checkpoint = open_checkpoint(Path(config.checkpoint), world)
        self.checkpoint = checkpoint
        self.model_config = model_from_state(checkpoint.state)
        self.video_size = video_size(config, checkpoint.state)
        self.encoder = PixelPatchEncoder(self.model_config.patch_size)
        self.grid = self.encoder.grid_for(*self.video_size)
        resolved = config.validate(world.size, self.model_config, self.grid)
        self.mesh = build_mesh(world, resolved.mesh.sp_size)
        sp = with_degrees(config.sp, resolved.mesh)
        self.config = dataclasses.replace(
            config,
            sp=with_all_counts(sp) if config.sample.reuse_report else sp,
            sample=dataclasses.replace(config.sample, seed=shared_seed(config.sample.seed, world)),
        )
        self._plan_counts = config.sp.plan_counts
        self.context, self.negative = self._contexts()
        self.sp = SequenceParallel(self.config.sp, self.mesh.sp_group)
        module = build_model(self.model_config, sp=self.sp, pg_collection=self.mesh.model_groups)
        module = module.to(world.device).eval()
        self.weights = load_trained(module, checkpoint, world, config.sample.weights)
        if self.weights != config.sample.weights:
            logger.info("%s holds no averaged weights: the plain ones are used", checkpoint.path)
        self.sharded = shard_model(
            module,
            module,
            self.model_config,
            self.sp,
            config.mask,
            device=world.device,
            precision=config.sample.precision,
        )

    def run(self, output: Path) -> int:
        """Make `sample.num_samples` videos in `output`: mp4, contact sheet and settings of each; returns the exit code.

        Data-parallel groups take turns; the first rank of a group writes its videos.
        """
        for index in range(self.mesh.dp_rank, self.config.sample.num_samples, self.mesh.dp_size):
            started = time.perf_counter()
            video, balance = self.sample(index)
            summary = balance.summary()
            if self.sp.rank == 0:
                self._write(output / f"sample_{index:04d}", index, video, summary, time.perf_counter() - started)
        self.world.barrier()
        return 0

    @torch.no_grad()
    def sample(self, index: int) -> tuple[Tensor, BalanceLog]:
        """Denoise one video; collective over its sequence-parallel group.

        Args:
            index: which video: its noise is a function of (seed, index).

        Returns:
            The video, fp32 [3, T, H, W] in about [-1, 1] on the CPU, and the balance over its steps.
        """
        sample, grid = self.config.sample, self.grid
        num_tokens, channels = grid[0] * grid[1] * grid[2], self.model_config.patch_dim
        x = self.sharded.shard(draw_noise(num_tokens, channels, seed=sample.seed, samples=[index], step=0), grid)
        schedule = timestep_schedule(sample.steps, sample.shift)
        sampler = build_sampler(sample.sampler, schedule)
        balance = BalanceLog(self.sp, reuse_comparison(self.sp, self._plan_counts) if sample.reuse_report else None)
        with ProgressBar(sample.steps, self.world.is_main, f"sample {index + 1}/{sample.num_samples}") as bar:
            for step in range(sample.steps):
                x, *held = self.sharded.relaid([x, *sampler.held()], grid)
                sampler.hold(held)
                self.sp.begin_step(step)
                timesteps = torch.full((1,), schedule[step], device=self.world.device)
                with self.sharded.session(grid):
                    velocity = guided_velocity(
                        self._predict,
                        x,
                        timesteps,
                        self.context,
                        self.negative,
                        scale=sample.guidance_scale,
                        mode=sample.guidance_mode,
                    )
                x = sampler.step(x, velocity, step)
                bar.update(step + 1, None, *balance.observe(step), {"reuse": balance.plan_reuse})
        video = self.encoder.decode(self.sharded.gather(x, grid).cpu(), grid)[0]
        return video, balance

    def _predict(self, x: Tensor, timesteps: Tensor, context: Tensor | None) -> Tensor:
        return self.sharded.velocity(x, timesteps, self.grid, context).float()

    def _contexts(self) -> tuple[Tensor | None, Tensor | None]:
        """Positive and negative text [1, L, text_dim]; zeros, as in training without text, where none is given."""
        if self.model_config.text == "none":
            return None, None
        given = load_context(self.config.sample.context, self.model_config) if self.config.sample.context else {}
        empty = torch.zeros(max(1, self.model_config.text_len), self.model_config.text_dim or 1)
        positive = given.get("context", empty)[None].to(self.world.device)
        negative = given.get("negative", empty)[None].to(self.world.device)
        return positive, negative

    def _write(self, stem: Path, index: int, video: Tensor, balance: Mapping[str, Any], seconds: float) -> None:
        from dbsp_megatron.observability.plots import contact_sheet

        encoder = write_mp4(video, stem.with_suffix(".mp4"), self.config.sample.fps)
        contact_sheet(video, stem.with_suffix(".png"))
        settings = {
            "index": index,
            "checkpoint": str(self.checkpoint.path),
            "checkpoint_step": self.checkpoint.step,
            "weights": self.weights,
            "frames_height_width": list(self.video_size),
            "encoder": encoder,
            "seconds": seconds,
            "world_size": self.world.size,
            **balance,
            "config": dataclasses.asdict(self.config),
        }
        if "reuse_rules" in balance:
            write_text(with_suffix(stem, ".reuse.md"), reuse_table(balance["reuse_rules"]))
        write_settings(stem, settings)
        logger.info("wrote %s (.mp4, .png, .json)", stem)


def model_from_state(state: Mapping[str, Any]) -> DiTConfig:
    """Model description saved in a checkpoint."""
    return model_from_fields(state["model"])


def video_size(config: InferConfig, state: Mapping[str, Any]) -> tuple[int, int, int]:
    """Frames, height and width to make: as configured, else as trained."""
    data, sample = state["config"]["data"], config.sample
    return (
        sample.num_frames or int(data["num_frames"]),
        sample.height or int(data["height"]),
        sample.width or int(data["width"]),
    )
