"""One model in both forms: its two configs, its tensors under both names, and the way between them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.models.convert import cogvideox, wan
from dbsp_megatron.models.convert.mapping import Rule, check_shapes, their_tensors
from dbsp_megatron.models.dit.config import DiTConfig

FAMILIES: dict[str, ModuleType] = {module.CLASS_NAME: module for module in (wan, cogvideox)}
"""What is known of a class of diffusers transformers, by its name."""
_FAMILY_OF_TEXT = {"cross": wan, "joint": cogvideox}
_NEUTRAL = ("init_seed", "recompute", "qk_gain_init")
"""Fields that say nothing about the function of given weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """A model of diffusers and the same model of ours."""

    class_name: str
    """Class in diffusers."""
    config: dict[str, Any]
    """Its config.json."""
    model: DiTConfig
    """Our description."""
    rules: list[Rule]
    """Which tensors are which."""
    our_shapes: dict[str, tuple[int, ...]]
    """Shape of each parameter of `VideoDiT`, by name."""
    their_shapes: dict[str, tuple[int, ...]]
    """Shape of each tensor in diffusers, by name."""

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(torch.Size(shape).numel() for shape in self.our_shapes.values())

    def check_theirs(self, found: Mapping[str, tuple[int, ...]], where: str) -> list[str]:
        """Refuse weights that are not those of `config`.

        Args:
            found: Shapes of the tensors of a diffusers folder, by name.
            where: What holds them.

        Returns:
            Names of tensors that are left out, as diffusers leaves them out.

        Raises:
            ValueError: Tensors are missing, unknown or have another shape.
        """
        pattern = FAMILIES[self.class_name].IGNORED
        ignored = [name for name in found if pattern is not None and re.search(pattern, name)]
        check_shapes({name: shape for name, shape in found.items() if name not in ignored}, self.their_shapes, where)
        return ignored

    def check_ours(self, found: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Like `check_theirs`, for our tensors."""
        check_shapes(found, self.our_shapes, where)

    def their_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Dtypes of the tensors that `to_theirs` makes, by name and in its order, from those of ours."""
        ours = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in self.our_shapes.items()}
        return {name: tensor.dtype for name, tensor in their_tensors(self.rules, ours).items()}

    def to_ours(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Our tensors one after another.

        Args:
            read: Gives a tensor of diffusers by its name; called once for each.
        """
        for rule in self.rules:
            yield from zip(rule.ours, rule.to_ours([read(name) for name in rule.theirs]), strict=True)

    def to_theirs(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of diffusers one after another; `read` gives ours, and is called once for each."""
        for rule in self.rules:
            yield from zip(rule.theirs, rule.to_theirs([read(name) for name in rule.ours]), strict=True)


def from_diffusers_config(config: Mapping[str, Any]) -> Conversion:
    """The conversion of a model that diffusers describes.

    Args:
        config: Contents of its config.json.

    Raises:
        ValueError: Its class, or a value, is one that our model cannot follow; it names key and value.
    """
    name = config.get("_class_name")
    if name not in FAMILIES:
        raise ValueError(f"_class_name must be {' or '.join(FAMILIES)}; got {name!r}: no other model is converted yet")
    try:
        model = FAMILIES[name].read_config(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    return _conversion(name, dict(config), model)


def from_model_config(model: DiTConfig, like: Mapping[str, Any] | None = None) -> Conversion:
    """The conversion of a model of ours.

    Args:
        model: Our description.
        like: A config.json that is kept if it describes the same model: it may hold what ours has no place for, such as
            the default size of videos.

    Raises:
        ValueError: diffusers has no such model, or `like` is another one; it names key and value.
    """
    if type(model) is not DiTConfig:
        raise ValueError(
            f"a model described by {type(model).__name__}, whose layers attend along one dim each, is not converted: "
            "convert models that attend to whole videos"
        )
    family = _FAMILY_OF_TEXT.get(model.text)
    if family is None:
        raise ValueError(
            f"text must be {' or '.join(_FAMILY_OF_TEXT)} for a model of diffusers that is converted; got {model.text}"
        )
    if like is None:
        found = from_diffusers_config({"_class_name": family.CLASS_NAME, **family.make_config(model)})
    else:
        found = from_diffusers_config(like)
    faults = _differences(model, found.model)
    if faults:
        what = f"{found.class_name} has no such model" if like is None else "the given config.json is another model"
        raise ValueError(f"{what}: {', '.join(faults)}")
    return _conversion(found.class_name, found.config, model)


def _differences(asked: DiTConfig, found: DiTConfig) -> list[str]:
    """Fields in which two models differ, as text; what only matters for new weights is left out."""
    ours, theirs = _resolved(asked), _resolved(found)
    # The text of a cross-attention may have any length, unless an image stands in front of it.
    neutral = {*_NEUTRAL, *(("text_len",) if asked.text == "cross" and asked.image_dim is None else ())}
    return [
        f"{key} would be {theirs[key]!r}, is {ours[key]!r}"
        for key in ours
        if key not in neutral and ours[key] != theirs[key]
    ]


def _resolved(model: DiTConfig) -> dict[str, Any]:
    """All fields, with defaults that depend on others filled in."""
    return dataclasses.asdict(model) | {
        "num_kv_heads": model.kv_heads,
        "head_dim": model.heads_dim,
        "ffn_hidden_size": model.ffn_channels,
        "out_channels": model.in_channels if model.out_channels is None else model.out_channels,
        "time_embed_dim": model.time_channels,
        "rope_axes": tuple(model.rope_axes_dims),
        "patch_size": tuple(model.patch_size),
    }


def _conversion(class_name: str, config: dict[str, Any], model: DiTConfig) -> Conversion:
    from dbsp_megatron.models.dit.model import VideoDiT  # imports megatron-core, which reading a config need not

    with torch.device("meta"):
        ours = {name: parameter.detach() for name, parameter in VideoDiT(model).named_parameters()}
    rules = FAMILIES[class_name].make_rules(config, model)
    return Conversion(
        class_name=class_name,
        config=config,
        model=model,
        rules=rules,
        our_shapes={name: tuple(tensor.shape) for name, tensor in ours.items()},
        their_shapes={name: tuple(tensor.shape) for name, tensor in their_tensors(rules, ours).items()},
    )
