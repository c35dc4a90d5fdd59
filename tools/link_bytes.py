"""Bytes that a rank sends, counted from outside at the collectives of torch.distributed, by kind of link.

Integers are left out: ranks compare shapes and plans with them. A gather or reduction counts as direct messages between
its ranks, whatever tree or ring a backend makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

REDUCE_SCATTERS = tuple(name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name))
_OTHERS = ("all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter", "send")


@dataclass
class LinkBytes:
    """Bytes sent by this rank to others."""

    inside: int = 0
    """To ranks of the same node."""
    between: int = 0
    """To ranks of other nodes."""
    collectives: int = 0
    """Collectives, and batches of messages, that carry numbers."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.inside + self.between


@contextmanager
def counting(ranks_per_node: int) -> Iterator[LinkBytes]:
    """Counts what this rank sends inside the block.

    Args:
        ranks_per_node: consecutive ranks that share a node.

    Yields:
        The counts, which grow.
    """
    found = LinkBytes()
    names = ["all_gather", "all_gather_into_tensor", "all_to_all_single", "batch_isend_irecv", *REDUCE_SCATTERS]
    originals = {name: getattr(dist, name) for name in (*names, *_OTHERS) if hasattr(dist, name)}

    def add(peer: int, x: Tensor, elements: int) -> None:
        me = dist.get_rank()
        if peer != me:
            kind = "inside" if peer // ranks_per_node == me // ranks_per_node else "between"
            setattr(found, kind, getattr(found, kind) + elements * x.element_size())

    def members(options: dict[str, Any]) -> list[int]:
        return dist.get_process_group_ranks(options.get("group") or dist.group.WORLD)

    def to_all(x: Tensor, options: dict[str, Any], sizes: list[int] | None = None) -> None:
        if x.is_floating_point():
            found.collectives += 1
            ranks = members(options)
            for index, peer in enumerate(ranks):
                add(peer, x, x.numel() if sizes is None else sizes[index])

    def gather(*args: Any, **options: Any) -> Any:
        to_all(args[1], options)
        return originals["all_gather"](*args, **options)

    def gather_into(*args: Any, **options: Any) -> Any:
        to_all(args[1], options)
        return originals["all_gather_into_tensor"](*args, **options)

    def exchange(*args: Any, **options: Any) -> Any:
        x, ranks = args[1], members(options)
        rows = args[3] if len(args) > 3 else options.get("input_split_sizes")
        rows = [x.shape[0] // len(ranks)] * len(ranks) if rows is None else rows
        width = x[:1].numel() if x.shape[0] else 0
        to_all(x, options, [count * width for count in rows])
        return originals["all_to_all_single"](*args, **options)

    def messages(ops: list[Any]) -> Any:
        sent = [op for op in ops if op.op is dist.isend and op.tensor.is_floating_point()]
        found.collectives += bool(sent)
        for op in sent:
            add(op.peer, op.tensor, op.tensor.numel())
        return originals["batch_isend_irecv"](ops)

    def scattering(name: str) -> Callable[..., Any]:
        def scatter(*args: Any, **options: Any) -> Any:
            x, ranks = args[1], members(options)
            to_all(x, options, [x.numel() // len(ranks)] * len(ranks))
            return originals[name](*args, **options)

        return scatter

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **options: Any) -> Any:
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                raise RuntimeError(f"the bytes of {name} are not counted: count them in tools/link_bytes.py")
            return originals[name](*args, **options)

        return refuse

    counted = {
        "all_gather": gather,
        "all_gather_into_tensor": gather_into,
        "all_to_all_single": exchange,
        "batch_isend_irecv": messages,
        **{name: scattering(name) for name in REDUCE_SCATTERS},
    }
    try:
        for name in originals:
            setattr(dist, name, counted.get(name) or refusing(name))
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
