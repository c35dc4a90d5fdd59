"""Every strategy on every mesh yields the single-process outputs and gradients, whatever lengths, heads and masks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from tests.harness import device_for, run_ranks
from tests.reference import (
    Gradients,
    attention_gradients,
    expand_blocks,
    max_error,
    nan_filled_memory,
    random_blocks,
    random_qkv,
    tolerance,
)


@dataclass(frozen=True)
class Shape:
    """Numbers of one attention; block sizes are those of layout, mask rows, mask columns."""

    seqlen: int
    num_heads: int
    num_kv_heads: int
    batch: int
    mask_batch: int
    block_sizes: tuple[int, int, int]
    dtype: torch.dtype = torch.float32
    dense: bool = False
    """No mask at all is passed."""


SHAPES = (
    Shape(101, 5, 5, 1, 1, (8, 8, 8)),
    Shape(67, 3, 3, 2, 2, (16, 16, 16), torch.float64),
    Shape(77, 6, 2, 1, 1, (16, 8, 16)),
    Shape(53, 4, 1, 2, 1, (8, 8, 4)),
    Shape(130, 8, 4, 1, 1, (8, 8, 8)),
    Shape(23, 2, 2, 2, 2, (8, 8, 8)),
    Shape(61, 7, 7, 1, 1, (16, 16, 16), dense=True),
)
ULYSSES_ONLY_SHAPES = (Shape(75, 5, 5, 1, 1, (8, 12, 5)), Shape(49, 4, 2, 2, 2, (8, 16, 64)))
"""Mask blocks that do not nest in layout blocks: legal where no ring cuts the sequence."""

POLICIES = (
    ("auto", "auto"),
    ("paper", "paper"),
    ("lpt_swap", "stripe"),
    ("contiguous", "contiguous"),
    ("auto", "paper"),
    ("split", "minimal_move"),
    ("split", "step_aware"),
    ("split", "paper"),
)


@dataclass(frozen=True)
class Case:
    """One strategy, mesh, policy pair and shape."""

    strategy: str
    ulysses: int
    ring: int
    policies: tuple[str, str]
    shape: Shape
    seed: int

    @property
    def name(self) -> str:
        s = self.shape
        sizes = "x".join(map(str, s.block_sizes))
        return (
            f"{self.strategy}-U{self.ulysses}R{self.ring}-{'-'.join(self.policies)}-S{s.seqlen}-H{s.num_heads}"
            f"-kv{s.num_kv_heads}-B{s.batch}m{s.mask_batch}-bs{sizes}-{str(s.dtype)[6:]}-seed{self.seed}"
        )


def _meshes(strategy: str, world_size: int) -> list[tuple[int, int]]:
    if strategy == "ulysses":
        return [(world_size, 1)]
    if strategy == "ring":
        return [(1, world_size)]
    return [(u, world_size // u) for u in range(1, world_size + 1) if world_size % u == 0]


def _cases(strategy: str, world_size: int) -> list[Case]:
    cases = []
    for u, r in _meshes(strategy, world_size):
        shapes = SHAPES + (ULYSSES_ONLY_SHAPES if r == 1 else ())
        for i, shape in enumerate(shapes):
            if world_size > 4 and (i + u) % 2 and len(_meshes(strategy, world_size)) > 1:
                continue  # many ranks on few cores are slow: every other shape on every mesh
            # Two policy pairs per mesh: building an object's groups costs more than running a case.
            policies = POLICIES[(2 * u + r + i % 2) % len(POLICIES)] if strategy == "dbsp" else ("auto", "auto")
            cases.append(Case(strategy, u, r, policies, shape, seed=i + 10 * u + 100 * r))
    return cases


def _compare(case: Case, what: str, got: Gradients, want: Gradients) -> list[str]:
    problems = []
    for field in ("out", "dq", "dk", "dv"):
        error = max_error(getattr(got, field), getattr(want, field))
        if not error <= tolerance(case.shape.dtype):
            problems.append(f"rank {dist.get_rank()}: {case.name}: {what}: {field} is off by {error:.3g}")
    return problems


def _run_case(case: Case, sp: SequenceParallel, rank: int, layer: int) -> list[str]:
    """Two steps of one layer with different masks (so that the second plan may be stale), two ways to take a loss."""
    shape = case.shape
    block, block_q, block_k = shape.block_sizes
    device = device_for(rank)
    layout = sp.layout(shape.seqlen, block_size=block)
    problems = []
    for step in range(2):
        sp.begin_step(2 * layer + step)
        seed = case.seed + 1000 * step
        q, k, v, dout = random_qkv(
            seed, shape.batch, shape.seqlen, shape.num_heads, 8, num_kv_heads=shape.num_kv_heads, dtype=shape.dtype
        )
        blocks = random_blocks(
            seed, shape.mask_batch, shape.num_heads, -(-shape.seqlen // block_q), -(-shape.seqlen // block_k)
        )
        mask = None if shape.dense else BlockMask(blocks, block_q, block_k, shape.seqlen, shape.seqlen)
        allowed = None if shape.dense else expand_blocks(blocks, block_q, block_k, shape.seqlen, shape.seqlen)
        want = attention_gradients(q, k, v, allowed, dout)

        whole = [x.clone().to(device).requires_grad_() for x in (q, k, v)]
        local = [layout.shard(x) for x in whole]
        out = layout.gather(sp.attention(*local, mask=mask, layer=layer, layout=layout))
        grads = torch.autograd.grad((out * dout.to(device)).sum(), whole)
        got = Gradients(*(x.cpu() for x in (out, *grads)))
        problems += _compare(case, f"step {step}, replicated loss", got, want)

        rows = layout.positions
        leaves = [x[:, rows].clone().to(device).requires_grad_() for x in (q, k, v)]
        out_local = sp.attention(*leaves, mask=mask, layer=layer, layout=layout)
        grads = torch.autograd.grad((out_local * dout[:, rows].to(device)).sum(), leaves)
        got = Gradients(*(x.cpu() for x in (out_local, *grads)))
        rows_want = Gradients(*(x[:, rows] for x in (want.out, want.dq, want.dk, want.dv)))
        problems += _compare(case, f"step {step}, loss over local tokens", got, rows_want)
        if out.dtype != shape.dtype or any(g.dtype != shape.dtype for g in grads):
            problems.append(f"{case.name}: dtypes {out.dtype}, {[g.dtype for g in grads]}")
    return problems


def _run_cases(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    with nan_filled_memory():
        return _problems(rank, cases)


def _problems(rank: int, cases: list[Case]) -> list[str]:
    objects: dict[tuple[int, int, tuple[str, str]], SequenceParallel] = {}
    problems = []
    for layer, case in enumerate(cases):
        key = (case.ulysses, case.ring, case.policies)
        try:
            if key not in objects:
                head_policy, block_policy = case.policies
                config = SequenceParallelConfig(
                    strategy=case.strategy,
                    ulysses_degree=case.ulysses,
                    ring_degree=case.ring,
                    head_policy=head_policy,
                    block_policy=block_policy,
                    plan_counts="current" if case.ring % 2 == 0 else "previous",
                    kv_gather_mib=512 if case.ulysses % 2 else 0,
                    kv_prefetch=1 + case.ulysses % 3,
                    exchange_chunks=1 + (case.ulysses + case.ring) % 3,
                    block_size=8,
                )
                objects[key] = SequenceParallel(config, group=dist.group.WORLD)
            problems += _run_case(case, objects[key], rank, layer)
        except Exception as error:
            raise AssertionError(f"case {case.name} raised {type(error).__name__}: {error}") from error
    for sp in objects.values():
        sp.destroy()
    return problems


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("strategy", ["ulysses", "ring", "usp", "dbsp"])
def test_attention_equals_single_process(strategy: str, world_size: int) -> None:
    """All (U, R) of 2 to 8 ranks; odd lengths, H not a multiple of U and below it, grouped heads, per-sample masks.

    Traps B01, B03, B17, B19, B29, B35, B39, B41, B49.
    """
    found = run_ranks(_run_cases, world_size, _cases(strategy, world_size), timeout_s=110)
    problems = [problem for rank in found for problem in rank]
    assert not problems, "\n".join(problems[:20])


@pytest.mark.parametrize("strategy", ["none", "ulysses", "ring", "usp", "dbsp"])
def test_attention_on_one_rank_equals_reference(strategy: str) -> None:
    """A group of one rank works with every strategy (Trap B121)."""
    cases = [Case(strategy, 1, 1, ("auto", "auto"), shape, seed=i) for i, shape in enumerate(SHAPES)]
    assert run_ranks(_run_cases, 1, cases) == [[]]


def _parts(rank: int, world_size: int, parts: list[list[int]]) -> list[str]:
    groups = [dist.new_group(part) for part in parts]
    index = next(i for i, part in enumerate(parts) if rank in part)
    size = len(parts[index])
    problems = []
    for u, r in _meshes("dbsp", size):
        config = SequenceParallelConfig(strategy="dbsp", ulysses_degree=u, ring_degree=r)
        sp = SequenceParallel(config, group=groups[index])
        case = Case("dbsp", u, r, ("auto", "auto"), SHAPES[(index + u) % len(SHAPES)], seed=index)
        problems += _run_case(case, sp, rank, layer=0)
    return problems


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2, 4, 5], [1, 3]]], ids=str)
def test_attention_in_a_part_of_the_world(parts: list[list[int]]) -> None:
    """Replicas with ranks of their own, not adjacent, of unequal size, work on different problems (Trap B71)."""
    assert not [problem for rank in run_ranks(_parts, sum(map(len, parts)), parts) for problem in rank]


def _without_gradient(rank: int, world_size: int) -> list[str]:
    q, k, v, dout = random_qkv(5, 1, 45, 5, 8)
    blocks = random_blocks(5, 1, 5, 6, 6)
    want = attention_gradients(q, k, v, expand_blocks(blocks, 8, 8, 45, 45), dout)
    problems = []
    for u, r in _meshes("dbsp", world_size):
        sp = SequenceParallel(SequenceParallelConfig(ulysses_degree=u, ring_degree=r), group=dist.group.WORLD)
        layout = sp.layout(45, block_size=8)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                mask = BlockMask(blocks.clone(), 8, 8, 45, 45)
                local = [layout.shard(x) for x in (q, k, v)]
                out = layout.gather(sp.attention(*local, mask=mask, layer=0, layout=layout))
            if max_error(out, want.out) > tolerance(out.dtype) or out.requires_grad:
                problems.append(f"U{u}R{r} {mode.__name__}: off by {max_error(out, want.out):.3g}")
    return problems


def test_attention_without_gradients() -> None:
    """Inside no_grad and inference_mode, masks made there included, the output is the same."""
    assert run_ranks(_without_gradient, 4) == [[]] * 4
