"""What a configuration becomes on a number of processes: nodes, process groups and the layout of tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dbsp_megatron.config.resolve import ResolvedRun, with_degrees
from dbsp_megatron.config.schema import TrainConfig
from dbsp_megatron.masks import MaskMethod, TokenGrid, build_mask_method
from dbsp_megatron.masks.file import FileMask
from dbsp_megatron.masks.schedule import ScheduledMask
from dbsp_megatron.models.axial import AxialConfig
from dbsp_megatron.models.dit.config import DiTConfig, Recompute
from dbsp_megatron.plan import block_homes
from dbsp_megatron.strategy import get_strategy
from dbsp_megatron.strategy.base import SequenceParallelStrategy
from dbsp_megatron.train.slurm import expand_nodelist

Mesh = tuple[int, int]

_MOST_GROUPS = 64
"""Groups of a kind that are listed; the others follow the same rule."""
_MOST_RANKS = 6
_USUAL_NODE = 8


@dataclass(frozen=True, kw_only=True)
class GroupKind:
    """Process groups of one kind."""

    name: str
    """ulysses, ring, sequence or data."""
    purpose: str
    """What goes through them."""
    size: int
    """Ranks in a group."""
    num_groups: int
    """Groups of this kind."""
    num_across_nodes: int
    """Of them, groups whose ranks are on more than one node."""
    groups: tuple[tuple[int, ...], ...]
    """Global ranks of the first groups."""
    nodes: tuple[tuple[str, ...], ...]
    """Nodes of the groups that are listed."""


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """How the tokens of one sequence lie on the ranks that share it."""

    num_tokens: int
    text_tokens: int
    grid: tuple[int, int, int]
    """Patches along frames, rows and columns."""
    block_size: int
    num_blocks: int
    policy: str
    """contiguous, or stripe."""
    evened_out: bool
    """The stripe is evened out by measured counts while the run goes on."""
    tokens: tuple[int, ...]
    """Tokens of each sp rank."""
    blocks: tuple[int, ...]
    """Blocks of each sp rank."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Situation:
    """A checked configuration on a number of processes; what all other facts follow from."""

    config: TrainConfig
    model: DiTConfig
    resolved: ResolvedRun
    strategy: SequenceParallelStrategy
    """The configured strategy, which has read its calibration."""
    method: MaskMethod
    gpus_per_node: int
    """Processes on a node."""
    hosts: tuple[str, ...]
    """Name of each node."""

    @property
    def mesh(self) -> Mesh:
        """(U, R) that is configured; where layers choose, the one that the degrees are filled in with."""
        return self.resolved.mesh.ulysses_degree, self.resolved.mesh.ring_degree

    @property
    def sp_size(self) -> int:
        """Ranks that share a sequence."""
        return self.resolved.mesh.sp_size

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of a rank in a step."""
        loop = self.config.train
        return loop.global_batch_size // (self.resolved.mesh.dp_size * loop.micro_batch_size)

    @property
    def recompute(self) -> Recompute:
        """Which activations are computed again in the backward pass."""
        kind = self.config.train.recompute_kind
        return self.model.recompute if kind == "none" else kind

    def node_of(self, rank: int) -> str:
        """Name of the node that a global rank runs on."""
        return self.hosts[rank // self.gpus_per_node]


def understand(
    config: TrainConfig, world_size: int, gpus_per_node: int | None = None, hosts: Sequence[str] = ()
) -> Situation:
    """Checks a configuration as `dbsp-train` does when it starts, calibration and mask file included.

    Args:
        config: the run.
        world_size: processes.
        gpus_per_node: processes on a node; None: as many as the hosts have, else 8.
        hosts: names of the nodes; empty: node0, node1, ...

    Raises:
        ValueError: what `dbsp-train` would refuse, or nodes that do not fit the processes.
    """
    if isinstance(config.load_model(), AxialConfig):
        raise ValueError(
            f"model={config.model} attends along one dim at a time, which is not explained here: see its plan with "
            "dbsp_megatron.dsp.explain, or the start of a run with --dry-run"
        )
    per_node = _per_node(world_size, gpus_per_node, hosts)
    num_nodes = -(-world_size // per_node)
    # What a launcher tells every process, and strategies read.
    with _local_world_size(per_node):
        resolved = config.validate(world_size)
        sp = with_degrees(config.sp, resolved.mesh)
        strategy = get_strategy(sp.strategy)(sp, resolved.mesh.sp_size)
        strategy.prepare(range(resolved.mesh.sp_size))
    model, method = config.load_model(), build_mask_method(config.mask)
    saved = method.inner if isinstance(method, ScheduledMask) else method
    if isinstance(saved, FileMask):
        known = TokenGrid(*resolved.grid, cube=config.mask.cube)
        saved.check_sizes(resolved.num_heads, resolved.num_tokens, known, config.sp.block_size)
    return Situation(
        config=config,
        model=model,
        resolved=resolved,
        strategy=strategy,
        method=method,
        gpus_per_node=per_node,
        hosts=tuple(hosts) or tuple(f"node{index}" for index in range(num_nodes)),
    )


def _per_node(world_size: int, gpus_per_node: int | None, hosts: Sequence[str]) -> int:
    if gpus_per_node is not None and gpus_per_node < 1:
        raise ValueError(f"--gpus-per-node must be >= 1, got {gpus_per_node}; pass the processes of a node")
    if not hosts:
        per_node = min(world_size, _USUAL_NODE if gpus_per_node is None else gpus_per_node)
    elif gpus_per_node is None:
        if world_size % len(hosts):
            raise ValueError(
                f"--hosts must hold equally many of the {world_size} processes, got {len(hosts)} hosts; name a number "
                "of hosts that divides --world-size"
            )
        per_node = world_size // len(hosts)
    else:
        per_node = gpus_per_node
    if world_size % per_node:
        raise ValueError(
            f"--world-size must be a multiple of --gpus-per-node={per_node}, got {world_size}; start whole nodes, with "
            "equally many processes on each"
        )
    if hosts and world_size != per_node * len(hosts):
        raise ValueError(
            f"--hosts must name {world_size // per_node} hosts for {world_size} processes of {per_node} a node, got "
            f"{len(hosts)}; leave out --gpus-per-node or name as many"
        )
    return per_node


@contextmanager
def _local_world_size(count: int) -> Iterator[None]:
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


def expand_hosts(text: str) -> list[str]:
    """Host names of a Slurm list such as `gpu[01-03,07],login1`.

    Raises:
        ValueError: it is no such list, or names a host twice.
    """
    try:
        hosts = expand_nodelist(text.strip(), "--hosts")
    except ValueError as error:
        raise ValueError(f"--hosts must be like gpu[01-04] or a,b, got {text!r}; correct it") from error
    if not all(re.fullmatch(r"[\w.-]+", host) for host in hosts) or len(set(hosts)) < len(hosts):
        raise ValueError(f"--hosts must be different host names, like gpu[01-04] or a,b, got {text!r}; correct it")
    return hosts


def process_groups(situation: Situation, mesh: Mesh) -> list[GroupKind]:
    """All process groups on one mesh.

    Args:
        situation: the run.
        mesh: (U, R).
    """
    ulysses, ring = mesh
    world, size = situation.resolved.mesh.world_size, situation.sp_size
    starts = range(0, world, size)
    kinds = {
        "ulysses": (
            "heads, by all-to-all",
            [tuple(range(start + r * ulysses, start + (r + 1) * ulysses)) for start in starts for r in range(ring)],
        ),
        "ring": (
            "K and V, rank to rank",
            [tuple(range(start + u, start + size, ulysses)) for start in starts for u in range(ulysses)],
        ),
        "sequence": (
            "one sample, and agreement before each layer",
            [tuple(range(start, start + size)) for start in starts],
        ),
        "data": (
            "other samples; gradients are summed over all ranks",
            [tuple(range(p, world, size)) for p in range(size)],
        ),
    }
    return [_group_kind(situation, name, purpose, groups) for name, (purpose, groups) in kinds.items()]


def _group_kind(situation: Situation, name: str, purpose: str, groups: list[tuple[int, ...]]) -> GroupKind:
    def nodes(group: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(situation.node_of(rank) for rank in group))

    return GroupKind(
        name=name,
        purpose=purpose,
        size=len(groups[0]),
        num_groups=len(groups),
        num_across_nodes=sum(len({rank // situation.gpus_per_node for rank in group}) > 1 for group in groups),
        groups=tuple(groups[:_MOST_GROUPS]),
        nodes=tuple(nodes(group) for group in groups[:_MOST_GROUPS]),
    )


def token_facts(situation: Situation) -> TokenFacts:
    """Tokens and blocks of each rank in the layout that the run starts with."""
    resolved, strategy = situation.resolved, situation.strategy
    size, num_tokens = situation.config.sp.block_size, resolved.num_tokens
    num_blocks = -(-num_tokens // size)
    homes = block_homes(num_blocks, *strategy.layout_degrees, strategy.layout_policy)
    lengths = np.full(num_blocks, size)
    lengths[-1] = num_tokens - (num_blocks - 1) * size
    tokens = np.bincount(homes, weights=lengths, minlength=situation.sp_size)
    blocks = np.bincount(homes, minlength=situation.sp_size)
    return TokenFacts(
        num_tokens=num_tokens,
        text_tokens=resolved.text_tokens,
        grid=resolved.grid,
        block_size=size,
        num_blocks=num_blocks,
        policy=strategy.layout_policy,
        evened_out=strategy.calibrates_layout,
        tokens=tuple(int(count) for count in tokens),
        blocks=tuple(int(count) for count in blocks),
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks of a group in few characters: `0-7`, or `0,4,8,...,28`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _MOST_RANKS:
        return ",".join(map(str, ranks))
    return f"{','.join(map(str, ranks[:3]))},...,{ranks[-1]}"
