"""VideoDiT on the real sequence-parallel attention equals one process, in every text mode and under recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import DenseMask, MaskMethod, TopPMask
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.model import VideoDiT
from tests.harness import run_ranks
from tests.reference import max_error, random_blocks
from tests.unit.models.cores import MODES, gradients, loss_weight, make_inputs, randomize, sequence_length, tiny_config

pytestmark = pytest.mark.timeout(300)

BLOCK = 3
"""Small and odd, so that text and video share a block and the last one is short."""


def _static_mask(config: DiTConfig, empty_row: bool) -> BlockMask:
    seqlen = sequence_length(config)
    count = -(-seqlen // BLOCK)
    blocks = random_blocks(4, 2, config.num_heads, count, count)
    if empty_row:
        blocks[:, :, 2] = False
    return BlockMask(blocks, BLOCK, BLOCK, seqlen, seqlen)


def _run(config: DiTConfig, sp: SequenceParallel, mask: BlockMask | MaskMethod) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's video tokens of the output, and its share of the gradients."""
    model = VideoDiT(config, sp=sp).double()
    randomize(model)
    layout = sp.layout(sequence_length(config))
    inputs = make_inputs(config)
    video = layout.positions[layout.positions >= config.sequence_text_len] - config.sequence_text_len
    inputs |= {"positions": layout.positions, "video_tokens": inputs["video_tokens"][:, video]}
    sp.begin_step(0)
    with sp.use(layout=layout, mask=mask, grid=inputs["grid"]):
        out = model(**inputs)
        (out * loss_weight(config)[:, video]).sum().backward()
    return out.detach(), gradients(model)


def _compare(rank: int, world_size: int, cases: list[tuple[str, str, int, str, str]]) -> list[str]:
    problems = []
    for text, strategy, ulysses, recompute, kind in cases:
        name = f"{text}-{strategy}-U{ulysses}R{world_size // ulysses}-recompute {recompute}-{kind}"
        config = tiny_config(text, recompute=recompute)
        mask: Any = {"topp": TopPMask(0.5), "dense": DenseMask()}.get(kind) or _static_mask(config, kind == "empty row")
        alone = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=BLOCK), group=_self_group())
        want_out, want = _run(config, alone, mask)
        sp = SequenceParallel(
            SequenceParallelConfig(
                strategy=strategy, ulysses_degree=ulysses, ring_degree=world_size // ulysses, block_size=BLOCK
            )
        )
        out, grads = _run(config, sp, mask)
        positions = sp.layout(sequence_length(config)).positions
        video = positions[positions >= config.sequence_text_len] - config.sequence_text_len
        errors = {"out": max_error(out, want_out[:, video])}
        for parameter, grad in grads.items():
            dist.all_reduce(grad)
            scale = max(1.0, float(want[parameter].abs().max()))
            errors[parameter] = max_error(grad, want[parameter]) / scale
        worst = max(errors, key=lambda key: errors[key])
        if not errors[worst] < 1e-9:
            problems.append(f"rank {rank}: {name}: {worst} is off by {errors[worst]:.3g}")
        sp.destroy()
    return problems


def _self_group() -> dist.ProcessGroup:
    """A group of this rank alone."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_dit_equals_one_process(world_size: int) -> None:
    """Text modes, per-head masks, text that straddles ranks, fully masked rows (Traps B13, B23, B25, B31, B33)."""
    cases = []
    for i, text in enumerate(MODES):
        ulysses = [u for u in range(1, world_size + 1) if world_size % u == 0]
        kind = ("random", "topp", "empty row", "random")[(i + world_size) % 4]
        recompute = "full" if (i + world_size) % 2 else "none"
        cases.append((text, "dbsp", ulysses[i % len(ulysses)], recompute, kind))
        cases.append((text, "usp", ulysses[(i + 1) % len(ulysses)], "none", "topp"))
    problems = [problem for rank in run_ranks(_compare, world_size, cases, timeout_s=240) for problem in rank]
    assert not problems, "\n".join(problems)
