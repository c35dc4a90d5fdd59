"""Index lists against lists made by hand, and their Triton kernels in the interpreter against the plain twin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.lists import (
    BlockLists,
    build_lists,
    dense_lists,
    launch_order,
    naive_build_lists,
    naive_launch_order,
)
from tests.harness import run_ranks
from tests.reference import nan_filled_memory, random_blocks

# batch, heads, q-blocks, k-blocks; every kind of head of `random_blocks` (dense, empty rows, hot columns), odd sizes.
SHAPES = [(1, 5, 19, 131), (2, 3, 33, 257), (3, 1, 70, 17), (1, 1, 1, 1), (1, 2, 3, 1343), (2, 5, 128, 16)]


def _views(shape: tuple[int, int, int, int]) -> dict[str, Tensor]:
    blocks = random_blocks(7, *shape)
    return {
        "contiguous": blocks,
        "transposed": blocks.transpose(2, 3).contiguous().transpose(2, 3),
        "every second column": blocks[..., ::2],
        "shared by heads": blocks[:, :1],
        "expanded batch": blocks[:1].expand(2, -1, -1, -1),
        "all dense": torch.ones_like(blocks),
        "all empty": torch.zeros_like(blocks),
        "no rows": blocks[:, :, :0],
        "no columns": blocks[..., :0],
    }


def _check_direction(count: Tensor, index: Tensor, blocks: Tensor) -> None:
    """The first `count` entries of each row are ascending and are exactly the dense blocks."""
    listed = torch.zeros_like(blocks)
    for row_count, row_index, row in zip(count.flatten(), index.flatten(0, 2), listed.flatten(0, 2), strict=True):
        entries = row_index[:row_count].long()
        assert bool((entries.diff() > 0).all())
        row[entries] = True
    assert torch.equal(listed, blocks)


def _check_by_hand(lists: BlockLists, blocks: Tensor) -> None:
    assert lists.t_count is not None
    assert lists.t_index is not None
    assert lists.full is not None
    assert torch.equal(lists.full, blocks.flatten(2).all(-1) if blocks.numel() else lists.full)
    _check_direction(lists.count, lists.index, blocks.contiguous())
    _check_direction(lists.t_count, lists.t_index, blocks.transpose(2, 3).contiguous())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_build_lists_equals_lists_made_by_hand(shape: tuple[int, int, int, int]) -> None:
    for blocks in _views(shape).values():
        lists = build_lists(blocks, transpose=True)
        _check_by_hand(lists, blocks)
        assert lists.t_order is not None
        assert lists.t_index is not None
        assert lists.index.is_contiguous()
        assert lists.t_index.is_contiguous()
        assert sorted(lists.order.tolist()) == list(range(lists.count.numel()))
        assert sorted(lists.t_order.tolist()) == list(range(lists.t_index.shape[:3].numel()))


def test_build_lists_makes_the_transpose_only_when_asked() -> None:
    blocks = random_blocks(3, 1, 5, 9, 7)
    lists = build_lists(blocks, transpose=False)
    assert (lists.t_count, lists.t_index, lists.t_order) == (None, None, None)
    _check_by_hand(lists.with_transpose(blocks), blocks)
    complete = build_lists(blocks, transpose=True)
    assert complete.with_transpose(blocks) is complete


def test_build_lists_stores_long_rows_in_32_bits() -> None:
    blocks = torch.zeros((1, 1, 2, 32770), dtype=torch.bool)
    blocks[..., -1] = True
    lists = build_lists(blocks, transpose=True)
    assert (lists.index.dtype, lists.t_index.dtype) == (torch.int32, torch.int16)  # type: ignore[union-attr]
    assert lists.index[0, 0, :, 0].tolist() == [32769, 32769]


def test_build_lists_takes_many_heads_of_many_rows() -> None:
    """Trap B53: no table of a fixed size limits heads times rows."""
    blocks = torch.zeros((1, 48, 768, 3), dtype=torch.bool)
    blocks[:, 1::2, 5::7, 1:] = True
    lists = build_lists(blocks, transpose=True)
    assert torch.equal(lists.count, blocks.sum(-1, dtype=torch.int32))
    assert sorted(lists.order.tolist()) == list(range(48 * 768))
    # Heads with work come first, longest row first; head 1 is the first of them.
    assert lists.order[0] == 768 + 5


def test_launch_order_starts_long_rows_then_goes_head_by_head() -> None:
    # One multiprocessor's mean share is sum / 132, so that only a row of more than sum / 1320 counts as long.
    count = torch.full((1, 3, 700), 2, dtype=torch.int32)
    count[0, 1] = 3
    count[0, 2, 650], count[0, 0, 3], count[0, 0, 690] = 40, 50, 1
    order = launch_order(count).tolist()
    assert order[:2] == [3, 2 * 700 + 650]
    assert order[2:702] == list(range(700, 1400))
    assert order[702:1401] == [i for i in range(700) if i not in (3, 690)] + [690]
    assert order[1401:] == [i for i in range(1400, 2100) if i != 2050]
    assert torch.equal(launch_order(count), naive_launch_order(count))


def test_dense_lists_equal_those_of_a_dense_mask() -> None:
    got = dense_lists(2, 3, 5, 1100, "cpu")
    want = build_lists(torch.ones((2, 3, 5, 1100), dtype=torch.bool), transpose=True)
    for name in FIELDS:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.index.untyped_storage().nbytes() < 100
    assert got.index.shape == want.index.shape


@pytest.mark.parametrize("blocks", [torch.ones(1, 2, 3, 4), torch.ones(2, 3, 4, dtype=torch.bool)], ids=str)
def test_build_lists_refuses_what_is_no_mask(blocks: Tensor) -> None:
    for build in (build_lists, naive_build_lists):
        with pytest.raises(ValueError, match="blocks must be bool"):
            build(blocks, transpose=False)


def test_union_counts_blocks_of_either_row_of_a_pair() -> None:
    blocks = torch.zeros((1, 5, 5, 6), dtype=torch.bool)
    blocks[0, 0, :4, 1:3] = True  # neighbours alike
    blocks[0, 1, 0::2, :3] = blocks[0, 1, 1::2, 3:] = True  # no block shared; row 4 is alone
    blocks[0, 2, 0, :4] = blocks[0, 2, 1, 3:5] = True
    blocks[0, 3] = True
    lists = build_lists(blocks, transpose=False)
    assert lists.union is not None
    assert lists.union.dtype == torch.int32
    assert lists.union.tolist() == [[4, 15, 5, 18, 0]]
    want = torch.tensor([[1.0, (2 * 12 + 3) / 15, 2 * 5 / 6, 1.0, 1.0]])
    torch.testing.assert_close(lists.union_factor(), want)
    assert lists.union_factor().dtype == torch.float32


def test_union_factor_of_single_rows_and_dense_lists_is_one() -> None:
    blocks = random_blocks(11, 2, 5, 1, 9)
    torch.testing.assert_close(build_lists(blocks, transpose=False).union_factor(), torch.ones(2, 5))
    for num_q in (4, 5):
        torch.testing.assert_close(dense_lists(2, 3, num_q, 7, "cpu").union_factor(), torch.ones(2, 3))


def test_union_factor_refuses_lists_without_union() -> None:
    lists = replace(build_lists(random_blocks(3, 1, 2, 3, 4), transpose=False), union=None)
    with pytest.raises(ValueError, match="lists must have `union`"):
        lists.union_factor()


def _interpreter_masks() -> dict[str, Tensor]:
    """Few blocks each: the interpreter takes some 0.1 ms for an operation on a tile."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.rand((1, 2, 37, 67), generator=generator)
    heavy = noise < 0.1
    heavy[0, 1, 29] = True
    heavy[0, 0, :, 41] = True
    ties = torch.zeros((2, 3, 17, 14), dtype=torch.bool)
    ties[:, :, :, ::3] = True
    ties[0, 1, 4:9] = False
    first = random_blocks(7, 1, 5, 19, 65)
    return {
        "every kind of head": first,
        "heavy row and column": heavy,
        "ties": ties,
        "32 bit": torch.rand((1, 1, 2, 130), generator=generator) < 0.3,
        "one block": torch.ones((1, 1, 1, 1), dtype=torch.bool),
        "one column": noise[:1, :1, :, :1] < 0.5,
        "all dense": torch.ones((1, 2, 18, 33), dtype=torch.bool),
        "all empty": torch.zeros((1, 2, 18, 33), dtype=torch.bool),
        "transposed": (noise[:, :1] < 0.3).transpose(2, 3),
        "every second column": first[:, 1:3, 2:, 1::2],
        "shared by heads": first[:, 1:2],
        "expanded": ties[1:, :1, :5].expand(2, 2, -1, -1),
        "bytes other than one": (first[:, 2:4].to(torch.uint8) * 6).view(torch.bool),
    }


FIELDS = ("count", "order", "full", "union", "t_count", "t_order")


def check_lists_equal(got: BlockLists, want: BlockLists) -> list[str]:
    """Names of fields that differ; of the lists only what is valid counts."""
    faults = []
    for name in FIELDS:
        x, y = getattr(got, name), getattr(want, name)
        if (x is None) != (y is None) or (x is not None and (x.dtype != y.dtype or not torch.equal(x, y))):
            faults.append(name)
    for name, count in (("index", want.count), ("t_index", want.t_count)):
        x, y = getattr(got, name), getattr(want, name)
        if count is None:
            continue
        valid = torch.arange(y.shape[3], device=y.device) < count[..., None]
        if x.dtype != y.dtype or not x.is_contiguous() or not torch.equal(x[valid], y[valid]):
            faults.append(name)
    return faults


def _run_interpreter(rank: int, world_size: int) -> list[str]:
    from dbsp_megatron.kernels.block_sparse_attention import lists, lists_kernel
    from tests.unit.kernels.interpreter import prepare

    prepare()
    masks = _interpreter_masks()
    # On a small device few rows are long; with the small tiles of a large mask every loop goes round several times.
    small, usual = (1, 7), (132, 10)
    tiles = {"_RANK_PROGRAMS": 2, "_CHUNK": 8, "_HEADS": 4}
    runs: list[tuple[str, tuple[int, int], dict[str, int]]] = [(name, usual, {}) for name in masks]
    runs += [("heavy row and column", small, {}), ("every second column", small, tiles), ("ties", small, tiles)]
    faults = []
    for name, sizes, constants in runs:
        blocks = masks[name]
        types = (torch.int32 if name == "32 bit" else torch.int16, torch.int16)
        with (
            mock.patch.object(lists, "multiprocessors", lambda _, n=sizes[0]: n),
            mock.patch.object(lists, "_SHARES", sizes[1]),
            ExitStack() as stack,
            nan_filled_memory(),
        ):
            for constant, value in constants.items():
                stack.enter_context(mock.patch.object(lists_kernel, constant, value))
            want = naive_build_lists(blocks, transpose=True)
            want = replace(want, index=want.index.to(types[0]))
            make = partial(lists_kernel.triton_build_lists, blocks, *types, *sizes)
            made = {"together": make(rows=True, columns=True)}
            if name in ("ties", "one column", "32 bit"):
                made["apart"] = make(rows=True, columns=False) | make(rows=False, columns=True)
                if not torch.equal(lists_kernel.triton_launch_order(want.count, *sizes), want.order):
                    faults.append(f"{name} {sizes}: launch order alone")
            for kind, fields in made.items():
                found = check_lists_equal(BlockLists(**fields), want)
                faults += [f"{name} {sizes} {constants} {kind}: {fault}" for fault in found]
    return faults


def test_triton_lists_equal_twin_in_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs it."""
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_run_interpreter, 1, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=200)[0]
    assert not faults, faults


@pytest.mark.parametrize("kind", ["16 bit", "32 bit", "column stride", "order"])
def test_list_kernels_compile_for_sm_90_with_neighbours_side_by_side(kind: str) -> None:
    """No spills; neighbouring threads read neighbouring columns and write neighbours in a list, without a detour."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dbsp_megatron.kernels.block_sparse_attention import lists_kernel

    kernel = lists_kernel._order_kernel if kind == "order" else lists_kernel._compact_kernel
    constants: dict[str, object] = {
        "UNIT": kind != "column stride",
        "ROWS": lists_kernel._TILE_ROWS,
        "COLUMNS": lists_kernel._TILE_COLUMNS,
        "GROUPS": lists_kernel._GROUPS,
    }
    if kind == "order":
        constants = {
            "ROWS": lists_kernel._RANKED,
            "CHUNK": lists_kernel._CHUNK,
            "HEADS": lists_kernel._HEADS,
            "LIST_ROWS": lists_kernel._TILE_ROWS,
        }
    index = "*i32" if kind == "32 bit" else "*i16"
    types = {"blocks_ptr": "*u1", "full_ptr": "*u1", "index_ptr": index, "t_index_ptr": index}
    plain = {p.name for p in kernel.params if p.do_not_specialize}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        if name not in plain:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): x for name, x in constants.items()},
        attrs=attributes,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.metadata.shared <= 2048
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [tool, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    assert int(found[1]) <= 176, usage
    assert int(found[2]) == 0, usage
    if kind == "order":
        return
    # Stores of list entries are one entry wide, whatever the compiler was told of their places.
    wide = re.findall(r"st\.global\.v\d\S*", compiled.asm["ptx"])
    assert not wide, wide
    code = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"#(blocked\d*) = .*threadsPerWarp = (\[[\d, ]+\])", code))
    tile = r"tt\.{} .*tensor<(\d+)x\d+x32x.*#(blocked\d*)>"
    lists = {(int(lines), layouts[layout]) for lines, layout in re.findall(tile.format("store"), code)}
    assert lists == {(lists_kernel._TILE_ROWS // 2, "[1, 1, 32]"), (lists_kernel._TILE_COLUMNS, "[1, 1, 32]")}
    if kind != "column stride":
        reads = {(int(lines), layouts[layout]) for lines, layout in re.findall(tile.format("load"), code)}
        assert reads == {(lists_kernel._TILE_ROWS // 2, "[1, 1, 32]"), (lists_kernel._TILE_COLUMNS, "[32, 1, 1]")}
