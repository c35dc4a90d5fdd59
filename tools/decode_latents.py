"""Decodes files of latents by a local VAE of diffusers into mp4 files: to look at what was encoded.

Usage: python tools/decode_latents.py latents/ --vae Wan2.1-T2V-1.3B-Diffusers --output decoded/ [--limit 4]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.data.latents import LatentError, LatentInfo, find_latents, read_info, read_latents
from dbsp_megatron.infer.video_file import write_mp4
from tools.encode_videos import DTYPES
from tools.video_vae import VideoVae, load_vae


def check_origin(info: LatentInfo, vae: VideoVae) -> None:
    """Refuse latents that another VAE made, or that were normalised otherwise: they would decode to noise.

    Raises:
        LatentError: they are.
    """
    made_by = info.settings.get("vae")
    for key, value in vae.identity.items():
        found = made_by.get(key) if isinstance(made_by, dict) else None
        if found != value:
            raise LatentError(info.path, f"was made by a VAE of another {key} ({found}); give that one as --vae")


def _run(given: argparse.Namespace) -> str:
    infos = [read_info(path) for path in find_latents(given.latents)[: given.limit]]
    device = torch.device(given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    vae = load_vae(given.vae, device=device, dtype=DTYPES[given.compute_dtype])
    for info in infos:
        check_origin(info, vae)
    for info in infos:
        path = given.output / f"{info.name}.mp4"
        write_mp4(vae.decode(read_latents(info)), path, given.fps)
        print(path, file=sys.stderr, flush=True)
    return f"{len(infos)} clips decoded: {given.output}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Decode files of latents by a local VAE into mp4 files.")
    parser.add_argument("latents", help="folder, glob pattern or file, as data.latents")
    parser.add_argument("--vae", type=Path, required=True, help="local folder of the VAE, or of its pipeline")
    parser.add_argument("--output", type=Path, required=True, help="folder for the videos")
    parser.add_argument("--limit", type=int, help="decode the first so many (default: all)")
    parser.add_argument("--fps", type=int, default=16, help="frames per second of the videos")
    parser.add_argument("--compute-dtype", choices=sorted(DTYPES), default="fp32", help="of the VAE")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 written; 2 bad arguments or files."""
    given = _parser().parse_args(argv)
    try:
        print(_run(given))
    except (ValueError, OSError) as error:
        print(f"decode_latents: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
