"""PipelineConfig: everything that determines what a pipeline of diffusers makes under sequence parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from dbsp_megatron.config.resolve import ResolvedMesh, ResolvedRun, resolve_mesh
from dbsp_megatron.config.sections import require
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.models.diffusers.guidance import NUM_BRANCHES
from dbsp_megatron.models.diffusers.sizes import PipelineSizes
from dbsp_megatron.strategy import SequenceParallelConfig


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Prompts and settings of a pipeline; what is left at 0, empty or null is the pipeline's own default."""

    prompt: str = ""
    """What to make."""
    prompts: str = ""
    """File of prompts in place of one: a text on each line, or JSON lines with prompt and, if wanted, negative_prompt,
    seed, image and name."""
    negative_prompt: str = ""
    """What to avoid; needs guidance. For all prompts that name none."""
    image: str = ""
    """Picture to start from, for pipelines that take one. For all prompts that name none."""
    height: int = 0
    """Pixels."""
    width: int = 0
    """Pixels."""
    num_frames: int = 0
    """Frames of a video."""
    steps: int = 0
    """Denoising steps."""
    guidance_scale: float | None = None
    """Classifier-free guidance; for models that learnt it as an input (Flux, HunyuanVideo) that input."""
    guidance_scale_2: float | None = None
    """The same for the second expert of Wan 2.2."""
    true_cfg_scale: float | None = None
    """Classifier-free guidance of models whose guidance_scale is an input; above 1 it takes a negative prompt."""
    max_sequence_length: int = 0
    """Text tokens."""
    seed: int = 0
    """Seed of the noise, which is drawn on the CPU: the same on any number of ranks. For all prompts that name none;
    -1 draws one."""
    fps: int = 0
    """Frames per second of the written file; 0 takes the model's."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Weights and activations."""
    vae_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """The same of the VAE; auto is fp32 for Wan, whose VAE needs it, else as dtype."""
    vae_tiling: bool = False
    """Decode in tiles: less memory, slower."""
    lora: str = ""
    """Adapter to load, a safetensors file; needs peft."""
    lora_scale: float = 1.0
    """Strength of the adapter."""
    compare_dense: bool = False
    """Make everything a second time with dense attention, and write PSNR, SSIM and a picture of both."""
    reuse_report: bool = False
    """Replay plan reuse by several rules on the counts of all steps: hit rates, plans made anew, regret."""
    cfg_parallel: bool = False
    """Each branch of classifier-free guidance on one half of the ranks."""
    overwrite: bool = False
    """Make outputs anew that exist already."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    timeout_s: float = 1800
    """Seconds after which a waiting collective fails."""

    def __post_init__(self) -> None:
        for key in ("height", "width", "num_frames", "steps", "max_sequence_length", "fps"):
            require(getattr(self, key) >= 0, f"generate.{key}", ">= 0", getattr(self, key), "0 takes the default")
        for key in ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "lora_scale"):
            value = getattr(self, key)
            require(value is None or math.isfinite(value), f"generate.{key}", "finite", value)
        require(self.seed >= -1, "generate.seed", ">= 0, or -1 for a random one", self.seed)
        require(self.timeout_s > 0, "generate.timeout_s", "> 0", self.timeout_s)
        if self.lora_scale != 1 and not self.lora:
            raise ValueError(f"generate.lora_scale={self.lora_scale} needs generate.lora; name the adapter's file")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A pipeline of diffusers under sequence parallelism."""

    pipeline: str = ""
    """Folder of a pipeline as published: model_index.json and a folder for each component. Nothing is downloaded."""
    output: str = "outputs"
    """Folder for videos or images."""
    sp: SequenceParallelConfig = field(default_factory=SequenceParallelConfig)
    """Sequence parallelism."""
    mask: MaskConfig = field(default_factory=lambda: MaskConfig(method="dense"))
    """Which attention blocks are computed; dense unless a method is named."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """Prompts and settings."""

    def __post_init__(self) -> None:
        if not self.pipeline:
            raise ValueError("pipeline must name a folder with a model_index.json, got none; e.g. --pipeline Wan2.1")
        if bool(self.generate.prompt) == bool(self.generate.prompts):
            given = "both" if self.generate.prompt else "neither"
            raise ValueError(
                f"exactly one of generate.prompt and generate.prompts must be given, got {given}; "
                "use --prompt 'a cat' or --prompts FILE"
            )
        require(bool(self.output), "output", "the name of a folder", self.output)
        if self.mask.cube is not None:
            raise ValueError(
                f"mask.cube={list(self.mask.cube)} orders the tokens of this project's own models, which pipelines do "
                "not do; remove it"
            )
        if self.generate.compare_dense and self.is_dense:
            raise ValueError(
                "generate.compare_dense=true compares a sparse mask with a dense one, got mask.method=dense; "
                "choose a method, e.g. --mask sparge"
            )
        check_reuse_report("generate.reuse_report", self.generate.reuse_report, self.sp)

    @property
    def is_dense(self) -> bool:
        """Whether all blocks are computed."""
        return self.mask.method == "dense"

    def validate(
        self, world_size: int, sizes: PipelineSizes, *, num_layers: int, num_parameters: int, num_prompts: int
    ) -> ResolvedRun:
        """Check against a pipeline, whose defaults are filled in already, and a number of processes.

        Args:
            world_size: number of processes.
            sizes: of the pipeline.
            num_layers: of all its transformers.
            num_parameters: of all its transformers.
            num_prompts: outputs to make.

        Raises:
            ValueError: sizes or degrees do not fit.
        """
        asked = self.generate
        grid = sizes.grid_for(asked.num_frames or 1, asked.height, asked.width)
        mesh = self._mesh(world_size, sizes.num_heads)
        self.mask.check_model(sizes.num_heads, num_layers)
        return ResolvedRun(
            mesh=mesh,
            strategy=self.sp.strategy,
            model=self.pipeline,
            num_parameters=num_parameters,
            num_heads=sizes.num_heads,
            num_layers=num_layers,
            grid=grid,
            text_tokens=asked.max_sequence_length if sizes.joint_text else 0,
            block_size=self.sp.block_size,
            batch=f"{num_prompts} prompt{'s' if num_prompts != 1 else ''}, {mesh.dp_size} at a time",
            steps=asked.steps,
        )

    def _mesh(self, world_size: int, num_heads: int) -> ResolvedMesh:
        if not self.generate.cfg_parallel:
            return resolve_mesh(self.sp, world_size, num_heads)
        if world_size % NUM_BRANCHES:
            raise ValueError(
                "generate.cfg_parallel=true takes an even number of processes, one half for each branch of guidance, "
                f"got {world_size}; start one more or less, or leave it out"
            )
        try:
            half = resolve_mesh(self.sp, world_size // NUM_BRANCHES, num_heads)
        except ValueError as error:
            raise ValueError(
                f"generate.cfg_parallel=true gives a branch half of {world_size} processes: {error}"
            ) from None
        return replace(half, world_size=world_size, branches=NUM_BRANCHES)


def check_reuse_report(key: str, wanted: bool, sp: SequenceParallelConfig) -> None:
    """Refuse a report on plan reuse where no plans are made, or where their mesh changes.

    Raises:
        ValueError: the strategy is not dbsp.
    """
    if wanted and sp.strategy != "dbsp":
        raise ValueError(
            f"{key}=true replays plans on one mesh and needs sp.strategy=dbsp, got {sp.strategy}; "
            "use --sp-strategy dbsp, or leave the report out"
        )


def with_all_counts(sp: SequenceParallelConfig) -> SequenceParallelConfig:
    """The section for a run that reports on plan reuse: counts of a step are on the host when it ends."""
    return replace(sp, plan_counts="current")
