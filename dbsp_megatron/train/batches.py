"""Loads the clips of a step as token tensors, with their text features, and draws timesteps and noise for them."""

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
    """Turns sample ids into micro-batches; several threads may, one of them reads at a time."""

    def __init__(self, dataset: ClipSource, encoder: PixelPatchEncoder, context: ContextSource) -> None:
        self._dataset = dataset
        self._encoder = encoder
        self._context = context
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
