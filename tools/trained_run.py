"""The model of a dbsp-train run in one process, with its real clips, as a source of attention inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.attention.module import DualBalancedAttention
from dbsp_megatron.data import DataConfig, PixelPatchEncoder, open_dataset
from dbsp_megatron.infer.pipeline import model_from_state
from dbsp_megatron.masks import DenseMask, MaskMethod, TokenGrid
from dbsp_megatron.models.dit import VideoDiT
from dbsp_megatron.strategy import SequenceParallel, SequenceParallelConfig
from dbsp_megatron.train import flow_matching
from dbsp_megatron.train.batches import clip_loader
from dbsp_megatron.train.checkpoint import open_checkpoint
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.trained_weights import Weights, load_trained
from tools.attention_inputs import Geometry, LayerInputs, Point, Visit


class TrainedRun:
    """The model of a run folder or checkpoint, in one process, and the clips that it was trained on or held out.

    Args:
        path: run folder (its newest good checkpoint) or one checkpoint folder.
        device: where to compute.
        weights: `ema` (falls back to the plain ones where there are none) or `model`.
        precision: `fp32` or `bf16` (autocast).
        data: video files or folders in place of those of training; of latents one folder or pattern.
        block_size: tokens per block; default that of training.
        seed: seed of the noise.
        engine: attention engine.

    Raises:
        ValueError: no intact checkpoint, or data that cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: torch.device,
        weights: Weights = "ema",
        precision: str = "fp32",
        data: Sequence[str] = (),
        block_size: int | None = None,
        seed: int = 0,
        engine: str = "auto",
    ) -> None:
        world = World(device=device)
        checkpoint = open_checkpoint(path, world)
        saved = checkpoint.state["config"]
        self.checkpoint, self.seed, self.device, self.engine = checkpoint, seed, device, engine
        self.config = model_from_state(checkpoint.state)
        settings: dict[str, Any] = {**saved["data"], "patch_size": tuple(saved["data"]["patch_size"])}
        if data and settings["latents"]:
            settings["latents"] = data[0]
        elif data:
            settings["paths"] = list(data)
        self.dataset = open_dataset(DataConfig(**settings))
        self.num_held_out = 0 if data else int(saved["train"]["eval_samples"])
        sizes = sorted(set(self.dataset.sizes))
        if len(sizes) > 1:
            raise ValueError(f"the clips of {path} must have one size here, got {sizes}; name some of one size as data")
        grid = PixelPatchEncoder(self.config.patch_size).grid_for(*sizes[0])
        seqlen = self.config.sequence_text_len + TokenGrid(*grid).num_tokens
        self.geometry = Geometry(
            grid=grid, seqlen=seqlen, block_size=int(saved["sp"]["block_size"]) if block_size is None else block_size
        )
        loop = saved["train"]
        # Runs of before there were image features have no such key.
        self._loader = clip_loader(self.dataset, self.config, loop["context"], loop.get("image_context", ""))
        self._data = [settings["latents"]] if settings["latents"] else list(settings["paths"])
        self.sp = SequenceParallel(
            SequenceParallelConfig(strategy="none", block_size=self.geometry.block_size, engine=engine)
        )
        self.module = VideoDiT(self.config, sp=self.sp).to(device).eval()
        self.weights = load_trained(self.module, checkpoint, world, weights)
        self._autocast = precision == "bf16"
        self._placed: dict[Any, tuple[Tensor, Tensor]] = {}

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return self.config.num_attention_layers

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.config.num_heads

    def default_samples(self, count: int, *, held_out: bool) -> list[int]:
        """Clips spread evenly over the held-out ones, or over those of training (all, where none was held out)."""
        num_train = len(self.dataset) - self.num_held_out
        held_out = held_out and self.num_held_out > 0
        first, total = (num_train, self.num_held_out) if held_out else (0, num_train)
        count = min(count, total)
        return [first + index * total // count for index in range(count)]

    def points(self, samples: Sequence[int], timesteps: Sequence[float]) -> Iterator[Point]:
        """Each clip at each noise level.

        Raises:
            ValueError: a clip that does not exist, or a timestep outside (0, 1].
        """
        for sample in samples:
            if not 0 <= sample < len(self.dataset):
                raise ValueError(f"--samples must be clip ids in 0 .. {len(self.dataset) - 1}, got {sample}")
        for timestep in timesteps:
            if not 0 < timestep <= 1:
                raise ValueError(f"--timesteps must be in (0, 1], got {timestep}: 0 is data, 1 is noise")
        for sample in samples:
            batch = self._loader.load([sample])
            num_tokens, channels = batch.tokens.shape[1:]
            for step, timestep in enumerate(timesteps):
                noise = flow_matching.draw_noise(num_tokens, channels, seed=self.seed, samples=[sample], step=step)
                yield Point(
                    sample=sample,
                    step=step,
                    timestep=timestep,
                    noisy=flow_matching.interpolate(batch.tokens, noise, torch.tensor([timestep])),
                    target=flow_matching.velocity(batch.tokens, noise),
                    context=batch.context,
                    condition=batch.condition,
                    image_context=batch.image_context,
                )

    @torch.no_grad()
    def velocity(
        self,
        point: Point,
        method: MaskMethod | None = None,
        cube: tuple[int, int, int] | None = None,
        visit: Visit | None = None,
    ) -> Tensor:
        """What the model predicts under a mask method.

        Args:
            point: clip and noise level.
            method: default dense.
            cube: cubes by which tokens are ordered at the model input.
            visit: called with the inputs of every attention layer; only with tokens in raster order.

        Returns:
            fp32 [1, N, C] on the CPU, raster order.
        """
        if visit is not None and cube is not None:
            raise ValueError("attention inputs are taken in raster order: visit without a cube")
        positions, video = self._places(cube)
        self.sp.begin_step(point.step)
        grid = self.geometry.tokens(cube)
        tokens = point.noisy if point.condition is None else torch.cat([point.noisy, point.condition], dim=-1)
        contexts = {"context": point.context}
        if point.image_context is not None:
            contexts["image_context"] = point.image_context
        layout = self.sp.layout(self.geometry.seqlen)
        with (
            self.sp.use(layout=layout, mask=method or DenseMask(), grid=grid),
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast),
            visited(self.module, point.step, visit),
        ):
            predicted = self.module(
                tokens[:, video].to(self.device),
                torch.tensor([point.timestep], device=self.device),
                grid=self.geometry.grid,
                positions=positions,
                **{key: None if value is None else value.to(self.device) for key, value in contexts.items()},
            )
        return predicted.float().cpu()[:, video.argsort()]

    def _places(self, cube: tuple[int, int, int] | None) -> tuple[Tensor, Tensor]:
        """Raster place of each token on the device, and index of each video token in the video on the CPU."""
        if cube not in self._placed:
            order = self.geometry.order(cube)
            num_text = self.config.sequence_text_len
            self._placed[cube] = order.to(self.device), order[num_text:] - num_text
        return self._placed[cube]

    def describe(self) -> dict[str, Any]:
        """Facts for reports."""
        return {
            "checkpoint": str(self.checkpoint.path),
            "step": self.checkpoint.step,
            "weights": self.weights,
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "layers": self.num_layers,
            "heads": self.num_heads,
            "data": self._data,
            "clips": len(self.dataset),
            "held_out": self.num_held_out,
            **dataclasses.asdict(self.geometry),
        }


@contextmanager
def visited(module: torch.nn.Module, step: int, visit: Visit | None) -> Iterator[None]:
    """Shows the inputs of every self-attention to `visit` while it is open; the model computes what it always does."""
    with ExitStack() as stack:
        for core in module.modules():
            if visit is None or not isinstance(core, DualBalancedAttention):
                continue

            def hook(core: torch.nn.Module, args: tuple[Any, ...], visit: Visit = visit) -> None:
                q, k, v = (x.detach().transpose(0, 1) for x in args[:3])
                found: Any = core
                visit(LayerInputs(layer=found.layer_index, step=step, q=q, k=k, v=v, scale=found.softmax_scale))

            handle = core.register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        yield
