"""Encodes captions by a local T5 or UMT5 into the file of text features that `train.context` reads.

Usage:
    python tools/encode_text.py captions.json --encoder Wan2.1-T2V-1.3B-Diffusers --output text.safetensors
    dbsp-train --model wan2_1_1_3b --data.latents latents/ --train.context text.safetensors

Captions are named like the file of their clip (`bikes.mp4`); the name `context` stands for all clips without one of
their own. They come as JSON (an object of captions by name), CSV (columns `name` and `caption`) or text (lines of
`name: caption`).

--padding says what stands behind a caption up to --length: `zeros`, as Wan has it; `tokens`, features of padding tokens
that all tokens attend to, as CogVideoX has it; `none` cuts each caption to its own length. Nothing is fetched; weights
are read from safetensors only.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.observability.atomic_file import atomic_path
from tools.video_vae import digest, model_files

FORMAT = "dbsp_megatron.text.1"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ENCODERS = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Classes of transformers, by the `model_type` of their config."""


def read_captions(path: Path) -> dict[str, str]:
    """Captions by name, runs of white space replaced by a blank.

    Args:
        path: `.json`, `.csv` or `.txt`.

    Raises:
        ValueError: the file cannot be read, or a name is empty, not a text or there twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        pairs = list(_pairs(path, text))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"captions must be a readable UTF-8 file, got {path} ({error})") from error
    captions: dict[str, str] = {}
    for name, caption in pairs:
        if not isinstance(name, str) or not isinstance(caption, str) or not name or name == "__metadata__":
            raise ValueError(f"captions must be texts by name, got {name!r}: {caption!r} in {path}")
        if name in captions:
            raise ValueError(f"captions must have different names, got {name!r} twice in {path}")
        captions[name] = " ".join(caption.split())
    if not captions:
        raise ValueError(f"captions must hold at least one, got none in {path}")
    return captions


def _pairs(path: Path, text: str) -> Iterable[tuple[Any, Any]]:
    if path.suffix == ".json":
        pairs = json.loads(text, object_pairs_hook=list)
        if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
            raise ValueError(f"captions in JSON must be one object of captions by name, got something else in {path}")
        return pairs
    if path.suffix == ".csv":
        rows = csv.DictReader(text.splitlines(keepends=True))
        if not {"name", "caption"} <= set(rows.fieldnames or ()):
            raise ValueError(f"captions in CSV must have the columns name and caption, got {rows.fieldnames} in {path}")
        return [(row["name"], row["caption"]) for row in rows]
    if path.suffix == ".txt":
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        for number, line in lines:
            if ":" not in line:
                raise ValueError(f"captions in text must be `name: caption` lines, got {line!r} at {path}:{number}")
        parts = (line.partition(":") for _, line in lines)
        return [(name.strip(), caption) for name, _, caption in parts]
    raise ValueError(f"captions must be a .json, .csv or .txt file, got {path}")


class TextEncoder:
    """A text encoder of transformers and its tokenizer, from local folders.

    Args:
        folder: of the encoder, or of a pipeline with `text_encoder` and `tokenizer` in it; weights in safetensors.
        tokenizer: folder of the tokenizer; None looks beside, or in, that of the encoder.
        device: where to compute.
        dtype: what to compute in.

    Raises:
        ValueError: a folder does not hold what it should.
    """

    def __init__(self, folder: Path, tokenizer: Path | None, *, device: torch.device, dtype: torch.dtype) -> None:
        if (folder / "text_encoder" / "config.json").is_file():
            folder = folder / "text_encoder"
        kind, files = model_files(folder, tuple(ENCODERS), "model_type", "--encoder")
        places = [tokenizer] if tokenizer else [folder.parent / "tokenizer", folder]
        found = [place for place in places if (place / "tokenizer_config.json").is_file()]
        if not found:
            raise ValueError(f"--tokenizer must be a folder with a tokenizer_config.json, got {places[0]}; name it")
        import transformers

        self._device = device
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(str(found[0]), local_files_only=True)
        module = getattr(transformers, ENCODERS[kind]).from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, dtype=dtype
        )
        self._module = module.to(device).eval().requires_grad_(False)
        tokens = sorted(path for path in found[0].iterdir() if path.is_file() and path not in files)
        self.digest = digest([*files, *tokens])

    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Tokens of each caption, the one that ends it included."""
        return [len(ids) for ids in self._tokenizer(list(captions))["input_ids"]]

    @torch.no_grad()
    def encode(self, captions: Sequence[str], length: int, padding: str) -> list[Tensor]:
        """Features of captions, each as if it were alone.

        Args:
            captions: any number, also none.
            length: most tokens of a caption; the rest is cut.
            padding: `zeros`, `tokens` or `none`.

        Returns:
            [length, channels] each, with `none` [tokens, channels], on the CPU.
        """
        if not captions:
            return []
        batch = self._tokenizer(
            list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).to(self._device)
        mask = None if padding == "tokens" else batch["attention_mask"]
        features: Tensor = self._module(batch["input_ids"], attention_mask=mask).last_hidden_state.cpu()
        if padding == "tokens":
            return list(features)
        counts = batch["attention_mask"].sum(1).tolist()
        if padding == "none":
            return [each[:count] for each, count in zip(features, counts, strict=True)]
        for each, count in zip(features, counts, strict=True):
            each[count:] = 0
        return list(features)


def _batches(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (names[start : start + size] for start in range(0, len(names), size))


def is_done(path: Path, metadata: dict[str, str], names: Iterable[str]) -> bool:
    """Whether a safetensors file is there, whole, with this header and tensors of these names."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return dict(file.metadata() or {}) == metadata and set(file.keys()) == set(names)
    except (OSError, SafetensorError):
        return False


def _run(given: argparse.Namespace) -> str:
    from safetensors.torch import save_file

    captions = read_captions(given.captions)
    device = torch.device(given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    encoder = TextEncoder(given.encoder, given.tokenizer, device=device, dtype=DTYPES[given.compute_dtype])
    settings = {
        "encoder": encoder.digest,
        "length": given.length,
        "padding": given.padding,
        "dtype": given.dtype,
        "compute_dtype": given.compute_dtype,
        # Not themselves: a header holds 100 MB at most.
        "captions": hashlib.sha256(json.dumps(captions, sort_keys=True).encode()).hexdigest(),
    }
    metadata = {"format": FORMAT, "settings": json.dumps(settings, sort_keys=True)}
    if is_done(given.output, metadata, captions):
        return f"{len(captions)} captions were encoded already: {given.output}"
    cut = sum(length > given.length for length in encoder.lengths(list(captions.values())))
    if cut:
        print(f"{cut} captions have more than {given.length} tokens and are cut (--length)", file=sys.stderr)
    tensors: dict[str, Tensor] = {}
    for names in _batches(list(captions), given.batch_size):
        features = encoder.encode([captions[name] for name in names], given.length, given.padding)
        for name, each in zip(names, features, strict=True):
            tensors[name] = each.to(DTYPES[given.dtype]).clone()
            if not tensors[name].isfinite().all():
                raise ValueError(f"features of {name!r} are not finite; use --compute-dtype and --dtype bf16 or fp32")
    with atomic_path(given.output) as temporary:
        save_file(tensors, temporary, metadata=metadata)
    return f"{len(captions)} captions encoded: {given.output}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1; got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Encode captions by a local T5 into the file train.context reads.")
    parser.add_argument("captions", type=Path, help=".json, .csv or .txt of captions by name")
    parser.add_argument("--encoder", type=Path, required=True, help="local folder of a T5 or UMT5, or of a pipeline")
    parser.add_argument("--tokenizer", type=Path, help="its folder (default: beside or in that of the encoder)")
    parser.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    parser.add_argument(
        "--length", type=_positive, default=512, help="tokens of a caption (512 for Wan, 226 CogVideoX)"
    )
    parser.add_argument("--padding", choices=("zeros", "tokens", "none"), default="zeros", help="behind a caption")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of the file")
    parser.add_argument("--compute-dtype", choices=sorted(DTYPES), default="bf16", help="of the encoder")
    parser.add_argument("--batch-size", type=_positive, default=8, help="captions at a time")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 written, or there already; 2 bad arguments or files."""
    given = _parser().parse_args(argv)
    try:
        if given.output.suffix != ".safetensors":
            raise ValueError(f"--output must end in .safetensors, got {given.output}")
        print(_run(given))
    except (ValueError, OSError) as error:
        print(f"encode_text: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
