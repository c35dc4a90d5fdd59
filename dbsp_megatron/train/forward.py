"""One call of the model on this rank's tokens, for training and sampling alike.

Dims: B samples, N video tokens of the whole sequence, s of this rank, C channels of a token, L text tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.comm.transfer import select_to_device, to_device
from dbsp_megatron.masks import MaskConfig, TokenGrid, build_mask_method, tile_order
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.strategy import SequenceParallel, TokenLayout

Grid = tuple[int, int, int]


class ShardedModel:
    """A VideoDiT (possibly wrapped for data parallelism) together with its token layout and mask method."""

    def __init__(
        self,
        module: Callable[..., Tensor],
        config: DiTConfig,
        sp: SequenceParallel,
        mask: MaskConfig,
        *,
        device: torch.device,
        precision: str,
        reorders: bool = True,
    ) -> None:
        self.module = module
        self.sp = sp
        self._text_tokens = config.sequence_text_len
        self._method = build_mask_method(mask)
        self._cube = mask.cube
        self._device = device
        self._bf16 = precision == "bf16"
        self._reorders = reorders
        self._layouts: dict[Grid, tuple[TokenLayout, Tensor, Tensor]] = {}
        self._orders: dict[Grid, Tensor] = {}

    def recalibrate(self) -> bool:
        """Between steps: lets measured counts reorder tokens; True if this rank's tokens of later calls are others."""
        # Ranks that share a layer's heads, or a pipeline, hold the same tokens but count different attention: each
        # would find another order.
        changed = self._reorders and self.sp.recalibrate()
        if changed:
            self._layouts.clear()
        return changed

    def layout(self, grid: Grid) -> TokenLayout:
        """Token layout of [text ; video] for a patch grid."""
        return self._placed(grid)[0]

    def _placed(self, grid: Grid) -> tuple[TokenLayout, Tensor, Tensor]:
        """Layout, and which tokens in raster order this rank holds: of the video, and of [text ; video] on the device.

        The last is one tensor for the whole run, by which the model knows it again.
        """
        if grid not in self._layouts:
            layout = self.sp.layout(self._text_tokens + math.prod(grid))
            tokens = torch.cat([torch.arange(self._text_tokens), self._text_tokens + self._order(grid)])
            positions = tokens[layout.positions]
            video = positions[positions >= self._text_tokens] - self._text_tokens
            self._layouts[grid] = (layout, video, positions.to(self._device))
        return self._layouts[grid]

    def _order(self, grid: Grid) -> Tensor:
        """Raster index of the video token at each place of the sequence, int64 [N] on the CPU."""
        if grid not in self._orders:
            self._orders[grid] = tile_order(self._tokens(grid))
        return self._orders[grid]

    def _tokens(self, grid: Grid) -> TokenGrid:
        return TokenGrid(*grid, cube=self._cube)

    def video_positions(self, grid: Grid) -> Tensor:
        """Indices of this rank's video tokens in the video sequence, int64 [s] on the CPU."""
        return self._placed(grid)[1]

    def shard(self, tokens: Tensor, grid: Grid) -> Tensor:
        """This rank's tokens of a whole CPU tensor [B, N, C], on the device."""
        # It copies whole rows; `tokens[:, positions]` takes several times as long.
        return select_to_device(tokens, 1, self.video_positions(grid), self._device)

    def relaid(self, tensors: list[Tensor], grid: Grid) -> list[Tensor]:
        """Recalibrates between steps, and gives this rank's tokens [B, s, C] of each tensor in the order from then on.

        Collective if the order changes.
        """
        before = self.layout(grid)
        if not self.recalibrate() or self.layout(grid) is before:
            return tensors
        whole = [self._gathered(tensor, before, grid) for tensor in tensors]
        return [tensor[:, self.video_positions(grid).to(tensor.device)] for tensor in whole]

    def gather(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Whole video tokens [B, N, C] from those of the ranks [B, s, C]; collective, no gradient needed."""
        return self._gathered(tokens, self.layout(grid), grid)

    def _gathered(self, tokens: Tensor, layout: TokenLayout, grid: Grid) -> Tensor:
        missing = layout.num_local - tokens.shape[1]
        # Text tokens come first in a layout: rows of them stand in for the text that the model does not return.
        padded = torch.cat([tokens.new_zeros(tokens.shape[0], missing, tokens.shape[2]), tokens], dim=1)
        ordered = layout.gather(padded, dim=1)[:, self._text_tokens :]
        return ordered if self._cube is None else ordered[:, self._order(grid).argsort().to(ordered.device)]

    @contextmanager
    def session(self, grid: Grid) -> Iterator[None]:
        """Holds layout, mask and precision for calls on one grid, and for their backward passes.

        Activation recomputation calls attention again during backward, so backward belongs inside.
        """
        autocast = torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16)
        with self.sp.use(layout=self.layout(grid), mask=self._method, grid=self._tokens(grid)), autocast:
            yield

    def velocity(
        self,
        x: Tensor,
        timesteps: Tensor,
        grid: Grid,
        context: Tensor | None,
        *,
        condition: Tensor | None = None,
        image_context: Tensor | None = None,
    ) -> Tensor:
        """Predicted velocity of this rank's tokens; call inside `session`.

        Args:
            x: [B, s, C], noisy.
            timesteps: [B].
            grid: patches of the whole video.
            context: [B, L, text_dim], the whole text.
            condition: [B, s, K], what is given of the same tokens, without noise.
            image_context: [B, L, image_dim], all tokens of the image.

        Returns:
            [B, s, C].
        """
        return self.module(
            x if condition is None else torch.cat([x, condition], dim=-1),
            to_device(timesteps, self._device),
            grid=grid,
            **self._inputs(grid, context, image_context),
        )

    def _inputs(self, grid: Grid, context: Tensor | None, image_context: Tensor | None) -> dict[str, Any]:
        """What the module takes beside tokens, timesteps and grid."""
        inputs = {"positions": self._placed(grid)[2], "context": self._on_device(context)}
        if image_context is not None:
            inputs["image_context"] = self._on_device(image_context)
        return inputs

    def _on_device(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else to_device(tensor, self._device)
