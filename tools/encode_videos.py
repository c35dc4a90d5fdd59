"""Encodes videos by a local VAE of diffusers into files of latents, which `data.latents` reads.

Usage:
    python tools/encode_videos.py my_clips/ --vae Wan2.1-T2V-1.3B-Diffusers/vae --output latents/ \
        --num-frames 81 --size 480x832 --size 832x480
    dbsp-train --model wan2_1_1_3b --data.latents latents/ --data.patch_size "[1, 2, 2]"

Each clip becomes one safetensors file: `latents` [C, T, H, W], normalised by the VAE's own mean and deviation (or
factor), and in its header what made it. A video gets the size whose shape is nearest to its own, and the most frames
that it has. With --first-frame a file also holds `condition` [K, T, H, W], what Wan's and CogVideoX's image-to-video
models are given beside the noisy latents. Files that are there already are kept, so that the same command goes on after
a stop; `--part 0/4` to `3/4` share the work. Nothing is fetched; weights are read from safetensors only.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.data.latents import SUFFIX, LatentError, read_info, write_latents
from dbsp_megatron.data.sources import VideoFile, expand_entry
from dbsp_megatron.data.video import VideoError, VideoInfo, probe_video, read_frames
from dbsp_megatron.train.flow_matching import keyed_generator
from tools.video_vae import VideoVae, load_vae

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One clip to encode."""

    info: VideoInfo
    """The video."""
    name: str
    """Of the clip: `file@frame`."""
    frames: range
    """Of the video."""
    size: tuple[int, int]
    """Height and width of the clip."""
    path: Path
    """The file to write."""


def nearest_size(aspect: float, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The (height, width) whose width / height differs least from `aspect`, as a ratio; the first of equal ones."""
    return min(sizes, key=lambda size: abs(math.log(size[1] / size[0] / aspect)))


def tasks_of(file: VideoFile, info: VideoInfo, given: argparse.Namespace) -> Iterator[Task]:
    """The clips of one video.

    Raises:
        VideoError: the video is too short.
    """

    def span(num_frames: int) -> int:
        return (num_frames - 1) * given.frame_stride + 1

    fitting = [count for count in given.num_frames if span(count) <= info.num_frames]
    if not fitting:
        shortest = min(given.num_frames)
        raise VideoError(
            file.path,
            f"is too short: it has {info.num_frames} frames, a clip needs {span(shortest)} "
            f"(--num-frames {shortest}, --frame-stride {given.frame_stride})",
        )
    count = max(fitting)
    step = given.clip_stride or count * given.frame_stride
    for start in range(0, info.num_frames - span(count) + 1, step)[: given.max_clips_per_file]:
        name = f"{file.name}@{start}"
        yield Task(
            info=info,
            name=name,
            frames=range(start, start + span(count), given.frame_stride),
            size=nearest_size(info.aspect, given.size),
            path=given.output / f"{name}{SUFFIX}",
        )


def settings_of(task: Task, vae: VideoVae, given: argparse.Namespace) -> dict[str, Any]:
    """What determines the numbers of a file."""
    # Files of before there were conditions have no such key.
    condition = {"condition": "first frame"} if given.first_frame else {}
    return condition | {
        "vae": {**vae.identity, "posterior": given.posterior},
        "seed": given.seed if given.posterior == "sample" else None,
        "tiling": given.tiling,
        "compute_dtype": given.compute_dtype,
        "dtype": given.dtype,
        "frames": [task.frames.start, task.frames.stop, task.frames.step],
        "size": list(task.size),
    }


def is_done(task: Task, settings: dict[str, Any]) -> bool:
    """Whether the file of a clip is there, whole and made with these settings; a damaged one is to be made again.

    Raises:
        ValueError: it was made with other settings.
    """
    try:
        info = read_info(task.path)
    except LatentError:
        return False
    if info.settings != settings or info.name != task.name:
        keys = sorted(settings.keys() | info.settings.keys())
        wrong = [key for key in keys if info.settings.get(key) != settings.get(key)] or ["name"]
        raise ValueError(
            f"--output must not hold files made with other settings, got another {wrong[0]} in {task.path}; "
            "choose another --output, or remove that one"
        )
    return True


def encode_task(task: Task, vae: VideoVae, settings: dict[str, Any], given: argparse.Namespace) -> None:
    """Read, encode and write one clip."""
    video = read_frames(task.info, task.frames, height=task.size[0], width=task.size[1])
    generator = None
    if given.posterior == "sample":
        generator = keyed_generator(f"posterior of {task.name}", given.seed)
    latents = vae.encode(video, generator).to(DTYPES[given.dtype])
    condition = vae.encode_first_frame(video).to(DTYPES[given.dtype]) if given.first_frame else None
    write_latents(task.path, latents, name=task.name, settings=settings, condition=condition)


def check_names(files: Sequence[VideoFile]) -> None:
    """Refuse two videos of one name, by which clips are told apart.

    Raises:
        ValueError: there are some.
    """
    name, times = Counter(file.name for file in files).most_common(1)[0]
    if times > 1:
        raise ValueError(f"videos must have different names, got {name} {times} times; encode them into two folders")


def _run(given: argparse.Namespace) -> str:
    files = [file for entry in given.videos for file in expand_entry(entry)]
    check_names(files)
    index, count = given.part
    device = torch.device(given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    vae = load_vae(given.vae, device=device, dtype=DTYPES[given.compute_dtype])
    for frames in given.num_frames:
        for size in given.size:
            vae.check_size(frames, *size)
    if given.first_frame:
        vae.check_first_frame()
    if given.tiling:
        vae.module.enable_tiling()
    made = kept = skipped = 0
    mine = files[index::count]
    for number, file in enumerate(mine, 1):
        try:
            info = probe_video(file.path, probe=given.probe)
            for task in tasks_of(file, info, given):
                settings = settings_of(task, vae, given)
                if is_done(task, settings):
                    kept += 1
                    continue
                encode_task(task, vae, settings, given)
                made += 1
                print(f"{number}/{len(mine)} {task.path}", file=sys.stderr, flush=True)
        except VideoError as error:
            if not given.skip_bad_data:
                raise VideoError(error.path, f"{error.reason}; remove it, or use --skip-bad-data") from error
            print(f"skipped {error}", file=sys.stderr, flush=True)
            skipped += 1
    return f"{made} clips encoded, {kept} were there, {skipped} videos skipped: {given.output}"


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or min(int(match[1]), int(match[2])) < 1:
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH in pixels, such as 480x832; got {text!r}")
    return int(match[1]), int(match[2])


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"must be INDEX/COUNT with INDEX from 0, such as 0/4; got {text!r}")
    return int(match[1]), int(match[2])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1; got {text!r}")
    return int(text)


def add_clip_arguments(parser: argparse.ArgumentParser) -> None:
    """Which clips are cut from which videos."""
    parser.add_argument("videos", nargs="+", help="files, folders and patterns, as data.paths")
    parser.add_argument(
        "--num-frames", type=_positive, action="append", required=True, help="may be given several times"
    )
    parser.add_argument("--size", type=_size, action="append", required=True, help="HxW; may be given several times")
    parser.add_argument("--frame-stride", type=_positive, default=1, help="take every n-th frame")
    parser.add_argument("--clip-stride", type=_positive, help="frames between clips (default: no overlap)")
    parser.add_argument("--max-clips-per-file", type=_positive, help="default: all")
    parser.add_argument("--probe", choices=("packets", "decode"), default="packets", help="how frames are counted")
    parser.add_argument("--skip-bad-data", action="store_true", help="leave out videos that cannot be used")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Encode videos by a local VAE into files that data.latents reads.")
    add_clip_arguments(parser)
    parser.add_argument(
        "--vae", type=Path, required=True, help="local folder of a VAE of diffusers, or of its pipeline"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of the files")
    parser.add_argument("--compute-dtype", choices=sorted(DTYPES), default="fp32", help="of the VAE")
    parser.add_argument("--posterior", choices=("mode", "sample"), default="mode", help="the VAE's mean, or a draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument(
        "--first-frame", action="store_true", help="also write what models of image to video are given of it"
    )
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="encode every N-th video only")
    parser.add_argument("--tiling", action="store_true", help="encode large frames tile by tile: less memory, seams")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all is encoded; 2 bad arguments, videos or files."""
    given = _parser().parse_args(argv)
    try:
        print(_run(given))
    except (ValueError, OSError) as error:
        print(f"encode_videos: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
