"""pack, unpack and unpack_sum against loops over rows, and their Triton kernels in the interpreter against twins."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_pack import (
    PieceIndex,
    naive_pack,
    naive_unpack,
    naive_unpack_sum,
    pack,
    piece_sizes,
    unpack,
    unpack_sum,
)
from tests.harness import run_ranks


@dataclass(frozen=True)
class Case:
    """Tensors of one call: tokens are dealt out to groups of pieces, heads to the pieces of a group."""

    batch: int
    tokens: int
    heads: tuple[int, ...]
    """Heads of each tensor; the first is q."""
    dims: tuple[int, ...]
    """Head dim of each tensor."""
    groups: int
    """Groups of pieces (ring ranks); each token goes to one."""
    members: int
    """Pieces of a group (Ulysses ranks)."""
    copies: bool = False
    """Heads of all tensors but the first go to two members each."""


# A tile is 64 rows or 32 tokens, and 32 to 256 columns: none is full, some rows take several tiles.
CASES = [
    Case(2, 37, (5, 2, 2), (24, 24, 16), groups=1, members=3, copies=True),
    Case(1, 70, (3,), (5,), groups=3, members=2),
    Case(3, 33, (2, 1, 1), (130, 130, 130), groups=2, members=2, copies=True),
    Case(2, 9, (7, 3), (16, 64), groups=1, members=5, copies=True),
    Case(1, 1, (1,), (1,), groups=1, members=1),
    Case(2, 0, (3,), (8,), groups=1, members=2),
]


def _lists(case: Case, which: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and heads of each piece; heads of several members are on neighbours, some pieces stay empty."""
    generator = torch.Generator().manual_seed(case.tokens)
    group = torch.randint(case.groups, (case.tokens,), generator=generator)
    member = torch.randint(case.members, (case.heads[which],), generator=generator)
    copied = case.copies and which > 0
    tokens, heads = [], []
    for piece in range(case.groups * case.members):
        here = member == piece % case.members
        if copied:
            here |= (member + 1) % case.members == piece % case.members
        tokens.append(torch.nonzero(group == piece // case.members).flatten().flip(0))
        heads.append(torch.nonzero(here).flatten())
    return tokens, heads


def _indices(case: Case) -> list[PieceIndex]:
    return [PieceIndex.build(*_lists(case, i), case.tokens, heads) for i, heads in enumerate(case.heads)]


def _tensors(case: Case, dtype: torch.dtype, layout: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    xs = []
    for heads, dim in zip(case.heads, case.dims, strict=True):
        x = torch.randn((case.batch, case.tokens, heads, dim), generator=generator) * 50
        x = x > 0 if dtype == torch.bool else x.abs().to(dtype) if dtype == torch.uint8 else x.to(dtype)
        if layout == "heads first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "dims apart":
            x = x.transpose(1, 3).contiguous().transpose(1, 3)
        if layout == "part of a wider tensor":
            x = torch.nn.functional.pad(x, (3, 2, 1, 0))[:, :, 1:, 3:-2]
        xs.append(x)
    return xs


LAYOUTS = ["contiguous", "heads first", "dims apart", "part of a wider tensor"]


def _by_hand(xs: list[Tensor], case: Case) -> list[Tensor]:
    """Rows of the flat buffer, one after another."""
    rows = []
    lists = [_lists(case, which) for which in range(len(xs))]
    for piece in range(case.groups * case.members):
        for x, (tokens, heads) in zip(xs, lists, strict=True):
            rows += [
                x[entry, token, head]
                for entry in range(case.batch)
                for token in tokens[piece].tolist()
                for head in heads[piece].tolist()
            ]
    return rows


def _distinct(flat: Tensor) -> Tensor:
    """Other values for a received buffer: every copy of a row differs, and additions round."""
    return (torch.randn(flat.shape, generator=torch.Generator().manual_seed(3)) * 30).to(flat.dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pack_holds_rows_of_pieces_in_order(case: Case, layout: str) -> None:
    """Views are sent by their values, and what they are cut from stays as it was (Trap B45)."""
    xs, indices = _tensors(case, torch.bfloat16, layout), _indices(case)
    before = [x.clone() for x in xs]
    flat = pack([x.requires_grad_() for x in xs], indices)
    assert not flat.requires_grad
    assert torch.equal(flat, torch.cat([*_by_hand(xs, case), flat.new_empty(0)]))
    assert sum(piece_sizes(indices, case.batch, case.dims)) == flat.numel()
    for x, y in zip(xs, before, strict=True):
        assert torch.equal(x, y)


def test_piece_sizes_cut_the_buffer_between_peers() -> None:
    case = CASES[0]
    sizes = piece_sizes(_indices(case), case.batch, case.dims)
    lists = [_lists(case, which) for which in range(3)]
    for piece, size in enumerate(sizes):
        assert size == sum(
            case.batch * tokens[piece].numel() * heads[piece].numel() * dim
            for (tokens, heads), dim in zip(lists, case.dims, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", [case for case in CASES if not case.copies], ids=str)
def test_unpack_inverts_pack(case: Case, dtype: torch.dtype) -> None:
    xs, indices = _tensors(case, dtype, "heads first"), _indices(case)
    for x, back in zip(xs, unpack(pack(xs, indices), indices, case.batch, case.dims), strict=True):
        assert back.is_contiguous()
        assert back.dtype == dtype
        assert torch.equal(x, back)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [case for case in CASES if not case.copies], ids=str)
def test_unpack_into_tensors_writes_the_named_rows_and_no_others(case: Case, layout: str) -> None:
    xs = _tensors(case, torch.float32, "contiguous")
    totals = [torch.full_like(x, 7.0) for x in _tensors(case, torch.float32, layout)]
    # Every head but the first: its rows stay what they are.
    some = []
    for which, heads in enumerate(case.heads):
        tokens, of_pieces = _lists(case, which)
        some.append(PieceIndex.build(tokens, [x[x > 0] for x in of_pieces], case.tokens, heads))
    found = unpack(pack(xs, some), some, case.batch, case.dims, into=totals)
    for x, total, got in zip(xs, totals, found, strict=True):
        assert got.data_ptr() == total.data_ptr()
        want = x.clone()
        want[:, :, :1] = 7.0
        assert torch.equal(total, want)


def test_unpack_refuses_tensors_to_write_to_that_do_not_fit() -> None:
    index = _indices(CASES[0])[0]
    flat = torch.ones(sum(piece_sizes([index], 2, [24])))
    right = torch.empty(2, index.num_tokens, index.num_heads, 24)
    for into in ([], [right[:1]], [right.double()], [right.transpose(1, 2)]):
        with pytest.raises(ValueError, match="into must be torch.float32"):
            unpack(flat, [index], 2, [24], into=into)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unpack_sum_is_the_adjoint_of_pack(case: Case) -> None:
    """<pack(x), y> = <x, unpack_sum(y)> for every x says that rows, copies and order fit one another."""
    indices = _indices(case)
    xs = [x.requires_grad_() for x in _tensors(case, torch.float64, "contiguous")]
    rows = _by_hand(list(xs), case)
    if not rows:
        assert all(x.numel() == 0 for x in unpack_sum(pack(xs, indices), indices, case.batch, case.dims))
        return
    flat = torch.cat(rows)
    received = _distinct(flat.detach())
    wanted = torch.autograd.grad(flat, xs, received, materialize_grads=True)
    for want, got in zip(wanted, unpack_sum(received, indices, case.batch, case.dims), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-13)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unpack_sum_into_tensors_sets_the_named_heads_and_no_others(case: Case) -> None:
    some = []
    for which, heads in enumerate(case.heads):
        tokens, of_pieces = _lists(case, which)
        some.append(PieceIndex.build(tokens, [x[x > 0] for x in of_pieces], case.tokens, heads))
    flat = _distinct(torch.empty(sum(piece_sizes(some, case.batch, case.dims))))
    totals = [
        torch.full((case.batch, case.tokens, heads, dim), 7.0) for heads, dim in zip(case.heads, case.dims, strict=True)
    ]
    found = unpack_sum(flat, some, case.batch, case.dims, into=totals)
    for index, want, total, got in zip(some, unpack_sum(flat, some, case.batch, case.dims), totals, found, strict=True):
        assert got.data_ptr() == total.data_ptr()
        named = torch.isin(torch.arange(index.num_heads), index.heads)
        assert torch.equal(total[:, :, named], want[:, :, named])
        assert bool((total[:, :, ~named] == 7).all())


def test_unpack_sum_into_sets_tokens_that_no_piece_has() -> None:
    index = PieceIndex.build([torch.tensor([2]), torch.tensor([0, 2])], [torch.tensor([1]), torch.tensor([1])], 4, 3)
    total = torch.full((2, 4, 3, 5), 7.0)
    unpack_sum(torch.ones(2 * 3 * 5), [index], 2, [5], into=[total])
    assert total[0, :, 1, 0].tolist() == [1, 0, 2, 0]
    assert bool((total[:, :, [0, 2]] == 7).all())
    with pytest.raises(ValueError, match="into must be contiguous"):
        unpack_sum(torch.ones(2 * 3 * 5), [index], 2, [5], into=[torch.ones(2, 4, 5, 3).transpose(2, 3)])


def test_unpack_sum_gives_zero_where_no_piece_has_a_row() -> None:
    index = PieceIndex.build([torch.tensor([2]), torch.tensor([0, 2])], [torch.tensor([1]), torch.tensor([1])], 4, 3)
    (out,) = unpack_sum(torch.ones(2 * 3 * 5), [index], 2, [5])
    wanted = torch.zeros(2, 4, 3, 5)
    wanted[:, 0, 1], wanted[:, 2, 1] = 1, 2
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_piece_index_tables_tell_where_rows_are(case: Case) -> None:
    for which, index in enumerate(_indices(case)):
        tokens, heads = _lists(case, which)
        for piece in range(index.num_pieces):
            for places, entries in ((index.token_places, tokens), (index.head_places, heads)):
                row = places[piece].tolist()
                wanted = entries[piece].tolist()
                assert [wanted.index(x) if x in wanted else -1 for x in range(len(row))] == row
        covered = [range(start, start + 64) for piece, start in index.tiles.tolist()]
        assert [row for tile in covered for row in tile[:1]] == [
            start for rows in index.num_rows for start in range(0, rows, 64)
        ]
        assert index.pieces[-1].tolist() == [sum(index.token_counts), 0, sum(index.head_counts), 0, sum(index.num_rows)]


def _run_interpreter(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    from dbsp_megatron.kernels.block_pack.triton_kernel import triton_pack, triton_unpack, triton_unpack_sum
    from tests.unit.kernels.interpreter import prepare

    prepare()
    faults = []
    for case in cases:
        indices = _indices(case)
        for layout, dtype in zip(LAYOUTS, (torch.bfloat16, torch.float32, torch.bool, torch.float64), strict=True):
            xs = _tensors(case, dtype, layout)
            flat = naive_pack(xs, indices)
            if not torch.equal(triton_pack(xs, indices), flat):
                faults.append(f"pack {case} {layout} {dtype}")
            if not case.copies:
                got = triton_unpack(flat, indices, case.batch, case.dims)
                want = naive_unpack(flat, indices, case.batch, case.dims)
                if not all(torch.equal(x, y) for x, y in zip(got, want, strict=True)):
                    faults.append(f"unpack {case} {dtype}")
                totals = [torch.zeros_like(x) for x in xs]
                triton_unpack(flat, indices, case.batch, case.dims, into=totals)
                if not all(torch.equal(x, y) for x, y in zip(totals, want, strict=True)):
                    faults.append(f"unpack into {case} {layout} {dtype}")
        for dtype in (torch.float16, torch.float32, torch.float64):
            flat = _distinct(torch.empty(sum(piece_sizes(indices, case.batch, case.dims)), dtype=dtype))
            got = triton_unpack_sum(flat, indices, case.batch, case.dims)
            want = naive_unpack_sum(flat, indices, case.batch, case.dims)
            if not all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(got, want, strict=True)):
                faults.append(f"unpack_sum {case} {dtype}")
            totals = [torch.full_like(x, 7.0) for x in want]
            triton_unpack_sum(flat, indices, case.batch, case.dims, into=totals)
            wanted = [torch.full_like(x, 7.0) for x in want]
            naive_unpack_sum(flat, indices, case.batch, case.dims, into=wanted)
            if not all(torch.equal(x, y) for x, y in zip(totals, wanted, strict=True)):
                faults.append(f"unpack_sum into {case} {dtype}")
    return faults


def test_triton_kernels_equal_twins_in_interpreter() -> None:
    """Bit by bit; Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs it."""
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_run_interpreter, 1, CASES, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=120)[0]
    assert not faults, faults


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("kernel", ["pack", "unpack", "unpack_sum", "unpack_sum into"])
def test_triton_kernels_compile_to_wide_loads_and_stores(kernel: str, num: int) -> None:
    """Compiled for sm_90 without a card, as a launch with aligned bf16 tensors of 128 dims would: 16 bytes a load."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from dbsp_megatron.kernels.block_pack import triton_kernel

    fill, kernel = kernel == "unpack_sum", kernel.removesuffix(" into")
    function = triton_kernel._sum_kernel if kernel == "unpack_sum" else triton_kernel._move_kernel
    names = function.arg_names
    data = "bf16" if kernel == "unpack_sum" else "i16"
    options = {"UNPACK": kernel == "unpack", "ROWS": 64, "TOKENS": 32, "COLS": 128, "NUM": num}
    options["FILL"] = fill
    options["ACC"] = triton.language.float32
    constants = {(names.index(name),): value for name, value in options.items() if name in names}
    signature: dict[str, object] = {}
    aligned = []
    for place, name in enumerate(names):
        if (place,) in constants:
            signature[name] = "constexpr"
        elif name == "flat_ptr":
            signature[name] = "*" + data
            aligned.append((place,))
        elif name == "num_pieces":
            signature[name] = "i32"
        elif name == "strides":
            signature[name] = (("i32", "i32", "i32", "constexpr"),) * num
            constants |= {(place, tensor, 3): 1 for tensor in range(num)}
            aligned += [(place, tensor, dim) for tensor in range(num) for dim in range(3)]
        else:
            kinds = {"xs": "*" + data, "outs": "*" + data, "pieces": "*i64", "dims": "i32"}
            signature[name] = (kinds.get(name, "*i32"),) * num
            aligned += [(place, tensor) for tensor in range(num)]
    source = triton.compiler.ASTSource(
        fn=function,
        signature=signature,
        constexprs=constants,
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    compiled = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
    stores = re.findall(r"st\.global[\w.:]*", compiled.asm["ptx"])
    loads = re.findall(r"ld\.global[\w.:]*v4\.b32", compiled.asm["ptx"])
    # A tile of 64 rows is eight loads of 16 bytes a thread, one of 32 tokens four.
    assert len(loads) == num * (4 if kernel == "unpack_sum" else 8)
    assert len(stores) == len(loads)
    assert all(store.endswith("v4.b32") for store in stores), stores


def test_piece_index_refuses_lists_that_do_not_fit() -> None:
    tokens = [torch.tensor([0, 1])]
    with pytest.raises(ValueError, match="tokens and heads must have one entry for each piece, got 1 and 2"):
        PieceIndex.build(tokens, tokens * 2, 2, 2)
    with pytest.raises(ValueError, match="got 0 and 0"):
        PieceIndex.build([], [], 2, 2)


def test_pack_refuses_tensors_that_do_not_fit() -> None:
    x, index = torch.ones(1, 37, 5, 24), _indices(CASES[0])[0]
    one_piece = PieceIndex.build([torch.tensor([0])], [torch.tensor([0])], 37, 5)
    for xs, indices, message in (
        ([], [], "xs must hold at least one tensor"),
        ([x, x.double()], [index, index], "xs must be .* of one B, dtype and device, got .* torch.float64"),
        ([x, x.expand(2, -1, -1, -1)], [index, index], "of one B, dtype and device"),
        ([x[0]], [index], "of one B, dtype and device"),
        ([x], [index, index], "indices must be one for each tensor, got 2 for 1"),
        ([x[:, 1:]], [index], "indices must be made for tensors of 36 tokens and 5 heads, got one for 37 and 5"),
        ([x, x], [index, one_piece], "indices must all have 3 pieces and be on cpu, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(xs, indices)


@pytest.mark.parametrize("call", [unpack, unpack_sum])
def test_unpack_refuses_buffers_that_do_not_fit(call: object) -> None:
    assert callable(call)
    index = _indices(CASES[0])[0]
    size = sum(piece_sizes([index], 2, [24]))
    for flat, indices, message in (
        (torch.ones(size - 1), [index], f"flat must be contiguous .{size}. for these indices, got .{size - 1}."),
        (torch.ones(2 * size)[::2], [index], "flat must be contiguous"),
        (torch.ones(size), [], "indices must hold at least one index"),
    ):
        with pytest.raises(ValueError, match=message):
            call(flat, indices, 2, [24])
