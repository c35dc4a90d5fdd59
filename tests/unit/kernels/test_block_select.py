"""Block selection: twins against rows taken block by block, and the Triton kernel in the interpreter against them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_select import naive_select_largest, naive_select_mass, select_largest, select_mass
from tests.harness import run_ranks

# batch, heads, rows, blocks: powers of two, one less and one more, single blocks, no rows.
SHAPES = [(2, 3, 4, 7), (1, 2, 3, 16), (1, 4, 2, 33), (2, 1, 5, 1), (1, 2, 1, 130), (1, 2, 0, 9)]
# The interpreter takes long for a row.
FEW_ROWS = [(1, 2, 2, 7), (1, 1, 2, 16), (1, 2, 1, 33), (2, 1, 1, 1), (1, 1, 1, 130), (1, 2, 0, 9)]
CHOICES: list[tuple[float | tuple[float, ...] | None, int]] = [
    *((share, 1) for share in (0.05, 0.5, 0.9, 0.999, 1.0)),
    (0.3, 4),
    (None, 1),
    (None, 5),
    (None, 1000),
]


def _scores(shape: tuple[int, int, int, int], kind: str) -> Tensor:
    """Rows that are spread, sharp, full of equal scores (both zeros among them), partly or wholly without weight."""
    generator = torch.Generator().manual_seed(sum(shape))
    scores = torch.randn(shape, generator=generator)
    if kind == "sharp":
        return scores * 20
    if kind == "tied":
        return (scores * 1.5).round()
    if kind == "masked":
        scores = scores.masked_fill(torch.rand(shape, generator=generator) < 0.5, -math.inf)
        scores[..., :1, :] = -math.inf
    if kind == "far":
        return scores * 1e4 - 3e4
    return scores


KINDS = ("spread", "sharp", "tied", "masked", "far")
TINY = (5e-324, 1e-46, 1e-39, 1e-12)
"""Shares that are 0, subnormal or without effect in fp32."""


def _slow_row(row: list[float], share: float | None, least: int) -> list[bool]:
    """Largest first, ties by index, until the share of the weights is reached."""
    keep = [False] * len(row)
    highest = max(row)
    weights = [0.0 if score == -math.inf else math.exp(score - highest) for score in row]
    total, mass = math.fsum(weights), 0.0
    for taken, index in enumerate(sorted(range(len(row)), key=lambda i: (-row[i], i))):
        reached = share is None or (total > 0 and share < 1 and mass >= share * total)
        if taken >= least and reached:
            break
        keep[index] = True
        mass += weights[index]
    return keep


def _select(scores: Tensor, share: float | Tensor | None, least: int, *, naive: bool = False) -> Tensor:
    if share is None:
        return (naive_select_largest if naive else select_largest)(scores, least)
    return (naive_select_mass if naive else select_mass)(scores, share, least)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_select_equals_rows_taken_block_by_block(shape: tuple[int, int, int, int], kind: str) -> None:
    scores = _scores(shape, kind).double()
    for share, least in CHOICES:
        got = _select(scores, share, least)
        assert got.dtype == torch.bool
        assert got.shape == scores.shape
        for row, kept in zip(scores.flatten(0, 2).tolist(), got.flatten(0, 2).tolist(), strict=True):
            assert kept == _slow_row(row, share, least), (share, least, row)


def test_select_mass_takes_a_share_of_each_head() -> None:
    scores = _scores((2, 3, 4, 17), "spread")
    shares = torch.tensor([0.2, 0.7, 1.0])
    got = select_mass(scores, shares)
    for head, share in enumerate(shares.tolist()):
        assert torch.equal(got[:, head], select_mass(scores[:, head : head + 1], share)[:, 0])


def test_select_largest_of_equal_scores_goes_by_index() -> None:
    scores = torch.tensor([[[[1.0, 0.0, -0.0, 0.0, 2.0, -1.0]]]])
    assert select_largest(scores, 3).tolist() == [[[[True, True, False, False, True, False]]]]


@pytest.mark.parametrize("share", TINY)
def test_select_mass_keeps_the_heaviest_block_for_any_share(share: float) -> None:
    scores = _scores((1, 2, 3, 33), "spread")
    for shares in (share, torch.full((2,), share)):
        assert torch.equal(select_mass(scores, shares), select_largest(scores, 1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: select_largest(torch.zeros(2, 3), 1), "scores must be fp32 or fp64 [B, H, nq, Nk]"),
        (lambda: select_largest(torch.zeros(1, 1, 1, 3).half(), 1), "torch.float16"),
        (lambda: select_largest(torch.zeros(1, 1, 1, 3), 0), "count must be at least 1, got 0"),
        (lambda: select_mass(torch.zeros(1, 1, 1, 3), 0.5, 0), "min_blocks must be at least 1, got 0"),
        (lambda: select_mass(torch.zeros(1, 2, 1, 3), torch.ones(3)), "shares must be a number or fp32 [H] = [2]"),
    ],
)
def test_select_refuses_what_does_not_fit(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        call()
    assert words in str(error.value)


def _run_interpreter(rank: int, world_size: int, shapes: list[tuple[int, int, int, int]]) -> list[str]:
    from dbsp_megatron.kernels.block_select.triton_kernel import triton_select
    from tests.unit.kernels.interpreter import prepare

    prepare()
    faults = []
    for number, shape in enumerate(shapes):
        for place, kind in enumerate(KINDS):
            scores = _scores(shape, kind)
            strided = torch.nn.functional.pad(scores, (1, 2, 0, 1))[..., : shape[2], 1:-2]
            for share, least in CHOICES[(number + place) % 3 :: 3]:
                want = _select(scores.double(), share, least, naive=True)
                got = triton_select(strided, share, least)
                if got.dtype != torch.bool or not torch.equal(got, want):
                    faults.append(f"{shape} {kind} {share} {least}: {int((got != want).sum())} blocks")
    shares = torch.tensor([0.2, 0.7, 1.0])
    scores = _scores((1, 3, 2, 17), "spread")
    if not torch.equal(triton_select(scores, shares, 2), naive_select_mass(scores, shares, 2)):
        faults.append("shares by head")
    for share in TINY:
        if not torch.equal(triton_select(scores, share, 1), naive_select_largest(scores, 1)):
            faults.append(f"a share of {share}")
    return faults


def test_triton_select_equals_twin_in_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs it."""
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_run_interpreter, 1, FEW_ROWS, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=200)[0]
    assert not faults, faults


@pytest.mark.parametrize("num_k", [64, 1182, 16384])
def test_triton_select_compiles_without_spills(num_k: int) -> None:
    """Compiled for sm_90 without a card: a row must stay in registers."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from dbsp_megatron.kernels.block_select.triton_kernel import _ELEMENTS_PER_THREAD, _select_kernel

    block = triton.next_power_of_2(num_k)
    constants = {"MASS": True, "COUNT": True, "BLOCK": block}
    pointers = {"scores_ptr": "*fp32", "shares_ptr": "*fp32", "keep_ptr": "*i8"}
    names = _select_kernel.arg_names
    source = triton.compiler.ASTSource(
        fn=_select_kernel,
        signature={name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    warps = min(16, max(1, block // (32 * _ELEMENTS_PER_THREAD)))
    compiled = triton.compile(
        source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )
    assert ".local" not in compiled.asm["ptx"]
