"""Loads the clips of a step as token tensors, with what the model is given of them, and draws timesteps and noise."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dbsp_megatron.config.schema import TrainConfig
from dbsp_megatron.config.sections import LoopConfig
from dbsp_megatron.data import BatchPlan, BucketPlan, Clip, ClipSource, PixelPatchEncoder
from dbsp_megatron.data.condition import condition_tokens, pixel_condition
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.train import flow_matching
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.mesh import Mesh


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
    condition: Tensor | None = None
    """fp32 [B, N, K] on the CPU: numbers of the first frame that follow those of `tokens` at the model's input, without
    noise; None for a model that takes none."""
    image_context: Tensor | None = None
    """fp32 [B, L, image_dim] on the CPU; None for a model without an image."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnBatch:
    """A micro-batch with what a step draws for it."""

    clips: MicroBatch
    """The clips."""
    timesteps: Tensor
    """fp32 [B] on the CPU."""
    noise: Tensor
    """fp32 [B, N, C] on the CPU."""


class StepBatches:
    """Micro-batches of one data-parallel rank, by step: pure functions of seed, step and sample ids.

    Args:
        loader: reads clips.
        plan: the samples of each step.
        loop: seed, size of a micro-batch, distribution of timesteps.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
    """

    def __init__(
        self, loader: ClipLoader, plan: BatchPlan | BucketPlan, loop: LoopConfig, *, dp_rank: int, dp_size: int
    ) -> None:
        self._loader, self._plan, self._loop = loader, plan, loop
        self._dp_rank, self._dp_size = dp_rank, dp_size

    def load(self, step: int) -> list[DrawnBatch]:
        """All micro-batches of a 0-based step.

        Raises:
            ValueError: as `ClipLoader.load`.
        """
        cut = self._plan.slice_for(step, self._dp_rank, self._dp_size, self._loop.micro_batch_size)
        return [self.draw(self._loader.load(samples), step) for samples in cut]

    def draw(self, clips: MicroBatch, step: int) -> DrawnBatch:
        """A micro-batch with the timesteps and noise of a 0-based step."""
        loop = self._loop
        timesteps = flow_matching.draw_timesteps(
            seed=loop.seed,
            samples=clips.samples,
            step=step,
            sampling=loop.timestep_sampling,
            shift=loop.timestep_shift,
            logit_mean=loop.logit_mean,
            logit_std=loop.logit_std,
            mode_scale=loop.mode_scale,
        )
        num_tokens, channels = clips.tokens.shape[1:]
        noise = flow_matching.draw_noise(num_tokens, channels, seed=loop.seed, samples=clips.samples, step=step)
        return DrawnBatch(clips=clips, timesteps=timesteps, noise=noise)


class ClipLoader:
    """Turns sample ids into micro-batches; several threads may, one of them reads at a time.

    Args:
        dataset: the clips.
        encoder: cuts them into tokens.
        context: text features.
        images: image features; None for a model without an image.
        condition_channels: of the model, beside those of a clip: its condition, or else one made of its first frame.
    """

    def __init__(
        self,
        dataset: ClipSource,
        encoder: PixelPatchEncoder,
        context: ContextSource,
        *,
        images: ImageFeatures | None = None,
        condition_channels: int = 0,
    ) -> None:
        self._dataset = dataset
        self._encoder = encoder
        self._context = context
        self._images = images
        self._condition_channels = condition_channels
        # Datasets need not be safe for several threads.
        self._reading = threading.Lock()

    def _read(self, sample: int) -> Clip:
        with self._reading:
            return self._dataset[sample]

    def load(self, samples: Sequence[int]) -> MicroBatch:
        """Read clips and cut them into patches.

        Raises:
            ValueError: a clip cannot be read, or clips differ in size.
        """
        clips = [self._read(sample) for sample in samples]
        sizes = sorted({tuple(clip.video.shape[1:]) for clip in clips})
        if len(sizes) > 1:
            raise ValueError(
                f"clips of one micro-batch must have one size, got {sizes} (frames, height, width); "
                "take the samples of a BucketPlan, or set train.micro_batch_size=1"
            )
        tokens, grid = self._encoder.encode(torch.stack([clip.video for clip in clips]))
        names = [clip.name for clip in clips]
        return MicroBatch(
            samples=list(samples),
            tokens=tokens,
            grid=grid,
            context=self._context.for_clips(names),
            condition=self._condition(clips),
            image_context=None if self._images is None else self._images.for_clips(names),
        )

    def _condition(self, clips: Sequence[Clip]) -> Tensor | None:
        if not self._condition_channels:
            return None
        given = [
            pixel_condition(clip.video, self._condition_channels) if clip.condition is None else clip.condition
            for clip in clips
        ]
        return condition_tokens(torch.stack(given), self._encoder.patch_size)


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


class ImageFeatures:
    """Features of an image by clip, from a safetensors file that is read clip by clip.

    Args:
        model: what attends to them.
        path: the file.
        names: of all clips that will be asked for; None for all that the file has.

    Raises:
        ValueError: the file is missing or unreadable, lacks a clip, or a tensor does not fit the model.
    """

    def __init__(self, model: DiTConfig, path: str, names: Sequence[str] | None) -> None:
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise ValueError(f"the image features {path} must be an existing safetensors file")
        try:
            self._file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"the image features {path} are not a readable safetensors file: {error}") from error
        found = set(self._file.keys())
        self.names = names = sorted(found) if names is None else list(names)
        missing = [name for name in names if name not in found]
        if missing:
            raise ValueError(
                f"{path} must have image features of every clip, got none for {len(missing)} of {len(names)}, the "
                f"first {missing[0]}; make them by tools/encode_images.py with the frames of these clips"
            )
        length: int | None = None
        for name in names:
            shape = self._file.get_slice(name).get_shape()
            if len(shape) != 2 or shape[1] != model.image_dim or shape[0] < 1 or length not in (None, shape[0]):
                raise ValueError(
                    f"{path}: {name} must be [{length or 'L'}, {model.image_dim}] for this model, got {list(shape)}"
                )
            length = shape[0]

    def for_clips(self, names: Sequence[str]) -> Tensor:
        """Features fp32 [B, L, image_dim] of clips by name, on the CPU."""
        return torch.stack([self._file.get_tensor(name).float() for name in names])


def clip_loader(dataset: ClipSource, model: DiTConfig, context: str, image_context: str) -> ClipLoader:
    """A loader of all that a model is given.

    Args:
        dataset: the clips.
        model: the model.
        context: file of text features, or empty.
        image_context: file of image features; empty for a model without an image.

    Raises:
        ValueError: a file cannot be used.
    """
    return ClipLoader(
        dataset,
        PixelPatchEncoder(model.patch_size, dataset.channels),
        ContextSource(model, context),
        images=None if model.image_dim is None else ImageFeatures(model, image_context, dataset.names),
        condition_channels=model.condition_channels,
    )


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


def count_training_clips(dataset: ClipSource, config: TrainConfig, world: World, mesh: Mesh) -> int:
    """Number of clips that are not held out for evaluation; collective.

    Raises:
        ValueError: on every rank: ranks have different clips, none is left, or sizes differ in a pipeline.
    """
    if len(set(world.gather(dataset.digest))) > 1:
        raise ValueError("data.paths holds different clips on different ranks; give all machines the same files")
    num_train = len(dataset) - config.train.eval_samples
    if num_train < 1:
        raise ValueError(
            f"train.eval_samples={config.train.eval_samples} leaves no clip to train on; data.paths holds "
            f"{len(dataset)} clips"
        )
    sizes = sorted(set(dataset.sizes))
    if mesh.pp_size > 1 and len(sizes) > 1:
        raise ValueError(
            f"parallel.pipeline_parallel_size={mesh.pp_size} has micro-batches under way at once and needs "
            f"clips of one size, got {sizes}; use clips of one size, or parallel.pipeline_parallel_size=1"
        )
    return num_train
