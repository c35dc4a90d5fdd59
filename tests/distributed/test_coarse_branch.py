"""The trainable pair of stages over ranks: one selection, one output and one gradient, from pooled summaries alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dbsp_megatron import SequenceParallel, SequenceParallelConfig
from dbsp_megatron.comm.gather_sum import gather_summed, scatter_summed
from dbsp_megatron.comm.reshard import RowMap
from dbsp_megatron.masks import VsaMask
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.model import VideoDiT
from tests.distributed.sharded import recorded_collectives
from tests.harness import run_ranks
from tests.reference import max_error
from tests.unit.models.cores import MODES, gradients, loss_weight, make_inputs, randomize, sequence_length, tiny_config

pytestmark = pytest.mark.timeout(300)

METHOD = VsaMask(0.4)


def _uneven_rows(rank: int, world_size: int) -> None:
    """Rows in stripes of unequal lengths, one rank without any, rows in the middle dim."""
    homes = torch.tensor([0, 3, 0, 1, 3, 0, 1])
    rows = RowMap([(homes == r).nonzero()[:, 0] for r in range(world_size)], rank, dist.group.WORLD)
    mine = [torch.randn(2, rows.counts[r], 3, generator=_generator(r), dtype=torch.float64) for r in range(world_size)]
    weights = [torch.randn(2, 7, 3, generator=_generator(9 + r), dtype=torch.float64) for r in range(world_size)]
    x = mine[rank].requires_grad_()
    whole = gather_summed(x, 1, rows)
    want = torch.empty(2, 7, 3, dtype=torch.float64)
    for r in range(world_size):
        want[:, homes == r] = mine[r].detach()
    assert torch.equal(whole.detach(), want)
    (whole * weights[rank]).sum().backward()
    total = torch.stack(weights).sum(0)
    assert x.grad is not None
    assert max_error(x.grad, total[:, homes == rank]) < 1e-14
    # Transposed, so that nothing depends on how the whole tensor lies in memory.
    turned = scatter_summed(weights[rank].transpose(0, 1), 0, rows)
    assert max_error(turned, total[:, homes == rank].transpose(0, 1)) < 1e-14


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_gather_summed_adds_gradients_over_ranks() -> None:
    """The exact adjoint of a gather that ranks use in different ways."""
    run_ranks(_uneven_rows, 4, timeout_s=200)


def _run(config: DiTConfig, sp: SequenceParallel) -> tuple[Tensor, dict[str, Tensor], list[np.ndarray]]:
    """This rank's video tokens of the output, its share of the gradients, and the blocks of every layer."""
    model = VideoDiT(config, sp=sp).double()
    randomize(model)
    layout = sp.layout(sequence_length(config))
    inputs = make_inputs(config)
    video = layout.positions[layout.positions >= config.sequence_text_len] - config.sequence_text_len
    inputs |= {"positions": layout.positions, "video_tokens": inputs["video_tokens"][:, video]}
    sp.begin_step(0)
    with sp.use(layout=layout, mask=METHOD, grid=inputs["grid"]):
        out = model(**inputs)
        (out * loss_weight(config)[:, video]).sum().backward()
    masks = [sp.layer_mask(layer)[0] for layer in range(config.num_attention_layers)]
    return out.detach(), gradients(model), masks


def _compare(rank: int, world_size: int, cases: list[tuple[str, str, int, str, int]]) -> list[str]:
    problems = []
    for text, strategy, ulysses, recompute, block in cases:
        mesh = {"ulysses_degree": ulysses, "ring_degree": world_size // ulysses}
        name = f"{text}-{strategy}-{mesh}-recompute {recompute}-blocks of {block}"
        config = tiny_config(text, recompute=recompute, coarse_branch=True)
        alone = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=block), group=_self_group())
        want_out, want, want_masks = _run(config, alone)
        sp = SequenceParallel(SequenceParallelConfig(strategy=strategy, block_size=block, **mesh))  # type: ignore[arg-type]
        out, grads, masks = _run(config, sp)
        if not all(np.array_equal(mine, other) for mine, other in zip(masks, want_masks, strict=True)):
            problems.append(f"rank {rank}: {name}: other blocks are selected")
        positions = sp.layout(sequence_length(config)).positions
        video = positions[positions >= config.sequence_text_len] - config.sequence_text_len
        errors = {"out": max_error(out, want_out[:, video])}
        for parameter, grad in grads.items():
            dist.all_reduce(grad)
            errors[parameter] = max_error(grad, want[parameter]) / max(1.0, float(want[parameter].abs().max()))
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
def test_vsa_equals_one_process(world_size: int) -> None:
    """fp64, odd lengths, GQA (no text), two samples, text that shares blocks with video, recompute, both layer kinds.

    Integers of the selection are equal; with blocks of 7 on four ranks one rank holds nothing (Traps B31, B117).
    """
    cases = []
    for i, text in enumerate(MODES):
        ulysses = [u for u in range(1, world_size + 1) if world_size % u == 0]
        recompute = "full" if (i + world_size) % 2 else "none"
        cases.append((text, "dbsp", ulysses[i % len(ulysses)], recompute, 3))
        cases.append((text, "usp", ulysses[(i + 1) % len(ulysses)], "full", 7))
    problems = [problem for rank in run_ranks(_compare, world_size, cases, timeout_s=240) for problem in rank]
    assert not problems, "\n".join(problems)


def _split_heads(rank: int, world_size: int, text: str) -> None:
    config = tiny_config(text, coarse_branch=True)
    alone = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=3), group=_self_group())
    inputs = make_inputs(config)
    found = []
    for tp, groups in ((1, None), (world_size, ProcessGroupCollection(tp=dist.group.WORLD, cp=None, pp=None))):
        model = VideoDiT(config, sp=alone, pg_collection=groups).double()
        randomize(model, rank if tp > 1 else 0, tp)
        with alone.use(layout=alone.layout(sequence_length(config)), mask=METHOD, grid=inputs["grid"]):
            out = model(**inputs)
            (out * loss_weight(config)).sum().backward()
        found.append((out.detach(), model))
    (want, whole), (got, split) = found
    assert max_error(got, want) < 1e-9
    wanted = gradients(whole)
    for name, parameter in split.named_parameters():
        part = wanted[name]
        if getattr(parameter, "tensor_model_parallel", False):
            part = part.chunk(world_size, parameter.partition_dim)[rank]
        assert parameter.grad is not None, name
        assert max_error(parameter.grad, part) < 1e-9, name
    gates = [name for name, p in split.named_parameters() if ".gates." in name and p.tensor_model_parallel]
    assert len(gates) == 4 * config.num_attention_layers


@pytest.mark.parametrize("text", ["none", "dual_stream"])
def test_tensor_parallel_equals_one_process(text: str) -> None:
    """Gates are split with the heads that they multiply."""
    run_ranks(_split_heads, 2, text, timeout_s=200)


def _exchanged(rank: int, world_size: int) -> list[Any]:
    """Collectives that a model with the branch has and one without lacks: forward, then backward."""
    found = []
    for coarse in (False, True):
        config = tiny_config("none", num_layers=1, coarse_branch=coarse)
        sp = SequenceParallel(SequenceParallelConfig(strategy="dbsp", ulysses_degree=2, ring_degree=1, block_size=3))
        _run(config, sp)
        with recorded_collectives() as log:
            _run(config, sp)
        found.append(log)
    without = list(found[0])
    extra = []
    for entry in found[1]:
        if entry in without:
            without.remove(entry)
        else:
            extra.append(entry)
    assert not without
    return extra


def test_only_pooled_summaries_are_exchanged() -> None:
    """One gather of the means of k and v, and one exchange of their gradients, of 6 blocks among 2 ranks."""
    extra = run_ranks(_exchanged, 2, timeout_s=200)[0]
    # [blocks of a rank, samples, kv heads, k and v], and the gradients of all blocks as sent and as received.
    assert extra == [
        ("all_gather", 2, [(3, 2, 2, 16)], None),
        ("all_to_all_single", 2, [(6 * 2 * 2 * 16,), (6 * 2 * 2 * 16,)], None),
    ]
