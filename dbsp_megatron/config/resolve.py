"""Works out from a configuration and a number of processes what will run where, without touching anything."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.lora import LoraConfig
from dbsp_megatron.parallel_state import factorisations
from dbsp_megatron.strategy import SequenceParallelConfig, get_strategy


@dataclass(frozen=True, kw_only=True)
class ResolvedMesh:
    """How a world of processes is divided."""

    world_size: int
    ulysses_degree: int
    ring_degree: int
    choices: tuple[tuple[int, int], ...] = ()
    """(U, R) of which layers choose at run time; empty if the degrees are those of all layers."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    virtual_pipeline_parallel_size: int = 1
    """Stages on each pipeline rank."""
    branches: int = 1
    """Groups of ranks that work on one sample, each on its own branch of guidance."""

    @property
    def sp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.ulysses_degree * self.ring_degree

    @property
    def dp_size(self) -> int:
        """Groups that work on different samples."""
        model = self.tensor_parallel_size * self.pipeline_parallel_size
        return self.world_size // (self.sp_size * self.branches * model)


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """The plan of a run, for people."""

    mesh: ResolvedMesh
    strategy: str
    model: str
    num_parameters: int
    num_heads: int
    num_layers: int
    grid: tuple[int, int, int]
    text_tokens: int
    block_size: int
    batch: str
    """What one step, or one pass, works on."""
    steps: int
    compile: bool = False
    """Parts of layers are compiled."""

    @property
    def num_tokens(self) -> int:
        """Tokens of one sequence."""
        return self.text_tokens + math.prod(self.grid)

    def describe(self) -> str:
        """One `key: value` line per fact."""
        mesh, num_blocks = self.mesh, -(-self.num_tokens // self.block_size)
        frames, rows, columns = self.grid
        degrees = f"ulysses {mesh.ulysses_degree} x ring {mesh.ring_degree}"
        split = f" x {mesh.tensor_parallel_size} tensor parallel" if mesh.tensor_parallel_size > 1 else ""
        pp, vp = mesh.pipeline_parallel_size, mesh.virtual_pipeline_parallel_size
        if pp > 1:
            split += f" x {pp} pipeline {'ranks' if vp > 1 else 'stages'}"
        own_heads = self.num_heads // mesh.tensor_parallel_size
        heads = f"{_spread(own_heads, mesh.ulysses_degree)} of {self.num_heads}"
        if mesh.choices:
            degrees = "ulysses x ring by layer: " + ", ".join(f"{u} x {r}" for u, r in mesh.choices)
            heads = ", ".join(f"{_spread(own_heads, u)} (ulysses {u})" for u, _ in mesh.choices)
            heads += f" of {self.num_heads}"
        blocks = f"{_spread(num_blocks, mesh.sp_size)} of {num_blocks} (block size {self.block_size})"
        if self.strategy == "dsp":
            degrees, blocks = f"{mesh.sp_size} ranks", "frames, or tokens of a frame, cut in turn"
            heads = f"{own_heads} of {self.num_heads}" if own_heads < self.num_heads else f"all {self.num_heads}"
        if mesh.branches > 1:
            split += f" x {mesh.branches} branches of guidance"
        text = f"{self.text_tokens} text + " if self.text_tokens else ""
        facts = {
            "processes": f"{mesh.world_size} = {mesh.dp_size} data parallel x {mesh.sp_size} sequence parallel{split}",
            "mesh": f"{self.strategy}, {degrees}",
            "model": f"{self.model}, {self.num_parameters:,} parameters, {self.num_layers} layers",
            "tokens": f"{self.num_tokens} ({text}{frames} x {rows} x {columns} patches)",
            "blocks per rank": blocks,
            "heads per rank": heads,
            "batch": self.batch,
            "steps": str(self.steps),
        }
        if vp > 1:
            each = self.num_layers // (pp * vp)
            layers = f"{each} layer{'s' if each > 1 else ''}"
            facts["pipeline"] = f"{pp * vp} stages of {layers}, {vp} on each rank in turns (interleaved)"
        if self.compile:
            facts["compile"] = "norms, modulation and rotary embedding (train.compile); the first step takes longer"
        width = max(map(len, facts))
        return "\n".join(f"{key + ':':<{width + 1}} {value}" for key, value in facts.items())


def resolve_mesh(
    sp: SequenceParallelConfig, world_size: int, num_heads: int, parallel: ParallelConfig | None = None
) -> ResolvedMesh:
    """Fill in `auto` degrees.

    Degrees that are both given leave the rest of the world to data parallelism; with an `auto` among them, one sequence
    takes the whole world. An `auto` Ulysses degree is the strategy's choice, but never more than there are heads.

    Args:
        sp: sequence parallelism.
        world_size: number of processes.
        num_heads: heads of the whole model.
        parallel: how the model itself is split; None for not at all.

    Raises:
        ValueError: the degrees do not divide the world or the heads, or contradict the strategy.
    """
    parallel = parallel or ParallelConfig()
    if num_heads % parallel.tensor_parallel_size:
        raise ValueError(
            f"parallel.tensor_parallel_size={parallel.tensor_parallel_size} must divide the number of heads "
            f"{num_heads}; sequence parallelism (sp.*) has no such rule"
        )
    num_heads //= parallel.tensor_parallel_size
    size = _sp_size(sp, max(1, world_size // parallel.model_size))
    check_world_size(world_size, size, parallel)
    strategy = get_strategy(sp.strategy)(sp, size)
    ulysses, ring = strategy.ulysses_degree, strategy.ring_degree
    if sp.ulysses_degree == "auto" and sp.ring_degree == "auto" and sp.strategy not in ("ulysses", "ring", "dsp"):
        limit = min(ulysses, max(1, num_heads))
        ulysses = next(u for u, _ in factorisations(size) if u <= limit)
        ring = size // ulysses
    choices = strategy.meshes if len(strategy.meshes) > 1 else ()
    return ResolvedMesh(
        world_size=world_size,
        ulysses_degree=ulysses,
        ring_degree=ring,
        choices=choices,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_parallel_size=parallel.virtual_pipeline_parallel_size,
    )


def check_world_size(world_size: int, sp_size: int, parallel: ParallelConfig) -> None:
    """Raise ValueError unless a world can be divided so."""
    unit = sp_size * parallel.model_size
    if unit < 1 or world_size % unit:
        names = ["sp.ulysses_degree * sp.ring_degree"]
        names += [
            f"parallel.{key}"
            for key in ("tensor_parallel_size", "pipeline_parallel_size")
            if getattr(parallel, key) != 1
        ]
        raise ValueError(
            f"{' * '.join(names)} = {unit} must divide the number of processes {world_size}; "
            f"start a multiple of {unit} processes or lower a degree"
        )


def _sp_size(sp: SequenceParallelConfig, world_size: int) -> int:
    """Ranks of one sequence: the product of the degrees, where an axis that the strategy lacks counts as 1."""
    degrees = {"ulysses": sp.ulysses_degree, "ring": sp.ring_degree}
    if sp.strategy == "none":
        degrees = {axis: 1 if degree == "auto" else degree for axis, degree in degrees.items()}
    elif sp.strategy == "dsp":
        degrees["ring"] = 1 if sp.ring_degree == "auto" else sp.ring_degree
    elif sp.strategy in degrees:
        degrees = {axis: 1 if degree == "auto" and axis != sp.strategy else degree for axis, degree in degrees.items()}
    size = 1
    for degree in degrees.values():
        if degree == "auto":
            return world_size
        size *= degree
    return size


def _spread(count: int, parts: int) -> str:
    low, extra = divmod(count, parts)
    return f"{low} to {low + 1}" if extra else str(low)


def with_degrees(sp: SequenceParallelConfig, mesh: ResolvedMesh) -> SequenceParallelConfig:
    """The section with its degrees as numbers, unless layers choose them at run time."""
    if mesh.choices:
        return sp
    return replace(sp, ulysses_degree=mesh.ulysses_degree, ring_degree=mesh.ring_degree)


def count_parameters(model: DiTConfig, lora: LoraConfig | None = None) -> int:
    """Number of weights of a model without adapters, found without allocating them.

    Args:
        model: the model.
        lora: adapters, which are checked against it.

    Raises:
        ValueError: the model has no such layers.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    from dbsp_megatron.models.build import build_model

    # Groups are given, so that a program's own parallel_state does not split what is counted.
    alone = ProcessGroupCollection(tp=None, cp=None, pp=None)
    with torch.device("meta"):
        module = build_model(model, pg_collection=alone)
        count = sum(parameter.numel() for parameter in module.parameters())
        if lora is not None and lora.rank:
            from dbsp_megatron.models.dit.lora_layers import add_lora

            add_lora(module, lora)
    return count
