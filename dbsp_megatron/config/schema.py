"""TrainConfig and InferConfig: compose the sections and check what needs two of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dbsp_megatron.config.generate import check_reuse_report
from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.resolve import ResolvedRun, count_parameters, resolve_mesh
from dbsp_megatron.config.sections import LoopConfig, OptimConfig, RunConfig, SampleConfig
from dbsp_megatron.data import DataConfig, PixelPatchEncoder
from dbsp_megatron.data.condition import pixel_condition_channels
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.models.axial.config import AxialConfig
from dbsp_megatron.models.dit.config import DiTConfig, load_model_config
from dbsp_megatron.models.dit.lora import LoraConfig
from dbsp_megatron.observability import WandbConfig
from dbsp_megatron.strategy import SequenceParallelConfig

_AXIAL_METHODS = ("dense", "topp", "topk", "sparge")
"""Methods that read nothing but one sequence's queries and keys."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a training run."""

    model: str = "dit_debug"
    """Name of a file in model_configs, or the path of a YAML file."""
    data: DataConfig = field(default_factory=DataConfig)
    """Clips to train on."""
    sp: SequenceParallelConfig = field(default_factory=SequenceParallelConfig)
    """Sequence parallelism."""
    mask: MaskConfig = field(default_factory=MaskConfig)
    """Which attention blocks are computed."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and learning rate."""
    train: LoopConfig = field(default_factory=LoopConfig)
    """The training loop."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How weights and optimizer state are split."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters in place of training all weights."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run folder."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""

    def __post_init__(self) -> None:
        if self.optim.warmup_steps > self.train.steps:
            raise ValueError(
                f"optim.warmup_steps must be at most train.steps={self.train.steps}, got {self.optim.warmup_steps}"
            )
        self.parallel.check_engine(self.train.engine)
        if self.parallel.sequence_parallel and self.lora.rank:
            raise ValueError(
                f"parallel.sequence_parallel=true does not go with lora.rank={self.lora.rank}; set it to false"
            )
        by_head = self.mask.setting_by_head
        if self.parallel.tensor_parallel_size > 1 and by_head:
            raise ValueError(
                f"mask.method={self.mask.method} tells heads of the whole model apart (mask.{by_head}), of which a "
                "tensor-parallel rank has a part: it needs parallel.tensor_parallel_size=1, got "
                f"{self.parallel.tensor_parallel_size}"
            )

    def load_model(self) -> DiTConfig:
        """The description that `model` names, with the coarse branch that `train.coarse_branch` asks for.

        Raises:
            ValueError: there is no such model.
        """
        model, wanted = load_model_config(self.model), self.train.coarse_branch
        if wanted == "auto":
            return replace(model, coarse_branch=model.coarse_branch or self.mask.method == "vsa")
        return replace(model, coarse_branch=wanted == "always")

    def validate(self, world_size: int) -> ResolvedRun:
        """Check the sections against one another, the model and a number of processes.

        Raises:
            ValueError: they do not fit.
        """
        model = self.load_model()
        grid = token_grid(model, self.model, self.data)
        check_image(model, self.model, "train.image_context", self.train.image_context)
        check_strategy(model, self.model, self.sp, self.mask)
        mesh = resolve_mesh(self.sp, world_size, model.num_heads, self.parallel)
        check_split(model, self.model, self.parallel)
        self.mask.check_model(model.num_heads, model.num_attention_layers)
        if self.parallel.data_parallel == "fsdp" and mesh.dp_size * mesh.sp_size == 1:
            raise ValueError(
                "parallel.data_parallel=fsdp splits weights over data and sequence ranks, of which it needs at least "
                f"two, got 1 of {world_size} processes; use parallel.data_parallel=ddp, or start more processes"
            )
        unit = mesh.dp_size * self.train.micro_batch_size
        if self.train.global_batch_size % unit:
            raise ValueError(
                f"train.global_batch_size must be a multiple of the data-parallel size {mesh.dp_size} times "
                f"train.micro_batch_size={self.train.micro_batch_size}, got {self.train.global_batch_size}; "
                f"use {-(-self.train.global_batch_size // unit) * unit}, or more sequence-parallel ranks"
            )
        rounds, pp = self.train.global_batch_size // unit, self.parallel.pipeline_parallel_size
        if self.parallel.virtual_pipeline_parallel_size > 1 and rounds % pp:
            raise ValueError(
                f"train.global_batch_size must give each data-parallel rank a multiple of "
                f"parallel.pipeline_parallel_size={pp} micro-batches with parallel.virtual_pipeline_parallel_size > 1, "
                f"got {self.train.global_batch_size}, which gives {rounds}; use {unit * pp * -(-rounds // pp)}, or "
                "parallel.virtual_pipeline_parallel_size=1"
            )
        return ResolvedRun(
            mesh=mesh,
            strategy=self.sp.strategy,
            model=self.model,
            num_parameters=count_parameters(model, self.lora),
            num_heads=model.num_heads,
            num_layers=model.num_attention_layers,
            grid=grid,
            text_tokens=model.sequence_text_len,
            block_size=self.sp.block_size,
            batch=f"{self.train.global_batch_size} clips per step = {mesh.dp_size} x "
            f"{self.train.global_batch_size // unit} micro-batches of {self.train.micro_batch_size}",
            steps=self.train.steps,
            compile=self.train.compile,
        )


@dataclass(frozen=True, kw_only=True)
class InferConfig:
    """Everything that determines sampled videos, next to a trained run."""

    checkpoint: str = ""
    """Run folder (its newest good checkpoint) or one checkpoint folder."""
    output: str = ""
    """Folder for the videos; empty means `samples` in the run folder."""
    sp: SequenceParallelConfig = field(default_factory=SequenceParallelConfig)
    """Sequence parallelism. On the command line the strategy and block size of training are the default."""
    mask: MaskConfig = field(default_factory=MaskConfig)
    """Which attention blocks are computed. On the command line the mask of training is the default."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Sampling."""

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError(
                "checkpoint must name a run or checkpoint folder; e.g. --checkpoint runs/demo "
                "(or name a pipeline of diffusers: --pipeline FOLDER)"
            )
        check_reuse_report("sample.reuse_report", self.sample.reuse_report, self.sp)

    def validate(self, world_size: int, model: DiTConfig, grid: tuple[int, int, int]) -> ResolvedRun:
        """Check against the model of the checkpoint and a number of processes.

        Raises:
            ValueError: the degrees do not fit, or guidance is asked of a model without text.
        """
        sample = self.sample
        for key, unset in (("guidance_scale", 1), ("context", "")):
            value = getattr(sample, key)
            if model.text == "none" and value != unset:
                raise ValueError(f"sample.{key}={value} needs a model with text; this one has none: remove the setting")
        check_image(model, f"checkpoint {self.checkpoint}", "sample.image_context", sample.image_context)
        check_first_frame(sample, model)
        check_strategy(model, self.checkpoint, self.sp, self.mask)
        mesh = resolve_mesh(self.sp, world_size, model.num_heads)
        self.mask.check_model(model.num_heads, model.num_attention_layers)
        return ResolvedRun(
            mesh=mesh,
            strategy=self.sp.strategy,
            model=self.checkpoint,
            num_parameters=count_parameters(model),
            num_heads=model.num_heads,
            num_layers=model.num_attention_layers,
            grid=grid,
            text_tokens=model.sequence_text_len,
            block_size=self.sp.block_size,
            batch=f"{sample.num_samples} videos, {mesh.dp_size} at a time",
            steps=sample.steps,
        )


def token_grid(model: DiTConfig, name: str, data: DataConfig) -> tuple[int, int, int]:
    """Patches along frames, rows and columns of a clip; of the largest one if latents have several sizes.

    Args:
        model: the model description.
        name: of the model, for messages.
        data: the clips; of latents one header is read, that of the largest file.

    Raises:
        ValueError: the model does not take and predict the patches of the data, or there are no latents.
    """
    kind, shape = "pixels", (3, data.num_frames, data.height, data.width)
    conditions = pixel_condition_channels(shape[0])
    if data.latents:
        from dbsp_megatron.data.latents import largest_latents

        largest = largest_latents(data.latents)
        kind, shape, conditions = "latents", largest.shape, tuple({0, largest.condition_channels})
    if shape[0] not in (model.in_channels, model.predicted_channels):
        remedy = "choose a model for them"
        if not data.latents:
            remedy += ", or give it latents: data.latents names the files of tools/encode_videos.py"
        elif model.in_channels == 3:
            remedy += ", or give it videos: leave out data.latents"
        raise ValueError(
            f"model={name} takes {model.in_channels} channels, the {kind} of the data have {shape[0]}; {remedy}"
        )
    if model.predicted_channels != shape[0]:
        raise ValueError(
            f"model={name} must predict the {shape[0]} channels of the {kind}, got {model.predicted_channels}; flow "
            "matching trains the velocity of all of them"
        )
    if model.in_channels - shape[0] not in conditions:
        found = f"have {max(conditions)} of a condition; encode them by tools/encode_videos.py --first-frame"
        if not data.latents:
            found = (
                f"give {' or '.join(map(str, conditions[1:]))} of their first frame (4 with a mask); see data.latents"
            )
        raise ValueError(
            f"model={name} takes {model.in_channels - shape[0]} channels beside the {shape[0]} noisy ones, the {kind} "
            f"of the data {found}, or choose another model"
        )
    if tuple(model.patch_size) != tuple(data.patch_size):
        raise ValueError(
            f"data.patch_size must be the patch size {list(model.patch_size)} of model={name}, "
            f"got {list(data.patch_size)}; set data.patch_size={list(model.patch_size)}"
        )
    return PixelPatchEncoder(data.patch_size, shape[0]).grid_for(*shape[1:])


def check_image(model: DiTConfig, name: str, key: str, path: str) -> None:
    """Refuse a model without the image features that it attends to, and features that no layer would read.

    Args:
        model: the model description.
        name: of the model, for messages.
        key: of the setting that names the features.
        path: its value.

    Raises:
        ValueError: see above.
    """
    if model.image_dim is not None and not path:
        raise ValueError(
            f"{key} must name a file of image features: model={name} attends to those of each clip's first frame "
            f"(image_dim={model.image_dim}), got none; make it by tools/encode_images.py"
        )
    if model.image_dim is None and path:
        raise ValueError(f"{key}={path} needs a model with image_dim; model={name} has none: remove the setting")


def check_first_frame(sample: SampleConfig, model: DiTConfig) -> None:
    """Refuse a model of image to video without a first frame, and a first frame that no model would be given.

    Args:
        sample: what to sample.
        model: the model description.

    Raises:
        ValueError: see above.
    """
    if model.condition_channels and not sample.first_frame:
        raise ValueError(
            "sample.first_frame must name what to start from, got nothing: this model is given "
            f"{model.condition_channels} channels of a first frame"
        )
    if sample.first_frame and not model.condition_channels:
        raise ValueError(
            f"sample.first_frame={sample.first_frame} needs a model of image to video, this one takes no first frame: "
            "remove the setting"
        )


def check_strategy(model: DiTConfig, name: str, sp: SequenceParallelConfig, mask: MaskConfig) -> None:
    """Refuse a strategy or mask that the model's attention does not have.

    Args:
        model: the model description.
        name: of the model, for messages.
        sp: sequence parallelism.
        mask: which attention blocks are computed.

    Raises:
        ValueError: see above.
    """
    if not isinstance(model, AxialConfig):
        if sp.strategy == "dsp":
            raise ValueError(
                f"sp.strategy=dsp needs a model that attends along one dim at a time (attention_dims), model={name} "
                "attends to whole videos: use sp.strategy=dbsp"
            )
        return
    if sp.strategy not in ("dsp", "none"):
        raise ValueError(
            f"sp.strategy={sp.strategy} splits one sequence, model={name} attends along {', '.join(model.grid_dims)} "
            "in turn: use sp.strategy=dsp, or none on one rank"
        )
    if mask.method not in _AXIAL_METHODS or mask.cube is not None:
        raise ValueError(
            f"mask.method={mask.method} with mask.cube={mask.cube} is for attention to whole videos, model={name} "
            f"attends along {', '.join(model.grid_dims)} in turn: use one of {', '.join(_AXIAL_METHODS)}, and no cube"
        )


def check_split(model: DiTConfig, name: str, parallel: ParallelConfig) -> None:
    """Refuse tensor- and pipeline-parallel sizes that the model cannot be cut into.

    Raises:
        ValueError: a size does not divide what it splits.
    """
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if isinstance(model, AxialConfig) and pp > 1:
        raise ValueError(
            f"parallel.pipeline_parallel_size={pp} must be 1 with model={name}, whose layers along dims are all "
            "on every rank; use parallel.tensor_parallel_size to split them"
        )
    if parallel.sequence_parallel and (model.text == "dual_stream" or model.coarse_branch):
        raise ValueError(
            f"parallel.sequence_parallel=true does not go with model={name}, which has "
            f"{'a coarse branch' if model.coarse_branch else 'text: dual_stream'}; set it to false"
        )
    for what, value in (
        ("num_kv_heads", model.kv_heads),
        ("ffn_hidden_size", model.ffn_channels),
        ("hidden_size", model.hidden_size),
    ):
        if value % tp:
            raise ValueError(
                f"parallel.tensor_parallel_size={tp} must divide {what}={value} of model={name}; use a smaller size"
            )
    vp = parallel.virtual_pipeline_parallel_size
    if model.num_attention_layers % (pp * vp):
        virtual = f" * parallel.virtual_pipeline_parallel_size={vp}" if vp > 1 else ""
        raise ValueError(
            f"parallel.pipeline_parallel_size={pp}{virtual} must divide the {model.num_attention_layers} layers of "
            f"model={name}; use a smaller size"
        )
