"""Steps that the distributed tests share: a sharded attention with gradients, refusals, a log of collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import MaskMethod
from tests.reference import Gradients, attention_gradients, expand_blocks, max_error, random_blocks, random_qkv

# isend and irecv are absent: P2POp compares them by identity. They are seen inside batch_isend_irecv.
COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


def make_sp(
    strategy: str = "dbsp", ulysses: int | str = "auto", ring: int | str = "auto", **options: Any
) -> SequenceParallel:
    """A SequenceParallel on the default group."""
    config = SequenceParallelConfig(
        strategy=strategy,
        ulysses_degree=ulysses,  # type: ignore[arg-type]
        ring_degree=ring,  # type: ignore[arg-type]
        **options,
    )
    return SequenceParallel(config, group=dist.group.WORLD if dist.is_initialized() else None)


def sharded_gradients(
    sp: SequenceParallel,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: BlockMask | MaskMethod | None,
    block_size: int,
    *,
    layer: int = 0,
    scale: float | None = None,
) -> Gradients:
    """Shard q, k, v, attend, gather, and take the gradients of `(out * dout).sum()`; all of it in whole tensors."""
    q, k, v, dout = inputs
    layout = sp.layout(q.shape[1], block_size=block_size)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    local = [layout.shard(x) for x in leaves]
    out = layout.gather(sp.attention(*local, mask=mask, layer=layer, layout=layout, scale=scale))
    return Gradients(out.detach(), *torch.autograd.grad((out * dout).sum(), leaves))


def errors(got: Gradients, want: Gradients) -> dict[str, float]:
    """Largest absolute error of each part."""
    return {name: max_error(getattr(got, name), getattr(want, name)) for name in ("out", "dq", "dk", "dv")}


def check(got: Gradients, want: Gradients, atol: float, label: str) -> None:
    """Fail, naming the parts and their errors, unless every part is within `atol`."""
    found = errors(got, want)
    # No assert statement: this must hold under `python -O` too.
    if not max(found.values()) <= atol:
        raise AssertionError(f"{label}: {found}")


def is_equal(a: Gradients, b: Gradients) -> bool:
    """Whether two results agree bit for bit."""
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("out", "dq", "dk", "dv"))


def random_problem(
    seed: int,
    seqlen: int,
    num_heads: int,
    block_size: int,
    *,
    batch: int = 1,
    num_kv_heads: int | None = None,
    dense: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], BlockMask, Gradients]:
    """Inputs, a mask of its own per sample, and the reference result."""
    inputs = random_qkv(seed, batch, seqlen, num_heads, 8, num_kv_heads=num_kv_heads, dtype=dtype)
    count = -(-seqlen // block_size)
    blocks = random_blocks(seed, batch, num_heads, count, count)
    if dense:
        blocks = torch.ones_like(blocks)
    allowed = expand_blocks(blocks, block_size, block_size, seqlen, seqlen)
    mask = BlockMask(blocks, block_size, block_size, seqlen, seqlen)
    return inputs, mask, attention_gradients(*inputs[:3], allowed, inputs[3])


def refusal(function: Callable[[], Any]) -> str:
    """'ValueError: ...' if the call was refused, else 'accepted'."""
    try:
        function()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@contextmanager
def recorded_collectives() -> Iterator[list[tuple[Any, ...]]]:
    """Log every collective by name, size of the group and shapes of the tensors that go in.

    Yields:
        The list that grows with each call.
    """
    log: list[tuple[Any, ...]] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def recording(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            shapes = [tuple(x.shape) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            size = dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else None
            count = len(args[0]) if name == "batch_isend_irecv" else None
            log.append((name, size, shapes, count))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, recording(name))
    try:
        yield log
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
