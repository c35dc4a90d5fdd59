"""Ways to run the transformer of a pipeline that are measured side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dbsp_megatron import SequenceParallel, SequenceParallelConfig
from dbsp_megatron.infer.balance import BalanceLog
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.models.diffusers import parallelize
from tools.device_timing import Ranks
from tools.pipeline_model import Video, denoise, make_pipeline, twin_of
from tools.sp_cases import Mesh

DIFFUSERS, CONTEXT_PARALLEL, OURS = "diffusers", "diffusers cp", "ours"
CONTEXT_PARALLEL_KINDS = ("ulysses", "ring")
ALONE = "none"
"""Our attention on one rank; all ranks compute the whole, each by itself."""


class PipelineEntry(ABC):
    """A pipeline on a twin of the transformer.

    Args:
        model: weights that all entries share.
        video: what is denoised.
        backend: attention of diffusers, wherever diffusers attends.
        compiled: the transformer's blocks are compiled.
    """

    kind: str
    strategy: str
    mesh: Mesh
    mask = "dense"
    block_size: int | None = None
    num_ranks: int
    """Ranks that share the work."""

    def __init__(self, model: Any, video: Video, backend: str, *, compiled: bool) -> None:
        self.video, self.backend = video, backend
        self.transformer = twin_of(model)
        # Whatever another entry has set would hold for all others.
        self.transformer.set_attention_backend(backend)
        self._prepare()
        if compiled:
            self.transformer.compile_repeated_blocks()
        self._pipe = make_pipeline(video.size, self.transformer)

    @abstractmethod
    def _prepare(self) -> None:
        """Make the transformer what it is measured as."""

    @property
    def name(self) -> str:
        """Different from that of every other entry."""
        words = [self.kind, self.strategy, f"{self.mesh[0]}x{self.mesh[1]}", self.mask]
        return " ".join([*words, f"blocks of {self.block_size}" if self.block_size else self.backend])

    def denoise(self, steps: int, step_done: Callable[[], None] = lambda: None) -> Tensor:
        """Latents after `steps` steps."""
        return denoise(self._pipe, self.video, steps, step_done)

    def facts(self) -> dict[str, Any]:
        """What the runtime says of the last step."""
        return {}

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release process groups."""


class DiffusersEntry(PipelineEntry):
    """The pipeline as it is, on one rank."""

    kind, strategy, mesh, num_ranks = DIFFUSERS, "none", (1, 1), 1

    def _prepare(self) -> None:
        """Nothing."""


class ContextParallelEntry(PipelineEntry):
    """The context parallelism that diffusers has itself.

    Args:
        kind: of CONTEXT_PARALLEL_KINDS.
        ranks: all ranks.
        model: see `PipelineEntry`, as what follows.

    Raises:
        ValueError: it cannot run on these ranks.
    """

    kind = CONTEXT_PARALLEL

    def __init__(self, kind: str, ranks: Ranks, model: Any, video: Video, backend: str, *, compiled: bool) -> None:
        self.strategy, self.num_ranks = kind, ranks.size
        self.mesh = (ranks.size, 1) if kind == "ulysses" else (1, ranks.size)
        super().__init__(model, video, backend, compiled=compiled)

    def _prepare(self) -> None:
        from diffusers import ContextParallelConfig

        if not torch.accelerator.device_count():
            raise ValueError("diffusers has context parallelism for accelerators only, and torch finds none")
        size = self.video.size.shape
        uneven = bool(size.seqlen % self.num_ranks)
        options: dict[str, Any] = {"ring_degree": self.mesh[1], "ulysses_degree": self.mesh[0]}
        options["mesh"] = init_device_mesh(
            self.video.latents.device.type, self.mesh[::-1], mesh_dim_names=("ring", "ulysses")
        )
        # Without these, lengths that the ranks do not divide fail.
        if self.strategy == "ulysses":
            options["ulysses_anything"] = uneven or bool(size.geometry.heads % self.num_ranks)
        else:
            options["ring_anything"] = uneven
        self.transformer.enable_parallelism(config=ContextParallelConfig(**options))


class OursEntry(PipelineEntry):
    """`parallelize`.

    Args:
        strategy: of SequenceParallelConfig.
        mesh: (U, R).
        label: of the mask.
        mask: None for all blocks.
        settings: fields of SequenceParallelConfig; `block_size` is one of them.
        ranks: all ranks.
        model: see `PipelineEntry`, as what follows.
    """

    kind = OURS

    def __init__(
        self,
        strategy: str,
        mesh: Mesh,
        label: str,
        mask: MaskMethod | None,
        settings: Mapping[str, Any],
        ranks: Ranks,
        model: Any,
        video: Video,
        backend: str,
        *,
        compiled: bool,
    ) -> None:
        self.strategy, self.mesh, self.mask, self.block_size = strategy, mesh, label, settings["block_size"]
        self.num_ranks, self._method = (1 if strategy == ALONE else ranks.size), mask
        config = SequenceParallelConfig(strategy=strategy, ulysses_degree=mesh[0], ring_degree=mesh[1], **settings)
        self._sp = SequenceParallel(config, group=_alone(ranks) if strategy == ALONE else ranks.group)
        super().__init__(model, video, backend, compiled=compiled)

    def _prepare(self) -> None:
        self._handle = parallelize(self.transformer, self._sp, mask=self._method)

    def facts(self) -> dict[str, Any]:
        """See `PipelineEntry.facts`."""
        log = BalanceLog(self._sp)
        log.observe(0)
        found = log.summary()
        known = [layer["density"] for layer in found["layers"] if layer["density"] is not None]
        return {
            "rho_before": found["imbalance_before"],
            "rho_after": found["imbalance_after"],
            "plan_reuse": found["plan_reuse"],
            "density": sum(known) / len(known) if known else None,
        }

    def close(self) -> None:
        """See `PipelineEntry.close`."""
        self._handle.undo()
        self._sp.destroy()


def _alone(ranks: Ranks) -> dist.ProcessGroup | None:
    """A group of this rank alone; collective."""
    if ranks.group is None:
        return None
    groups = [dist.new_group([rank]) for rank in range(ranks.size)]
    found: dist.ProcessGroup = groups[ranks.rank]
    return found


def change_of(latents: Tensor, video: Video) -> Tensor:
    """What denoising did to the noise, fp32 on the CPU: noise itself would hide errors."""
    return (latents.float() - video.latents.float()).cpu()
