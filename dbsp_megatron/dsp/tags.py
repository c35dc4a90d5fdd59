"""Tags: the layout that travels with a tensor, kept beside it without changing its type."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dbsp_megatron.dsp.layout import Coords, Layout


@dataclass(frozen=True)
class Tag:
    """A layout and this rank's place in it."""

    layout: Layout
    """What all ranks hold."""
    coords: Coords
    """This rank's place on every axis of the layout."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape that the tensor must have on this rank."""
        return self.layout.local_shape(self.coords)


# By identity and weakly: a tag dies with its tensor, is never saved with it and costs operations nothing. What an
# operation returns has no tag; a `DspRun` knows the layout there, and primitives ask for the length.
_tags = WeakIdKeyDictionary()


def tag(x: Tensor, layout: Layout, coords: Coords) -> Tensor:
    """Say how the ranks hold a tensor; returns it.

    Args:
        x: this rank's part.
        layout: what all ranks hold.
        coords: this rank's place on every axis of the layout.

    Raises:
        ValueError: x does not have the shape that the layout gives this rank.
    """
    if missing := [axis.name for axis in layout.axes if axis.name not in coords]:
        raise ValueError(f"coords must name every axis of layout {layout}, got {dict(coords)}: add {missing}")
    new = Tag(layout, dict(coords))
    check_shape(x, new, "dsp.tag")
    _tags[x] = new, x.stride()
    return x


def tag_of(x: Tensor) -> Tag | None:
    """The tag of a tensor, None if it has none."""
    found: tuple[Tag, tuple[int, ...]] | None = _tags.get(x)
    # Dims that were exchanged in place (`x.transpose_`, `x.data =`) are other ones; their lengths may be equal.
    return found[0] if found is not None and found[1] == x.stride() else None


def untag(x: Tensor) -> Tensor:
    """Forget what is known about a tensor; returns it."""
    _tags.pop(x, None)
    return x


def layout_of(x: Tensor) -> Layout | None:
    """The layout of a tensor as the primitives left it, None for a tensor that an operation made."""
    found = tag_of(x)
    return None if found is None else found.layout


def check_shape(x: Tensor, expected: Tag, where: str) -> None:
    """Raise ValueError unless a tensor has the local shape of a tag."""
    if tuple(x.shape) != expected.local_shape:
        raise ValueError(
            f"{where}: layout {expected.layout} gives rank {dict(expected.coords)} the shape "
            f"{list(expected.local_shape)}, got {list(x.shape)}: pass this rank's part, or the layout that it has"
        )
