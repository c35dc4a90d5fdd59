"""What attention is measured on: inputs of layers and of the model, and dumped q, k and v.

Dims: B samples (1), S tokens of the sequence, N video tokens, C channels of a token, H/Hkv heads, D head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.masks import TokenGrid, tile_order


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerInputs:
    """q, k and v of one attention call, tokens in raster order behind the text."""

    layer: int
    """Layer index."""
    step: int
    """Which of the timesteps."""
    q: Tensor
    """[B, S, H, D]."""
    k: Tensor
    """[B, S, Hkv, D]."""
    v: Tensor | None
    """[B, S, Hkv, Dv]; None in dumps without."""
    scale: float | None
    """Softmax scale; None for D ** -0.5."""


Visit = Callable[[LayerInputs], None]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What masks are made for."""

    grid: tuple[int, int, int]
    """Frames, rows and columns of video tokens."""
    seqlen: int
    """Tokens with the text in front."""
    block_size: int
    """Tokens per block."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"--block-size must be at least 1, got {self.block_size}")
        TokenGrid.of(self.grid).num_text(self.seqlen)

    def tokens(self, cube: tuple[int, int, int] | None = None) -> TokenGrid:
        """The grid with its token order."""
        return TokenGrid(*self.grid, cube=cube)

    def order(self, cube: tuple[int, int, int] | None) -> Tensor:
        """Raster place of the token at each place of the sequence, int64 [S] on the CPU."""
        num_text = self.tokens().num_text(self.seqlen)
        return torch.cat([torch.arange(num_text), num_text + tile_order(self.tokens(cube))])


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """One model call: a clip, noised."""

    sample: int
    """Clip id."""
    step: int
    """Index of the timestep."""
    timestep: float
    """Noise level, 0 is data."""
    noisy: Tensor
    """fp32 [1, N, C] on the CPU, raster order."""
    target: Tensor
    """fp32 [1, N, C]: the velocity that training asks for."""
    context: Tensor | None
    """Text features [1, L, text_dim]."""
    condition: Tensor | None = None
    """fp32 [1, N, K] on the CPU: what is given of the first frame, without noise."""
    image_context: Tensor | None = None
    """Image features [1, L, image_dim]."""


class DumpedInputs:
    """q, k and perhaps v of another model's layers, one safetensors file for each step.

    A file holds tensors `q.L`, `k.L` and `v.L` for layers L: [B, S, H, D], text tokens first, video tokens in raster
    order.

    Args:
        paths: files, in the order of their steps.
        geometry: grid, tokens and block size.
        device: where to compute.

    Raises:
        ValueError: a file cannot be read, or shapes do not fit together or to the geometry.
    """

    def __init__(self, paths: Sequence[Path], geometry: Geometry, device: torch.device) -> None:
        from safetensors import SafetensorError, safe_open

        self.geometry, self.device, self.paths = geometry, device, list(paths)
        self.layers: list[int] = []
        self.num_heads = 0
        for path in paths:
            try:
                with safe_open(str(path), framework="pt") as opened:
                    shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} must be a safetensors file with q.0, k.0, ...: {error}") from error
            self._check(path, shapes)

    def _check(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        layers = sorted(int(name[2:]) for name in shapes if name.startswith("q.") and name[2:].isdecimal())
        if not layers or (self.layers and layers != self.layers):
            raise ValueError(f"{path} must hold q.L and k.L of the same layers as the other files, got layers {layers}")
        self.layers = layers
        for layer in layers:
            q, k = shapes[f"q.{layer}"], shapes.get(f"k.{layer}", ())
            v = shapes.get(f"v.{layer}", (*k[:3], 1))
            good = len(q) == len(k) == len(v) == 4 and q[:2] == k[:2] and q[3] == k[3] and v[:3] == k[:3]
            if not good or q[1] != self.geometry.seqlen or q[2] % k[2] or q[2] != (self.num_heads or q[2]):
                raise ValueError(
                    f"{path}: q.{layer}, k.{layer}, v.{layer} must be [B, {self.geometry.seqlen}, H, D], Hkv dividing H"
                    f" and H alike in all layers, got {list(q)}, {list(k)}, {list(v)}: pass their own --grid"
                )
            self.num_heads = q[2]

    @property
    def num_layers(self) -> int:
        """One more than the last layer that is there."""
        return self.layers[-1] + 1

    def visit(self, visit: Visit) -> None:
        """Show all layers of all files, sample by sample."""
        from safetensors import safe_open

        for step, path in enumerate(self.paths):
            with safe_open(str(path), framework="pt", device=str(self.device)) as opened:
                names = set(opened.keys())
                for layer in self.layers:
                    q, k = opened.get_tensor(f"q.{layer}"), opened.get_tensor(f"k.{layer}")
                    v = opened.get_tensor(f"v.{layer}") if f"v.{layer}" in names else None
                    for one in range(q.shape[0]):
                        part = slice(one, one + 1)
                        own = None if v is None else v[part]
                        visit(LayerInputs(layer=layer, step=step, q=q[part], k=k[part], v=own, scale=None))

    def describe(self) -> dict[str, Any]:
        """Facts for reports."""
        names = [path.name for path in self.paths]
        return {"dumps": names, "layers": self.layers, "heads": self.num_heads, **dataclasses.asdict(self.geometry)}
