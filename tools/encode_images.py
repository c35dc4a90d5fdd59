"""Encodes the first frame of clips by a local CLIP into the file of image features that `train.image_context` reads.

Usage:
    python tools/encode_images.py my_clips/ --encoder Wan2.1-I2V-14B-480P-Diffusers --output images.safetensors \
        --num-frames 81 --size 480x832 --size 832x480
    dbsp-train --model wan2_1_i2v_14b --data.latents latents/ --train.image_context images.safetensors

Videos and the flags that cut clips are those of tools/encode_videos.py: clips then have the same names (`bikes.mp4@16`)
and sizes. Features are the hidden states before the last layer, one row a token, as Wan is given them. All are held in
memory until the file is written. Nothing is fetched; weights are read from safetensors only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.data.sources import expand_entry
from dbsp_megatron.data.video import VideoError, probe_video, read_frames
from dbsp_megatron.observability.atomic_file import atomic_path
from tools.encode_text import DTYPES, is_done
from tools.encode_videos import Task, add_clip_arguments, check_names, tasks_of
from tools.video_vae import digest, model_files

FORMAT = "dbsp_megatron.images.1"
ENCODERS = ("clip_vision_model",)
"""`model_type` of the configs of encoders that can be loaded."""


class ImageEncoder:
    """A CLIP vision model of transformers and its image processor, from local folders.

    Args:
        folder: of the encoder, or of a pipeline with `image_encoder` and `image_processor` in it; weights in
            safetensors.
        device: where to compute.
        dtype: what to compute in.

    Raises:
        ValueError: a folder does not hold what it should.
    """

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        if (folder / "image_encoder" / "config.json").is_file():
            folder = folder / "image_encoder"
        files = model_files(folder, ENCODERS, "model_type", "--encoder")[1]
        settings = [place / "preprocessor_config.json" for place in (folder.parent / "image_processor", folder)]
        found = [path for path in settings if path.is_file()]
        if not found:
            raise ValueError(
                f"--encoder must have a preprocessor_config.json beside or in it, got none at {settings[0]}"
            )
        import transformers

        self._processor = transformers.CLIPImageProcessor.from_pretrained(str(found[0].parent), local_files_only=True)
        module = transformers.CLIPVisionModel.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, dtype=dtype
        )
        self._module = module.to(device).eval().requires_grad_(False)
        self.digest = digest([*files, found[0]])

    @torch.no_grad()
    def encode(self, frame: Tensor) -> Tensor:
        """Features of a picture.

        Args:
            frame: [3, H, W] in [-1, 1].

        Returns:
            [L, image_dim] on the CPU.
        """
        picture = ((frame.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).contiguous().numpy()
        pixels = self._processor(images=picture, return_tensors="pt")["pixel_values"]
        states = self._module(pixels.to(self._module.device, self._module.dtype), output_hidden_states=True)
        features: Tensor = states.hidden_states[-2][0].cpu()
        return features


def _tasks(given: argparse.Namespace) -> list[Task]:
    """All clips, in the order of their videos."""
    files = [file for entry in given.videos for file in expand_entry(entry)]
    check_names(files)
    tasks: list[Task] = []
    for file in files:
        try:
            tasks += tasks_of(file, probe_video(file.path, probe=given.probe), given)
        except VideoError as error:
            if not given.skip_bad_data:
                raise VideoError(error.path, f"{error.reason}; remove it, or use --skip-bad-data") from error
            print(f"skipped {error}", file=sys.stderr, flush=True)
    if not tasks:
        raise ValueError("videos must give at least one clip, got none: all were skipped")
    return tasks


def _run(given: argparse.Namespace) -> str:
    from safetensors.torch import save_file

    tasks = _tasks(given)
    device = torch.device(given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    encoder = ImageEncoder(given.encoder, device=device, dtype=DTYPES[given.compute_dtype])
    clips = [[task.name, task.frames.start, *task.size] for task in tasks]
    settings = {
        "encoder": encoder.digest,
        "dtype": given.dtype,
        "compute_dtype": given.compute_dtype,
        "clips": hashlib.sha256(json.dumps(clips).encode()).hexdigest(),
    }
    metadata = {"format": FORMAT, "settings": json.dumps(settings, sort_keys=True)}
    if is_done(given.output, metadata, [task.name for task in tasks]):
        return f"{len(tasks)} first frames were encoded already: {given.output}"
    tensors: dict[str, Tensor] = {}
    for task in tasks:
        first = range(task.frames.start, task.frames.start + 1)
        frame = read_frames(task.info, first, height=task.size[0], width=task.size[1])[:, 0]
        tensors[task.name] = encoder.encode(frame).to(DTYPES[given.dtype]).clone()
        if not tensors[task.name].isfinite().all():
            raise ValueError(f"features of {task.name} are not finite; use --compute-dtype and --dtype bf16 or fp32")
    with atomic_path(given.output) as temporary:
        save_file(tensors, temporary, metadata=metadata)
    return f"{len(tasks)} first frames encoded: {given.output}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Encode first frames of clips into the file train.image_context reads."
    )
    add_clip_arguments(parser)
    parser.add_argument(
        "--encoder", type=Path, required=True, help="local folder of a CLIP vision model, or of a pipeline"
    )
    parser.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of the file")
    parser.add_argument("--compute-dtype", choices=sorted(DTYPES), default="fp32", help="of the encoder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 written, or there already; 2 bad arguments, videos or files."""
    given = _parser().parse_args(argv)
    try:
        if given.output.suffix != ".safetensors":
            raise ValueError(f"--output must end in .safetensors, got {given.output}")
        print(_run(given))
    except (ValueError, OSError) as error:
        print(f"encode_images: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
