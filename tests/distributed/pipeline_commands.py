"""`dbsp-infer --pipeline` on ranks of the harness, with the tensors that it writes kept beside its files."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dbsp_megatron.infer import diffusers_run
from dbsp_megatron.infer.__main__ import main
from dbsp_megatron.infer.balance import BalanceLog
from dbsp_megatron.infer.outputs import write_media
from tests.pipeline_folders import text_length

if multiprocessing.parent_process() is not None:
    # In ranks, which wait for one another once all have imported their test, and for no more than seconds later on.
    from diffusers import (  # noqa: F401
        CogVideoXPipeline,
        FluxPipeline,
        HunyuanVideoPipeline,
        WanImageToVideoPipeline,
        WanPipeline,
    )

SIZES = {
    # 3 x 5 x 3 tokens, or 9 x 5: odd numbers, which no number of ranks divides.
    "wan": "--height 80 --width 48 --num-frames 9 --guidance-scale 4 --steps 3",
    "wan i2v": "--height 80 --width 48 --num-frames 9 --guidance-scale 4 --steps 2",
    "wan i2v clip": "--height 80 --width 48 --num-frames 9 --guidance-scale 4 --steps 2",
    "cogvideox": "--height 80 --width 48 --num-frames 9 --guidance-scale 4 --steps 2",
    "hunyuan": "--height 80 --width 48 --num-frames 9 --true-cfg-scale 3 --steps 2",
    "flux": "--height 144 --width 80 --true-cfg-scale 3 --steps 2",
}
"""Guidance with two prompts of unequal length, in one call and in two."""
PROMPT, NEGATIVE = "a red cat walks on the grass", "rain in snow"


def command(name: str, folder: Path, output: Path, *more: str) -> list[str]:
    """Words of the command for a pipeline of `save_pipeline`."""
    image = ["--image", str(folder.parent / "start.png")] if name.startswith("wan i2v") else []
    words = ["--pipeline", str(folder), "--output", str(output), "--prompt", PROMPT, "--negative-prompt", NEGATIVE]
    numbers = f"--max-sequence-length {text_length(name)} --seed 7 --dtype fp32 --device cpu --sp.block_size 4"
    return [*words, *image, *SIZES[name].split(), *numbers.split(), *more]


def run_command(rank: int, world_size: int, words: list[str]) -> tuple[object, str]:
    """Exit code and what was printed, of one rank."""
    before, printed = dict(os.environ), io.StringIO()
    # One process runs without a launcher.
    if world_size > 1:
        own, size = str(rank), str(world_size)
        os.environ.update(RANK=own, LOCAL_RANK=own, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), _tensors_kept():
            main(words)
    except SystemExit as end:
        return end.code, printed.getvalue()
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_commands(rank: int, world_size: int, lists: list[list[str]]) -> list[tuple[object, str]]:
    """Several commands, one after the other."""
    return [run_command(rank, world_size, words) for words in lists]


def run_until(rank: int, world_size: int, words: list[str], number: int) -> tuple[object, str]:
    """A command whose last rank is sent SIGTERM when it has made a number of steps."""
    observe, seen = BalanceLog.observe, 0

    def counting(self: Any, step: int) -> tuple[float, float]:
        nonlocal seen
        seen += 1
        if seen == number and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return observe(self, step)

    with patch.object(BalanceLog, "observe", counting):
        return run_command(rank, world_size, words)


@contextlib.contextmanager
def _tensors_kept() -> Iterator[None]:
    """Files are rounded to 8 bits and, for videos, compressed."""

    def keeping(video: Tensor, path: Path, fps: int) -> str:
        encoder = write_media(video, path, fps)
        torch.save(video, path.with_name(path.name + ".pt"))
        return encoder

    with patch.object(diffusers_run, "write_media", keeping):
        yield


def made(output: Path) -> dict[str, Tensor]:
    """Tensors of an output folder by file name."""
    return {path.name: torch.load(path) for path in sorted(output.glob("*.pt"))}
