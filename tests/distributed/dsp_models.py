"""Small transformers over several sequence dims, their single-process gradients, and steps that DSP tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dbsp_megatron.dsp import DspGroup, DspMesh, DspRun, StageSpec

WIDTH = 4
ATOL = 1e-12


class DimAttention(nn.Module):
    """Attention along one dim, all others are batch; with `residual` it reads and writes the stream."""

    def __init__(self, dim: int, residual: bool = True) -> None:
        super().__init__()
        self.dim, self.residual = dim, residual
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x.movedim(self.dim, -2)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        if mask is not None:
            # [B, T, S]: which keys count.
            scores = scores + (mask.movedim(self.dim, -1)[..., None, :] - 1) * 3
        y: Tensor = self.out((scores.softmax(-1) @ v).movedim(-2, self.dim))
        return x + y if self.residual else y


class Block(nn.Module):
    """One attention for each dim, text cross-attention of a kind, and an MLP."""

    def __init__(self, dims: Sequence[int], residual: bool = True) -> None:
        super().__init__()
        self.attend = nn.ModuleList(DimAttention(dim, residual) for dim in dims)
        self.residual = residual
        self.text = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        for attend in self.attend:
            x = attend(x) if self.residual else x + attend(self.norm(x))
            x = x + self.text(text)
        return x + self.mlp(self.norm(x))


class Axial(nn.Module):
    """Embedding, blocks, head on [B, T, S, C] or with more dims; optionally recomputes its blocks."""

    def __init__(self, num_dims: int = 2, num_blocks: int = 2, residual: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block(range(1, num_dims + 1), residual) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 3)
        self.recompute: bool | None = None

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            run = block if self.recompute is None else partial(checkpoint, block, use_reentrant=self.recompute)
            x = run(x, text)
        out: Tensor = self.head(x)
        return out


class AxialInCode(Axial):
    """The same model with switches written into its code."""

    def run_on(self, run: DspRun, x: Tensor, text: Tensor, pattern: str, grid: Sequence[str]) -> Tensor:
        """Parts in, parts out."""
        x = self.embed(run.enter(x, pattern))
        for index, block in enumerate(self.blocks):
            if self.recompute is None:
                x = self._block(run, index, block, x, text, pattern, grid)
            else:
                x = checkpoint(self._block, run, index, block, x, text, pattern, grid, use_reentrant=self.recompute)
        out: Tensor = self.head(x)
        return out

    def _block(
        self, run: DspRun, index: int, block: Any, x: Tensor, text: Tensor, pattern: str, grid: Sequence[str]
    ) -> Tensor:
        for name, attend in zip(grid, block.attend, strict=True):
            key = f"{index}.{name}"
            if block.residual:
                x = attend(run.stage(key, x, pattern, needs={name}))
            else:
                x = x + run.branch(key, attend, block.norm(x), pattern, needs={name})
            x = x + block.text(text)
        moved: Tensor = x + block.mlp(block.norm(x))
        return moved


def make(**options: Any) -> Axial:
    """A model with the same weights on all ranks, fp64."""
    torch.manual_seed(0)
    return Axial(**options).double()


def make_in_code(**options: Any) -> AxialInCode:
    """The same model with switches in its code."""
    torch.manual_seed(0)
    return AxialInCode(**options).double()


def inputs(shape: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(input [*shape, 3], text, weights of the loss), fp64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    text = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    return x, text, torch.randn(*shape, 3, generator=generator, dtype=torch.float64)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name, taken away from the model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def summed(grads: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Gradients summed over the ranks."""
    for grad in grads.values():
        dist.all_reduce(grad, group=group)
    return grads


def reference(model: Axial, x: Tensor, text: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of the whole in one process."""
    recompute, model.recompute = model.recompute, None
    out = model(x, text)
    (out * weights).sum().backward()
    model.recompute = recompute
    return out.detach(), gradients(model)


def check(got: dict[str, Tensor], want: dict[str, Tensor], label: str) -> None:
    """Fail unless gradients agree."""
    if got.keys() != want.keys():
        raise AssertionError(f"{label}: {sorted(got.keys() ^ want.keys())}")
    for name, expected in want.items():
        error = float((got[name] - expected).abs().max())
        if not error <= ATOL * max(1.0, float(expected.abs().max())):
            raise AssertionError(f"{label}: {name} is off by {error}")


def mesh_of_world() -> DspMesh:
    """One axis of all ranks."""
    return DspMesh(DspGroup(dist.group.WORLD, "dsp"))


def specs(grid: Sequence[str], branch: bool = False) -> list[StageSpec]:
    """Stages of `Axial`."""
    return [
        StageSpec(modules=f"blocks.*.attend.{index}", needs={name}, tensor=pattern_of(grid), branch=branch)
        for index, name in enumerate(grid)
    ]


def pattern_of(grid: Sequence[str]) -> str:
    """Pattern of the stream."""
    return f"B {' '.join(grid)} C"


def refused(function: Callable[[], Any]) -> str:
    """Message of the ValueError."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return "accepted"
