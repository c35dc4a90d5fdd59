"""`dbsp-infer --pipeline`: a pipeline of diffusers in place of a trained run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from dbsp_megatron.compat import quiet_megatron
from dbsp_megatron.config.cli import parse_pipeline
from dbsp_megatron.config.generate import PipelineConfig
from dbsp_megatron.config.resolve import ResolvedRun
from dbsp_megatron.infer.pipeline_folder import PipelineFolder, read_folder
from dbsp_megatron.infer.pipeline_loading import check_adapter
from dbsp_megatron.infer.prompts import PromptJob, read_jobs
from dbsp_megatron.train.distributed import World, env_world_size
from dbsp_megatron.train.launch import exit_with_line, launch, launched_rank
from dbsp_megatron.train.signals import StopRequest


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A command that was checked without communication."""

    config: PipelineConfig
    """With the pipeline's defaults filled in."""
    folder: PipelineFolder
    jobs: list[PromptJob]
    resolved: ResolvedRun


def prepare(words: Sequence[str], world_size: int | None = None) -> Prepared:
    """Parse the arguments and check them against the folder and a number of processes; loads no weights.

    Args:
        words: after the command.
        world_size: number of processes; None takes that of `--world-size`, else the launcher's.

    Raises:
        ValueError: something does not fit.
    """
    command = parse_pipeline(words)
    config = command.config
    folder = read_folder(config.pipeline)
    jobs = read_jobs(config.generate)
    check_adapter(config.generate)
    complete = folder.complete(
        config.generate,
        num_prompts=len(jobs),
        num_without_image=sum(not job.image for job in jobs),
        num_negative=sum(bool(job.negative_prompt) for job in jobs),
    )
    config = dataclasses.replace(config, generate=complete)
    resolved = config.validate(
        world_size or command.world_size or env_world_size(),
        folder.sizes,
        num_layers=folder.num_layers,
        num_parameters=folder.num_parameters(),
        num_prompts=len(jobs),
    )
    return Prepared(config=config, folder=folder, jobs=jobs, resolved=resolved)


def main(words: Sequence[str]) -> NoReturn:
    """Run the pipeline as the command line says.

    Exit codes: 0 done, or stopped by a signal, with the outputs so far; 1 failed; 2 a mistake in the command, the
    folder or the prompts, with one line that says what.
    """
    if "--dry-run" in words:
        _dry_run(words)
    launch(
        lambda: prepare(words),
        _run,
        settings=lambda prepared: (prepared.config.generate.device, prepared.config.generate.timeout_s),
        resume_hint=lambda prepared: "run the same command again: outputs that exist are kept",
        handle_signals=True,
    )


def _dry_run(words: Sequence[str]) -> NoReturn:
    quiet_megatron()
    try:
        text = describe(prepare(words))
    except ValueError as error:
        exit_with_line(error)
    if launched_rank() == 0:
        print(text, flush=True)
    raise SystemExit(0)


def describe(prepared: Prepared) -> str:
    """One `key: value` line per fact, and the files that would be written."""
    asked, folder = prepared.config.generate, prepared.folder
    size = f"{asked.width} x {asked.height}"
    if folder.is_video:
        size += f", {asked.num_frames} frames, {asked.fps} fps"
    suffix = "mp4" if folder.is_video else "png"
    return "\n".join(
        [
            prepared.resolved.describe(),
            f"pipeline:        {folder.class_name}, {asked.dtype}, {size}",
            f"mask:            {prepared.config.mask.method}",
            *(f"output:          {prepared.config.output}/{job.name}.{suffix}" for job in prepared.jobs),
        ]
    )


def _run(prepared: Prepared, world: World, stop: StopRequest) -> int:
    from dbsp_megatron.infer.diffusers_run import PipelineRun
    from dbsp_megatron.observability import setup_logging

    setup_logging(world.rank)
    if world.is_main:
        print(describe(prepared), file=sys.stderr, flush=True)
    mesh = prepared.resolved.mesh
    return PipelineRun(prepared.config, prepared.folder, prepared.jobs, mesh, world, stop).run()
