"""Times attention launches, collectives and planning, on all ranks that measure together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron import BlockMask
from dbsp_megatron.attention.engines import AttentionClass, BlockPattern, Engine
from dbsp_megatron.comm.collectives import PeerSwap
from dbsp_megatron.kernels.block_sparse_attention import output_delta
from dbsp_megatron.parallel_state import factorisations
from dbsp_megatron.plan import Workload, block_homes, plan_workload

DESIGN = (
    *((1, 1, 1.0), (1, 1, 0.4), (1, 1, 0.2), (1, 1, 0.1), (1, 1, 0.05), (1, 2, 1.0), (1, 2, 0.2), (1, 2, 0.05)),
    *((1, 4, 0.7), (1, 4, 0.1), (2, 1, 0.7), (2, 1, 0.1), (2, 2, 0.4), (2, 4, 0.2), (4, 1, 1.0), (4, 1, 0.2)),
)
"""Masks of a fit: divisor of the heads, divisor of the q-blocks, density. Blocks vary apart from rows."""
_WARM_UP = 2
_LEAST_ROUNDS = 2
"""Timings behind a figure when time runs out."""
_USUAL_TIMEOUT_S, _LEAST_TIMEOUT_S = 600.0, 120.0
HELD_OUT = ("skewed heads", "skewed rows", "band and hot columns", "full rows")
"""Masks that no fit sees, of the kinds that trained models have."""


class Ranks:
    """The ranks that measure together; a single one without torch.distributed.

    Args:
        device: `cpu` or `cuda`.
        max_seconds: time that measuring may take; a rank that waits much longer for another ends with an error.

    Raises:
        ValueError: the launcher does not say how ranks spread over nodes, they do so unevenly, or lack devices.
    """

    def __init__(self, device: str, max_seconds: float | None = None) -> None:
        running = dist.is_initialized()
        self.size = dist.get_world_size() if running else int(os.environ.get("WORLD_SIZE", "1"))
        if not running and self.size > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
            raise ValueError(
                f"LOCAL_WORLD_SIZE must say how many of the {self.size} ranks share a node, it is not set: links "
                "in nodes and between nodes are measured apart; start with torchrun, or set it"
            )
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.size)))
        if not 1 <= self.local_size <= self.size or self.size % self.local_size:
            raise ValueError(
                f"every node must have the same number of ranks, got LOCAL_WORLD_SIZE={self.local_size} of "
                f"WORLD_SIZE={self.size}: start with torchrun and one --nproc-per-node for all nodes"
            )
        self.device = torch.device("cpu")
        if device == "cuda":
            if self.local_size > torch.cuda.device_count():
                raise ValueError(
                    f"every rank needs a device of its own, got {self.local_size} ranks on a node with "
                    f"{torch.cuda.device_count()}: start fewer, or pass --device cpu"
                )
            local_rank = dist.get_rank() % self.local_size if running else int(os.environ.get("LOCAL_RANK", "0"))
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        self._made = not running and self.size > 1
        if self._made:
            seconds = _USUAL_TIMEOUT_S if max_seconds is None else max(_LEAST_TIMEOUT_S, 2 * max_seconds)
            dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=seconds))
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.group = dist.group.WORLD if self.size > 1 else None

    def slowest(self, times: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, entry by entry; collective."""
        joined = torch.tensor(times, dtype=torch.float64, device=self.device)
        if self.group is not None:
            dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in joined.tolist()]

    def close(self) -> None:
        """End the process group, if it was made here."""
        if self._made:
            dist.destroy_process_group()


def group_layouts(num_ranks: int, ranks_per_node: int) -> list[tuple[str, list[list[int]]]]:
    """(scope, groups of one size that hold every rank once), of every size that divides a node or the nodes.

    Groups of scope `node` are neighbours inside a node; those of scope `network` have one rank of each of their nodes.
    """
    num_nodes = num_ranks // ranks_per_node
    found = []
    for size in (n for n in range(2, ranks_per_node + 1) if ranks_per_node % n == 0):
        found.append(("node", [list(range(start, start + size)) for start in range(0, num_ranks, size)]))
    for size in (n for n in range(2, num_nodes + 1) if num_nodes % n == 0):
        nodes = range(0, num_nodes, size)
        starts = [node * ranks_per_node + i for node in nodes for i in range(ranks_per_node)]
        found.append(("network", [[start + j * ranks_per_node for j in range(size)] for start in starts]))
    return found


class Stopwatch:
    """Times calls on a device; on CUDA the cache is overwritten first, as by the layers between two attentions."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(2**28, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def microseconds(
        self, call: Callable[[], object], calls: int = 1, meet: Callable[[], object] | None = None
    ) -> float:
        """Time of one of `calls` calls in a row, after `meet` (ranks waiting for one another)."""
        if self._flush is not None:
            # Also keeps the device busy while the host launches, so that launching is not what is timed.
            self._flush.zero_()
        if meet is not None:
            meet()
        if self._flush is None:
            started = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - started) * 1e6 / calls
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / calls

    def typical(self, times: Sequence[float]) -> float:
        """One figure for repeated timings: the median, or on CPU the least, as other jobs there only add to a time."""
        return median(times) if self._flush is not None else min(times)


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """The largest attention launch that is timed; others are parts of it."""

    dtype: torch.dtype
    """Data type of q, k, v."""
    head_dim: int
    """Head dimension."""
    block_size_q: int
    """Query tokens in a block."""
    block_size_k: int
    """Key tokens in a block."""
    heads: int
    """Heads."""
    num_blocks: int
    """Blocks of the sequence, on both sides of the mask."""

    def attention_class(self, device: torch.device) -> AttentionClass:
        """What an engine for these launches is chosen by."""
        return AttentionClass(
            device=device,
            dtype=self.dtype,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            block_size_q=self.block_size_q,
            block_size_k=self.block_size_k,
            grouped=False,
            batch_masks=False,
            backward=True,
            deterministic=False,
            resume=False,
        )


@dataclass(frozen=True)
class TimedLaunch:
    """Forward and backward of one mask."""

    name: str
    blocks: int
    rows: int
    forward_us: float
    backward_us: float

    def us(self, direction: str) -> float:
        """Microseconds of `forward` or `backward`."""
        return self.forward_us if direction == "forward" else self.backward_us


def make_masks(shape: LaunchShape, device: torch.device) -> dict[str, Tensor]:
    """Masks by name, bool [1, H, nq, N]: those of DESIGN, then those of HELD_OUT; equal on equal devices."""
    generator = torch.Generator(device).manual_seed(0)
    masks = {}
    for by_heads, by_rows, density in DESIGN:
        size = (1, shape.heads // by_heads, shape.num_blocks // by_rows, shape.num_blocks)
        # As many blocks in every row: what remains of a fit's error is then the kernel's, not that of unequal rows.
        per_row = max(1, round(density * shape.num_blocks))
        chosen = torch.rand(size, generator=generator, device=device).topk(per_row, dim=-1).indices
        mask = torch.zeros(size, dtype=torch.bool, device=device).scatter_(-1, chosen, True)
        masks[f"{size[1]} heads, {size[2]} rows, density {density}"] = mask
    return masks | {name: held_out_mask(name, shape.heads, shape.num_blocks, generator) for name in HELD_OUT}


def held_out_mask(name: str, heads: int, num: int, generator: torch.Generator) -> Tensor:
    """A mask of HELD_OUT on the generator's device, bool [1, heads, num, num]."""
    device = generator.device
    density = torch.full((1, heads, num, num), 0.15, device=device)
    at = torch.arange(num, device=device)
    if name == "skewed heads":
        density *= torch.exp(0.8 * torch.randn((1, heads, 1, 1), generator=generator, device=device))
    elif name == "skewed rows":
        density *= torch.exp(0.8 * torch.randn((1, 1, num, 1), generator=generator, device=device))
    elif name == "full rows":
        density[:, :, -max(1, num // 16) :] = 1.0
    else:
        density = density * 0.2 + ((at[:, None] - at).abs() <= num // 16).float() + (at % 16 == 3).float()
    return torch.rand(density.shape, generator=generator, device=device) < density


def time_launches(
    engine: Engine, shape: LaunchShape, repeats: int, device: torch.device, deadline: float | None = None
) -> list[TimedLaunch]:
    """Forward and backward of every mask; the masks take turns, so that clocks drift alike for all.

    Args:
        engine: what is launched.
        shape: the largest launch.
        repeats: timings behind each figure; fewer, but at least two, once `time.monotonic()` is past the deadline.
        device: where.
        deadline: None: none.
    """
    masks = make_masks(shape, device)
    inputs: dict[tuple[int, int], list[Tensor]] = {}
    calls = []
    for mask in masks.values():
        heads, rows, num_k = mask.shape[1:]
        if (heads, rows) not in inputs:
            lengths = (rows * shape.block_size_q, *2 * (num_k * shape.block_size_k,), rows * shape.block_size_q)
            inputs[heads, rows] = [
                torch.randn((1, length, heads, shape.head_dim), device=device).to(shape.dtype) for length in lengths
            ]
        calls.append(_launches(engine, mask, inputs[heads, rows], shape))
    watch = Stopwatch(device)
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in calls]
    for repeat in range(repeats + 1):
        for pair, found in zip(calls, times, strict=True):
            for call, timings in zip(pair, found, strict=True):
                us = watch.microseconds(call)
                # The first round warms up.
                if repeat:
                    timings.append(us)
        if deadline is not None and repeat >= _LEAST_ROUNDS and time.monotonic() > deadline:
            break
    return [
        TimedLaunch(name, int(mask.sum()), mask.shape[1] * mask.shape[2], watch.typical(forward), watch.typical(back))
        for (name, mask), (forward, back) in zip(masks.items(), times, strict=True)
    ]


def _launches(
    engine: Engine, mask: Tensor, inputs: Sequence[Tensor], shape: LaunchShape
) -> tuple[Callable[[], object], Callable[[], object]]:
    q, k, v, dout = inputs
    pattern = BlockPattern(mask, shape.block_size_q, shape.block_size_k)
    # Index lists are made here, once, as they are kept with a plan.
    pattern.lists(transpose=True)
    scale = shape.head_dim**-0.5
    out, lse = engine.forward(q, k, v, pattern, scale)
    delta = output_delta(out, dout)
    return (
        lambda: engine.forward(q, k, v, pattern, scale),
        lambda: engine.backward(q, k, v, dout, lse, delta, pattern, scale, out=out),
    )


def time_collective(
    collective: str,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    ranks: Ranks,
    repeats: int,
    deadline: float | None = None,
) -> list[tuple[int, float]]:
    """(bytes that this rank sends to others, microseconds) for about each of `sizes`; collective.

    The sizes take turns, so that a busy moment of the machine does not fall on one of them. All ranks start together.

    Args:
        collective: `all_to_all`, `p2p` (one hop of a ring) or `all_gather`.
        sizes: bytes; rounded up to 16 bytes for each receiver.
        group: ranks of the collective.
        ranks: all ranks that measure at once.
        repeats: timings behind each figure.
        deadline: once `time.monotonic()` is past it on any rank, two timings do.
    """
    watch, flag = Stopwatch(ranks.device), torch.zeros(1, device=ranks.device)
    receivers = 1 if collective == "p2p" else group.size() - 1
    pieces = [16 * -(-size // (16 * receivers)) for size in sizes]
    calls = [_collective_call(collective, piece, group, ranks.device) for piece in pieces]
    times: list[list[float]] = [[] for _ in sizes]
    for repeat in range(repeats + _WARM_UP):
        for call, size, found in zip(calls, sizes, times, strict=True):
            us = watch.microseconds(
                call, 5 if size <= 2**20 else 2, meet=lambda: dist.all_reduce(flag, group=ranks.group)
            )
            if repeat >= _WARM_UP:
                found.append(us)
        enough = deadline is not None and repeat + 1 >= _WARM_UP + _LEAST_ROUNDS
        # All stop together, as they wait for one another in every round.
        if deadline is not None and enough and ranks.slowest([float(time.monotonic() > deadline)])[0]:
            break
    return [(piece * receivers, watch.typical(found)) for piece, found in zip(pieces, times, strict=True)]


def _collective_call(
    collective: str, piece: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    send = torch.zeros(piece, dtype=torch.uint8, device=device)
    if collective == "p2p":
        return lambda: PeerSwap([send], [(piece,)], group, 1).wait()[0]
    if collective == "all_gather":
        parts = [torch.empty_like(send) for _ in range(group.size())]
        return lambda: dist.all_gather(parts, send, group=group)
    send = send.repeat(group.size())
    received = torch.empty_like(send)
    return lambda: dist.all_to_all_single(received, send, group=group)


def time_planning(heads: int, num_blocks: int, num_ranks: int, repeats: int) -> float:
    """Median host microseconds of `plan_workload`, counts at hand, over all meshes of `num_ranks`."""
    blocks = held_out_mask("skewed heads", heads, num_blocks, torch.Generator().manual_seed(0))
    mask = BlockMask(blocks, 1, 1, num_blocks, num_blocks)
    times = []
    for ulysses, ring in factorisations(num_ranks):
        homes = block_homes(num_blocks, ulysses, ring, "stripe")
        workload = Workload.from_mask(mask, homes, homes, num_ranks)
        # The first call of a mesh warms up.
        for repeat in range(repeats + 1):
            started = time.perf_counter()
            plan_workload(workload, ulysses_degree=ulysses, ring_degree=ring)
            if repeat:
                times.append((time.perf_counter() - started) * 1e6)
    return median(times)
