"""Loads the clips of a step as token tensors, with their text features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dbsp_megatron.data import ClipSource, PixelPatchEncoder
from dbsp_megatron.models.dit import DiTConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Whole clips of one forward pass, before sharding; equal on the ranks of a sequence-parallel group."""

    samples: list[int]
    """Ids of the clips."""
    tokens: Tensor
    """fp32 [B, N, C] on the CPU."""
    grid: tuple[int, int, int]
    """Patches along frames, rows and columns."""
    context: Tensor | None
    """fp32 [B, L, text_dim] on the CPU; None for a model without text."""


class ClipLoader:
    """Turns sample ids into micro-batches."""

    def __init__(self, dataset: ClipSource, encoder: PixelPatchEncoder, context: ContextSource) -> None:
        self._dataset = dataset
        self._encoder = encoder
        self._context = context

    def load(self, samples: Sequence[int]) -> MicroBatch:
        """Read clips and cut them into patches.

        Raises:
            ValueError: a clip cannot be read, or clips differ in size.
        """
        clips = [self._dataset[sample] for sample in samples]
        sizes = sorted({tuple(clip.video.shape[1:]) for clip in clips})
        if len(sizes) > 1:
            raise ValueError(
                f"clips of one micro-batch must have one size, got {sizes} (frames, height, width); "
                "take the samples of a BucketPlan, or set train.micro_batch_size=1"
            )
        tokens, grid = self._encoder.encode(torch.stack([clip.video for clip in clips]))
        context = self._context.for_clips([clip.name for clip in clips])
        return MicroBatch(samples=list(samples), tokens=tokens, grid=grid, context=context)


class ContextSource:
    """Text features by clip, from a safetensors file.

    A tensor named like the clip's file (`bikes.mp4`) is used for its clips, `context` for all others, and zeros, the
    empty text, where there is neither.
    """

    def __init__(self, model: DiTConfig, path: str) -> None:
        self._model = model
        self._tensors: dict[str, Tensor] = {}
        if not path:
            return
        if model.text == "none":
            raise ValueError(f"train.context={path} needs a model with text; remove it or choose another model")
        self._tensors = load_context(path, model)

    def for_clips(self, names: Sequence[str]) -> Tensor | None:
        """Features [B, L, text_dim] of clips by name (`file@frame`).

        Raises:
            ValueError: texts of different lengths are in one micro-batch.
        """
        if self._model.text == "none":
            return None
        empty = torch.zeros(max(1, self._model.text_len), self._model.text_dim or 1)
        default = self._tensors.get("context", empty)
        found = [self._tensors.get(name.rpartition("@")[0], default) for name in names]
        lengths = sorted({len(features) for features in found})
        if len(lengths) > 1:
            raise ValueError(
                f"train.context has texts of lengths {lengths} in one micro-batch; pad them alike when encoding, "
                "or set train.micro_batch_size=1"
            )
        return torch.stack(found)


def load_context(path: str, model: DiTConfig) -> dict[str, Tensor]:
    """Text features of a safetensors file as fp32 [L, text_dim] tensors by name.

    Raises:
        ValueError: the file is missing or unreadable, or a tensor does not fit the model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not Path(path).is_file():
        raise ValueError(f"the text features {path} must be an existing safetensors file")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"the text features {path} are not a readable safetensors file: {error}") from error
    for name, tensor in tensors.items():
        wrong_length = model.has_joint_text and tensor.dim() == 2 and len(tensor) != model.text_len
        if tensor.dim() != 2 or tensor.shape[1] != model.text_dim or len(tensor) < 1 or wrong_length:
            length = model.text_len if model.has_joint_text else "L"
            raise ValueError(
                f"{path}: {name} must be [{length}, {model.text_dim}] for this model, got {list(tensor.shape)}"
            )
    return {name: tensor.float() for name, tensor in tensors.items()}
