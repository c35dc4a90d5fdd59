"""Command `dbsp-infer`, also `python -m dbsp_megatron.infer`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dbsp_megatron.compat import quiet_megatron
from dbsp_megatron.config.cli import Command, names_pipeline, parse_infer, without_section
from dbsp_megatron.config.schema import InferConfig
from dbsp_megatron.infer.pipeline_command import main as pipeline_main
from dbsp_megatron.masks.config import COMMON
from dbsp_megatron.train.checkpoint_folder import foreign_note, list_checkpoints
from dbsp_megatron.train.distributed import World, env_world_size
from dbsp_megatron.train.launch import exit_with_line, launch, launched_rank
from dbsp_megatron.train.signals import StopRequest


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Sample as the command line says, from a trained run or from a pipeline of diffusers.

    Exit codes of a trained run: 0 done; 1 failed; 2 bad configuration or no checkpoint, with one line that says what.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if names_pipeline(words):
            pipeline_main(words)
    except ValueError as error:
        exit_with_line(error)
    if "--dry-run" in words:
        _dry_run(words)
    launch(
        lambda: _parse(words)[0].config,
        _sample,
        settings=lambda config: (config.sample.device, config.sample.timeout_s),
        resume_hint=lambda config: "run the same command again",
        handle_signals=False,
    )


def _parse(words: Sequence[str]) -> tuple[Command[InferConfig], Mapping[str, Any]]:
    """The command line, with the trained run's strategy, blocks and mask as defaults, and the run's saved state.

    Settings of the trained mask method are defaults only where the method stays the same.
    """
    # Settings of a mask may only fit the method of training, which is not known yet.
    state = _peek(Path(parse_infer(without_section(words, "mask")).config.checkpoint))
    saved = state["config"]
    defaults = {f"sp.{key}": saved["sp"][key] for key in ("strategy", "block_size", "head_policy", "block_policy")}
    mask = {key: value for key, value in saved["mask"].items() if key in COMMON}
    if _mask_method(words, saved["mask"]["method"]) == saved["mask"]["method"]:
        mask = saved["mask"]
    defaults |= {f"mask.{key}": value for key, value in mask.items()}
    return parse_infer(words, defaults), state


def _mask_method(words: Sequence[str], trained: str) -> str:
    """The method that the command line names, or else that of training."""
    try:
        return parse_infer(words, {"mask.method": trained}).config.mask.method
    except ValueError:
        # Settings that belong to neither: the command line is parsed again, and refused, with all defaults.
        return trained


def _peek(path: Path) -> Mapping[str, Any]:
    """JSON state of a checkpoint, or of the newest one in a run folder; its tensors are not looked at.

    Raises:
        ValueError: there is no checkpoint.
    """
    for folder in (path, *list_checkpoints(path), *list_checkpoints(path / "checkpoints")):
        try:
            state: Mapping[str, Any] = json.loads((folder / "state.json").read_text())
        except (OSError, ValueError):
            continue
        if {"model", "config"} <= state.keys():
            return state
    raise ValueError(
        f"checkpoint={path} must be a run folder or a checkpoint folder; no readable checkpoint is there"
        f"{foreign_note(path)}"
    )


def _dry_run(words: Sequence[str]) -> NoReturn:
    quiet_megatron()
    from dbsp_megatron.data import PixelPatchEncoder
    from dbsp_megatron.infer.first_frame import FirstFrames
    from dbsp_megatron.infer.pipeline import model_from_state
    from dbsp_megatron.infer.space import sample_space

    try:
        command, state = _parse(words)
        model = model_from_state(state)
        space = sample_space(command.config, state, model)
        grid = PixelPatchEncoder(model.patch_size, space.channels).grid_for(*space.size)
        resolved = command.config.validate(command.world_size or env_world_size(), model, grid)
        FirstFrames(command.config.sample, model, space)
    except ValueError as error:
        exit_with_line(error)
    if launched_rank() == 0:
        print(resolved.describe(), flush=True)
    raise SystemExit(0)


def _sample(config: InferConfig, world: World, stop: StopRequest) -> int:
    from dbsp_megatron.infer.pipeline import SamplingPipeline
    from dbsp_megatron.observability import setup_logging

    setup_logging(world.rank)
    pipeline = SamplingPipeline(config, world)
    return pipeline.run(Path(config.output) if config.output else _default_output(pipeline.checkpoint.path))


def _default_output(checkpoint: Path) -> Path:
    """`<run>/samples/<checkpoint>`, next to the folder of checkpoints."""
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    return run / "samples" / checkpoint.name


if __name__ == "__main__":
    main()
