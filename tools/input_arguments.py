"""The part of a command line that says on what attention is measured: a trained run, or dumps of q, k and v."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dbsp_megatron.compat import quiet_megatron
from tools.attention_inputs import DumpedInputs, Geometry, Point, Visit

if TYPE_CHECKING:
    from tools.trained_run import TrainedRun


def add_input_arguments(parser: argparse.ArgumentParser, *, dumps: bool) -> None:
    """Adds where inputs come from.

    Args:
        parser: gets the arguments.
        dumps: whether dumps will do, or only a trained run.
    """
    source = parser.add_argument_group("inputs")
    which = source.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", type=Path, help="run folder or checkpoint of dbsp-train")
    if dumps:
        which.add_argument("--dumps", type=Path, nargs="+", help="safetensors files of q.L, k.L, v.L, one a step")
        source.add_argument("--grid", type=int, nargs=3, metavar=("T", "H", "W"), help="tokens of dumps")
        source.add_argument("--text-tokens", type=int, default=0, help="in front of the video in dumps (default: 0)")
    source.add_argument("--block-size", type=int, help="default: that of training")
    source.add_argument("--data", nargs="+", default=[], help="videos in place of those of training")
    source.add_argument("--samples", type=int, nargs="+", default=[], help="clip ids (default: --num-samples of them)")
    source.add_argument("--num-samples", type=int, default=4, help="clips, spread evenly (default: 4)")
    source.add_argument("--timesteps", type=float, nargs="+", default=[0.9, 0.6, 0.3], help="noise levels in (0, 1]")
    source.add_argument("--weights", choices=("ema", "model"), default="ema")
    source.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    source.add_argument("--engine", default="auto", help="attention engine (default: auto)")
    source.add_argument("--seed", type=int, default=0, help="of the noise")
    source.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def open_run(given: argparse.Namespace) -> TrainedRun:
    """The run of a command line."""
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device and torch finds none: pass --device cpu")
    quiet_megatron()
    from tools.trained_run import TrainedRun

    return TrainedRun(
        given.run,
        device=device,
        weights=given.weights,
        precision=given.precision,
        data=given.data,
        block_size=given.block_size,
        seed=given.seed,
        engine=given.engine,
    )


def chosen_points(run: TrainedRun, given: argparse.Namespace, *, held_out: bool) -> list[Point]:
    """Clips and noise levels of a command line.

    Args:
        run: the trained run.
        given: parsed arguments.
        held_out: whether clips are by default those that training did not see.
    """
    if given.num_samples < 1:
        raise ValueError(f"--num-samples must be at least 1, got {given.num_samples}")
    samples = given.samples or run.default_samples(given.num_samples, held_out=held_out)
    return list(run.points(samples, given.timesteps))


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Attention inputs that can be gone through again and again."""

    geometry: Geometry
    num_layers: int
    num_heads: int
    facts: dict[str, object]
    """What they are, for reports."""
    go_through: Callable[[Visit], None]
    """Shows every layer of every sample and step to a function."""


def open_inputs(given: argparse.Namespace) -> Inputs:
    """Inputs to calibrate on: clips of training, or dumps.

    Raises:
        ValueError: arguments are missing, or do not fit what they name.
    """
    if given.run is not None:
        run = open_run(given)
        points = chosen_points(run, given, held_out=False)

        def go_through(visit: Visit) -> None:
            for point in points:
                run.velocity(point, visit=visit)

        samples = sorted({point.sample for point in points})
        facts: dict[str, object] = {**run.describe(), "samples": samples, "timesteps": given.timesteps}
        return Inputs(
            geometry=run.geometry,
            num_layers=run.num_layers,
            num_heads=run.num_heads,
            facts=facts,
            go_through=go_through,
        )
    if given.grid is None or given.block_size is None:
        raise ValueError("--dumps needs --grid and --block-size: say what the tokens are and how blocks are cut")
    frames, rows, columns = given.grid
    geometry = Geometry(
        grid=(frames, rows, columns),
        seqlen=given.text_tokens + frames * rows * columns,
        block_size=given.block_size,
    )
    dumps = DumpedInputs(given.dumps, geometry, torch.device(given.device))
    return Inputs(
        geometry=geometry,
        num_layers=dumps.num_layers,
        num_heads=dumps.num_heads,
        facts=dumps.describe(),
        go_through=dumps.visit,
    )
