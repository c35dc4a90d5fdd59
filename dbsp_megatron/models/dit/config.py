"""The description of a video Diffusion Transformer, and its YAML files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

TextMode = Literal["none", "cross", "joint", "dual_stream"]
QKNorm = Literal["none", "rms_head", "layer_head", "rms_hidden"]
Modulation = Literal["table", "linear"]
TextProjectionKind = Literal["linear", "mlp"]
PositionEmbeddingKind = Literal["none", "sincos", "learned"]
Recompute = Literal["none", "selective", "full"]


def _choice(name: str, value: Any, literal: Any) -> None:
    allowed = get_args(literal)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def _positive_int(name: str, value: Any, *, minimum: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}; got {value!r}")


def _positive_number(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise ValueError(f"{name} must be a number; got the text {value!r}. YAML needs a dot in 1.0e-6")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{name} must be a number > 0; got {value!r}")


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Shape and options of a `VideoDiT`."""

    hidden_size: int
    """Channels of the residual stream."""
    num_layers: int
    """Transformer layers; with `text: dual_stream` the layers that keep separate weights for text and video."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); None means `num_heads`."""
    head_dim: int | None = None
    """Channels per head; None means `hidden_size / num_heads`."""
    ffn_hidden_size: int | None = None
    """Inner channels of the feed-forward; None means `4 * hidden_size`."""
    num_single_layers: int = 0
    """Single-stream layers (attention and feed-forward in parallel) after the dual-stream ones."""
    patch_size: tuple[int, int, int] = (1, 2, 2)
    """Voxels per patch along time, height and width."""
    in_channels: int = 16
    """Channels of the input video or latent."""
    out_channels: int | None = None
    """Channels of the prediction; None means `in_channels`."""
    text: TextMode = "none"
    """`cross`: cross-attention to a replicated context. `joint`: text tokens in the sequence, shared weights, own
    modulation. `dual_stream`: text tokens in the sequence, own weights, one attention."""
    text_dim: int | None = None
    """Channels of the text encoder's output; needed unless `text` is `none`."""
    text_len: int = 0
    """Text tokens; for `joint` and `dual_stream` the number that comes first in the sequence."""
    text_projection: TextProjectionKind = "mlp"
    """How text channels become `hidden_size`: one linear layer, or two with a tanh-GELU between."""
    image_dim: int | None = None
    """Channels of an image encoder's output: the cross-attention also attends to its tokens, with keys and values of
    their own (Wan's image to video). None: no image. Needs `text: cross`."""
    qk_norm: QKNorm = "rms_head"
    """Norm of queries and keys: RMS or LayerNorm over each head, or RMS over all heads at once."""
    qk_norm_eps: float = 1e-6
    """Epsilon of `qk_norm`."""
    qk_gain_init: tuple[float, float] = (1.0, 1.0)
    """Initial gain of self-attention's query and key norms in the first and the last head, geometric in between: heads
    start from broad to narrow attention. Needs `qk_norm: rms_hidden`, whose gains are per head."""
    rope_axes: tuple[int, int, int] | None = None
    """Head channels rotated by time, height and width; None means Wan's split, `2 * (head_dim // 6)` for height and
    width and the rest for time. Three zeros: no rotation."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_base_grid: tuple[int, int] | None = None
    """Height and width, in patches, of the videos of training: on any other grid rotary coordinates are spread over the
    region of this one that has the same aspect ratio (CogVideoX). None counts patches."""
    position_embedding: PositionEmbeddingKind = "none"
    """What is added to tokens at the input, beside the rotation of queries and keys: sinusoids of time, width and
    height, or a learned row for each token of `[text ; video]`."""
    position_grid: tuple[int, int, int] | None = None
    """Patches along time, height and width that `position_embedding: learned` has rows for; no other grid is taken."""
    position_scales: tuple[float, float] = (1.0, 1.0)
    """With `position_embedding: sincos`, coordinates along time, and along height and width, are divided by these."""
    modulation: Modulation = "linear"
    """Where shift, scale and gate come from: a linear layer of the timestep embedding in every layer, or one for the
    whole model plus a learned table in every layer."""
    time_embed_dim: int | None = None
    """Channels of the timestep embedding; None means `hidden_size` (required by `modulation: table`)."""
    time_freq_dim: int = 256
    """Sinusoidal features of the timestep."""
    time_scale: float = 1000.0
    """The timestep in [0, 1] is multiplied by this before the sinusoids."""
    norm_eps: float = 1e-6
    """Epsilon of the layer norms."""
    norm_affine: bool = False
    """Whether the modulated layer norms have a weight and bias of their own."""
    final_norm: bool = False
    """An additional affine layer norm before the modulated norm of the output layer."""
    coarse_branch: bool = False
    """VSA's coarse branch: every self-attention adds attention of block means through learned gates, which start
    without effect."""
    recompute: Recompute = "none"
    """`full`: keep only layer inputs and compute each layer again in the backward pass."""
    init_seed: int = 0
    """Seed of the initial weights; the weights do not depend on how the model is split over ranks."""

    def __post_init__(self) -> None:
        _choice("text", self.text, TextMode)
        _choice("text_projection", self.text_projection, TextProjectionKind)
        _choice("qk_norm", self.qk_norm, QKNorm)
        _choice("modulation", self.modulation, Modulation)
        _choice("position_embedding", self.position_embedding, PositionEmbeddingKind)
        _choice("recompute", self.recompute, Recompute)
        for name in ("hidden_size", "num_layers", "num_heads", "in_channels"):
            _positive_int(name, getattr(self, name))
        for name in (
            "num_kv_heads", "head_dim", "ffn_hidden_size", "out_channels", "text_dim", "image_dim", "time_embed_dim",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                _positive_int(name, getattr(self, name))
        if not isinstance(self.coarse_branch, bool):
            raise ValueError(f"coarse_branch must be true or false; got {self.coarse_branch!r}")
        _positive_int("num_single_layers", self.num_single_layers, minimum=0)
        _positive_int("text_len", self.text_len, minimum=0)
        self._check_heads()
        self._check_text()
        for name, triple in (("patch_size", self.patch_size), ("rope_axes", self.rope_axes_dims)):
            if len(triple) != 3 or any(not isinstance(n, int) or n < 0 for n in triple):
                raise ValueError(f"{name} must be three non-negative integers (time, height, width); got {triple!r}")
        if min(self.patch_size) < 1:
            raise ValueError(f"patch_size must be three integers >= 1; got {self.patch_size!r}")
        if sum(self.rope_axes_dims) not in (0, self.heads_dim) or any(n % 2 for n in self.rope_axes_dims):
            raise ValueError(
                f"rope_axes must be three even numbers that sum to head_dim {self.heads_dim}, or three zeros; "
                f"got {self.rope_axes_dims}"
            )
        self._check_positions()
        _positive_int("time_freq_dim", self.time_freq_dim, minimum=2)
        if self.time_freq_dim % 2:
            raise ValueError(f"time_freq_dim must be even; got {self.time_freq_dim}")
        for name in ("qk_norm_eps", "rope_theta", "time_scale", "norm_eps"):
            _positive_number(name, getattr(self, name))
        if tuple(self.qk_gain_init) != (1.0, 1.0) and self.qk_norm != "rms_hidden":
            raise ValueError(
                f"qk_gain_init needs qk_norm: rms_hidden, got {self.qk_gain_init} with qk_norm: {self.qk_norm}"
            )
        for gain in self.qk_gain_init:
            _positive_number("qk_gain_init", gain)
        if self.modulation == "table" and self.time_channels != self.hidden_size:
            raise ValueError(
                f"time_embed_dim must equal hidden_size {self.hidden_size} with modulation: table; "
                f"got {self.time_channels}. Leave time_embed_dim out, or use modulation: linear"
            )

    def _check_heads(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size must be divisible by num_heads {self.num_heads} when head_dim is not given; "
                f"got {self.hidden_size}. Set head_dim"
            )
        if self.heads_dim % 2:
            raise ValueError(f"head_dim must be even, since RoPE rotates pairs of channels; got {self.heads_dim}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads {self.kv_heads}; got {self.num_heads}")

    def _check_positions(self) -> None:
        for name, value, length in (
            ("rope_base_grid", self.rope_base_grid, 2),
            ("position_grid", self.position_grid, 3),
        ):
            if value is not None and (len(value) != length or any(not isinstance(n, int) or n < 1 for n in value)):
                raise ValueError(f"{name} must be {length} integers >= 1, or null; got {value!r}")
        if (self.position_grid is not None) != (self.position_embedding == "learned"):
            raise ValueError(
                "position_grid must be given with position_embedding: learned, and only then; got "
                f"{self.position_grid} with position_embedding: {self.position_embedding}"
            )
        if len(self.position_scales) != 2:
            raise ValueError(f"position_scales must be two numbers (time, space); got {self.position_scales!r}")
        for scale in self.position_scales:
            _positive_number("position_scales", scale)
        if self.position_embedding == "sincos" and self.hidden_size % 16:
            raise ValueError(
                f"hidden_size must be a multiple of 16 with position_embedding: sincos; got {self.hidden_size}"
            )

    def _check_text(self) -> None:
        if self.image_dim is not None and self.text != "cross":
            raise ValueError(
                f"image_dim needs text: cross, whose layers attend to the image; got {self.image_dim} with text: "
                f"{self.text}"
            )
        if self.text != "none" and self.text_dim is None:
            raise ValueError(f"text_dim must be given with text: {self.text}; got None")
        if self.has_joint_text and self.text_len < 1:
            raise ValueError(f"text_len must be >= 1 with text: {self.text}; got {self.text_len}")
        if self.num_single_layers and self.text != "dual_stream":
            raise ValueError(
                f"num_single_layers must be 0 unless text is dual_stream; got {self.num_single_layers} with text: "
                f"{self.text}"
            )

    @property
    def has_joint_text(self) -> bool:
        """Whether the sequence is `[text ; video]`."""
        return self.text in ("joint", "dual_stream")

    @property
    def heads_dim(self) -> int:
        """Channels per head, resolved."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key/value heads, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_channels(self) -> int:
        """Inner channels of the feed-forward, resolved."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def time_channels(self) -> int:
        """Channels of the timestep embedding, resolved."""
        return self.hidden_size if self.time_embed_dim is None else self.time_embed_dim

    @property
    def rope_axes_dims(self) -> tuple[int, int, int]:
        """Head channels rotated by time, height and width, resolved."""
        if self.rope_axes is not None:
            return self.rope_axes
        space = 2 * (self.heads_dim // 6)
        return (self.heads_dim - 2 * space, space, space)

    @property
    def patch_dim(self) -> int:
        """Channels of one input token."""
        return self.in_channels * math.prod(self.patch_size)

    @property
    def predicted_channels(self) -> int:
        """Channels of the prediction, resolved."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def patch_out_dim(self) -> int:
        """Channels of one output token."""
        return self.predicted_channels * math.prod(self.patch_size)

    @property
    def condition_channels(self) -> int:
        """Input channels after the noisy ones, which are as many as are predicted: what is given of the first frame."""
        return max(0, self.in_channels - self.predicted_channels)

    @property
    def num_attention_layers(self) -> int:
        """Layers with self-attention: all of them."""
        return self.num_layers + self.num_single_layers

    @property
    def sequence_text_len(self) -> int:
        """Text tokens inside the sequence: `text_len` for joint text, else 0."""
        return self.text_len if self.has_joint_text else 0


def _config_from_text(text: str, where: str) -> DiTConfig:
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} must be plain YAML data: {error}") from error
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} must hold a mapping of DiTConfig fields; got {type(raw).__name__}")
    try:
        kind = _config_class(raw)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(str(key) for key in raw if key not in known)
    if unknown:
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}. Known keys: {', '.join(sorted(known))}")
    missing = sorted(name for name, field in known.items() if field.default is dataclasses.MISSING and name not in raw)
    if missing:
        raise ValueError(f"{where} lacks required keys: {', '.join(missing)}")
    try:
        return model_from_fields(raw)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _config_class(fields: Mapping[str, Any]) -> type[DiTConfig]:
    """A model that attends along its dims in turn says so by `attention_dims`."""
    if "msa_channels" in fields:
        raise ValueError("it describes an Evoformer, no video model: read it with load_evoformer_config")
    if "attention_dims" not in fields:
        return DiTConfig
    from dbsp_megatron.models.axial.config import AxialConfig  # subclasses DiTConfig

    return AxialConfig


def model_from_fields(fields: Mapping[str, Any]) -> DiTConfig:
    """The description with these fields, of the class that they belong to; lists become tuples.

    Raises:
        ValueError: a field has a bad value.
    """
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    return _config_class(fields)(**values)


def model_config_text(config: DiTConfig) -> str:
    """A model description as YAML that `load_model_config` reads back; fields with their default are left out."""
    chosen = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default
    }
    return yaml.safe_dump(chosen, sort_keys=False, default_flow_style=None)


def model_config_names() -> list[str]:
    """Names that `load_model_config` knows without a path."""
    folder = resources.files("dbsp_megatron") / "model_configs"
    if not folder.is_dir():
        return []
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_model_config(name_or_path: str | Path) -> DiTConfig:
    """Reads a model description.

    Args:
        name_or_path: A name such as `wan2_1_1_3b` (a file of `model_configs/`), or the path of a YAML file.

    Returns:
        The checked config.

    Raises:
        ValueError: If there is no such file, or a key is unknown, missing or has a bad value.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(
                f"model config {str(path)!r} must be an existing file, or one of: {', '.join(model_config_names())}"
            )
        return _config_from_text(path.read_text(encoding="utf-8"), str(path))
    name = str(name_or_path)
    if name not in model_config_names():
        raise ValueError(f"model config must be a YAML file or one of: {', '.join(model_config_names())}; got {name!r}")
    entry = resources.files("dbsp_megatron") / "model_configs" / f"{name}.yaml"
    return _config_from_text(entry.read_text(encoding="utf-8"), f"{name}.yaml")
