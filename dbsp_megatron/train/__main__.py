"""Command `dbsp-train`, also `python -m dbsp_megatron.train`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dbsp_megatron.compat import quiet_megatron
from dbsp_megatron.config.cli import parse_train
from dbsp_megatron.config.resolve import ResolvedRun
from dbsp_megatron.config.schema import TrainConfig
from dbsp_megatron.train.distributed import World, env_world_size
from dbsp_megatron.train.launch import exit_with_line, launch, launched_rank, same_start
from dbsp_megatron.train.signals import StopRequest


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Train as the command line says.

    Exit codes: 0 trained, or stopped by a signal with a checkpoint; 1 failed; 2 bad configuration or data, with one
    line that says what; 3 `train.check` did not hold.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if "--dry-run" in words:
        _dry_run(words)
    launch(
        lambda: _prepare(words),
        _train,
        settings=lambda config: (config.train.device, config.train.timeout_s),
        resume_hint=_resume_hint,
        handle_signals=True,
    )


def _prepare(words: Sequence[str]) -> TrainConfig:
    config = parse_train(words).config
    _check_engine(config, config.validate(env_world_size()))
    return config


def _check_engine(config: TrainConfig, resolved: ResolvedRun) -> None:
    """Refuse a DeepSpeed file that contradicts the run, before anything is started."""
    if config.train.engine == "deepspeed":
        from dbsp_megatron.train.engines.deepspeed_config import build_deepspeed_config

        mesh = resolved.mesh
        data_size = mesh.dp_size * mesh.sp_size
        build_deepspeed_config(config.train, config.parallel, dp_size=mesh.dp_size, data_size=data_size)


def _dry_run(words: Sequence[str]) -> NoReturn:
    from dbsp_megatron.data.sources import expand_entry

    quiet_megatron()
    try:
        command = parse_train(words)
        resolved = command.config.validate(command.world_size or env_world_size())
        _check_engine(command.config, resolved)
        # A missing file is a mistake of the configuration too; files of latents were looked at for their size.
        for entry in () if command.config.data.latents else command.config.data.paths:
            expand_entry(entry)
    except ValueError as error:
        exit_with_line(error)
    if launched_rank() == 0:
        print(resolved.describe(), flush=True)
    raise SystemExit(0)


def _train(config: TrainConfig, world: World, stop: StopRequest) -> int:
    from dbsp_megatron.data import open_dataset
    from dbsp_megatron.observability import setup_logging
    from dbsp_megatron.train.trainer import Trainer

    setup_logging(world.rank)
    if world.is_main:
        print(config.validate(world.size).describe(), file=sys.stderr, flush=True)
    stop.stop_file = config.run.stop_file
    return Trainer(config, world, open_dataset(config.data)).run(stop)


def _resume_hint(config: TrainConfig) -> str:
    saved = Path(config.run.root) / config.run.name / "config.yaml"
    words = f"-m dbsp_megatron.train --config {shlex.quote(str(saved))} --run.resume=auto"
    return f"resume with: {same_start(words, os.environ)}"


if __name__ == "__main__":
    main()
