"""DualBalancedAttention inside Megatron's own TransformerBlock, under its parallel state, equals one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dbsp_megatron import BlockMask, DualBalancedAttention, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.parallel_state import attach_to_collection, hierarchical_sizes, set_sequence_parallel
from tests.harness import run_ranks
from tests.reference import attention_reference, expand_blocks, max_error, random_blocks

pytestmark = pytest.mark.timeout(300)

SEQLEN, BATCH, HIDDEN, HEADS, GROUPS, BLOCK = 43, 2, 48, 6, 2, 8


class WholeAttention(torch.nn.Module):
    """The reference as core attention of one process."""

    allowed: Tensor

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None, **_: Any) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attention_reference(q, k, v, self.allowed)[0].transpose(0, 1).flatten(2)


def _mask() -> BlockMask:
    blocks = random_blocks(3, BATCH, HEADS, -(-SEQLEN // BLOCK), -(-SEQLEN // BLOCK))
    return BlockMask(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN)


def _block(core: Any, groups: ProcessGroupCollection, tp_size: int, cp_size: int) -> TransformerBlock:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        tensor_model_parallel_size=tp_size,
        context_parallel_size=cp_size,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        params_dtype=torch.float64,
    )
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = core
    spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    block = TransformerBlock(config=config, spec=spec, post_layer_norm=True, pg_collection=groups).double()
    generator = torch.Generator().manual_seed(5)
    rank = groups.tp.rank()
    with torch.no_grad():
        for parameter in block.parameters():
            dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            shape = list(parameter.shape)
            if dim is not None:
                shape[dim] *= tp_size
            whole = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
            parameter.copy_(whole if dim is None else whole.chunk(tp_size, dim)[rank])
    return block


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(SEQLEN, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    return x, torch.randn(x.shape, generator=generator, dtype=torch.float64)


def _gradients(block: TransformerBlock, tp_group: Any) -> dict[str, Tensor]:
    """Whole gradients, put together over tensor-parallel ranks."""
    whole = {}
    for name, parameter in block.named_parameters():
        grad = parameter.grad
        if getattr(parameter, "tensor_model_parallel", False) and tp_group.size() > 1:
            parts = [torch.empty_like(grad) for _ in range(tp_group.size())]
            dist.all_gather(parts, grad.contiguous(), group=tp_group)
            grad = torch.cat(parts, dim=parameter.partition_dim)
        whole[name] = grad
    return whole


def _compare(rank: int, world_size: int, tp_size: int, ulysses: int, ring: int, strategy: str, registered: bool) -> str:
    cp_size = ulysses * ring
    nested = {"hierarchical_context_parallel_sizes": hierarchical_sizes(ulysses, ring)} if cp_size > 1 else {}
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp_size, context_parallel_size=cp_size, create_gloo_process_groups=False, **nested
    )
    try:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config = SequenceParallelConfig(strategy=strategy, ulysses_degree=ulysses, ring_degree=ring, block_size=BLOCK)
        sp = SequenceParallel(config, pg_collection=groups)
        attach_to_collection(groups, sp.mesh)
        if min(ulysses, ring) > 1 and groups.ulysses is not groups.hcp[0]:
            return "Megatron's hierarchical groups were not reused"
        if registered:
            set_sequence_parallel(sp)
        core: Any = DualBalancedAttention if registered else ModuleSpec(DualBalancedAttention, params={"sp": sp})
        block = _block(core, groups, tp_size, cp_size)
        x, weight = _inputs()
        mask = _mask()
        heads = HEADS // tp_size
        first = groups.tp.rank() * heads
        mine = BlockMask(mask.blocks[:, first : first + heads], BLOCK, BLOCK, SEQLEN, SEQLEN)
        layout = sp.layout(SEQLEN)
        local = x[layout.positions].clone().requires_grad_()
        with sp.use(layout=layout, mask=mine):
            out = block(hidden_states=local, attention_mask=None)
            (out * weight[layout.positions]).sum().backward()
        grads = _gradients(block, groups.tp)
        for grad in grads.values():
            dist.all_reduce(grad, group=groups.cp)
        got = {"out": layout.gather(out.detach(), dim=0), "dx": layout.gather(local.grad, dim=0), **grads}

        alone = ProcessGroupCollection.use_mpu_process_groups()
        single = [dist.new_group([r]) for r in range(world_size)][rank]
        for name in ("tp", "cp", "pp"):
            setattr(alone, name, single)
        WholeAttention.allowed = expand_blocks(mask.blocks, BLOCK, BLOCK, SEQLEN, SEQLEN)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        twin = _block(WholeAttention, alone, 1, 1)
        whole = x.clone().requires_grad_()
        twin_out = twin(hidden_states=whole, attention_mask=None)
        (twin_out * weight).sum().backward()
        want = {"out": twin_out, "dx": whole.grad, **_gradients(twin, single)}
        scale = {name: max(1.0, float(value.abs().max())) for name, value in want.items()}
        errors = {name: max_error(got[name], want[name]) / scale[name] for name in want}
        worst = max(errors, key=lambda name: errors[name])
        return "" if errors[worst] < 1e-9 and set(got) == set(want) else f"{worst} is off by {errors[worst]}"
    finally:
        set_sequence_parallel(None)
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("tp_size", "ulysses", "ring", "strategy", "registered"),
    [(1, 2, 1, "dbsp", False), (1, 1, 3, "dbsp", True), (1, 2, 2, "dbsp", False), (2, 2, 1, "usp", False)],
    ids=["TP1-U2", "TP1-R3", "TP1-U2R2", "TP2-U2"],
)
def test_transformer_block_equals_one_process(
    tp_size: int, ulysses: int, ring: int, strategy: str, registered: bool
) -> None:
    """Outputs, input gradients and every parameter gradient, summed over context-parallel ranks (Trap B19)."""
    world_size = tp_size * ulysses * ring
    args = (tp_size, ulysses, ring, strategy, registered)
    assert run_ranks(_compare, world_size, *args, timeout_s=200) == [""] * world_size


def _refusals(rank: int, world_size: int) -> list[str]:
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0)
    messages = []
    for kind, dropout in (("self", 0.5), ("cross", 0.0)):
        try:
            DualBalancedAttention(config, 1, AttnMaskType.no_mask, kind, dropout)
        except ValueError as error:
            messages.append(str(error))
    core = DualBalancedAttention(config, 1, AttnMaskType.no_mask, "self")
    sp = SequenceParallel(SequenceParallelConfig(strategy="dbsp", ulysses_degree=world_size, block_size=8))
    layout = sp.layout(8 * world_size)
    q = torch.randn(8, 1, 2, 4)
    odd = rank == world_size - 1
    for given, options, registered in (
        (torch.ones(8, 8, dtype=torch.bool), {}, sp),
        (None, {"attention_bias": torch.zeros(8, 8)}, sp),
        (None, {"packed_seq_params": object()}, sp),
        (None, {"attn_mask_type": AttnMaskType.causal}, sp),
        (None, {}, None),
    ):
        set_sequence_parallel(registered)
        if not odd:
            # The others call it as they should.
            given, options = None, {}
        with sp.use(layout=layout):
            try:
                core(q, q, q, given, **options)
            except ValueError as error:
                messages.append(str(error))
    parallel_state.destroy_model_parallel()
    return messages


@pytest.mark.parametrize("world_size", [1, 2])
def test_dual_balanced_attention_refuses_what_it_would_ignore(world_size: int) -> None:
    """Dropout (Trap B81), masks, biases and packing are never dropped silently (Trap B35); a missing sp is said.

    What one rank alone is given is refused on all of them, which would else wait for it (Trap B65).
    """
    found = run_ranks(_refusals, world_size)
    messages = found[0]
    assert all(other == messages for other in found)
    words = ["dropout", "cross", "attention_mask", "attention_bias", "packed_seq_params", "causal", "registered"]
    assert len(messages) == len(words)
    for word, message in zip(words, messages, strict=True):
        assert word in message
    assert all(message.endswith("rank 1]") for message in messages[2:6]) == (world_size == 2)
