"""Masks that a pipeline is measured with: none, a method, or drawn ones that all strategies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from dbsp_megatron.masks import FileMask, MaskMethod, write_masks
from tools.mask_cases import MaskCase, parse_case
from tools.sp_cases import DENSE, MaskChoice, Shape
from tools.structured_masks import KINDS


class PipelineMask(ABC):
    """Which blocks are computed."""

    label: str
    """How tables name it."""

    @abstractmethod
    def build(self, shape: Shape, block_size: int, num_layers: int, folder: Path) -> MaskMethod | None:
        """The method that gives each layer its mask; None for all blocks.

        Args:
            shape: self-attention.
            block_size: tokens of a block.
            num_layers: layers with self-attention.
            folder: for files that the method reads; of this rank alone.
        """


class AllBlocks(PipelineMask):
    """Dense attention."""

    label = DENSE

    def build(self, shape: Shape, block_size: int, num_layers: int, folder: Path) -> None:
        """See `PipelineMask.build`."""


@dataclass(frozen=True)
class MethodMask(PipelineMask):
    """A mask method of this package.

    Raises:
        ValueError: it orders tokens in cubes, which diffusers does not.
    """

    case: MaskCase

    def __post_init__(self) -> None:
        if self.case.cube is not None:
            raise ValueError(f"--mask {self.case.label}: pipelines have tokens in raster order; leave cube out")

    @property
    def label(self) -> str:  # type: ignore[override]
        """Name and settings, or the label that was given."""
        settings = self.case.settings_text
        return self.case.name if settings == "-" else f"{self.case.name} {settings}"

    def build(self, shape: Shape, block_size: int, num_layers: int, folder: Path) -> MaskMethod:
        """See `PipelineMask.build`."""
        return self.case.build()


@dataclass(frozen=True)
class DrawnMask(PipelineMask):
    """A synthetic mask for each layer, whatever queries and keys are."""

    choice: MaskChoice

    @property
    def label(self) -> str:  # type: ignore[override]
        """Kind, density and seed."""
        return str(self.choice)

    def build(self, shape: Shape, block_size: int, num_layers: int, folder: Path) -> MaskMethod:
        """See `PipelineMask.build`."""
        masks = {layer: self.choice.make(shape, block_size, layer).blocks[0] for layer in range(num_layers)}
        size, path = shape.geometry, folder / f"{self.label} {block_size}.safetensors".replace(" ", "_")
        write_masks(path, masks, seqlen=shape.seqlen, block_size=block_size, grid=(size.frames, size.rows, size.cols))
        return FileMask(str(path))


def parse_mask(text: str) -> PipelineMask:
    """A mask from `dense`, `METHOD:key=value,...` (see `mask_cases`), or `KIND:density=0.25,seed=0`.

    Raises:
        ValueError: it cannot be read.
    """
    name, _, rest = text.partition(":")
    if name == DENSE:
        return AllBlocks()
    if name not in KINDS:
        return MethodMask(parse_case(text))
    settings: dict[str, float] = {"density": 0.25, "seed": 0}
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        try:
            settings[key] = {"density": float, "seed": int}[key](value)
        except (KeyError, ValueError):
            raise ValueError(f"--mask {text!r}: a drawn mask takes density=0.25 and seed=0, got {word!r}") from None
    return DrawnMask(MaskChoice(kind=name, density=settings["density"], seed=int(settings["seed"])))
