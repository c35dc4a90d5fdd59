"""VsaMask: the coarse stage written out, on cubes of 4 x 4 x 4 tokens."""

from __future__ import annotations

import torch

from dbsp_megatron.masks import TokenGrid, VsaMask, tile_order


def test_predict_equals_slow_twin() -> None:
    """Mean of every cube, softmax of the cubes' scores, and its largest entries; raster tokens put into cubes first."""
    grid = TokenGrid(8, 8, 12, (4, 4, 4))
    q, k = (torch.randn(2, 8, 8, 12, 4, 8, dtype=torch.float64) for _ in range(2))
    order = tile_order(grid)
    flat = [x.flatten(1, 3)[:, order] for x in (q, k)]
    got = VsaMask(0.25).mask(*flat, grid=grid, block_size=64).blocks
    means = []
    for x in (q, k):
        cubes = [
            x[:, t : t + 4, h : h + 4, w : w + 4].mean((1, 2, 3)) for t in (0, 4) for h in (0, 4) for w in (0, 4, 8)
        ]
        means.append(torch.stack(cubes, 1))
    weights = torch.einsum("bihd,bjhd->bhij", *means).mul(8**-0.5).softmax(-1)
    want = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, weights.topk(3).indices, True)
    assert torch.equal(got, want)
