"""Which tokens of the [text ; video] sequence this rank holds, and their rotary angles."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dbsp_megatron.models.dit.rope import rotary_angles

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTokens:
    """This rank's tokens in the order of `positions`. A rank may hold none of either kind."""

    num_text: int
    """Local text tokens."""
    num_video: int
    """Local video tokens."""
    text_positions: Tensor
    """int64 [num_text]: rows of the text context that are local."""
    cos: Tensor
    """float32 [s_local, 1, 1, head_dim / 2]; 1 for text tokens, which are not rotated."""
    sin: Tensor
    """float32 [s_local, 1, 1, head_dim / 2]; 0 for text tokens."""
    text_first: Tensor | None
    """int64 [s_local]: local indices with the text tokens in front; None if they already are."""
    original: Tensor | None
    """int64 [s_local]: the inverse of `text_first`."""

    def part(self, places: range) -> LocalTokens:
        """Some of the tokens, consecutive ones; there is no text."""
        cos, sin = (table[places.start : places.stop] for table in (self.cos, self.sin))
        return replace(self, num_video=len(places), cos=cos, sin=sin)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Splits [s_local, ...] into text [num_text, ...] and video [num_video, ...]."""
        ordered = x if self.text_first is None else x.index_select(0, self.text_first)
        return ordered[: self.num_text], ordered[self.num_text :]

    def merge(self, text: Tensor, video: Tensor) -> Tensor:
        """The inverse of `split`: [s_local, ...] in the order of `positions`."""
        ordered = torch.cat((text, video))
        return ordered if self.original is None else ordered.index_select(0, self.original)


def locate_tokens(
    positions: Tensor,
    grid: Grid,
    *,
    text_len: int,
    rope_axes: tuple[int, int, int],
    rope_theta: float,
    rope_base_grid: tuple[int, int] | None = None,
) -> LocalTokens:
    """Finds the kind and the rotary angles of this rank's tokens.

    Args:
        positions: int64 [s_local], global token ids; ids below `text_len` are text.
        grid: Patches along time, height and width of the whole video.
        text_len: Text tokens at the front of the sequence, 0 if there are none.
        rope_axes: Head channels rotated by time, height and width.
        rope_theta: Base of the rotary frequencies.
        rope_base_grid: Rows and columns over which those of `grid` are spread; None counts patches.

    Returns:
        Tensors on the device of `positions`.

    Raises:
        ValueError: If an id lies outside the sequence.
    """
    if positions.dim() != 1 or positions.dtype != torch.int64:
        raise ValueError(
            f"positions must be int64 of shape [s_local]; got {positions.dtype} of shape {tuple(positions.shape)}"
        )
    seqlen = text_len + grid[0] * grid[1] * grid[2]
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= seqlen):
        raise ValueError(
            f"positions must lie in [0, {seqlen}) for {text_len} text tokens and grid {grid}; got "
            f"[{int(positions.min())}, {int(positions.max())}]. Use the positions of a layout for this seqlen"
        )
    is_text = positions < text_len
    num_text = int(is_text.sum())
    text_first = original = None
    if not bool(is_text[:num_text].all()):
        text_first = torch.argsort(is_text.logical_not().to(torch.int8), stable=True)
        original = torch.argsort(text_first)
    cos, sin = rotary_angles(positions - text_len, grid, rope_axes, rope_theta, rope_base_grid)
    keep = is_text.logical_not()[:, None]
    cos, sin = torch.where(keep, cos, 1.0), torch.where(keep, sin, 0.0)
    return LocalTokens(
        num_text=num_text,
        num_video=positions.numel() - num_text,
        text_positions=positions[is_text],
        cos=cos[:, None, None, :],
        sin=sin[:, None, None, :],
        text_first=text_first,
        original=original,
    )


class TokenLocator:
    """`locate_tokens` with a small cache, since a layout's `positions` serve many steps.

    An entry is valid only for the very tensor it was made from, unmodified: equal shapes say nothing about equal
    positions (every rank of a sharded sequence may have the same shape).
    """

    def __init__(
        self,
        *,
        text_len: int,
        rope_axes: tuple[int, int, int],
        rope_theta: float,
        rope_base_grid: tuple[int, int] | None = None,
        max_entries: int = 4,
    ) -> None:
        self.text_len = text_len
        self.rope_axes = rope_axes
        self.rope_theta = rope_theta
        self.rope_base_grid = rope_base_grid
        self.max_entries = max_entries
        self._entries: OrderedDict[tuple[int, Grid], tuple[weakref.ref[Tensor], int, LocalTokens]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __call__(self, positions: Tensor, grid: Grid) -> LocalTokens:
        """Like `locate_tokens`."""
        # Tables made under inference_mode could not be used by a later training step, hence the way out of it.
        with torch.inference_mode(False), torch.no_grad():
            if positions.is_inference():  # has no version counter, so a change in place would go unseen
                return self._locate(positions.clone(), grid)
            key = (id(positions), grid)
            found = self._entries.get(key)
            if found is not None and found[0]() is positions and found[1] == positions._version:
                self._entries.move_to_end(key)
                return found[2]
            tokens = self._locate(positions, grid)
            self._entries[key] = (weakref.ref(positions), positions._version, tokens)
            self._entries.move_to_end(key)
            while len(self._entries) > self.max_entries:
                self._entries.popitem(last=False)
            return tokens

    def _locate(self, positions: Tensor, grid: Grid) -> LocalTokens:
        return locate_tokens(
            positions,
            grid,
            text_len=self.text_len,
            rope_axes=self.rope_axes,
            rope_theta=self.rope_theta,
            rope_base_grid=self.rope_base_grid,
        )
