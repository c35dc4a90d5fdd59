"""A pipeline of diffusers as published: what its folder says, what can be asked of it, and how it is loaded.

Nothing is downloaded, no code of the folder runs, and weights are safetensors only.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dbsp_megatron.config.generate import GenerateConfig
from dbsp_megatron.models.diffusers import SUPPORTED
from dbsp_megatron.models.diffusers.sizes import PipelineSizes, read_sizes

_INDEX = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_NEEDED = ("accelerate", "diffusers", "ftfy", "transformers")
_TRANSFORMERS = ("transformer", "transformer_2")
_OPTIONAL = {
    "negative_prompt": "",
    "image": "",
    "num_frames": 0,
    "guidance_scale": None,
    "guidance_scale_2": None,
    "true_cfg_scale": None,
    "max_sequence_length": 0,
}
"""Settings that not every pipeline has, and the value that asks for nothing."""
_CASTING_VAES = ("AutoencoderKLHunyuanVideo", "AutoencoderKLWan")
"""VAEs whose pipelines cast the latents for them."""
_GIVEN = ("prompt", "image", "height", "width", "num_frames", "generator")


@dataclass(frozen=True, kw_only=True)
class PipelineFolder:
    """What the configuration files of a folder say."""

    path: Path
    class_name: str
    components: Mapping[str, tuple[str, str]]
    """Library and class by folder name."""
    configs: Mapping[str, Mapping[str, Any]]
    """`config.json` by folder name, of the transformers and the VAE."""
    sizes: PipelineSizes

    @property
    def is_video(self) -> bool:
        """Whether it makes videos, else images."""
        return self.sizes.temporal > 0

    @property
    def num_layers(self) -> int:
        """Attention layers over the sequence, of all transformers."""
        vae = self.configs["vae"]
        return sum(read_sizes(self.configs[name], vae).num_layers for name in _TRANSFORMERS if name in self.configs)

    def num_parameters(self) -> int:
        """Weights of all transformers, from the headers of their files.

        Raises:
            ValueError: a file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        count = 0
        for name in _TRANSFORMERS:
            for file in sorted((self.path / name).glob("*.safetensors")) if name in self.configs else ():
                try:
                    with safe_open(file, framework="pt") as weights:
                        shapes = [weights.get_slice(key).get_shape() for key in weights.keys()]  # noqa: SIM118
                except (OSError, SafetensorError) as error:
                    raise ValueError(f"{file} is not a whole safetensors file ({error}); fetch it again") from error
                for shape in shapes:
                    size = 1
                    for length in shape:
                        size *= length
                    count += size
        return count

    @property
    def pipeline_class(self) -> type[Any]:
        """The class in diffusers.

        Raises:
            ValueError: this version has none of the name.
        """
        import diffusers

        found = getattr(diffusers, self.class_name, None)
        if not isinstance(found, type) or not issubclass(found, diffusers.DiffusionPipeline):
            raise ValueError(
                f"{self.path / _INDEX} names {self.class_name}, which is no pipeline of diffusers "
                f"{diffusers.__version__}; install a version that has it"
            )
        return found

    def complete(
        self, asked: GenerateConfig, *, num_prompts: int, num_without_image: int, num_negative: int
    ) -> GenerateConfig:
        """The settings with the pipeline's defaults in place of those left open.

        Args:
            asked: what was configured.
            num_prompts: prompts of the batch.
            num_without_image: prompts that come without an image.
            num_negative: prompts that come with a negative one.

        Raises:
            ValueError: a setting that this pipeline does not take, or that would have no effect.
        """
        taken = dict(inspect.signature(self.pipeline_class.__call__).parameters)
        for key, nothing in _OPTIONAL.items():
            if getattr(asked, key) != nothing and key not in taken:
                value = getattr(asked, key)
                raise ValueError(f"generate.{key}={value!r} is nothing that {self.class_name} takes; remove it")
        if num_negative and "negative_prompt" not in taken:
            raise ValueError(f"{self.class_name} takes no negative_prompt; remove it from the prompts")
        for key, parameter in taken.items():
            plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and key != "self"
            if plain and parameter.default is parameter.empty and key not in _GIVEN:
                raise ValueError(
                    f"{self.class_name} needs {key}, which dbsp-infer does not give; call it in a script of your own, "
                    "with parallelize (docs/diffusers.md)"
                )
        image = taken.get("image")
        if image is not None and image.default is image.empty and num_without_image:
            raise ValueError(f"{self.class_name} starts from a picture: give generate.image, or image for every prompt")
        self._check_guidance(asked, taken, num_negative)
        if asked.cfg_parallel:
            self._check_branches(asked, taken, num_prompts - num_negative)
        vae = self.components["vae"][1]
        if asked.vae_dtype not in ("auto", asked.dtype) and vae not in _CASTING_VAES:
            raise ValueError(
                f"generate.vae_dtype={asked.vae_dtype} must be auto or generate.dtype={asked.dtype} for {vae}: "
                f"{self.class_name} hands it latents as they are; change one of them"
            )
        default = dict(zip(("num_frames", "height", "width"), self.sizes.default_size, strict=True))
        filled: dict[str, Any] = {
            key: getattr(asked, key) or _default(taken, key) or default.get(key, 0)
            for key in ("height", "width", "num_frames", "max_sequence_length")
        }
        steps = asked.steps or _default(taken, "num_inference_steps") or 50
        fps = asked.fps or self.sizes.fps
        return replace(asked, **filled, steps=steps, fps=fps)

    def _check_guidance(self, asked: GenerateConfig, taken: Mapping[str, inspect.Parameter], num_negative: int) -> None:
        """Refuse what diffusers would silently ignore."""
        learnt = "true_cfg_scale" in taken
        key = "true_cfg_scale" if learnt else "guidance_scale"
        scale = getattr(asked, key)
        scale = _default(taken, key) if scale is None else scale
        # The second expert of Wan follows the guidance of the first unless it is told otherwise.
        off = scale is not None and scale <= 1
        if num_negative and off:
            raise ValueError(
                f"negative_prompt has no effect on {self.class_name} with generate.{key}={scale}; set it above 1, or "
                "leave the negative prompt out"
            )
        if learnt and asked.true_cfg_scale is not None and asked.true_cfg_scale > 1 and not num_negative:
            raise ValueError(
                f"generate.true_cfg_scale={asked.true_cfg_scale} has no effect on {self.class_name} without a negative "
                "prompt; give generate.negative_prompt, or leave it out"
            )
        if learnt and asked.guidance_scale is not None and self.configs["transformer"].get("guidance_embeds") is False:
            raise ValueError(
                f"generate.guidance_scale={asked.guidance_scale} has no effect: this transformer takes no guidance; "
                "use generate.true_cfg_scale and a negative prompt, or leave it out"
            )
        if asked.guidance_scale_2 is not None and "transformer_2" not in self.configs:
            raise ValueError(
                f"generate.guidance_scale_2={asked.guidance_scale_2} is for the second of two transformers, and this "
                "pipeline has one; remove it"
            )

    def _check_branches(
        self, asked: GenerateConfig, taken: Mapping[str, inspect.Parameter], num_without_negative: int
    ) -> None:
        """Refuse to divide branches of guidance where there is one."""
        learnt = "true_cfg_scale" in taken
        key = "true_cfg_scale" if learnt else "guidance_scale"
        scale = getattr(asked, key)
        scale = _default(taken, key) if scale is None else scale
        if "negative_prompt" not in taken or scale is None or scale <= 1 or (learnt and num_without_negative):
            needed = f"generate.{key} above 1" + (" and a negative prompt for every prompt" if learnt else "")
            raise ValueError(
                f"generate.cfg_parallel=true divides two branches of guidance, and {self.class_name} has them only "
                f"with {needed}; give that, or leave it out"
            )

    def call_settings(self, asked: GenerateConfig) -> dict[str, Any]:
        """Arguments of the pipeline's call that are alike for all prompts, of completed settings."""
        taken = inspect.signature(self.pipeline_class.__call__).parameters
        settings: dict[str, Any] = {"height": asked.height, "width": asked.width, "num_inference_steps": asked.steps}
        if self.is_video:
            settings["num_frames"] = asked.num_frames
        for key in ("guidance_scale", "guidance_scale_2", "true_cfg_scale"):
            if getattr(asked, key) is not None:
                settings[key] = getattr(asked, key)
        if asked.max_sequence_length and "max_sequence_length" in taken:
            settings["max_sequence_length"] = asked.max_sequence_length
        return settings


def _default(taken: Mapping[str, inspect.Parameter], key: str) -> Any:
    parameter = taken.get(key)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def read_folder(path: str) -> PipelineFolder:
    """Read the configuration files of a pipeline's folder, and look at the names of its weights.

    Raises:
        ValueError: it is no such folder, needs code or pickles of its own, or its transformer cannot be parallel.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"pipeline={path} needs the packages {', '.join(missing)}; run pip install 'dbsp-megatron[diffusers]'"
        )
    folder = Path(path)
    if not (folder / _INDEX).is_file():
        raise ValueError(
            f"pipeline={path} must be a folder with a {_INDEX}, there is none; names of hub repositories are not "
            "looked up, fetch the folder first"
        )
    index = _read_json(folder / _INDEX)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str):
        raise ValueError(f"{folder / _INDEX} names a class in code of its own ({class_name!r}), which is never run")
    components = {}
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list) or entry[:1] == [None]:
            continue
        if len(entry) != 2 or entry[0] not in _LIBRARIES or not isinstance(entry[1], str):
            raise ValueError(
                f"{folder / _INDEX}: component {name} is {entry!r}; only classes of {' and '.join(_LIBRARIES)} are "
                "loaded, never code of a folder"
            )
        components[name] = (entry[0], entry[1])
        _check_component(folder / name)
    kind = components.get("transformer", ("", "none"))[1]
    if kind not in SUPPORTED or "vae" not in components:
        raise ValueError(
            f"pipeline={path} ({class_name}) has the transformer {kind}, which cannot be parallel; supported are "
            f"{', '.join(SUPPORTED)}"
        )
    described = [name for name in (*_TRANSFORMERS, "vae") if name in components]
    configs = {name: _read_json(folder / name / "config.json") for name in described}
    return PipelineFolder(
        path=folder,
        class_name=class_name,
        components=components,
        configs=configs,
        sizes=read_sizes({**configs["transformer"], "_class_name": kind}, configs["vae"]),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a JSON file, it cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(found).__name__}")
    return found


def _check_component(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder.parent / _INDEX} names the component {folder.name}, but {folder} is not there")
    names = [file.name for file in folder.iterdir()]
    # Tokenizers, schedulers and image processors have no config.json.
    is_model = "config.json" in names and "tokenizer_config.json" not in names
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles or is_model:
        held = f"has {', '.join(pickles)}, which could run code" if pickles else "has none"
        raise ValueError(
            f"weights of {folder} must be safetensors, it {held}; fetch the safetensors files, or save the pipeline "
            "with save_pretrained(..., safe_serialization=True)"
        )
