"""Sections of the configuration that no lower layer owns: optimizer, training loop, run folder, sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dbsp_megatron.config.parallel import EngineName


def require(condition: bool, key: str, rule: str, value: object, remedy: str = "") -> None:
    """Raise ValueError, with key, rule, value and remedy, unless a condition holds."""
    if not condition:
        raise ValueError(f"{key} must be {rule}, got {value!r}" + (f"; {remedy}" if remedy else ""))


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Optimizer; sgd is plain gradient descent, for tests of gradient scale."""
    lr: float = 1e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of AdamW's mean."""
    beta2: float = 0.95
    """Decay of AdamW's variance."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; vectors are not decayed."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after warm-up."""
    min_lr_ratio: float = 0.1
    """End of the cosine, as a fraction of lr."""

    def __post_init__(self) -> None:
        require(self.lr > 0 and math.isfinite(self.lr), "optim.lr", "a positive number", self.lr)
        require(0 <= self.beta1 < 1, "optim.beta1", "in [0, 1)", self.beta1)
        require(0 <= self.beta2 < 1, "optim.beta2", "in [0, 1)", self.beta2)
        require(self.eps > 0, "optim.eps", "> 0", self.eps)
        require(self.weight_decay >= 0, "optim.weight_decay", ">= 0", self.weight_decay)
        require(self.warmup_steps >= 0, "optim.warmup_steps", ">= 0", self.warmup_steps)
        require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", "in [0, 1]", self.min_lr_ratio)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The training loop."""

    steps: int = 1000
    """Optimizer steps of the whole run, resumed parts included."""
    global_batch_size: int = 1
    """Clips per optimizer step, over all ranks; a multiple of the data-parallel size."""
    micro_batch_size: int = 1
    """Clips per forward pass; the rest of a rank's share is accumulated."""
    seed: int = 0
    """Seed of weights, data order, noise and timesteps; -1 draws one, the same on all ranks."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes under autocast; weights, gradients and optimizer stay in fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA if every local rank gets a device."""
    grad_clip: float = 1.0
    """Limit of the global gradient norm; 0 only measures it."""
    ema_decay: float = 0.0
    """Decay of the averaged weights that are used for sampling; 0 keeps none."""
    recompute: bool | Literal["selective", "full"] = False
    """Recompute activations in the backward pass instead of storing them: `full` (or true) everything, `selective` all
    but the attention of tokens, which takes most of the time of a long sequence and little memory."""
    compile: bool = False
    """Compile norms, modulation and rotary embedding of layers with torch.compile: less time and less memory for
    activations, after about a minute at the start; attention and matrix products stay as they are."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """Distribution of training timesteps: flat, sigmoid of a normal, or SD3's mode sampling."""
    logit_mean: float = 0.0
    """Mean of the normal of logit_normal; above 0 for more noise."""
    logit_std: float = 1.0
    """Standard deviation of the normal of logit_normal."""
    mode_scale: float = 1.29
    """How much mode sampling prefers the middle, in [-1, 1.75]."""
    timestep_shift: float = 1.0
    """Moves timesteps towards noise; above 1 for long sequences, 1 for none."""
    loss_weighting: Literal["none", "min_snr", "cosmap"] = "none"
    """Weight of the squared velocity error by timestep."""
    min_snr_gamma: float = 5.0
    """Largest signal-to-noise ratio that counts, with loss_weighting=min_snr."""
    coarse_branch: Literal["auto", "always", "never"] = "auto"
    """Whether the model has VSA's coarse branch (attention of block means through learned gates, without effect at
    first); auto gives it to mask.method=vsa, and where the model file has it."""
    context: str = ""
    """Safetensors file of text features [L, text_dim] for models with text: named like a clip's file, or `context` for
    all; empty trains without text (zeros)."""
    image_context: str = ""
    """Safetensors file of image features [L, image_dim], named like the clip (`bikes.mp4@16`), for models that attend
    to an image (image_dim): tools/encode_images.py."""
    checkpoint_every: int = 500
    """Steps between checkpoints; 0 writes one at the end only."""
    keep_last: int = 2
    """Checkpoints to keep; 0 writes none, for measurements: such a run cannot go on after its end."""
    checkpoint_format: Literal["native", "torch_dist"] = "native"
    """Format to save in: safetensors, or that of megatron-core's `dist_checkpointing` (engine megatron only). Runs go
    on from either, on any engine."""
    async_checkpoint: bool = False
    """Copy the state to host memory and write it while training goes on; each rank copies what it writes."""
    log_every: int = 1
    """Steps between logged metrics."""
    eval_every: int = 0
    """Steps between evaluations on held-out clips; 0 for none."""
    eval_samples: int = 0
    """Clips at the end of the data that are held out for evaluation."""
    engine: EngineName = "native"
    """What reduces gradients and steps: native is torch's DistributedDataParallel or FSDP2, megatron is
    megatron-core's DDP and distributed optimizer, deepspeed is ZeRO. See `parallel`."""
    check: bool = False
    """Exit with code 3 unless the loss fell and planning lowered the imbalance, both as measured in this run."""
    timeout_s: float = 600
    """Seconds after which a waiting collective fails."""

    def __post_init__(self) -> None:
        for key in ("steps", "global_batch_size", "micro_batch_size", "log_every"):
            require(getattr(self, key) >= 1, f"train.{key}", ">= 1", getattr(self, key))
        for key in ("checkpoint_every", "keep_last", "eval_every", "eval_samples"):
            require(getattr(self, key) >= 0, f"train.{key}", ">= 0", getattr(self, key))
        require(self.seed >= -1, "train.seed", ">= 0, or -1 for a random one", self.seed)
        require(self.grad_clip >= 0, "train.grad_clip", ">= 0", self.grad_clip, "0 means no clipping")
        require(0 <= self.ema_decay < 1, "train.ema_decay", "in [0, 1)", self.ema_decay, "0 keeps no average")
        require(
            self.checkpoint_format == "native" or self.engine == "megatron",
            "train.checkpoint_format",
            f"native with train.engine={self.engine}",
            self.checkpoint_format,
            "torch_dist is megatron-core's format: use train.engine=megatron (any engine reads it)",
        )
        require(self.timestep_shift > 0, "train.timestep_shift", "> 0", self.timestep_shift, "1.0 means no shift")
        require(self.timeout_s > 0, "train.timeout_s", "> 0", self.timeout_s)
        require(math.isfinite(self.logit_mean), "train.logit_mean", "finite", self.logit_mean)
        require(0 < self.logit_std < math.inf, "train.logit_std", "a positive number", self.logit_std)
        require(-1 <= self.mode_scale <= 1.75, "train.mode_scale", "in [-1, 1.75]", self.mode_scale, "1.29 is usual")
        require(self.min_snr_gamma > 0, "train.min_snr_gamma", "> 0", self.min_snr_gamma, "5 is usual")
        require(
            self.micro_batch_size <= self.global_batch_size,
            "train.micro_batch_size",
            f"at most train.global_batch_size={self.global_batch_size}",
            self.micro_batch_size,
        )
        require(
            not self.eval_every or self.eval_samples >= 1,
            "train.eval_samples",
            ">= 1 with train.eval_every",
            self.eval_samples,
            "hold out some clips or set train.eval_every=0",
        )

    @property
    def recompute_kind(self) -> Literal["none", "selective", "full"]:
        """`recompute` in one word."""
        return "full" if self.recompute is True else self.recompute or "none"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run folder."""

    name: str = "run"
    """Name of the folder that receives everything the run writes."""
    root: str = "runs"
    """Folder of all runs."""
    resume: str = "auto"
    """auto: from the newest good checkpoint of this run, if any; never; or the path of a checkpoint or run."""
    init_from: str = ""
    """Run or checkpoint whose weights a new run starts from: fine-tuning, with step 0, a fresh optimizer and a mask of
    its own. Without effect once the run has a checkpoint to resume from."""
    plots: bool = True
    """Draw loss, imbalance and masks at the end."""
    report: bool = True
    """Write report.html at the end, one file that a browser shows without anything else; tools/report.py makes it of
    any run folder."""
    tensorboard: bool = False
    """Write TensorBoard's event files to the run folder, with the keys of metrics.jsonl."""
    profile: int = 0
    """First step (from 1) to trace with torch's profiler, on every rank, into the folder `profile`; 0 for none."""
    profile_steps: int = 3
    """Steps to trace."""
    stop_file: str = ""
    """The run saves and ends when this file appears, as on SIGTERM; for launchers that cannot signal ranks."""

    def __post_init__(self) -> None:
        plain = bool(self.name) and self.name not in (".", "..") and "/" not in self.name and self.name.isprintable()
        require(plain, "run.name", "a folder name without '/'", self.name, "use run.root for the folder above")
        require(self.profile >= 0, "run.profile", ">= 0", self.profile, "0 traces nothing")
        require(self.profile_steps >= 1, "run.profile_steps", ">= 1", self.profile_steps)
        require(bool(self.resume), "run.resume", "auto, never or a path", self.resume)
        require(
            not self.init_from or self.resume in ("auto", "never"),
            "run.init_from",
            f"empty with run.resume={self.resume}",
            self.init_from,
            "resume goes on with step and optimizer of a checkpoint, init_from takes its weights only: choose one",
        )


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Sampling of videos."""

    steps: int = 50
    """Denoising steps."""
    sampler: Literal["euler", "unipc"] = "unipc"
    """euler is first order; unipc is a second-order predictor-corrector with one model call per step."""
    shift: float = 1.0
    """Spends more steps near noise; above 1 for long sequences, 1 for none."""
    num_samples: int = 1
    """Videos to make."""
    seed: int = 0
    """Seed of the noise; video i is the same whatever is made beside it. -1 draws one."""
    num_frames: int = 0
    """Frames per video, also where latents are made; 0 takes the training length."""
    height: int = 0
    """Pixels, also where latents are made; 0 takes the training height."""
    width: int = 0
    """Pixels, also where latents are made; 0 takes the training width."""
    latents: str = ""
    """For models of latents whose checkpoint does not say what they were trained on, or to make others: files of
    tools/encode_videos.py, of which the largest has the size and the VAE to make."""
    first_frame: str = ""
    """What image-to-video models start from, one after another: files of tools/encode_videos.py --first-frame, or a
    video, a picture or a folder of videos for models of pixels."""
    image_context: str = ""
    """Safetensors file of image features by name of the clip, for models that attend to an image (image_dim)."""
    fps: int = 8
    """Frames per second of the written file."""
    guidance_scale: float = 1.0
    """Classifier-free guidance for models with text; 1 turns it off."""
    guidance_mode: Literal["auto", "batched", "sequential"] = "auto"
    """Both guidance branches in one batch, or one after the other; auto batches when their lengths are equal."""
    context: str = ""
    """Safetensors file with text features `context` [L, text_dim] and optionally `negative` [L', text_dim]."""
    weights: Literal["ema", "model"] = "ema"
    """ema uses averaged weights where the checkpoint has them."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes under autocast, and keeps the matrices of layers in bf16: same results, half of their memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    timeout_s: float = 600
    """Seconds after which a waiting collective fails."""
    reuse_report: bool = False
    """Replay plan reuse by several rules on the counts of all steps: hit rates, plans made anew, regret."""

    def __post_init__(self) -> None:
        for key in ("steps", "num_samples", "fps"):
            require(getattr(self, key) >= 1, f"sample.{key}", ">= 1", getattr(self, key))
        for key in ("num_frames", "height", "width"):
            require(getattr(self, key) >= 0, f"sample.{key}", ">= 0", getattr(self, key), "0 takes the training size")
        require(self.seed >= -1, "sample.seed", ">= 0, or -1 for a random one", self.seed)
        require(self.shift > 0, "sample.shift", "> 0", self.shift, "1.0 means no shift")
        require(math.isfinite(self.guidance_scale), "sample.guidance_scale", "finite", self.guidance_scale)
        require(self.timeout_s > 0, "sample.timeout_s", "> 0", self.timeout_s)
