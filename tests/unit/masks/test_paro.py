"""ParoMask and HeadOrders: attention of heads in orders of their own against reordering by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dbsp_megatron import MaskConfig, block_sparse_attention, build_mask_method
from dbsp_megatron.masks import FileMask, HeadOrders, ParoMask, TokenGrid, write_masks
from dbsp_megatron.masks.head_order import AXES, axis_orders
from tests.reference import attention_reference, random_blocks, random_qkv

GRID, SEQLEN, BLOCK = (3, 4, 5), 65, 8
NUM = -(-SEQLEN // BLOCK)
ORDERS = (5, 5, 0, 0, 2, 2)


def _file(path: Path, grid: tuple[int, int, int] | None = GRID, orders: tuple[int, ...] | None = ORDERS) -> ParoMask:
    masks = {layer: random_blocks(layer, 1, 6, NUM, NUM)[0] for layer in range(2)}
    chosen = None if orders is None else {0: orders, 1: orders[::-1]}
    write_masks(path, masks, seqlen=SEQLEN, block_size=BLOCK, grid=grid, orders=chosen)
    return ParoMask(str(path))


def _slow_order(grid: TokenGrid, num_text: int, axes: tuple[int, ...]) -> list[int]:
    """Places of the tokens, text first, then by the coordinates in the order of `axes`."""
    tokens = grid.locate(torch.arange(num_text + grid.num_tokens), num_text)
    found = [(int(tokens.frame[i]), int(tokens.row[i]), int(tokens.column[i])) for i in range(len(tokens.frame))]
    video = sorted(range(num_text, len(found)), key=lambda i: [found[i][axis] for axis in axes])
    return [*range(num_text), *video]


@pytest.mark.parametrize("cube", [None, (2, 2, 2)])
@pytest.mark.parametrize("num_text", [0, 5])
def test_axis_orders_equal_slow_twin(cube: tuple[int, int, int] | None, num_text: int) -> None:
    grid = TokenGrid(*GRID, cube=cube)
    places = axis_orders(grid, num_text + 60)
    assert places.shape == (6, num_text + 60)
    for row, axes in zip(places.tolist(), AXES, strict=True):
        assert row == _slow_order(grid, num_text, axes)
    if cube is None:
        assert places[0].tolist() == list(range(num_text + 60))


def _attention_by_hand(q: Tensor, k: Tensor, v: Tensor, masks: Tensor, orders: tuple[int, ...]) -> Tensor:
    """Head after head in fp64: put its tokens in its order, attend under its mask, put them back."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for head, order in enumerate(orders):
        places = _slow_order(TokenGrid(*GRID), SEQLEN - 60, AXES[order])
        parts = [x[:, places, h : h + 1] for x, h in ((q, head), (k, head // group), (v, head // group))]
        allowed = masks[head].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:SEQLEN, :SEQLEN]
        out[:, places, head] = attention_reference(*parts, allowed[None, None])[0][:, :, 0]
    return out


@pytest.mark.parametrize("kv_heads", [3, 6])
def test_attention_in_the_orders_of_the_heads_equals_slow_twin(tmp_path: Path, kv_heads: int) -> None:
    method = _file(tmp_path / "paro.safetensors")
    q, k, v, _ = random_qkv(0, 2, SEQLEN, 6, 8, num_kv_heads=kv_heads)
    for layer, orders in ((0, ORDERS), (1, ORDERS[::-1])):
        mask = method.mask(q, k, layer, 0, GRID, BLOCK)
        found = method.head_orders(layer, 0, 6, kv_heads, SEQLEN, GRID)
        assert found is not None
        assert found.of_head == orders
        out, _ = block_sparse_attention(*(found.reorder(x) for x in (q, k, v)), mask)
        want = _attention_by_hand(q, k, v, random_blocks(layer, 1, 6, NUM, NUM)[0], orders)
        torch.testing.assert_close(found.restore(out).double(), want, rtol=0, atol=1e-5)
        assert torch.equal(found.restore(found.reorder(k)), k)


def test_raster_order_everywhere_needs_no_reordering(tmp_path: Path) -> None:
    assert _file(tmp_path / "a", orders=(0,) * 6).head_orders(0, 0, 6, 6, SEQLEN, GRID) is None
    assert _file(tmp_path / "b", orders=None).head_orders(0, 0, 6, 6, SEQLEN, GRID) is None
    assert FileMask(str(tmp_path / "b")).head_orders(0, 0, 6, 6, SEQLEN, GRID) is None


def test_order_0_of_a_sequence_in_cubes_is_frame_by_frame(tmp_path: Path) -> None:
    """An order of axes means the same whatever order the model input has."""
    grid = TokenGrid(*GRID, cube=(2, 2, 2))
    found = _file(tmp_path / "a", grid, (0,) * 6).head_orders(0, 0, 6, 6, SEQLEN, grid)
    assert found is not None
    raster = grid.locate(torch.arange(5, SEQLEN), 5).raster
    assert found.index(found.of_head)[5:, 3].sub(5).tolist() == raster.argsort().tolist()


def test_heads_that_share_keys_must_share_an_order(tmp_path: Path) -> None:
    method = _file(tmp_path / "a")
    with pytest.raises(ValueError, match="query heads that share a key head must have one order"):
        method.head_orders(0, 0, 6, 2, SEQLEN, GRID)
    assert HeadOrders(torch.zeros(3, 4), (1, 1, 2, 2), ()).of_kv_heads(2) == (1, 2)


def test_orders_need_their_grid(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="orders of axes and no grid"):
        _file(tmp_path / "a", grid=None)
    method = _file(tmp_path / "b")
    with pytest.raises(ValueError, match="needs the token grid"):
        method.head_orders(0, 0, 6, 6, SEQLEN, None)
    for sizes, words in (
        ((6, SEQLEN, (5, 4, 3)), "token grid"),
        ((4, SEQLEN, GRID), "heads"),
        ((6, 66, GRID), "tokens"),
    ):
        heads, seqlen, grid = sizes
        with pytest.raises(ValueError, match=f"is for {words}"):
            method.head_orders(0, 0, heads, heads, seqlen, grid)


def test_dense_layers_need_no_orders(tmp_path: Path) -> None:
    """Layers that a schedule keeps dense may be missing in the file."""
    path = tmp_path / "a"
    masks = {1: random_blocks(0, 1, 6, NUM, NUM)[0]}
    write_masks(path, masks, seqlen=SEQLEN, block_size=BLOCK, grid=GRID, orders={1: ORDERS})
    method = build_mask_method(MaskConfig(method="paro", path=str(path), dense_layers=1, dense_steps=2))
    assert method.head_orders(0, 5, 6, 6, SEQLEN, GRID) is None
    assert method.head_orders(1, 1, 6, 6, SEQLEN, GRID) is None
    found = method.head_orders(1, 2, 6, 6, SEQLEN, GRID)
    assert found is not None
    assert found.of_head == ORDERS
