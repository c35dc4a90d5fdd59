"""How near sparse attention comes to dense attention, layer by layer and for the whole model.

Dims: B samples (1), S tokens, H heads, N blocks, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbsp_megatron import BlockMask, block_sparse_attention, sparse_imbalance
from dbsp_megatron.masks import MaskMethod, TokenGrid
from tools.attention_inputs import Geometry, LayerInputs, Point
from tools.attention_mass import block_mass, recalled_mass
from tools.mask_cases import MaskCase, ordered

if TYPE_CHECKING:
    from tools.trained_run import TrainedRun

FloatArray = NDArray[np.float64]
Mesh = tuple[int, int]
HISTOGRAM_BINS = 20


@dataclass
class Errors:
    """Sums of absolute and squared differences, and of what they are relative to."""

    sums: Tensor | None = None

    def add(self, result: Tensor, reference: Tensor, dims: tuple[int, ...]) -> None:
        """Compare two tensors; sums over `dims`, which leaves one shape for all calls."""
        result, reference = result.double(), reference.double()
        difference = result - reference
        parts = (difference.abs(), reference.abs(), difference.square(), reference.square())
        sums = torch.stack([part.sum(dims) for part in parts]).cpu()
        self.sums = sums if self.sums is None else self.sums + sums

    def relative(self, over: tuple[int, ...] = ()) -> tuple[FloatArray, FloatArray]:
        """Relative L1 and L2 errors, of sums over some of the remaining dims.

        Raises:
            ValueError: the reference is 0, so that nothing is relative to it.
        """
        if self.sums is None:
            raise ValueError("nothing was compared")
        sums = self.sums.sum([dim + 1 for dim in over]) if over else self.sums
        if not bool((sums[1] > 0).all()):
            raise ValueError("the dense output is 0: there is nothing to compare with, train the model first")
        return (sums[0] / sums[1]).numpy(), (sums[2] / sums[3]).sqrt().numpy()


@dataclass
class CaseTally:
    """What is added up for one case."""

    density: dict[int, list[FloatArray]] = field(default_factory=dict)
    """By layer, for each input: [H]."""
    recall: dict[int, list[FloatArray]] = field(default_factory=dict)
    """By layer, for each input: [H]."""
    output: dict[int, Errors] = field(default_factory=dict)
    """By layer: [H]."""
    imbalance: dict[Mesh, list[float]] = field(default_factory=dict)
    """By mesh, for each layer and input."""
    model: Errors = field(default_factory=Errors)
    loss: list[float] = field(default_factory=list)
    """Mean squared error of the velocity, for each input."""


class QualityMeter:
    """Measures mask methods on a trained run.

    Args:
        run: the trained run.
        cases: methods.
        meshes: Ulysses and Ring degrees to count imbalance for.
        bound_density: density for which the best possible recall is found, in raster order; None for none.
    """

    def __init__(
        self,
        run: TrainedRun,
        cases: Sequence[MaskCase],
        meshes: Sequence[Mesh],
        bound_density: float | None = None,
    ) -> None:
        self.run, self.cases, self.meshes, self.bound_density = run, list(cases), list(meshes), bound_density
        self.methods = [case.build() for case in cases]
        self.tallies = [CaseTally() for _ in cases]
        self.dense_loss: list[float] = []
        self.best_recall: list[float] = []

    def measure(self, points: Sequence[Point]) -> None:
        """Everything on some inputs; may be called again for more."""
        for point in points:
            dense = self.run.velocity(point, visit=self._layer)
            self.dense_loss.append(_loss(dense, point))
            for case, method, tally in zip(self.cases, self.methods, self.tallies, strict=True):
                sparse = self.run.velocity(point, method, case.cube)
                tally.model.add(sparse, dense, (0, 1, 2))
                tally.loss.append(_loss(sparse, point))

    def _layer(self, x: LayerInputs) -> None:
        geometry = self.run.geometry
        masses: dict[Any, Tensor] = {None: block_mass(x.q, x.k, geometry.block_size, x.scale)}
        if x.v is None:
            raise ValueError(f"layer {x.layer} has no v: output errors need it")
        if self.bound_density is not None:
            best = heaviest_share(masses[None], self.bound_density)
            recall = recalled_mass(masses[None], best, geometry.seqlen, geometry.block_size)
            self.best_recall.append(float(recall.mean()))
        dense = attend(x, None, self.run.engine)
        for case, method, tally in zip(self.cases, self.methods, self.tallies, strict=True):
            sparse = SparseLayer(x, method, geometry, case.cube)
            key = sparse.order_key
            if key not in masses:
                masses[key] = block_mass(sparse.inputs.q, sparse.inputs.k, geometry.block_size, x.scale)
            blocks = sparse.mask.blocks
            recall = recalled_mass(masses[key], blocks, geometry.seqlen, geometry.block_size)
            tally.recall.setdefault(x.layer, []).append(recall[0].cpu().numpy())
            tally.density.setdefault(x.layer, []).append(blocks[0].double().mean((1, 2)).cpu().numpy())
            out = sparse.output(self.run.engine)
            tally.output.setdefault(x.layer, Errors()).add(out, dense, (0, 1, 3))
            for mesh in self.meshes:
                tally.imbalance.setdefault(mesh, []).append(sparse_imbalance(sparse.mask, *mesh))

    def results(self) -> list[dict[str, Any]]:
        """Figures of each case, JSON values."""
        return [
            case_figures(case, method, tally)
            for case, method, tally in zip(self.cases, self.methods, self.tallies, strict=True)
        ]


class SparseLayer:
    """One layer's inputs in the token order of a case, with its mask.

    Args:
        x: inputs in raster order.
        method: mask method.
        geometry: grid, tokens and block size.
        cube: order of tokens of the case.
    """

    def __init__(
        self, x: LayerInputs, method: MaskMethod, geometry: Geometry, cube: tuple[int, int, int] | None
    ) -> None:
        grid: TokenGrid = geometry.tokens(cube)
        self._restore = None if cube is None else geometry.order(cube).argsort().to(x.q.device)
        self.inputs = ordered(x, geometry, cube)
        q, k, v = self.inputs.q, self.inputs.k, self.inputs.v
        self._orders = method.head_orders(x.layer, x.step, q.shape[2], k.shape[2], geometry.seqlen, grid)
        if self._orders is not None:
            q, k = self._orders.reorder(q), self._orders.reorder(k)
            v = None if v is None else self._orders.reorder(v)
            self.inputs = LayerInputs(layer=x.layer, step=x.step, q=q, k=k, v=v, scale=x.scale)
        self.order_key = cube if self._orders is None else self._orders.key
        self.mask = method.mask(q, k, x.layer, x.step, grid, geometry.block_size, v=v, scale=x.scale)

    def output(self, engine: str) -> Tensor:
        """Attention output, [B, S, H, Dv], in raster order."""
        out = attend(self.inputs, self.mask, engine)
        if self._orders is not None:
            out = self._orders.restore(out)
        return out if self._restore is None else out[:, self._restore]


def heaviest_share(mass: Tensor, density: float) -> Tensor:
    """The key blocks with most weight in each row, as many in all of them: bool like `mass`, [B, H, N, N]."""
    kept = max(1, round(density * mass.shape[-1]))
    chosen = torch.zeros(mass.shape, dtype=torch.bool, device=mass.device)
    return chosen.scatter_(-1, mass.topk(kept, dim=-1).indices, True)


def attend(x: LayerInputs, mask: BlockMask | None, engine: str) -> Tensor:
    """Attention under a mask, or dense."""
    if x.v is None:
        raise ValueError(f"layer {x.layer} has no v")
    if mask is None:
        mask = BlockMask.dense(x.q.shape[2], x.q.shape[1], device=x.q.device)
    q, k, v = (y.contiguous() for y in (x.q, x.k, x.v))
    return block_sparse_attention(q, k, v, mask, scale=x.scale, engine=engine)[0]


def _loss(velocity: Tensor, point: Point) -> float:
    return float((velocity.double() - point.target.double()).square().mean())


def case_figures(case: MaskCase, method: MaskMethod, tally: CaseTally) -> dict[str, Any]:
    """Means over inputs, by layer and head; and of all."""
    layers = sorted(tally.density)
    density, recall = (np.stack([np.mean(by[layer], 0) for layer in layers]) for by in (tally.density, tally.recall))
    by_head = [tally.output[layer].relative() for layer in layers]
    by_layer = [tally.output[layer].relative((0,)) for layer in layers]
    model = tally.model.relative()
    # Rounded, so that densities on an edge of two bins all fall into the upper one.
    edges = np.arange(HISTOGRAM_BINS + 1) / HISTOGRAM_BINS
    counts, _ = np.histogram(density.round(9), bins=edges)
    return {
        "label": case.label,
        "method": case.name,
        "settings": case.settings_text,
        "describe": method.describe(),
        "density": float(density.mean()),
        "density_min": float(density.min()),
        "density_max": float(density.max()),
        "recall": float(recall.mean()),
        "recall_min": float(recall.min()),
        "output_l1": float(np.mean([l1 for l1, _ in by_layer])),
        "output_l2": float(np.mean([l2 for _, l2 in by_layer])),
        "model_l1": float(model[0]),
        "model_l2": float(model[1]),
        "loss": float(np.mean(tally.loss)),
        "imbalance": {f"{u}x{r}": float(np.mean(values)) for (u, r), values in tally.imbalance.items()},
        "imbalance_max": {f"{u}x{r}": float(np.max(values)) for (u, r), values in tally.imbalance.items()},
        "layers": layers,
        "density_by_head": density.tolist(),
        "recall_by_head": recall.tolist(),
        "output_l1_by_head": [l1.tolist() for l1, _ in by_head],
        "output_l2_by_head": [l2.tolist() for _, l2 in by_head],
        "density_histogram": {"edges": edges.tolist(), "heads": counts.tolist()},
    }


def mean_densities(run: TrainedRun, points: Sequence[Point], cases: Sequence[MaskCase]) -> list[float]:
    """Mean density of each case over layers, heads and inputs."""
    methods = [case.build() for case in cases]
    sums, number = [0.0] * len(cases), 0

    def visit(x: LayerInputs) -> None:
        nonlocal number
        number += 1
        for index, (case, method) in enumerate(zip(cases, methods, strict=True)):
            sums[index] += SparseLayer(x, method, run.geometry, case.cube).mask.density

    for point in points:
        run.velocity(point, visit=visit)
    return [total / number for total in sums]
