"""Runs a pipeline of diffusers for a batch of prompts, on any number of ranks, and goes on where it was stopped."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.config.generate import PipelineConfig, with_all_counts
from dbsp_megatron.config.resolve import ResolvedMesh, with_degrees
from dbsp_megatron.infer.balance import BalanceLog, reuse_comparison
from dbsp_megatron.infer.outputs import (
    SETTINGS,
    check_folder,
    comparison_file,
    dense_stem,
    forget,
    is_done,
    media_file,
    reuse_file,
    write_comparison,
    write_media,
    write_settings,
)
from dbsp_megatron.infer.pictures import picture_digest, read_picture
from dbsp_megatron.infer.pipeline_folder import PipelineFolder
from dbsp_megatron.infer.pipeline_loading import load_pipeline
from dbsp_megatron.infer.prompts import PromptJob, with_seeds
from dbsp_megatron.infer.quality import psnr, ssim
from dbsp_megatron.infer.seeds import shared_seed
from dbsp_megatron.masks import MaskMethod, build_mask_method
from dbsp_megatron.models.diffusers import parallelize, split_guidance
from dbsp_megatron.observability import ProgressBar, get_logger
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.parallel_state import SequenceParallelGroups
from dbsp_megatron.plan import reuse_table
from dbsp_megatron.strategy import SequenceParallel
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.mesh import build_mesh
from dbsp_megatron.train.signals import StopRequest

logger = get_logger(__name__)

_HOW_NOT_WHAT = (
    *("prompt", "prompts", "negative_prompt", "image", "seed"),
    *("compare_dense", "reuse_report", "cfg_parallel", "overwrite", "device", "timeout_s"),
)
"""Settings that do not determine an output, or that its prompt brings."""


class _Stopped(Exception):  # noqa: N818
    """All ranks of this sequence stop here."""


class PipelineRun:
    """A pipeline on `world`, whose sequence-parallel groups take turns with the prompts; every rank makes one.

    Args:
        config: completed by `PipelineFolder.complete`.
        folder: the pipeline.
        jobs: what to make; rank 0's count.
        mesh: how the world is divided.
        world: all ranks.
        stop: looked at after each step.

    Raises:
        ValueError: an output exists that was made with other settings.
    """

    def __init__(
        self,
        config: PipelineConfig,
        folder: PipelineFolder,
        jobs: Sequence[PromptJob],
        mesh: ResolvedMesh,
        world: World,
        stop: StopRequest,
    ) -> None:
        self.config, self.folder, self.world, self._stop = config, folder, world, stop
        self.output = Path(config.output)
        self._resolved = mesh
        jobs = world.broadcast(list(jobs))
        self.missing = with_seeds(self._missing(jobs), shared_seed(-1, world))
        self.num_done = len(jobs) - len(self.missing)
        self._num_made = 0

    def _missing(self, jobs: Sequence[PromptJob]) -> list[PromptJob]:
        """Jobs that have no output yet, as rank 0 sees it: other nodes may see its folder later."""
        missing, problem = [], None
        if self.world.is_main:
            try:
                missing = [job for job in jobs if self.config.generate.overwrite or not self._is_done(job)]
            except (OSError, ValueError) as error:
                problem = str(error)
        missing, problem = self.world.broadcast((missing, problem))
        if problem is not None:
            raise ValueError(problem)
        return list(missing)

    def _is_done(self, job: PromptJob) -> bool:
        stem = self.output / job.name
        settings = self._settings(job)
        if job.seed < 0:
            del settings["seed"]
        asked = self.config.generate
        extras = [
            key for key, wanted in (("compared", asked.compare_dense), ("reuse_rules", asked.reuse_report)) if wanted
        ]
        return is_done(stem, media_file(stem, self.folder.is_video), settings, extras)

    def _settings(self, job: PromptJob) -> dict[str, Any]:
        """What determines an output: not how many ranks make it, nor where."""
        generate = dataclasses.asdict(self.config.generate)
        return {
            "pipeline": self.folder.path.resolve().name,
            "class": self.folder.class_name,
            **dataclasses.asdict(job),
            "image_digest": picture_digest(job.image),
            **{key: value for key, value in generate.items() if key not in _HOW_NOT_WHAT},
            "mask": dataclasses.asdict(self.config.mask),
            "block_size": None if self.config.is_dense else self.config.sp.block_size,
        }

    def run(self) -> int:
        """Make what is missing; returns the exit code, 0 also when it was asked to stop."""
        total = len(self.missing)
        if self.num_done:
            logger.info("%d of %d outputs exist already in %s", self.num_done, self.num_done + total, self.output)
        if not total:
            return 0
        branches = self._resolved.branches
        mesh = build_mesh(self.world, self._resolved.sp_size * branches)
        group, self._guidance_group = mesh.sp_group, None
        if branches > 1:
            group, self._guidance_group = split_guidance(mesh.sp_group)
        config = with_degrees(self.config.sp, self._resolved)
        self.sp = SequenceParallel(with_all_counts(config) if self.config.generate.reuse_report else config, group)
        # Ranks that make an output together, which may be at another step than others.
        groups = self.sp.groups if branches == 1 else SequenceParallelGroups(mesh.sp_group)
        control = groups.control_group if groups.size > 1 else None
        self._together = World(rank=groups.rank, size=groups.size, device=self.world.device, group=control)
        self.mask = None if self.config.is_dense else build_mask_method(self.config.mask)
        self._check_output()
        self.pipe = self._load()
        stopped = False
        for index in range(mesh.dp_rank, total, mesh.dp_size):
            try:
                self._make(self.missing[index], f"{index + 1}/{total}")
            except _Stopped:
                stopped = True
                break
        self._close(stopped, total)
        return 0

    def _close(self, stopped: bool, total: int) -> None:
        counts = self.world.gather((self._num_made if self._together.is_main else 0, stopped, self._stop.reason))
        made = sum(count for count, _, _ in counts)
        if not self.world.is_main:
            return
        if any(was for _, was, _ in counts):
            reason = next((why for _, _, why in counts if why), "a request")
            logger.warning(
                "stopped by %s with %d of %d outputs made; run the same command to go on", reason, made, total
            )
        else:
            logger.info("made %d outputs in %s", made, self.output)

    def _load(self) -> Any:
        problem, pipe = None, None
        try:
            pipe = load_pipeline(self.folder, self.config.generate, self.world.device, speaks=self.world.is_main)
        except (OSError, ValueError) as error:
            problem = f"rank {self.world.rank}: {self.folder.path} cannot be loaded: {error}"
        self._raise_together(problem)
        return pipe

    def _check_output(self) -> None:
        """On the ranks that write."""
        problem = None
        try:
            if self._together.is_main:
                check_folder(self.output)
        except ValueError as error:
            problem = f"rank {self.world.rank}: {error}"
        self._raise_together(problem)

    def _raise_together(self, problem: str | None) -> None:
        problems = [text for text in self.world.gather(problem) if text]
        if problems:
            raise ValueError(problems[0])

    def _make(self, job: PromptJob, place: str) -> None:
        """One output, of which the first rank of the group writes the files."""
        self._stop_if_asked()
        started = time.perf_counter()
        seconds = {}
        result, balance = self._denoise(job, self.mask, f"prompt {place}")
        seconds["seconds"] = time.perf_counter() - started
        dense = None
        if self.config.generate.compare_dense:
            started = time.perf_counter()
            dense, _ = self._denoise(job, None, f"prompt {place}, dense")
            seconds["seconds_dense"] = time.perf_counter() - started
        problem: OSError | ValueError | None = None
        if result is not None:
            try:
                self._write(job, result, dense, balance, seconds)
                self._num_made += 1
            except (OSError, ValueError) as error:
                problem = error
        # A rank that cannot write must not leave others in the next exchange.
        for found in self._together.gather(problem):
            if found is not None:
                raise found

    def _denoise(self, job: PromptJob, mask: MaskMethod | None, words: str) -> tuple[Tensor | None, BalanceLog]:
        """The video [3, T, H, W] in [-1, 1] on the CPU, on the group's first rank only; collective over the group."""
        writes, asked = self._together.is_main, self.config.generate
        replayed = None
        # The dense twin of a sparse output is no part of the report.
        if asked.reuse_report and mask is self.mask:
            replayed = reuse_comparison(self.sp, self.config.sp.plan_counts)
        balance = BalanceLog(self.sp, replayed)
        arguments = {"prompt": job.prompt, **self.folder.call_settings(asked)}
        if job.negative_prompt:
            arguments["negative_prompt"] = job.negative_prompt
        if job.image:
            arguments["image"] = read_picture(job.image)
        # Noise is drawn on the CPU, whole, by all ranks alike.
        arguments["generator"] = torch.Generator().manual_seed(job.seed)
        with (
            ProgressBar(asked.steps, self.world.is_main, words) as bar,
            parallelize(self.pipe, self.sp, mask=mask, guidance_group=self._guidance_group),
        ):

            def step_done(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                bar.update(step + 1, None, *balance.observe(step), {"reuse": balance.plan_reuse})
                if step + 1 < pipe.num_timesteps:
                    self._stop_if_asked()
                return tensors

            # Every rank has the latents; one decodes them.
            made = self.pipe(
                **arguments,
                callback_on_step_end=step_done,
                output_type="pt" if writes else "latent",
                return_dict=False,
            )[0]
        return (_as_video(made, self.folder.is_video) if writes else None), balance

    def _stop_if_asked(self) -> None:
        asked = self._together.sum(torch.tensor([float(self._stop.requested())]))
        if float(asked) > 0:
            raise _Stopped

    def _write(
        self, job: PromptJob, result: Tensor, dense: Tensor | None, balance: BalanceLog, seconds: dict[str, float]
    ) -> None:
        """Files of an output, the JSON last.

        Raises:
            ValueError: the result is not finite.
        """
        asked, stem = self.config.generate, self.output / job.name
        for kind, x in (("", result), ("dense ", dense)):
            if x is not None and not x.isfinite().all():
                raise ValueError(
                    f"the {kind}output of prompt {job.name} is not finite: generate.dtype={asked.dtype} may be too "
                    "narrow for this model; use bf16 or fp32"
                )
        media = media_file(stem, self.folder.is_video)
        forget(stem)
        summary: dict[str, Any] = {
            "file": media.name,
            "encoder": write_media(result, media, asked.fps),
            **seconds,
            "world_size": self.world.size,
            "sp_strategy": self.config.sp.strategy,
            **balance.summary(),
        }
        if dense is not None:
            summary["compared"] = self._write_dense(stem, result, dense)
        if "reuse_rules" in summary:
            write_text(reuse_file(stem), reuse_table(summary["reuse_rules"]))
        write_settings(stem, {SETTINGS: self._settings(job), **summary, "sp": dataclasses.asdict(self.config.sp)})
        logger.info(
            "wrote %s: rho %.3f -> %.3f, plan reuse %.0f %%, mesh by layers and steps %s",
            media, summary["imbalance_before"] or math.nan, summary["imbalance_after"] or math.nan,
            100 * (summary["plan_reuse"] or 0), summary["meshes"],
        )  # fmt: skip

    def _write_dense(self, stem: Path, sparse: Tensor, dense: Tensor) -> dict[str, Any]:
        """The dense output and how far the sparse one is from it."""
        media = media_file(dense_stem(stem), self.folder.is_video)
        write_media(dense, media, self.config.generate.fps)
        write_comparison(dense, sparse, comparison_file(stem))
        one, other = ((x.clamp(-1, 1) + 1) / 2 for x in (dense, sparse))
        decibels = psnr(one, other)
        # JSON has no infinity; equal outputs are told apart by the other entry.
        return {
            "file": media.name,
            "psnr_db": decibels if math.isfinite(decibels) else None,
            "ssim": ssim(one, other),
            "identical": not math.isfinite(decibels),
        }


def _as_video(made: Tensor, is_video: bool) -> Tensor:
    """[1, T, 3, H, W], or [1, 3, H, W], in [0, 1], as [3, T, H, W] in [-1, 1] on the CPU."""
    first = made[0].detach().float().cpu()
    return 2 * (first.transpose(0, 1) if is_video else first[:, None]) - 1
