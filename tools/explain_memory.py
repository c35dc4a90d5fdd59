"""Memory that a rank of a training run takes, by what it is for.

Dims: n parameters, s tokens of the rank that holds most, B samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.tokens import LocalTokens, locate_tokens
from dbsp_megatron.plan import PartitionPlan
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.layer_memory import layer_bytes
from tools.explain_layout import Situation, TokenFacts
from tools.explain_stages import PipelineRank, pipeline_ranks
from tools.explain_state import state_parts

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dbsp_megatron.models.dit import VideoDiT

_FP32_BYTES = 4
_IMAGE_TOKENS = 257
"""Of the CLIP that Wan 2.1 attends to; how many there are shows in a file of features only."""


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """One use of memory on the rank that needs most."""

    name: str
    """What it holds."""
    num_bytes: int
    """Bytes."""
    exact: bool
    """Follows from the number of parameters alone; otherwise an estimate."""
    note: str
    """How it was found."""


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """What a forward pass of the model, attention cores left out, keeps for the backward pass."""

    fixed: int
    """Of the first and last layers."""
    layer: int
    """Of one transformer layer; of the larger kind where there are two."""
    by_layer: tuple[int, ...]
    """Of each transformer layer."""
    layer_input: int
    """What a recomputed layer keeps."""

    @property
    def layers(self) -> int:
        """Of all transformer layers."""
        return sum(self.by_layer)


class _NoAttention(nn.Module):
    """Stands for the attention core, which keeps what it needs in its own way."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        made: Tensor = _KeepNothing.apply(query, key, value)
        return made


class _KeepNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.new_empty(query.shape).flatten(2)


def memory_parts(situation: Situation, tokens: TokenFacts, plan: PartitionPlan) -> list[MemoryPart]:
    """Memory of the rank that needs most while it trains; of the pipeline rank that keeps most.

    Args:
        situation: the run.
        tokens: its token layout.
        plan: the plan of a layer, on the mesh that is used.
    """
    return max(
        (memory_of_rank(situation, tokens, plan, rank) for rank in ranks_of(situation)),
        key=lambda parts: sum(part.num_bytes for part in parts),
    )


def ranks_of(situation: Situation) -> list[PipelineRank]:
    """The ranks of the run's pipeline; one that holds all layers if there is none."""
    parallel = situation.config.parallel
    return pipeline_ranks(
        parallel.pipeline_parallel_size,
        parallel.virtual_pipeline_parallel_size,
        situation.resolved.num_layers,
        # Without a pipeline a backward pass follows each forward pass.
        situation.num_micro_batches if parallel.pipeline_parallel_size > 1 else 1,
    )


def memory_of_rank(
    situation: Situation, tokens: TokenFacts, plan: PartitionPlan, rank: PipelineRank
) -> list[MemoryPart]:
    """Memory of one pipeline rank while it trains.

    Args:
        situation: the run.
        tokens: its token layout.
        plan: the plan of a layer, on the mesh that is used.
        rank: its layers, and the micro-batches that it keeps.
    """
    config, number = situation.config, situation.resolved.num_parameters
    parallel, loop = config.parallel, config.train
    parts = [
        MemoryPart(name=part.name, num_bytes=part.num_bytes, exact=True, note=part.note)
        for part in state_parts(config, situation.model, situation.resolved.mesh, number)
    ]
    batch, bf16 = loop.micro_batch_size, loop.precision == "bf16"
    saved = saved_by_model(situation.model, tokens, batch, bf16=bf16)
    most = max(tokens.tokens)
    kept, each = rank.num_kept, attention_bytes(situation, tokens, plan)
    num_stages = parallel.pipeline_parallel_size * parallel.virtual_pipeline_parallel_size
    ends = saved.fixed * rank.ends_kept(num_stages)
    of_layers = f"{kept} layers"
    if num_stages > 1:
        of_layers = f"{kept} layers of micro-batches under way on pipeline rank {rank.rank}"
    copies = ", bf16 copies of weights among them" if bf16 else ""
    whole = ", not tensor parallel" if parallel.tensor_parallel_size > 1 else ""
    fused = ", without train.compile, which keeps less" if loop.compile else ""
    how = f"{of_layers}, {most} tokens x {batch} samples, counted on a model without data{whole}{copies}{fused}"
    if situation.recompute != "none":
        selective = situation.recompute == "selective"
        if bf16:
            # Autocast keeps them until the backward pass has ended.
            note = "made by autocast, for matrix products"
            copied = _FP32_BYTES * number // (2 * parallel.model_size)
            parts.append(MemoryPart(name="bf16 weights", num_bytes=copied, exact=False, note=note))
        parts += [
            MemoryPart(
                name="layer inputs",
                num_bytes=ends + kept * saved.layer_input,
                exact=False,
                note=f"{of_layers}, {most} tokens x {batch} samples; recompute is {situation.recompute}",
            ),
            MemoryPart(
                name="one layer, recomputed",
                num_bytes=saved.layer + (0 if selective else each),
                exact=False,
                note=f"activations{'' if selective else ' and attention'} of the layer that is in its backward "
                f"pass{fused}",
            ),
        ]
        if selective:
            # The part behind attention keeps its input, which came back over ranks.
            behind = most * batch * situation.model.num_heads * situation.model.heads_dim
            each += behind * call_shape(situation).dtype.itemsize
            parts.append(_kept_attention(kept * each, of_layers))
    else:
        parts += [
            MemoryPart(name="activations", num_bytes=ends + rank.kept(saved.by_layer), exact=False, note=how),
            _kept_attention(kept * each, of_layers),
        ]
    parts.append(
        MemoryPart(
            name="attention, one layer at work",
            num_bytes=layer_bytes(plan, call_shape(situation), tokens.tokens, situation.strategy.config),
            exact=False,
            note="buffers of the exchange and of the ring, states and gradients",
        )
    )
    return parts


def _kept_attention(num_bytes: int, of_layers: str) -> MemoryPart:
    note = f"q, k, v, out and lse of {of_layers}, as the plan places them"
    return MemoryPart(name="attention, kept", num_bytes=num_bytes, exact=False, note=note)


def checkpoint_bytes(situation: Situation) -> int:
    """Bytes of a checkpoint on disk: weights, moving average and moments."""
    config = situation.config
    copies = 1 + bool(config.train.ema_decay) + 2 * (config.optim.name == "adamw")
    return copies * _FP32_BYTES * situation.resolved.num_parameters


def call_shape(situation: Situation) -> CallShape:
    """What attention is called with in a micro-batch."""
    config, model = situation.config, situation.model
    return CallShape(
        batch=config.train.micro_batch_size,
        seqlen=situation.resolved.num_tokens,
        num_heads=model.num_heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.heads_dim,
        head_dim_v=model.heads_dim,
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        block_size_q=config.sp.block_size,
        block_size_k=config.sp.block_size,
        backward=True,
        whole_chunks=True,
    )


def attention_bytes(situation: Situation, tokens: TokenFacts, plan: PartitionPlan) -> int:
    """Bytes that one attention layer keeps for its backward pass, on the rank that keeps most."""
    shape = call_shape(situation)
    size, ring = tokens.block_size, plan.ring_degree
    kv_heads = np.array([heads.size for heads in plan.kv_heads(shape.num_kv_heads)])
    kv_tokens = np.minimum(np.bincount(plan.kv_block_owner, minlength=ring) * size, shape.seqlen)
    rows = np.minimum(plan.rows * size, shape.seqlen * shape.num_heads)
    narrow = shape.dtype.itemsize
    q_and_out = rows * ((shape.head_dim + shape.head_dim_v) * narrow + _FP32_BYTES)
    kv = kv_heads[:, None] * kv_tokens * (shape.head_dim + shape.head_dim_v) * narrow
    return shape.batch * int((q_and_out + kv).max())


def saved_by_model(model: DiTConfig, tokens: TokenFacts, batch: int, *, bf16: bool) -> SavedBytes:
    """Counts what autograd keeps when tensors without data go through the model.

    Args:
        model: its description.
        tokens: the token layout; the rank with most tokens counts, text among them in its share.
        batch: samples B.
        bf16: under autocast, as the trainer runs it.
    """
    number = max(tokens.tokens)
    num_text = min(tokens.text_tokens, -(-tokens.text_tokens * number // tokens.num_tokens))
    one, two = (
        _saved(replace(model, num_layers=count, num_single_layers=0, recompute="none"), number, num_text, batch, bf16)
        for count in (1, 2)
    )
    layer = two - one
    single = 0
    if model.num_single_layers:
        both = replace(model, num_layers=1, num_single_layers=1, recompute="none")
        single = _saved(both, number, num_text, batch, bf16) - one
    return SavedBytes(
        fixed=one - layer,
        layer=max(layer, single),
        by_layer=(layer,) * model.num_layers + (single,) * model.num_single_layers,
        layer_input=_FP32_BYTES * number * batch * model.hidden_size,
    )


@cache
def _saved(model: DiTConfig, number: int, num_text: int, batch: int, bf16: bool) -> int:
    """Bytes of the different tensors that autograd keeps, weights left out."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with model_without_data(model, number, num_text, batch) as (module, run):
        weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16)
        with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run()
        return sum(tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in weights)


@contextmanager
def model_without_data(
    model: DiTConfig, number: int, num_text: int, batch: int
) -> Iterator[tuple[VideoDiT, Callable[[], Tensor]]]:
    """The model on tensors without data, attention cores left out, and what runs its forward pass; nothing is computed.

    Args:
        model: its description.
        number: tokens, text in the sequence among them.
        num_text: text tokens among them.
        batch: samples B.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    num_video = number - num_text
    grid = (max(1, num_video), 1, 1)
    positions = torch.cat([torch.arange(num_text), model.sequence_text_len + torch.arange(num_video)])
    places = locate_tokens(
        positions,
        grid,
        text_len=model.sequence_text_len,
        rope_axes=model.rope_axes_dims,
        rope_theta=model.rope_theta,
    )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _built(model) as module:
        located = _without_data(places, mode)
        # Where tokens are is looked up by value, which tensors without data do not have.
        module._locate = lambda *_: located  # type: ignore[assignment]
        video = torch.empty(batch, num_video, model.patch_dim)
        context = None
        if model.text != "none":
            context = torch.empty(batch, max(1, model.text_len), model.text_dim or 1)
        image = None if model.image_dim is None else torch.empty(batch, _IMAGE_TOKENS, model.image_dim)
        yield (
            module,
            lambda: module(
                video, torch.empty(batch), grid=grid, positions=positions, context=context, image_context=image
            ),
        )


@contextmanager
def _built(model: DiTConfig) -> Iterator[VideoDiT]:
    from dbsp_megatron.models.dit import VideoDiT  # imports megatron-core, which a refused run need not

    # The coarse branch communicates; what it keeps are means of blocks, which are few.
    yield VideoDiT(replace(model, coarse_branch=False), core_attention=_NoAttention).train()


def _without_data(places: LocalTokens, mode: FakeTensorMode) -> LocalTokens:
    def empty(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor)

    first, original = places.text_first, places.original
    return replace(
        places,
        text_positions=empty(places.text_positions),
        cos=empty(places.cos),
        sin=empty(places.sin),
        text_first=None if first is None else empty(first),
        original=None if original is None else empty(original),
    )
