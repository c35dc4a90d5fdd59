"""Loads a checkpoint under any number of ranks and samples videos that do not depend on how many there are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.config.generate import with_all_counts
from dbsp_megatron.config.resolve import with_degrees
from dbsp_megatron.config.schema import InferConfig
from dbsp_megatron.data import PixelPatchEncoder
from dbsp_megatron.data.latents import write_latents
from dbsp_megatron.infer.balance import BalanceLog, reuse_comparison
from dbsp_megatron.infer.cfg import guided_velocity
from dbsp_megatron.infer.first_frame import FirstFrames
from dbsp_megatron.infer.outputs import with_suffix, write_settings
from dbsp_megatron.infer.sampler import build_sampler, timestep_schedule
from dbsp_megatron.infer.seeds import shared_seed
from dbsp_megatron.infer.space import sample_space
from dbsp_megatron.infer.video_file import write_mp4
from dbsp_megatron.models.build import build_model
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.models.dit.config import model_from_fields
from dbsp_megatron.models.dit.narrow import narrow_matrices
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
        self.space = sample_space(config, checkpoint.state, self.model_config)
        self.encoder = PixelPatchEncoder(self.model_config.patch_size, self.space.channels)
        self.grid = self.encoder.grid_for(*self.space.size)
        resolved = config.validate(world.size, self.model_config, self.grid)
        self.first_frames = FirstFrames(config.sample, self.model_config, self.space)
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
        if config.sample.precision == "bf16":
            narrow_matrices(module, torch.bfloat16)
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
        """Make `sample.num_samples` videos in `output`; returns the exit code.

        Files of each are mp4, contact sheet and settings; of latents a file that tools/decode_latents.py reads, and
        settings.
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
            The video, fp32 [C, T, H, W] on the CPU, in about [-1, 1] or latents, and the balance over its steps.
        """
        sample, grid = self.config.sample, self.grid
        num_tokens, channels = grid[0] * grid[1] * grid[2], self.model_config.patch_out_dim
        x = self.sharded.shard(draw_noise(num_tokens, channels, seed=sample.seed, samples=[index], step=0), grid)
        condition = self.first_frames.condition(index)
        given = [] if condition is None else [self.sharded.shard(condition, grid)]
        image = self.first_frames.image_context(index)
        schedule = timestep_schedule(sample.steps, sample.shift)
        sampler = build_sampler(sample.sampler, schedule)
        balance = BalanceLog(self.sp, reuse_comparison(self.sp, self._plan_counts) if sample.reuse_report else None)
        with ProgressBar(sample.steps, self.world.is_main, f"sample {index + 1}/{sample.num_samples}") as bar:
            for step in range(sample.steps):
                x, *others = self.sharded.relaid([x, *given, *sampler.held()], grid)
                given, held = others[: len(given)], others[len(given) :]
                sampler.hold(held)
                self.sp.begin_step(step)
                timesteps = torch.full((1,), schedule[step], device=self.world.device)
                with self.sharded.session(grid):
                    velocity = guided_velocity(
                        partial(self._predict, condition=given[0] if given else None, image=image),
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

    def _predict(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor | None,
        *,
        condition: Tensor | None,
        image: Tensor | None,
    ) -> Tensor:
        # Both branches of guidance, if they come in one batch, start from the same frame.
        return self.sharded.velocity(
            x,
            timesteps,
            self.grid,
            context,
            condition=None if condition is None else condition.expand(len(x), -1, -1),
            image_context=None if image is None else image.expand(len(x), -1, -1),
        ).float()

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
        encoder = None
        if self.space.is_latent:
            self._write_latents(stem, index, video)
        else:
            encoder = self._write_video(stem, video)
        settings = {
            "index": index,
            "checkpoint": str(self.checkpoint.path),
            "checkpoint_step": self.checkpoint.step,
            "weights": self.weights,
            "frames_height_width": None if self.space.pixels is None else list(self.space.pixels),
            "first_frame": self.first_frames.name(index),
            "encoder": encoder,
            "seconds": seconds,
            "world_size": self.world.size,
            **balance,
            "config": dataclasses.asdict(self.config),
        }
        if "reuse_rules" in balance:
            write_text(with_suffix(stem, ".reuse.md"), reuse_table(balance["reuse_rules"]))
        write_settings(stem, settings)
        logger.info("wrote %s (%s, .json)", stem, ".safetensors" if self.space.is_latent else ".mp4, .png")

    def _write_video(self, stem: Path, video: Tensor) -> str:
        from dbsp_megatron.observability.plots import contact_sheet

        contact_sheet(video, stem.with_suffix(".png"))
        return write_mp4(video, stem.with_suffix(".mp4"), self.config.sample.fps)

    def _write_latents(self, stem: Path, index: int, latents: Tensor) -> None:
        settings: dict[str, Any] = {
            "vae": self.space.vae,
            "sampled": {
                "checkpoint": str(self.checkpoint.path),
                "step": self.checkpoint.step,
                "seed": self.config.sample.seed,
                "index": index,
            },
        }
        if self.space.pixels is not None:
            settings |= {"frames": [0, self.space.pixels[0], 1], "size": list(self.space.pixels[1:])}
        write_latents(with_suffix(stem, ".safetensors"), latents, name=stem.name, settings=settings)


def model_from_state(state: Mapping[str, Any]) -> DiTConfig:
    """Model description saved in a checkpoint."""
    return model_from_fields(state["model"])
