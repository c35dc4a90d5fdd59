"""Mask files: what was written is what is predicted, and nothing else is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dbsp_megatron.masks import FileMask, MaskFile, TokenGrid, write_masks
from dbsp_megatron.masks.mask_file import FORMAT, VERSION, pack_bits, unpack_bits
from tests.unit.masks.summaries import check_rows_apart


def _masks(num_layers: int = 3, heads: int = 4, num: int = 15) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {layer: torch.rand(heads, num, num, generator=generator) < 0.3 for layer in range(num_layers)}


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 131])
def test_pack_bits_and_back(length: int) -> None:
    mask = torch.rand(2, 3, length) < 0.5
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, -(-length // 8))
    assert torch.equal(unpack_bits(packed, length), mask)


def test_pack_bits_puts_the_first_block_lowest() -> None:
    assert pack_bits(torch.tensor([True, False, True] + [False] * 5 + [True])).tolist() == [5, 1]


@pytest.mark.parametrize("seqlen", [117, 120])
def test_predict_gives_what_was_written(tmp_path: Path, seqlen: int) -> None:
    """Every layer, head and row, for each sample; rows may be empty."""
    masks = _masks()
    masks[1][2, 3] = False
    path = tmp_path / "masks.safetensors"
    write_masks(path, masks, seqlen=seqlen, block_size=8)
    method = FileMask(str(path))
    q = torch.randn(2, seqlen, 4, 8)
    for layer in (1, 0, 2, 1):
        got = method.mask(q, q[:, :, :2], layer, 0, None, 8).blocks
        assert torch.equal(got, masks[layer].expand(2, -1, -1, -1))
    assert torch.equal(check_rows_apart(method, seqlen, 8, None), masks[1].expand(2, -1, -1, -1))


def test_grids_must_agree_where_both_are_known(tmp_path: Path) -> None:
    path = tmp_path / "masks.safetensors"
    grid = TokenGrid(5, 8, 3, (2, 2, 2))
    write_masks(path, _masks(), seqlen=120, block_size=8, grid=grid)
    assert MaskFile(path).grid == grid
    q = torch.randn(1, 120, 4, 8)
    method = FileMask(str(path))
    method.mask(q, q, 0, 0, grid, 8)
    method.mask(q, q, 0, 0, None, 8)
    for other in ((5, 8, 3), (8, 5, 3)):
        with pytest.raises(ValueError, match=r"is for token grid \(5, 8, 3\) in cubes of \(2, 2, 2\)"):
            method.mask(q, q, 0, 0, other, 8)


@pytest.mark.parametrize(
    ("shape", "block_size", "words"),
    [
        ((1, 120, 3, 8), 8, "heads 4, attention has 3"),
        ((1, 121, 4, 8), 8, "tokens 120, attention has 121"),
        ((1, 120, 4, 8), 16, "tokens a block 8, attention has 16"),
    ],
)
def test_another_attention_is_refused(tmp_path: Path, shape: tuple[int, ...], block_size: int, words: str) -> None:
    path = tmp_path / "masks.safetensors"
    write_masks(path, _masks(), seqlen=120, block_size=8)
    q = torch.randn(*shape)
    with pytest.raises(ValueError, match=words):
        FileMask(str(path)).mask(q, q, 0, 0, None, block_size)


def test_a_layer_without_masks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "masks.safetensors"
    write_masks(path, {4: _masks()[0]}, seqlen=120, block_size=8)
    q = torch.randn(1, 120, 4, 8)
    FileMask(str(path)).mask(q, q, 4, 0, None, 8)
    with pytest.raises(ValueError, match="no masks for layer 3"):
        FileMask(str(path)).mask(q, q, 3, 0, None, 8)


def test_files_that_are_none_are_refused_with_their_name(tmp_path: Path) -> None:
    text, foreign = tmp_path / "a.txt", tmp_path / "b.safetensors"
    text.write_text("no tensors")
    save_file({"x": torch.zeros(2)}, foreign)
    for path in (text, foreign, tmp_path / "missing"):
        with pytest.raises(ValueError, match=f"path={path} must be a file of block masks"):
            FileMask(str(path))
    with pytest.raises(ValueError, match="path must name a file"):
        FileMask("")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"masks": {}}, "at least one layer"),
        ({"seqlen": 121}, r"masks\[0\] must be bool \[H, N, N\] = \[4, 16, 16\]"),
        ({"masks": {0: torch.zeros(4, 15, 15)}}, "torch.float32"),
        ({"masks": {0: torch.zeros(4, 15, 15).bool(), 1: torch.zeros(3, 15, 15).bool()}}, r"masks\[1\]"),
        ({"orders": {0: [0, 1, 2, 6], 1: [0] * 4, 2: [0] * 4}}, r"orders\[0\] must be 4 numbers in 0 .. 5"),
        ({"orders": {0: [0] * 4}}, r"orders\[1\] must be 4 numbers"),
    ],
)
def test_write_masks_refuses_and_leaves_nothing(tmp_path: Path, changes: dict, words: str) -> None:
    options = {"masks": _masks(), "seqlen": 120, "block_size": 8} | changes
    with pytest.raises(ValueError, match=words):
        write_masks(tmp_path / "masks.safetensors", options.pop("masks"), **options)
    assert list(tmp_path.iterdir()) == []


def _save(path: Path, tensors: dict[str, Tensor], **changes: object) -> None:
    facts = {"version": VERSION, "heads": 2, "seqlen": 24, "block_size": 8, "grid": None, "cube": None} | changes
    save_file(tensors, path, metadata={FORMAT: json.dumps(facts)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 0}, "heads must be an integer >= 1, got 0"),
        ({"heads": "2"}, "heads must be an integer >= 1, got '2'"),
        ({"seqlen": -24}, "seqlen must be an integer >= 1, got -24"),
        ({"block_size": 0}, "block_size must be an integer >= 1, got 0"),
        ({"block_size": 8.5}, "block_size must be an integer >= 1, got 8.5"),
        ({"grid": [1, 2]}, "not enough values"),
        ({"grid": [1, 2, 0]}, "grid must be three integers"),
        ({"grid": [1, 2, 3], "cube": 2}, "cube must be three integers"),
        ({"version": 9}, "no masks of version 1"),
    ],
)
def test_facts_that_cannot_be_are_refused_with_the_file(tmp_path: Path, changes: dict, words: str) -> None:
    path = tmp_path / "a.safetensors"
    _save(path, {"mask.0": torch.zeros(2, 3, 1, dtype=torch.uint8)}, **changes)
    with pytest.raises(ValueError, match=f"path={path} must be a file of block masks") as error:
        FileMask(str(path))
    assert words in str(error.value)


def test_contents_that_cannot_be_are_refused_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    rows, order = torch.zeros(2, 3, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    for tensors in (
        {},
        {"order.0": order},
        {"mask.0": rows, "mask.1": rows.clone(), "order.0": order},
        {"mask.x": rows},
    ):
        _save(path, tensors)
        with pytest.raises(ValueError, match=f"path={path} must be a file of block masks"):
            MaskFile(path)
    save_file({"mask.0": rows}, path, metadata={FORMAT: "[1]"})
    with pytest.raises(ValueError, match=f"path={path} must be a file of block masks"):
        MaskFile(path)
    _save(path, {"mask.0": rows, "order.0": order + 6})
    with pytest.raises(ValueError, match=r"order.0 must be in 0 .. 5, got \[6, 6\]"):
        MaskFile(path).orders(0)
    file = MaskFile(path)
    path.unlink()
    with pytest.raises(ValueError, match="mask.0 cannot be read any more"):
        file.packed(0)


def test_describe_is_of_the_content(tmp_path: Path) -> None:
    """Ranks may find the file in other places, but not other masks."""
    for name, masks in (("a", _masks()), ("b", _masks()), ("c", _masks(2))):
        write_masks(tmp_path / name, masks, seqlen=120, block_size=8)
    texts = [FileMask(str(tmp_path / name)).describe() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]


def test_file_with_orders_is_for_paro(tmp_path: Path) -> None:
    path = tmp_path / "paro.safetensors"
    write_masks(path, _masks(), seqlen=120, block_size=8, orders={layer: [0, 1, 5, 2] for layer in range(3)})
    assert MaskFile(path).orders(1).tolist() == [0, 1, 5, 2]
    with pytest.raises(ValueError, match="use the method paro"):
        FileMask(str(path))
